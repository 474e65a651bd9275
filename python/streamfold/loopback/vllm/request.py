"""A request inside vLLM: what ends it, the text that it shows, and how an abort ends it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from streamfold.loopback.core.reply import Reply, length, stopped
from streamfold.loopback.core.request import INTERVAL_UNSTREAMED, Request
from streamfold.loopback.core.tokenizer import Detokenizer
from streamfold.loopback.vllm import wire
from streamfold.loopback.vllm.completions import CompletionWriter
from streamfold.loopback.vllm.params import VllmAsk, read_generate, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Finish
    from streamfold.loopback.core.request_params import SamplingParams
    from streamfold.loopback.core.tokenizer import Tokenizer

__all__ = ["VllmRequest", "undisturbed"]

LONGEST_CHARACTER = 4  # in bytes of UTF-8


class VllmRequest(Request):
    """A generation under way in vLLM."""

    ask: VllmAsk
    _text: _Text
    _writer: wire.Writer

    def __init__(self, ask: VllmAsk, config: Config, *, notify: Callable[[], None] = lambda: None) -> None:
        super().__init__(ask, config, notify=notify)

    def _ends(self) -> Collection[int]:
        own = self._params.stop_token_ids
        return own if self._params.ignore_eos else own | {self._tokenizer.eos_token_id}

    def _open_text(self) -> _Text:
        return _Text(self._params, self._tokenizer, self.ask.prompt)

    def _open_reply(self) -> Reply:
        ask = self.ask
        reply = Reply(
            rid=ask.shown_rid,
            prompt_tokens=len(ask.prompt),
            pieces=None if self._config.skip_tokenizer_init else [],
            prompt_token_ids=ask.prompt if ask.prompt_ids else None,
            sampling_mask=[] if ask.sampling_mask else None,
        )
        if ask.logprobs:
            reply.logprobs, reply.top_logprobs = [], []
            reply.logprob_texts = [] if ask.logprob_texts else None
        return reply

    def _open_writer(self) -> wire.Writer:
        told = wire.Told(
            usage=self.ask.usage,
            continuous_usage=self.ask.continuous_usage,
            text=self.ask.text,
            decode=lambda token: self._tokenizer.decode([token], skip_special_tokens=False),
        )
        if self.ask.completion:
            return CompletionWriter(
                self.reply, self._config.vllm, told, self._config.model_name, ids_as_text=self.ask.ids_as_text
            )
        return wire.Writer(self.reply, self._config.vllm, told)

    def abort_now(self) -> None:
        """End at once. What was sampled is told: the frontend knows every token, it only holds some back."""
        reply = self.reply
        reply.finish = wire.aborted()
        self._text.close()
        if reply.pieces and self._known == len(reply.token_ids):
            reply.pieces[-1] += self._text.take()
        self._cut()

    def turn_away(self) -> None:
        """End before the start, for want of room in the queue."""
        self.fail("The request queue is full.", 503)

    def body(self, label: str) -> dict[str, Any]:
        """Give the answer to a request that is not streamed."""
        self.reply.label = label
        return self._writer.whole(self._config.model_name)

    def _take(self, token: int) -> Finish | None:
        reply, params = self.reply, self._params
        n = len(reply.token_ids)
        ends_it = token in self._stop_ids  # before min_tokens it is never drawn
        self._text.push(token, hidden=ends_it and not params.no_stop_trim, watched=n > params.min_new_tokens)
        if self.aborting:
            return wire.aborted()
        if self._text.matched is not None:
            return stopped(self._text.matched)
        if ends_it:
            is_eos = token == self._tokenizer.eos_token_id and not params.ignore_eos
            return stopped(None if is_eos else token)
        if n >= self._budget:
            return length(self._budget)
        return None

    def _text_of(self, token: int) -> str:  # noqa: ARG002  # it is the one that was pushed last
        return self._text.spelled

    def _is_due(self, n: int) -> bool:
        interval = self._params.stream_interval or self._config.stream_interval
        if not self.ask.stream:
            interval = INTERVAL_UNSTREAMED
        return self._known == 0 or n - self._known >= interval

    def _add_experts(self) -> None:
        if not self.ask.experts or self._config.num_layers == 0 or self.aborting:
            return
        if self.ask.stream and self._config.vllm.release < (0, 24):
            return
        tokens = self.ask.prompt + self.reply.token_ids
        # The last token was sampled and never went through the model: it has no row.
        rows = self._model.experts(self._model.hashes(tokens[:-1])[self.ask.experts_start :])
        file = io.BytesIO()
        np.save(file, rows.astype(np.uint8 if self._config.num_experts <= 256 else np.uint16))
        self.reply.routed_experts = file.getvalue()


class _Text:
    """The text of one request: whole characters only, and as many held back as a stop string could take away.

    A character that the prompt leaves open is told whole, with the token that completes it. ``spelled`` is the text of
    the last token by itself, special or not, ``matched`` the stop string that the text has come to.
    """

    withheld = False  # the tokens come all the same

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._visible = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._spelling = Detokenizer(tokenizer, skip_special_tokens=False)
        for token in prompt[1 - LONGEST_CHARACTER :]:
            self._visible.push(token)
            self._spelling.push(token)
        self._stops = params.stop
        self._keeps_stop = params.no_stop_trim
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tail = ""  # as long as a stop string could reach back
        self._text = ""  # not taken yet
        self._closed = False
        self.spelled = ""
        self.matched: str | None = None

    def push(self, token: int, *, hidden: bool, watched: bool) -> None:
        """Add one token; ``hidden``: without its text; ``watched``: it may complete a stop string."""
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
        """Take note that the last token is in: nothing is held back any more."""
        self._closed = True

    def take(self) -> str:
        """Give what may be seen of the text since the last time."""
        held = 0 if self._closed or self._keeps_stop else self._reach
        end = max(len(self._text) - held, 0)
        shown, self._text = self._text[:end], self._text[end:]
        return shown


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate by itself, without HTTP or a clock. Raises MalformedBody or InvalidRequest."""
    given = {"token_ids": list(input_ids), "sampling_params": sampling_params or {}, "stream": True, **body}
    config = replace(config, frontend="python")
    ask = read_generate(given, config)
    verify(ask, config)
    request = VllmRequest(ask, config)
    while not request.done:
        request.step(config.weight_version)
    return request.reply
