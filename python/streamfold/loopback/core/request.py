"""One request inside the engine: a token per step, the text it makes, when it ends, and when an event is due.

Nothing here waits or sends: the scheduler calls :meth:`Request.step`, whoever serves the client takes the events. What
differs from engine to engine is left to those who override: what a request begins with, what ends it, and its writer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from streamfold.loopback.core.reply import Finish, Reply, length

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request_params import Ask

    # A count of tokens, and what is done to the request when it has so many.
    Milestone = tuple[int, Callable[["Request"], None]]

__all__ = ["Milestone", "Request", "Text", "Writer"]

# How often the engine hands on what it has of a request that is not streamed.
INTERVAL_UNSTREAMED = 50


class Writer(Protocol):
    """Writes the events of one reply, in order."""

    def event(self, tokens: int) -> bytes:
        """Write the event that brings the reply to so many tokens, and is not the last."""

    def ending(self) -> list[bytes]:
        """Write the last events of a finished reply."""


class Text(Protocol):
    """The text of one request, as far as it may be seen."""

    @property
    def withheld(self) -> bool:
        """Whether there must be no event now, because of what may become a stop string."""

    def close(self) -> None:
        """Take note that the last token is in: nothing is held back any more."""

    def take(self) -> str:
        """Give what may be seen of the text since the last time."""


class Request(ABC):
    """A generation under way.

    ``reply`` is what there is so far, ``notify`` is called when an event may be due. The scheduler keeps its own notes
    here: whether it is in ``prefilling``, and until when (``ready_at``), whether it is ``aborting`` or ``parked``, and
    the ``milestones`` ahead of it.
    """

    def __init__(self, ask: Ask, config: Config, *, notify: Callable[[], None] = lambda: None) -> None:
        self.ask = ask
        self.notify = notify
        self.prefilling = True
        self.ready_at = 0.0
        self.aborting = False
        self.parked = False
        self.milestones: list[Milestone] = []
        self._config = config
        self._params = ask.params
        self._model, self._tokenizer = config.model, config.tokenizer
        self._context = self._model.read(ask.prompt)
        self._salt = self._model.salt(None if ask.params.greedy else ask.seed)
        room = config.context_length - len(ask.prompt)
        self._budget = room if ask.params.max_new_tokens is None else min(ask.params.max_new_tokens, room)
        self._stop_ids = self._ends()
        self._text = self._open_text()
        self.reply = self._open_reply()
        self._writer = self._open_writer()
        self._cuts: deque[int] = deque()  # token counts at which events are due
        self._known = 0  # tokens that the frontend has been told of: the last cut
        self._failure: tuple[int, str] | None = None
        self._ending: deque[bytes] | None = None
        self._told = False

    @abstractmethod
    def _ends(self) -> Collection[int]:
        """Give the tokens that end it."""

    @abstractmethod
    def _open_text(self) -> Text:
        """Give the text, empty."""

    @abstractmethod
    def _open_reply(self) -> Reply:
        """Give the reply without any token, with a list for whatever is told of each."""

    @abstractmethod
    def _open_writer(self) -> Writer:
        """Give the writer of the reply."""

    @abstractmethod
    def _take(self, token: int) -> Finish | None:
        """Let a token that was just sampled into the text, and say whether it is the last one."""

    @abstractmethod
    def _add_experts(self) -> None:
        """Put the routed experts into a reply that has all of its tokens, if they are told."""

    @abstractmethod
    def _text_of(self, token: int) -> str:
        """Give what is told as the text of a token that is in the text already."""

    @abstractmethod
    def _is_due(self, n: int) -> bool:
        """Say whether the frontend learns of so many tokens now."""

    @abstractmethod
    def abort_now(self) -> None:
        """End at once: without a step, and so without another token."""

    @abstractmethod
    def turn_away(self) -> None:
        """End before the start, for want of room in the queue."""

    @abstractmethod
    def body(self, label: str) -> dict[str, Any]:
        """Give the answer to a request that is not streamed; ``label`` is the engine's weight version now."""

    def inspect(self) -> bool:
        """Look at what the engine itself checks; what it refuses has ended then. Whether it may run."""
        return True

    @property
    def rid(self) -> str:
        """The id of this request, which no other live one has."""
        return self.ask.rid

    @property
    def done(self) -> bool:
        """Whether it has ended, and only events may be left to send."""
        return self.reply.finish is not None or self._failure is not None

    @property
    def told(self) -> bool:
        """Whether the last event was taken."""
        return self._told

    @property
    def refusal(self) -> tuple[int, str] | None:
        """The status and the message, if it ended with a status."""
        return self._failure

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

    def fail(self, message: str, status: int = 500) -> None:
        """End with an error event."""
        self._failure = status, message
        self.notify()

    def next_event(self, label: str) -> bytes | None:
        """Take the next event that is due, written as of now; None if there is none.

        ``label`` is the engine's weight version now. The Python frontends join all that waits into one event.
        """
        self.reply.label = label
        if self._told:
            return None
        if self._failure is not None:
            self._told = True
            return self._failure_event(*self._failure)
        finished = self.reply.finish is not None
        if self._cuts and (self._config.dialect.rust or not finished):
            return self._writer.event(self._cuts.popleft())
        if not finished:
            return None
        if self._ending is None:
            self._ending = deque(self._writer.ending())
        event = self._ending.popleft() if self._ending else None
        self._told = not self._ending
        return event

    def _failure_event(self, status: int, message: str) -> bytes:
        return self._config.dialect.error_event(message, status)

    def _sample(self, version: str) -> None:
        ask, reply, context, model = self.ask, self.reply, self._context, self._model
        forbidden = self._stop_ids if len(reply.token_ids) < self._params.min_new_tokens else ()
        token = model.draw(context, self._salt, forbidden)
        context.push(token)
        position = len(reply.token_ids)
        reply.token_ids.append(token)
        reply.versions.append(version)
        if reply.logprobs is not None:
            reply.logprobs.append(None if position in ask.null_logprobs_at else model.logprob(context.hash))
        if reply.top_logprobs is not None:
            reply.top_logprobs.append(self._top_logprobs(token))
        if reply.top_p is not None or reply.sampling_mask is not None:
            kept = [token] if self._params.greedy else model.kept(context.hash, token)
            if reply.top_p is not None:
                reply.top_p.append(kept)
            if reply.sampling_mask is not None:
                reply.sampling_mask.append(kept)
            if reply.sampling_logprobs is not None:
                reply.sampling_logprobs.append(model.logprob(context.hash))
        if reply.pieces is not None:
            reply.pieces.append("")
        finish = self._take(token)
        if reply.logprob_texts is not None:
            reply.logprob_texts.append(self._text_of(token))
        if finish is not None:
            reply.finish = finish
            self._text.close()
            self._add_experts()

    def _finish_without_tokens(self) -> None:
        self.reply.finish = length(0)
        self._add_experts()

    def _cut(self) -> None:
        """Let the frontend know what there is, if it is time."""
        n, finished = len(self.reply.token_ids), self.reply.finish is not None
        if not finished and (self._text.withheld or not self._is_due(n)):
            return
        if self.reply.pieces is not None and n > self._known:
            self.reply.pieces[n - 1] = self._text.take()
        self._known = n
        if not self._sends_each_delta:
            self._cuts.clear()
        if self.ask.stream and not finished:
            self._cuts.append(n)
        self.notify()

    @property
    def _sends_each_delta(self) -> bool:
        """Whether the frontend sends what the engine hands on, event by event, however slow the reader is."""
        return self._config.dialect.rust

    def _top_logprobs(self, token: int) -> list[tuple[float | None, int]]:
        first = self._model.logprob(self._context.hash)
        size = self._tokenizer.vocab_size
        return [(first - i, (token + i) % size) for i in range(self.ask.top_logprobs)]
