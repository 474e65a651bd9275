"""One request inside the engine: a token per step, the text it makes, when it ends, and when an event is due.

Nothing here waits or sends: the scheduler calls :meth:`Request.step`, whoever serves the client takes the events.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamfold.loopback import wire
from streamfold.loopback.params import EXPERTS_DTYPES, Ask, SamplingParams, read_asks
from streamfold.loopback.tokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamfold.loopback.config import Config
    from streamfold.loopback.tokenizer import Tokenizer

__all__ = ["Request", "undisturbed"]

# The Rust frontend sends each delta by itself, and gives a request up that has this many waiting.
MOST_WAITING_EVENTS = 1024
# How often the engine hands on what it has of a request that is not streamed.
INTERVAL_UNSTREAMED = 50

_REPLACEMENT = "\ufffd"
_CJK = (("\u3400", "\u4dbf"), ("\u4e00", "\u9fff"), ("\U00020000", "\U0002ffff"))


class Request:
    """A generation under way.

    ``reply`` is what there is so far, ``notify`` is called when an event may be due. The scheduler keeps its own notes
    here: whether it is in ``prefilling``, and until when (``ready_at``), and whether it is ``aborting``.
    """

    def __init__(self, ask: Ask, config: Config, *, notify: Callable[[], None] = lambda: None) -> None:
        self.ask = ask
        self.notify = notify
        self.prefilling = True
        self.ready_at = 0.0
        self.aborting = False
        self._config = config
        self._params = params = ask.params
        self._model, self._tokenizer = config.model, config.tokenizer
        self._context = self._model.read(ask.prompt)
        self._salt = self._model.salt(None if params.greedy else ask.seed)
        room = config.context_length - len(ask.prompt)
        self._budget = room if params.max_new_tokens is None else params.max_new_tokens
        self._stop_ids: frozenset[int] = (
            frozenset() if params.ignore_eos else params.stop_token_ids | {self._tokenizer.eos_token_id}
        )
        self._text = _Text(params, self._tokenizer)
        self._wants_top_p = (
            ask.logprobs and bool(params.custom_params.get("return_top_p_token_ids")) and params.filtered
        )
        self._null_logprobs = frozenset(params.custom_params.get("null_logprobs_at", ()))
        self.reply = self._open_reply()
        self._writer = wire.Writer(self.reply, config.dialect)
        self._cuts: deque[int] = deque()  # token counts at which events are due
        self._known = 0  # tokens that the frontend has been told of: the last cut
        self._failure: str | None = None
        self._told = False

    def _open_reply(self) -> wire.Reply:
        ask, config = self.ask, self._config
        reply = wire.Reply(
            rid=ask.rid,
            prompt_tokens=len(ask.prompt),
            pieces=None if config.skip_tokenizer_init else [],
            prompt_token_ids=ask.prompt if ask.prompt_ids and config.dialect.release >= (0, 5, 13) else None,
            index=ask.index,
            arrived=time.time(),
        )
        if ask.logprobs:
            reply.logprobs = []
            reply.logprob_texts = [] if ask.logprob_texts else None
            reply.top_logprobs = [] if ask.top_logprobs else None
            if 0 <= ask.logprob_start < len(ask.prompt):
                reply.input_logprobs = self._input_logprobs(ask.logprob_start)
        if self._wants_top_p:
            reply.top_p = []
        if ask.sampling_mask and config.dialect.release >= (0, 5, 16):
            reply.sampling_mask, reply.sampling_logprobs = [], []
        return reply

    @property
    def rid(self) -> str:
        """The id that the client, or the engine for it, gave."""
        return self.ask.rid

    @property
    def done(self) -> bool:
        """Whether it has ended, and only events may be left to send."""
        return self.reply.finish is not None or self._failure is not None

    @property
    def told(self) -> bool:
        """Whether the last event was taken."""
        return self._told

    def step(self, version: str) -> int:
        """Generate what one step of the engine gives, under these weights; the number of tokens that it gave."""
        before = len(self.reply.token_ids)
        if self._budget == 0 and not self.aborting:
            self._finish_without_tokens()
        while not self.done:
            self._sample(version)
            if len(self.reply.token_ids) - before >= self._config.tokens_per_step:
                break
        self._cut()
        return len(self.reply.token_ids) - before

    def abort_in_queue(self) -> None:
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

    def refuse(self, finish: wire.Finish, *, in_queue: bool = False) -> None:
        """End before the start, by the scheduler's word."""
        reply = self.reply
        reply.finish, reply.in_queue = finish, in_queue
        if not in_queue:
            # The engine puts a dummy of one token in the place of a prompt that it refuses.
            reply.prompt_tokens, reply.logprobs = 1, None
        self.notify()

    def fail(self, message: str) -> None:
        """End with an error event, status 500."""
        self._failure = message
        self.notify()

    def next_event(self, label: str) -> bytes | None:
        """Take the next event that is due, written as of now; None if there is none.

        ``label`` is the engine's weight version now. The Python frontend joins all that waits into one event.
        """
        self.reply.label = label
        if self._told:
            return None
        if self._failure is not None:
            self._told = True
            return wire.error_event(self._config.dialect, self._failure, 500, self.reply.index)
        finished, rust = self.reply.finish is not None, self._config.dialect.rust
        if self._cuts and (rust or not finished):
            return self._writer.event(self._cuts.popleft())
        if finished:
            self._told = True
            return self._writer.terminal()
        return None

    @property
    def refusal(self) -> tuple[int, str] | None:
        """The status and the message, if it ended with a status."""
        if self._failure is not None:
            return 500, self._failure
        finish = self.reply.finish or {}
        status = finish.get("status_code")
        return None if status is None else (status, finish["message"])

    def body(self, label: str) -> dict[str, Any]:
        """Give the answer to a request that is not streamed."""
        self.reply.label = label
        return wire.whole(self.reply, self._config.dialect)

    def _sample(self, version: str) -> None:
        reply, context, model = self.reply, self._context, self._model
        forbidden = self._stop_ids if len(reply.token_ids) < self._params.min_new_tokens else ()
        token = model.draw(context, self._salt, forbidden)
        context.push(token)
        position = len(reply.token_ids)
        reply.token_ids.append(token)
        reply.versions.append(version)
        if reply.logprobs is not None:
            reply.logprobs.append(None if position in self._null_logprobs else model.logprob(context.hash))
        if reply.logprob_texts is not None:
            reply.logprob_texts.append(self._tokenizer.decode([token], skip_special_tokens=False))
        if reply.top_logprobs is not None:
            reply.top_logprobs.append(self._top_logprobs(token))
        if reply.top_p is not None or reply.sampling_mask is not None:
            kept = [token] if self._params.greedy else model.kept(context.hash, token)
            if reply.top_p is not None:
                reply.top_p.append(kept)
            if reply.sampling_mask is not None and reply.sampling_logprobs is not None:
                reply.sampling_mask.append(kept)
                reply.sampling_logprobs.append(model.logprob(context.hash))
        if reply.pieces is not None:
            reply.pieces.append("")
        self._settle(token)

    def _settle(self, token: int) -> None:
        """See whether this token is the last one, and let it into the text."""
        reply, text, params = self.reply, self._text, self._params
        ends_it = token in self._stop_ids
        aborted, full = self.aborting, len(reply.token_ids) >= self._budget
        if not ends_it or aborted or full or params.no_stop_trim:
            text.push(token)
        if aborted:
            reply.finish = wire.aborted()
        elif full:
            reply.finish = wire.length(self._budget)
        elif ends_it:
            reply.finish = wire.stopped(token)
        elif text.matched is not None:
            reply.finish = wire.stopped(text.matched)
            text.trim(text.matched)
        if reply.finish is not None:
            text.close()
            self._add_experts()

    def _finish_without_tokens(self) -> None:
        reply = self.reply
        if reply.logprobs is not None:
            token = self._model.draw(self._context, self._salt)
            reply.spare_pair = (self._model.logprob(self._model.read([*self.ask.prompt, token]).hash), token)
        reply.finish = wire.length(0)
        self._add_experts()

    def _cut(self) -> None:
        """Let the frontend know what there is, if it is time."""
        n, finished = len(self.reply.token_ids), self.reply.finish is not None
        if not finished and (self._text.withheld or not self._is_due(n)):
            return
        if self.reply.pieces is not None and n > self._known:
            self.reply.pieces[n - 1] = self._text.take()
        self._known = n
        if not self._config.dialect.rust or not self._config.dialect.incremental:
            self._cuts.clear()
        if self.ask.stream and not finished:
            self._cuts.append(n)
        if len(self._cuts) > MOST_WAITING_EVENTS:
            self._cuts.clear()
            self.fail("response truncated before completion")
        self.notify()

    def _is_due(self, n: int) -> bool:
        interval = self._params.stream_interval or self._config.stream_interval
        if not self.ask.stream:
            interval = INTERVAL_UNSTREAMED
        if self._config.dialect.release >= (0, 5, 22):
            return self._known == 0 or n - self._known >= interval
        return interval == 1 or n % interval == 1

    def _add_experts(self) -> None:
        ask, config = self.ask, self._config
        if not ask.experts or config.num_layers == 0:
            return
        # Old releases took the start for granted and gave all rows.
        start = ask.experts_start if config.dialect.release >= (0, 5, 12) else 0
        tokens = ask.prompt + self.reply.token_ids
        # The last token was sampled and never went through the model: it has no row.
        rows = self._model.experts(self._model.hashes(tokens[:-1])[start:])
        self.reply.routed_experts = rows.astype(EXPERTS_DTYPES[ask.experts_dtype]).tobytes()

    def _input_logprobs(self, start: int) -> list[tuple[float | None, int]]:
        prompt, hashes = self.ask.prompt, self._model.hashes(self.ask.prompt)
        rest = ((self._model.logprob(int(hashes[i])), prompt[i]) for i in range(start + 1, len(prompt)))
        # Nothing stands before the first one that could have predicted it.
        return [(None, prompt[start]), *rest]

    def _top_logprobs(self, token: int) -> list[tuple[float, int]]:
        first = self._model.logprob(self._context.hash)
        size = self._tokenizer.vocab_size
        return [(first - i, (token + i) % size) for i in range(self.ask.top_logprobs)]


