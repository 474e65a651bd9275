"""A request inside SGLang: what it checks, what ends it, and the text that it shows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.request import INTERVAL_UNSTREAMED, Request
from streamfold.loopback.core.tokenizer import Detokenizer
from streamfold.loopback.sglang import wire
from streamfold.loopback.sglang.params import EXPERTS_DTYPES, read_asks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Finish, Reply
    from streamfold.loopback.core.request_params import SamplingParams
    from streamfold.loopback.core.tokenizer import Tokenizer

__all__ = ["SglangRequest", "undisturbed"]

# The Rust frontend sends each delta by itself, and gives a request up that has this many waiting.
MOST_WAITING_EVENTS = 1024
# Text is decoded after so many tokens of the prompt: enough for the words and characters that it goes on with.
CONTEXT_TOKENS = 5

_REPLACEMENT = "\ufffd"
_CJK = (("\u3400", "\u4dbf"), ("\u4e00", "\u9fff"), ("\U00020000", "\U0002ffff"))


class SglangRequest(Request):
    """A generation under way in SGLang. An abort takes effect with a step, which samples one more token."""

    _text: _Text

    def _ends(self) -> Collection[int]:
        params = self._params
        return frozenset() if params.ignore_eos else params.stop_token_ids | {self._tokenizer.eos_token_id}

    def _open_text(self) -> _Text:
        return _Text(self._params, self._tokenizer, self.ask.prompt)

    def _open_reply(self) -> Reply:
        ask, config = self.ask, self._config
        reply = wire.Reply(
            rid=ask.rid,
            prompt_tokens=len(ask.prompt),
            pieces=None if config.skip_tokenizer_init else [],
            prompt_token_ids=ask.prompt if ask.prompt_ids and config.sglang.release >= (0, 5, 13) else None,
            index=ask.index,
            arrived=time.time(),
        )
        if ask.logprobs:
            reply.logprobs = []
            reply.logprob_texts = [] if ask.logprob_texts else None
            reply.top_logprobs = [] if ask.top_logprobs else None
            if 0 <= ask.logprob_start < len(ask.prompt):
                reply.input_logprobs = self._input_logprobs(ask.logprob_start)
            if ask.top_p and self._params.filtered:
                reply.top_p = []
        if ask.sampling_mask and config.sglang.release >= (0, 5, 16):
            reply.sampling_mask, reply.sampling_logprobs = [], []
        return reply

    def _open_writer(self) -> wire.Writer:
        return wire.Writer(self.reply, self._config.sglang)

    def inspect(self) -> bool:
        """Look at what the scheduler checks; what it refuses has ended then. Whether it may run."""
        ask, prompt_len = self.ask, len(self.ask.prompt)
        if ask.logprobs and ask.logprob_start > prompt_len:
            self._refuse(wire.refused(f"logprob_start_len ({ask.logprob_start}) is beyond the prompt ({prompt_len})."))
        elif ask.experts and not 0 <= ask.experts_start <= prompt_len:
            self._refuse(wire.refused(f"routed_experts_start_len ({ask.experts_start}) is not in [0, {prompt_len}]."))
        return not self.done

    def turn_away(self) -> None:
        """End before the start, for want of room in the queue."""
        self._refuse(wire.queue_full(), in_queue=True)

    def _refuse(self, finish: Finish, *, in_queue: bool = False) -> None:
        reply = self.reply
        reply.finish, reply.in_queue = finish, in_queue
        if not in_queue:
            # The engine puts a dummy of one token in the place of a prompt that it refuses.
            reply.prompt_tokens, reply.logprobs = 1, None
        self.notify()

    def abort_now(self) -> None:
        """End at once: it does not run. What was sampled and not told yet is lost, as the frontend knows none of it."""
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
    def refusal(self) -> tuple[int, str] | None:
        """The status and the message, if it ended with a status."""
        finish = self.reply.finish or {}
        status = finish.get("status_code")
        return self._failure if status is None else (status, finish["message"])

    def body(self, label: str) -> dict[str, Any]:
        """Give the answer to a request that is not streamed."""
        self.reply.label = label
        return wire.whole(self.reply, self._config.sglang)

    def _failure_event(self, status: int, message: str) -> bytes:
        return wire.error_event(self._config.sglang, message, status, self.reply.index)

    def _take(self, token: int) -> Finish | None:
        reply, text, params = self.reply, self._text, self._params
        ends_it = token in self._stop_ids
        aborted, full = self.aborting, len(reply.token_ids) >= self._budget
        if not ends_it or aborted or full or params.no_stop_trim:
            text.push(token)
        if aborted:
            return wire.aborted()
        if full:
            return wire.length(self._budget)
        if ends_it:
            return wire.stopped(token)
        if text.matched is not None:
            text.stop_at(text.matched)
            return wire.stopped(text.matched)
        return None

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _finish_without_tokens(self) -> None:
        if self.reply.logprobs is not None:
            token = self._model.draw(self._context, self._salt)
            after = self._model.read([*self.ask.prompt, token])
            self.reply.spare_pair = (self._model.logprob(after.hash), token)
        super()._finish_without_tokens()

    def _cut(self) -> None:
        super()._cut()
        if len(self._cuts) > MOST_WAITING_EVENTS:
            self._cuts.clear()
            self.fail("response truncated before completion")

    @property
    def _sends_each_delta(self) -> bool:
        return self._config.sglang.rust and self._config.sglang.incremental

    def _is_due(self, n: int) -> bool:
        interval = self._params.stream_interval or self._config.stream_interval
        if not self.ask.stream:
            interval = INTERVAL_UNSTREAMED
        if self._config.sglang.release >= (0, 5, 22):
            return self._known == 0 or n - self._known >= interval
        return interval == 1 or n % interval == 1

    def _add_experts(self) -> None:
        ask, config = self.ask, self._config
        if not ask.experts or config.num_layers == 0:
            return
        # Old releases took the start for granted and gave all rows.
        start = ask.experts_start if config.sglang.release >= (0, 5, 12) else 0
        tokens = ask.prompt + self.reply.token_ids
        # The last token was sampled and never went through the model: it has no row.
        rows = self._model.experts(self._model.hashes(tokens[:-1])[start:])
        self.reply.routed_experts = rows.astype(EXPERTS_DTYPES[ask.experts_dtype]).tobytes()

    def _input_logprobs(self, start: int) -> list[tuple[float | None, int]]:
        prompt, hashes = self.ask.prompt, self._model.hashes(self.ask.prompt)
        rest = ((self._model.logprob(int(hashes[i])), prompt[i]) for i in range(start + 1, len(prompt)))
        # Nothing stands before the first one that could have predicted it.
        return [(None, prompt[start]), *rest]


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate by itself, without HTTP or a clock. Raises InvalidRequest."""
    given = {"input_ids": list(input_ids), "sampling_params": sampling_params or {}, "stream": True, **body}
    config = replace(config, frontend="python")
    (ask,) = read_asks(given, config)
    request = SglangRequest(ask, config)
    while not request.done:
        request.step(config.weight_version)
    return request.reply


