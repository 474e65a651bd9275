"""A request inside vLLM: its stop conditions, aborts, and the visible text."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from streamfold.loopback.core.reply import Reply, length, stopped
from streamfold.loopback.core.request import UNSTREAMED_INTERVAL, EngineRequest
from streamfold.loopback.core.request_params import check_known_seed
from streamfold.loopback.vllm import wire
from streamfold.loopback.vllm.completions import CompletionWriter
from streamfold.loopback.vllm.params import VllmRequestParams, read_generate, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from streamfold.loopback.core.causal_lm import CausalLM, LogprobsOf, Tokenizer
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Finish
    from streamfold.loopback.core.request_params import SamplingParams

__all__ = ["VllmRequest", "undisturbed"]

LONGEST_CHARACTER = 4  # in bytes of UTF-8


class VllmRequest(EngineRequest):
    """A generation in progress in vLLM."""

    counts_prompt: ClassVar[frozenset[str]] = frozenset(("repetition_penalty",))

    params: VllmRequestParams
    _text: _VllmText
    _writer: wire.VllmWriter

    def __init__(
        self, params: VllmRequestParams, config: Config, model: CausalLM, *, notify: Callable[[], None] = lambda: None
    ) -> None:
        self._format = wire.VllmFormat.of(config)
        super().__init__(params, config, model, notify=notify)

    @property
    def _logprobs_of(self) -> LogprobsOf:
        return "kept" if self._config.logprobs_mode == "processed_logprobs" else "raw"

    def _find_stop_ids(self) -> Collection[int]:
        own = self._sampling.stop_token_ids
        return own if self._sampling.ignore_eos else own | self._tokenizer.eos_token_ids

    def _make_text(self) -> _VllmText:
        return _VllmText(self._sampling, self._tokenizer, self.params.prompt)

    def _make_reply(self) -> Reply:
        params = self.params
        reply = Reply(
            rid=params.shown_rid,
            prompt_tokens=len(params.prompt),
            pieces=None if self._config.skip_tokenizer_init else [],
            prompt_token_ids=params.prompt if params.prompt_ids else None,
            sampling_mask=[] if params.sampling_mask else None,
        )
        if params.logprobs:
            reply.logprobs, reply.top_logprobs, reply.ranks = [], [], []
            reply.logprob_texts = [] if params.logprob_texts else None
        return reply

    def _make_writer(self) -> wire.VllmWriter:
        options = wire.ResponseOptions(
            usage=self.params.usage,
            continuous_usage=self.params.continuous_usage,
            text=self.params.text,
            decode=lambda token: self._tokenizer.decode([token], skip_special_tokens=False),
        )
        if self.params.completion:
            return CompletionWriter(
                self.reply, self._format, options, self._config.model_name, ids_as_text=self.params.ids_as_text
            )
        return wire.VllmWriter(self.reply, self._format, options)

    def _candidates(self) -> list[tuple[float | None, int]]:
        """The sampled token, then the most probable of the others, as many as were asked for."""
        sequence, token = self.sequence, self.reply.token_ids[-1]
        others = [pair for pair in sequence.candidates(self.params.top_logprobs) if pair[1] != token]
        return [(sequence.logprob, token), *others]

    def _failure_event(self, status: int, message: str) -> bytes:
        return self._format.error_event(message, status)

    def abort_now(self) -> None:
        """Abort without another step. All sampled tokens are sent: the frontend has them, it only holds some back.

        The Rust frontend sends what waits, and an error: the engine core has closed the stream of the request.
        """
        reply = self.reply
        if self._config.rust:
            self.fail(f"request output stream for `{reply.rid}` closed unexpectedly")
            return
        reply.finish = wire.aborted()
        self._text.close()
        if reply.pieces and self._known == len(reply.token_ids):
            reply.pieces[-1] += self._text.take()
        self._hand_over()

    def reject_queue_full(self) -> None:
        """Finish before the start, because the queue is full."""
        self.fail("The request queue is full.", 503)

    def body(self, label: str) -> dict[str, Any]:
        """Return the response body of an unstreamed request; ``label`` is the engine's current weight version."""
        self.reply.label = label
        return self._writer.whole(self._config.model_name)

    def _accept(self, token: int) -> Finish | None:
        reply, sampling = self.reply, self._sampling
        n = len(reply.token_ids)
        is_stop = token in self._stop_ids  # never sampled before min_tokens
        self._text.push(token, hidden=is_stop and not sampling.no_stop_trim, watched=n > sampling.min_new_tokens)
        if self.aborting:
            return wire.aborted()
        if self._text.matched is not None:
            return stopped(self._text.matched)
        if is_stop:
            is_eos = token in self._tokenizer.eos_token_ids and not sampling.ignore_eos
            return stopped(None if is_eos else token)
        if n >= self._budget:
            return length(self._budget)
        return None

    def _logprob_text(self, token: int) -> str:  # noqa: ARG002  # it is the one that was pushed last
        return self._text.spelled

    def _is_due(self, n: int) -> bool:
        interval = self._sampling.stream_interval or self._config.stream_interval
        if not self.params.stream:
            interval = UNSTREAMED_INTERVAL
        return self._known == 0 or n - self._known >= interval

    def _add_experts(self) -> None:
        if not self.params.experts or self._config.num_layers == 0 or self.aborting:
            return
        if self.params.stream and self._config.release < (0, 24):
            return
        rows = self.sequence.experts(self.params.experts_start, self.reply.token_ids)
        file = io.BytesIO()
        np.save(file, rows.astype(np.uint8 if self._config.num_experts <= 256 else np.uint16))
        self.reply.routed_experts = file.getvalue()