class _Text:
    """The text of one request: decoded token by token, held back where more tokens could change what is seen."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._no_stop_trim = params.no_stop_trim
        self._stops = params.stop
        self._seen = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._raw = Detokenizer(tokenizer, skip_special_tokens=False)  # stop strings may lie in special tokens
        self._span = ""  # decoded since the last cut
        self._tail = ""  # as long as a stop string could reach back
        self._reach = max(map(len, self._stops), default=1) - 1
        self._closed = False
        self.matched: str | None = None

    def push(self, token: int) -> None:
        """Add the text of one token."""
        self._span += self._seen.push(token)
        if self._stops:
            tail = self._tail + self._raw.push(token)
            self.matched = next((stop for stop in self._stops if stop in tail), None)
            self._tail = tail[len(tail) - self._reach :] if self._reach else ""

    @property
    def withheld(self) -> bool:
        """Whether the text ends in what may become a stop string."""
        return any(self._tail.endswith(stop[:k]) for stop in self._stops for k in range(1, len(stop)))

    def trim(self, stop: str) -> None:
        """Cut the text at a stop string, or behind it."""
        found = self._span.find(stop)
        if found >= 0:
            self._span = self._span[: found + len(stop) if self._no_stop_trim else found]

    def close(self) -> None:
        """Take note that the last token is in: nothing is held back any more."""
        self._span += self._seen.flush()
        self._closed = True

    def take(self) -> str:
        """Give what may be seen of the text since the last time."""
        # An incomplete character decodes to U+FFFD. Of a text that ends so the engine shows the words before.
        span = self._span + (_REPLACEMENT if self._seen.pending else "")
        end = len(self._span)
        if span.endswith(_REPLACEMENT) and not self._closed:
            end = len(span) - 1 if _is_cjk(span[-2:-1]) else span.rfind(" ") + 1
        self._span, shown = self._span[end:], self._span[:end]
        return shown


def _is_cjk(character: str) -> bool:
    return any(first <= character <= last for first, last in _CJK)


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> wire.Reply:
    """Generate by itself, without HTTP or a clock: what any cut and resumed generation has to equal.

    ``body`` has further keys of the request's body. Raises InvalidRequest.
    """
    given = {"input_ids": list(input_ids), "sampling_params": sampling_params or {}, "stream": True, **body}
    config = replace(config, frontend="python")
    (ask,) = read_asks(given, config)
    request = Request(ask, config)
    while not request.done:
        request.step(config.weight_version)
    return request.reply
