"""Complete a sample (:func:`complete`): request it, merge what was generated, retry failures, resume what was aborted.

Generations are never joined to each other. What a call has generated is merged into the sample, and a later call is
sent the sample's prompt plus generated tokens, with ``max_new_tokens`` reduced, as for any partial sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamfold.client._internal import internals_of
from streamfold.client.abort_signal import AbortSignal
from streamfold.client.observer import all_observers, observed
from streamfold.engines.base import PROMPT_KEYS, expects_top_p
from streamfold.errors import EngineError, StreamfoldError, StreamTruncated
from streamfold.samples.call_writer import CallWriter
from streamfold.samples.experts import kept_rows
from streamfold.samples.images import MEDIA_KEYS, image_fields
from streamfold.samples.merging import check_ready
from streamfold.samples.metadata import add_counts, enter
from streamfold.samples.options import CompletionOptions
from streamfold.samples.repeats import Repeats
from streamfold.samples.routing import routed_headers
from streamfold.samples.running import running
from streamfold.samples.staleness import call_version
from streamfold.samples.status import is_finished
from streamfold.samples.stopping import Verdict
from streamfold.samples.subject import subject_of
from streamfold.samples.turn import Turn
from streamfold.samples.validation import check_uniform, has_generated

if TYPE_CHECKING:
    from streamfold._types import SampleLike
    from streamfold.client.client import Client
    from streamfold.client.observer import Subject
    from streamfold.samples.call_writer import CallOutcome
    from streamfold.samples.options import Resume

__all__ = ["complete"]

S = TypeVar("S", bound="SampleLike")

_logger = logging.getLogger("streamfold")


def _check_budget(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be an integer of at least 1, or None; not {value!r}")


async def complete(
    client: Client,
    sample: S,
    sampling_params: Mapping[str, Any],
    *,
    resume: Resume = "continue",
    options: CompletionOptions | None = None,
    max_new_tokens_per_turn: int | None = None,
    max_response_len: int | None = None,
    args: Any = None,  # noqa: ANN401  # the host's own
) -> S:
    """Request ``sample`` until it is COMPLETED or TRUNCATED, each time from the prompt plus the generated tokens.

    What a call has generated is merged before anything else happens, also if the call failed or this is cancelled. As
    long as a call has received no token, the client itself retries it. After that ``resume`` decides what follows a
    truncated or damaged stream, a timeout, a retryable error and an abort by the engine. Each resume is logged and
    counted in ``metadata["streamfold_resumed"]``; ``client.retries`` limits their number and gives the backoff before
    each. Three calls in a row whose streams are damaged in the same way, with fewer than 16 tokens each, are the last
    ones; the second is logged as a warning.

    Images of the sample (``multimodal_inputs["images"]``) are sent to SGLang with each request, unless
    ``options.extra`` has them; other inputs, and images for other endpoints, are refused.

    A prompt without ids (``sample.tokens`` empty) is sent as ``sample.prompt``. If the engine sends the prompt's ids
    (``options.prompt_token_ids``), they are kept. Otherwise such a sample cannot be resumed from its tokens: it is
    restarted from its prompt, and ``metadata["streamfold_restarted_tokens"]`` counts what was dropped. The same holds
    if the response was aborted within what may be a stop string, or has a grammar or ``stop_regex``: the engine would
    match them from their beginning. Penalties would be counted from their beginning too: see
    ``options.resume_penalties``. A later turn is restarted from where it started; it needs the prompt's ids.

    Routed experts that the sample has stay as they are, since they are of the weights that sampled its tokens: each
    call adds those of later tokens.

    Args:
        client: of the engine.
        sample: ours or a host's; PENDING, or ABORTED and then resumed. One that is finished is returned as it is, a
            FAILED one too. If anything was appended behind the last call (:func:`~streamfold.append_observation`),
            another turn starts behind that, whatever the status is.
        sampling_params: in the engine's words, for the whole response: ``max_new_tokens`` limits all of it, a tool's
            tokens included, and each call is given what is left. Without any limit nothing is resumed. Never changed.
        resume: ``"continue"`` resumes from the tokens that were received. ``"restart"`` drops what the failed call has
            generated and requests it again. ``"raise"`` raises the error.
        options: how the requests are made; None: the defaults.
        max_new_tokens_per_turn: limits what each turn generates, besides ``max_new_tokens``. None: no such limit.
        max_response_len: limits the whole response, as ``max_new_tokens`` does. None: no such limit.
        args: the host's settings, which its samples need.

    Returns:
        The sample: COMPLETED, or TRUNCATED, also if it was as long as a limit already; ABORTED if the caller or the
        host aborted it, or the engine did and ``options.resume_aborts`` is False.

    Raises:
        StreamfoldError: the last retry failed, or the engine would refuse another one (4xx), or damage repeats itself,
            or requested side data was not received. The sample is ABORTED and can be resumed.
        ValueError: the request is invalid, or what was received does not fit the sample.
        asyncio.CancelledError: this was cancelled. What was received is in the sample, which is ABORTED, unless the
            engine finished it first.
    """
    completion = _Completion(
        client,
        sample,
        sampling_params,
        resume=resume,
        options=options or CompletionOptions(),
        budgets=(max_new_tokens_per_turn, max_response_len),
        args=args,
    )
    await completion.run()
    return sample


class _Completion:
    """One run of :func:`complete`."""

    def __init__(
        self,
        client: Client,
        sample: SampleLike,
        sampling_params: Mapping[str, Any],
        *,
        resume: Resume,
        options: CompletionOptions,
        budgets: tuple[int | None, int | None],
        args: Any,  # noqa: ANN401  # the host's own
    ) -> None:
        for name, budget in zip(("max_new_tokens_per_turn", "max_response_len"), budgets, strict=True):
            _check_budget(name, budget)
        internals = internals_of(client)
        self._client = client
        self._engine_spec = internals.engine_spec
        self._client_headers = internals.header_names
        self._has_experts = internals.experts is not None
        self._retries = internals.retries
        self._client_abort = internals.abort_signal
        self._observers = internals.observers
        self._subject: Subject | None = None  # of no interest to anybody
        self._host_abort = AbortSignal.of(options.aborted)
        self._sample = sample
        self._params = self._engine_spec.normalize_params(sampling_params)
        self._resume = resume
        self._options = options
        self._calls = 0
        self._images: dict[str, Any] = {}  # the sample's own, if the caller has not encoded them
        self._headers: Mapping[str, str] | None = None  # with the sample's key, once it runs
        self._failures = 0  # of calls in a row that have received no token
        self._repeats = Repeats()
        self._turn = Turn(
            sample=sample,
            params=self._params,
            engine_spec=self._engine_spec,
            tokenizer=options.tokenizer if options.tokenizer is not None else internals.tokenizer,
            eos_ids=set() if options.stop_ids is None else options.stop_ids,
            has_experts=self._has_experts,
            has_indexer=options.indexer_topk,
            restarts_penalties=options.resume_penalties == "restart",
            has_fixed_prompt=isinstance(options.extra, Mapping) and bool(options.extra.keys() & PROMPT_KEYS),
            max_new_tokens_per_turn=budgets[0],
            max_response_len=budgets[1],
        )
        self._writer = CallWriter(
            sample=sample,
            turn=self._turn,
            engine_spec=self._engine_spec,
            options=options,
            resume=resume,
            has_experts=self._has_experts,
            args=args,
        )

    async def run(self) -> None:
        """Make calls until the sample is finished, its abort is the result, or no call may follow."""
        turn = self._turn
        begins = turn.open()
        if is_finished(self._sample):
            return
        check_ready(self._sample)
        self._check_request()
        enter(self._sample)
        options = self._options
        self._headers = routed_headers(
            self._sample, options.headers, options.routing_header, self._engine_spec, self._client_headers
        )
        self._subject = subject_of(self._sample) if all_observers(self._observers) else None
        if begins:
            turn.begin()
        verdict = turn.judge()
        while verdict is not Verdict.FINISHED:
            if verdict is Verdict.RESTART:
                if self._host_abort.is_set():
                    return  # keep what there is: no call may follow that replaces it
                turn.restart()
            outcome = await self._call()
            try:
                outcome = self._assess(outcome)
            except BaseException as cause:  # the host's flag raised
                self._writer.write_or_drop(outcome, cause=cause)
                raise
            may_resume = self._writer.write_or_drop(outcome, may_resume=self._may_resume(outcome))
            if outcome.error is None:
                return
            verdict = turn.judge()
            if verdict is Verdict.FINISHED:
                return
            if not may_resume:
                raise outcome.error
            if not await self._back_off(outcome):
                return
            add_counts(self._sample, resumed=1)

    # The request.

    def _check_request(self) -> None:
        """Raise ValueError, before anything is sent, if what the calls will generate cannot fit the sample."""
        sample, before, left = self._sample, self._sample.response_length, self._turn.tokens_left
        limit = self._params.get("max_new_tokens")
        if isinstance(limit, int) and limit < 0:
            raise ValueError(f"max_new_tokens is {limit}: it must be 0 or more")
        extra, has_budget = self._options.extra, left is None or left > 0  # without it no request is sent
        if has_budget and not callable(extra) and not (extra or {}).keys() & (PROMPT_KEYS | MEDIA_KEYS):
            self._images = image_fields(sample, self._engine_spec)
        if not has_budget or not has_generated(sample):
            return
        has_logprobs = sample.rollout_log_probs is not None
        check_uniform("log-probabilities", before=before, has=has_logprobs, more=None, gets=self._options.logprobs)
        has_top_p = getattr(sample, "rollout_top_p_token_offsets", None) is not None
        if not (has_top_p and self._engine_spec.sends_unrequested_side_data):
            check_uniform("top-p ids", before=before, has=has_top_p, more=None, gets=expects_top_p(self._params))

    async def _call(self) -> CallOutcome:
        """Make one call. If this is cancelled, the call is aborted and what it has generated is merged."""
        self._calls += 1
        get_version = call_version.get()
        self._writer.version = None if get_version is None else get_version()
        input_ids, extra = self._prompt()
        self._writer.has_media = bool(extra.keys() & MEDIA_KEYS)
        with observed(subject=self._subject):
            call = self._client.start(
                input_ids,
                self._remaining_params(),
                logprobs=self._options.logprobs,
                # Without the prompt's ids, the rows of routed experts could not be merged.
                prompt_token_ids=input_ids is None
                and (self._options.prompt_token_ids or (self._has_experts and not self._sample.tokens)),
                # Where the engine makes more of the prompt (images), rows are not at the places of our tokens.
                experts_start=kept_rows(self._sample) if self._has_experts and input_ids is not None else 0,
                headers=self._headers,
                extra=extra,
                aborted=self._host_abort,
            )
        with running(self._sample, call, self._writer):
            try:
                return self._writer.outcome(await call, None, was_aborted=call.aborting)
            except StreamfoldError as error:
                ended = await call.abort()  # at once: the call has ended
                return self._writer.outcome(ended, error, was_aborted=call.aborting)
            except BaseException as cause:
                generation = await call.abort()
                failure = call.error if isinstance(call.error, StreamfoldError) else None
                outcome = self._writer.outcome(generation, failure, was_aborted=True)
                self._writer.write_or_drop(outcome, cause=cause)
                raise

    def _prompt(self) -> tuple[list[int] | None, dict[str, Any]]:
        """The ids to send, if the prompt is sent as ids, and the further keys of the request."""
        sample, extra = self._sample, self._options.extra
        keys = dict((extra() if callable(extra) else extra) or {})
        if self._options.indexer_topk:
            keys["return_indexer_topk"] = True
        if keys.keys() & PROMPT_KEYS:
            return None, keys
        keys |= self._images
        if len(sample.tokens) > sample.response_length:
            # The engine may make more ids of those of an image, so the client must not count them.
            return (None, {**keys, "input_ids": sample.tokens}) if self._images else (sample.tokens, keys)
        if sample.response_length:
            raise ValueError("another turn needs the ids of the prompt before those of the response: sample.tokens")
        if not isinstance(sample.prompt, str):
            raise ValueError(
                "sample.prompt is the messages of a chat, which need the model's template: set sample.tokens = "
                "tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True)"
            )
        return None, {**keys, "text": sample.prompt}

    def _remaining_params(self) -> dict[str, Any]:
        """The sampling parameters with the limits that are left for the next call."""
        params, left = dict(self._params), self._turn.tokens_left
        limit, minimum = params.get("max_new_tokens"), params.get("min_new_tokens")
        # Any other value is for the client to refuse.
        if left is not None and (limit is None or (isinstance(limit, int) and limit > 0)):
            params["max_new_tokens"] = max(0, left)
        if isinstance(minimum, int) and minimum > 0:
            params["min_new_tokens"] = max(0, minimum - self._sample.response_length)
        return params

    # The outcome.

    def _assess(self, outcome: CallOutcome) -> CallOutcome:
        """Decide whether a call has failed: an abort that this process has caused is a result, any other is not."""
        error, was_aborted = outcome.error, outcome.was_aborted or self._client_abort.is_set()
        if self._host_abort.is_set():
            was_aborted = True
            if isinstance(error, StreamTruncated):  # the host may have ended the engine itself
                error = None
        is_unexpected_abort = error is None and outcome.generation.finish_reason == "abort" and not was_aborted
        if is_unexpected_abort and self._options.resume_aborts:
            message = "the engine aborted the request, which neither the caller nor the host had requested"
            error = EngineError(message, retryable=True, partial=outcome.generation)
        return replace(outcome, error=error, was_aborted=was_aborted)

    def _may_resume(self, outcome: CallOutcome) -> bool:
        """Whether another call may follow. Once for each call: some damage counts."""
        tokens = len(outcome.generation.token_ids)
        if not outcome.was_aborted and self._repeats.give_up(outcome.error, tokens, self._sample.index):
            return False
        has_budget = self._turn.tokens_left is not None  # otherwise it is not known what is left
        is_last = self._resume == "raise" or self._retries.is_last(self._calls)
        return outcome.is_resumable and has_budget and not is_last

    # The next call.

    async def _back_off(self, outcome: CallOutcome) -> bool:
        """Wait before the next call; False if an abort forbids it."""
        if outcome.was_aborted:
            return False
        sample = self._sample
        _logger.info("resuming sample %s at token %s after: %s", sample.index, sample.response_length, outcome.error)
        self._failures = 1 if outcome.has_tokens else self._failures + 1
        was_aborted = await (self._client_abort | self._host_abort).wait(self._retries.pause(self._failures))
        return not was_aborted
