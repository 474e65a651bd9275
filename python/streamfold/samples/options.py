"""``CompletionOptions``: how :func:`~streamfold.complete` makes the requests of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from streamfold.samples.routing import AUTO, check_routing_header

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold._types import Tokenizer

__all__ = ["CompletionOptions", "Extra", "Resume", "ResumePenalties", "check_resume_penalties"]

Resume = Literal["continue", "restart", "raise"]
ResumePenalties = Literal["continue", "restart"]
Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # further keys of a request, or what makes them


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """How :func:`~streamfold.complete` makes the requests of a sample.

    Attributes:
        logprobs: whether to request log-probabilities; the same for all calls of a sample.
        tokenizer: decodes responses whose engine sends no text, or that took several calls; None: the client's. The
            text of a finished response is compared with that of its tokens: one that the engine would not have shown
            (SGLang repeats characters where an event brings several tokens) is replaced, which
            ``metadata["streamfold_corrected_text"]`` counts. Without any tokenizer such a text stays as it was sent;
            ``metadata["streamfold_unchecked_text"]`` marks it where an event had several tokens.
        stop_ids: tokens that end a response, besides ``stop_token_ids``: the model's EOS. A response that is aborted
            right behind such a token is finished. The set is shared: an EOS at which the engine is seen to stop is
            added to it.
        headers: of each request.
        routing_header: the header that carries ``sample.session_id``, by which a router keeps all calls and turns of a
            sample on one worker, whose prefix cache serves them. One is made if that is None; samples without the
            attribute have none. ``"auto"``: the header of the engine's own router, ``X-SMG-Routing-Key`` of SGLang's
            (policies ``consistent_hashing`` and ``manual``) and ``X-Session-ID`` of vLLM's (``consistent_hash``);
            nothing if the client was given a header of that name. None: not sent.
        prompt_token_ids: whether to request the ids of prompts that are text. A sample can then be resumed instead of
            restarted; SGLang repeats the ids in each event.
        indexer_topk: whether to request the positions that the indexers of a sparse attention chose (SGLang's
            ``return_indexer_topk``), for samples with ``rollout_indexer_topk``.
        extra: further keys of each request, or a function that is called for each request to give them. ``text``,
            ``input_ids``, ``token_ids`` or ``prompt`` among them replaces the sample's prompt. In a mapping it is the
            same for each request, so an aborted response is restarted; a function can add the generated tokens.
        aborted: a host's flag, or an :class:`~streamfold.client.abort_signal.AbortSignal`. While it returns True, no
            request is sent and nothing is resumed.
        resume_aborts: whether to resume after an abort event that neither the caller nor the host has caused. If not,
            the abort is the result.
        resume_penalties: what is done with a partial response if its sampling has a penalty (``frequency_penalty``,
            ``presence_penalty``, ``repetition_penalty``). SGLang counts only what a call itself has generated, vLLM
            does so for the first two, so a call that resumes samples from another distribution than an uninterrupted
            one. ``"continue"`` resumes all the same, and counts that in ``metadata["streamfold_resumed_penalties"]``;
            ``"restart"`` drops what the turn has generated and requests it again.
        on_generation: called with what each call has generated, before it is merged.

    Raises:
        ValueError: ``resume_penalties`` has another value, or ``routing_header`` cannot be a header.
    """

    logprobs: bool = True
    tokenizer: Tokenizer | None = None
    stop_ids: set[int] | None = None
    prompt_token_ids: bool = False
    indexer_topk: bool = False
    headers: Mapping[str, str] | None = None
    routing_header: str | None = AUTO
    extra: Extra | None = None
    aborted: Callable[[], bool] | None = None
    resume_aborts: bool = True
    resume_penalties: ResumePenalties = "continue"
    on_generation: Callable[[Generation], object] | None = None

    def __post_init__(self) -> None:
        check_resume_penalties(self.resume_penalties)
        check_routing_header(self.routing_header)


def check_resume_penalties(value: object) -> None:
    """Raise ValueError if a value is not one of ``resume_penalties``."""
    if value not in get_args(ResumePenalties):
        raise ValueError(f'resume_penalties must be "continue" or "restart", not {value!r}')