class _Text:
    """The text of one request: decoded after the last tokens of the prompt, held back where more could change it.

    A character that the prompt leaves open counts for a character of the prompt from its first byte on: once the
    response completes it, it is in neither text.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._no_stop_trim = params.no_stop_trim
        self._stops = params.stop
        self._ids = list(prompt[-CONTEXT_TOKENS:])  # what was decoded last, and what is new
        self._context = len(self._ids)  # how many of them are not new
        self._context_length = len(self._decoded())
        self._shown = 0  # characters of the new text that were taken before it was whole
        self._raw = Detokenizer(tokenizer, skip_special_tokens=False)  # stop strings may lie in special tokens
        self._tail = ""  # as long as a stop string could reach back
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
        """Whether the text ends in what may become a stop string."""
        return any(self._tail.endswith(stop[:k]) for stop in self._stops for k in range(1, len(stop)))

    def stop_at(self, stop: str) -> None:
        """Have the text end at a stop string, or behind it."""
        self._stop = stop

    def close(self) -> None:
        """Take note that the last token is in: nothing is held back any more."""
        self._closed = True

    def take(self) -> str:
        """Give what may be seen of the text since the last time."""
        text = self._decoded()[self._context_length :]
        whole = bool(text) and not text.endswith(_REPLACEMENT)
        if self._closed:
            text = self._trimmed(text)
        elif not whole:
            text = _printable(text)
        shown, self._shown = text[self._shown :], max(self._shown, len(text))
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
    """Give what the engine shows of a text whose last character may be half of one: the words before."""
    return text[:-1] if _is_cjk(text[-2:-1]) else text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return any(first <= character <= last for first, last in _CJK)