class _VllmText:
    """The text of one request: whole characters only; as many as a stop string could remove are held back.

    A character that starts in the prompt is sent whole, with the token that completes it. ``spelled`` is the text of
    the last token alone, special or not; ``matched`` is the stop string that was found.
    """

    withheld = False  # tokens are sent while text is held back

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._visible = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._spelling = tokenizer.detokenizer(skip_special_tokens=False)
        for token in prompt[1 - LONGEST_CHARACTER :]:
            self._visible.push(token)
            self._spelling.push(token)
        self._stops = params.stop
        self._keeps_stop = params.no_stop_trim
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tail = ""  # as long as a stop string can be, less one character
        self._text = ""  # not taken yet
        self._closed = False
        self.spelled = ""
        self.matched: str | None = None

    def push(self, token: int, *, hidden: bool, watched: bool) -> None:
        """Add one token; ``hidden``: without its text; ``watched``: look for stop strings."""
        self.spelled = self._spelling.push(token)
        new = "" if hidden else self._visible.push(token)
        self._text += new
        tail = self._tail + new
        self._tail = tail[-self._reach :] if self._reach else ""
        found = [(tail.find(stop), stop) for stop in self._stops if watched and stop in tail]
        if found:
            start, self.matched = min(found)
            end = start + len(self.matched) if self._keeps_stop else start
            self._text = self._text[: len(self._text) - (len(tail) - end)]

    def close(self) -> None:
        """Mark the text as complete: nothing is held back any more."""
        self._closed = True

    def take(self) -> str:
        """Return the text that became visible since the last call."""
        held = 0 if self._closed or self._keeps_stop else self._reach
        end = max(len(self._text) - held, 0)
        shown, self._text = self._text[:end], self._text[end:]
        return shown


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate without HTTP, clock or faults. Raises MalformedBody or InvalidRequest."""
    given = {"token_ids": list(input_ids), "sampling_params": sampling_params or {}, "stream": True, **body}
    config = replace(config, frontend="python")
    params = read_generate(given, config)
    verify(params, config)
    check_known_seed(params, "seed")
    request = VllmRequest(params, config, config.load_model())
    while not request.done:
        request.step(config.weight_version)
    return request.reply
