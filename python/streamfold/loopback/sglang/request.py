"""A request inside SGLang: its checks, stop conditions, aborts, and the visible text."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.reply import Reply, length, stopped
from streamfold.loopback.core.request import UNSTREAMED_INTERVAL, EngineRequest
from streamfold.loopback.core.request_params import check_known_seed
from streamfold.loopback.sglang import wire
from streamfold.loopback.sglang.params import EXPERTS_DTYPES, read_generate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from streamfold.loopback.core.causal_lm import LogprobsOf, Tokenizer
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Finish
    from streamfold.loopback.core.request_params import SamplingParams

__all__ = ["SglangRequest", "undisturbed"]

# The Rust frontend sends each delta as one event, and fails a request with more waiting events than this.
MAX_WAITING_EVENTS = 1024
# Text is detokenized together with this many tokens of the prompt, so that it continues their words and characters.
CONTEXT_TOKENS = 5

_REPLACEMENT = "\ufffd"
_CJK = (("\u3400", "\u4dbf"), ("\u4e00", "\u9fff"), ("\U00020000", "\U0002ffff"))


class SglangRequest(EngineRequest):
    """A generation in progress in SGLang. An abort takes effect in the next step, which samples one more token."""

    _text: _SglangText

    @property
    def _logprobs_of(self) -> LogprobsOf:
        return "kept" if self.params.top_p and self._sampling.filtered else "scaled"

    def _find_stop_ids(self) -> Collection[int]:
        sampling = self._sampling
        return frozenset() if sampling.ignore_eos else sampling.stop_token_ids | self._tokenizer.eos_token_ids

    def _make_text(self) -> _SglangText:
        return _SglangText(self._sampling, self._tokenizer, self.params.prompt)

    def _make_reply(self) -> Reply:
        params, config = self.params, self._config
        reply = Reply(
            rid=params.rid,
            prompt_tokens=len(params.prompt),
            pieces=None if config.skip_tokenizer_init else [],
            prompt_token_ids=params.prompt if params.prompt_ids and config.release >= (0, 5, 13) else None,
            index=params.index,
            arrived=time.time(),
        )
        if params.logprobs:
            reply.logprobs = []
            reply.logprob_texts = [] if params.logprob_texts else None
            reply.top_logprobs = [] if params.top_logprobs else None
            if 0 <= params.logprob_start < len(params.prompt):
                reply.input_logprobs = self.sequence.prompt_logprobs(params.logprob_start)
            if params.top_p and self._sampling.filtered:
                reply.top_p = []
        if params.sampling_mask and config.release >= (0, 5, 16):
            reply.sampling_mask, reply.sampling_logprobs = [], []
        return reply

    def _make_writer(self) -> wire.SglangWriter:
        self._format = wire.SglangFormat.of(self._config)
        return wire.SglangWriter(self.reply, self._format)

    def validate(self) -> bool:
        """Check what the scheduler checks; return whether the request may run. A rejected one is finished."""
        params, prompt_len = self.params, len(self.params.prompt)
        if params.logprobs and params.logprob_start > prompt_len:
            self._reject(
                wire.refused(f"logprob_start_len ({params.logprob_start}) is beyond the prompt ({prompt_len}).")
            )
        elif params.experts and not 0 <= params.experts_start <= prompt_len:
            self._reject(
                wire.refused(f"routed_experts_start_len ({params.experts_start}) is not in [0, {prompt_len}].")
            )
        return not self.done

    def reject_queue_full(self) -> None:
        """Finish before the start, because the queue is full."""
        self._reject(wire.queue_full(), in_queue=True)

    def _reject(self, finish: Finish, *, in_queue: bool = False) -> None:
        reply = self.reply
        reply.finish, reply.in_queue = finish, in_queue
        if not in_queue:
            # The engine replaces a rejected prompt by a dummy of one token.
            reply.prompt_tokens, reply.logprobs = 1, None
        self.notify()

    def abort_now(self) -> None:
        """Abort a request that does not run. Tokens that the frontend has not received are lost."""
        reply = self.reply
        lists = (
            *(reply.token_ids, reply.versions, reply.logprobs, reply.pieces, reply.logprob_texts, reply.top_logprobs),
            *(reply.sampling_mask, reply.sampling_logprobs, reply.top_p),
        )
        for values in lists:
            if values is not None:
                del values[self._known :]
        reply.finish, reply.in_queue = wire.aborted_in_queue(), True
        self.notify()

    @property
    def http_failure(self) -> tuple[int, str] | None:
        """HTTP status and message, if it failed with a status."""
        finish = self.reply.finish or {}
        status = finish.get("status_code")
        return self._failure if status is None else (status, finish["message"])

    def body(self, label: str) -> dict[str, Any]:
        """Return the response body of an unstreamed request; ``label`` is the engine's current weight version."""
        self.reply.label = label
        return wire.whole(self.reply, self._format)

    def _failure_event(self, status: int, message: str) -> bytes:
        return wire.error_event(self._format, message, status, self.reply.index)

    def _accept(self, token: int) -> Finish | None:
        reply, text, sampling = self.reply, self._text, self._sampling
        is_stop = token in self._stop_ids
        aborted, full = self.aborting, len(reply.token_ids) >= self._budget
        if not is_stop or aborted or full or sampling.no_stop_trim:
            text.push(token)
        if aborted:
            return wire.aborted()
        if full:
            return length(self._budget)
        if is_stop:
            return stopped(token)
        if text.matched is not None:
            text.stop_at(text.matched)
            return stopped(text.matched)
        return None

    def _logprob_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _finish_without_tokens(self) -> None:
        if self.reply.logprobs is not None:
            token = self.sequence.draw()
            self.reply.spare_pair = (self.sequence.logprob, token)
            self._add_input_logprobs()
        super()._finish_without_tokens()

    def _add_logprobs(self) -> None:
        super()._add_logprobs()
        self._add_input_logprobs()

    def _add_input_logprobs(self) -> None:
        """Add the prompt's logprobs, which a real model has computed by the first token."""
        reply, start = self.reply, self.params.logprob_start
        if reply.logprobs is not None and reply.input_logprobs is None and 0 <= start < len(self.params.prompt):
            reply.input_logprobs = self.sequence.prompt_logprobs(start)

    def _hand_over(self) -> None:
        super()._hand_over()
        if len(self._due) > MAX_WAITING_EVENTS:
            self._due.clear()
            self.fail("response truncated before completion")

    @property
    def _sends_each_delta(self) -> bool:
        return self._config.rust and self._config.incremental

    def _is_due(self, n: int) -> bool:
        interval = self._sampling.stream_interval or self._config.stream_interval
        if not self.params.stream:
            interval = UNSTREAMED_INTERVAL
        if self._config.release >= (0, 5, 22):
            return self._known == 0 or n - self._known >= interval
        return interval == 1 or n % interval == 1

    def _add_experts(self) -> None:
        params, config = self.params, self._config
        if not params.experts or config.num_layers == 0:
            return
        # Versions before 0.5.12 ignore the start and return all rows.
        start = params.experts_start if config.release >= (0, 5, 12) else 0
        rows = self.sequence.experts(start, self.reply.token_ids)
        self.reply.routed_experts = rows.astype(EXPERTS_DTYPES[params.experts_dtype]).tobytes()


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate without HTTP, clock or faults, one token a step and an event. Raises InvalidRequest."""
    sampling_params = {**(sampling_params or {}), "stream_interval": 1}  # so that no text is repeated
    given = {"input_ids": list(input_ids), "sampling_params": sampling_params, "stream": True, **body}
    config = replace(config, frontend="python", tokens_per_step=1)
    (params,) = read_generate(given, config)
    check_known_seed(params, "sampling_seed")
    request = SglangRequest(params, config, config.load_model())
    while not request.done:
        request.step(config.weight_version)
    return request.reply


class _SglangText:
    """The text of one request: detokenized after the last tokens of the prompt; what may still change is held back.

    A character that starts in the prompt belongs to the prompt: if the response completes it, it is in neither text.
    Where an event brings several tokens, characters may be sent twice: an incomplete character at the end can make less
    of the text visible than before, and the next event then starts there.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._no_stop_trim = params.no_stop_trim
        self._stops = params.stop
        self._ids = list(prompt[-CONTEXT_TOKENS:])  # the last tokens with text, then the new ones
        self._context = len(self._ids)  # number of those that are not new
        self._context_length = len(self._decoded())
        self._shown = 0  # characters of the new text that were visible last, while it was incomplete
        self._raw = tokenizer.detokenizer(skip_special_tokens=False)  # stop strings may be in special tokens
        self._tail = ""  # as long as a stop string can be, less one character
        self._reach = max(map(len, self._stops), default=1) - 1
        self._stop = ""
        self._closed = False
        self.matched: str | None = None

    def push(self, token: int) -> None:
        """Add one token."""
        self._ids.append(token)
        if self._stops:
            tail = self._tail + self._raw.push(token)
            self.matched = next((stop for stop in self._stops if stop in tail), None)
            self._tail = tail[-self._reach :] if self._reach else ""

    @property
    def withheld(self) -> bool:
        """Whether the text ends with the beginning of a stop string."""
        return any(self._tail.endswith(stop[:k]) for stop in self._stops for k in range(1, len(stop)))

    def stop_at(self, stop: str) -> None:
        """Trim the text at a stop string, before or behind it."""
        self._stop = stop

    def close(self) -> None:
        """Mark the text as complete: nothing is held back any more."""
        self._closed = True

    def take(self) -> str:
        """Return the text that became visible since the last call."""
        text = self._decoded()[self._context_length :]
        whole = bool(text) and not text.endswith(_REPLACEMENT)
        if self._closed:
            text = self._trimmed(text)
        elif not whole:
            text = _printable(text)
        shown, self._shown = text[self._shown :], len(text)
        if whole and not self._closed:
            del self._ids[: self._context]
            self._context, self._context_length, self._shown = len(self._ids), len(self._decoded()), 0
        return shown

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)

    def _trimmed(self, text: str) -> str:
        found = text.find(self._stop, self._shown) if self._stop else -1
        if found < 0:
            return text
        return text[: found + len(self._stop) if self._no_stop_trim else found]


def _printable(text: str) -> str:
    """Return what the engine sends of a text whose last character may be incomplete: the words before it."""
    return text[:-1] if _is_cjk(text[-2:-1]) else text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return any(first <= character <= last for first, last in _CJK)
