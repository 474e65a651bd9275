"""One request inside the engine: samples a token per step, collects its text, decides when an event is due.

Nothing here waits or sends: the scheduler calls :meth:`EngineRequest.step`, the HTTP endpoint takes the events. Engines
override what differs between them: stop conditions, text, reply and writer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from streamfold.loopback.core.reply import Finish, Reply, length

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from streamfold.loopback.core.causal_lm import CausalLM, LogprobsOf, SequenceState
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request_params import RequestParams

    # A number of tokens, and what is done to the request when it has that many.
    Milestone = tuple[int, Callable[["EngineRequest"], None]]

__all__ = ["UNSTREAMED_INTERVAL", "EngineRequest", "EventWriter", "VisibleText"]

# Tokens between two hand-overs from the engine to its frontend for a request that is not streamed.
UNSTREAMED_INTERVAL = 50


class EventWriter(Protocol):
    """Writes the events of one reply, in order."""

    def event(self, tokens: int) -> bytes:
        """Return the event that extends the reply to ``tokens`` tokens; not the last one."""

    def last_events(self) -> list[bytes]:
        """Return the last events of a finished reply."""


class VisibleText(Protocol):
    """The text of one request that may be sent."""

    @property
    def withheld(self) -> bool:
        """Whether no event may be sent now, because the text may become a stop string."""

    def close(self) -> None:
        """Mark the text as complete: nothing is held back any more."""

    def take(self) -> str:
        """Return the text that became visible since the last call."""


class EngineRequest(ABC):
    """A generation in progress.

    ``reply`` is what has been generated so far; ``notify`` is called when an event may be due. The scheduler keeps its
    state of the request here: ``prefilling`` until ``ready_at``, ``aborting``, ``parked``, and the ``milestones`` that
    it has not reached. ``connection`` is the number of the one on which it came.
    """

    counts_prompt: ClassVar[frozenset[str]] = frozenset()  # penalties that count the prompt's tokens too

    def __init__(
        self, params: RequestParams, config: Config, model: CausalLM, *, notify: Callable[[], None] = lambda: None
    ) -> None:
        self.params = params
        self.notify = notify
        self.prefilling = True
        self.ready_at: float = 0.0
        self.aborting = False
        self.parked = False
        self.milestones: list[Milestone] = []
        self.connection = 0
        self._config = config
        self._sampling = params.sampling
        self._tokenizer = config.tokenizer
        room = config.context_length - len(params.prompt)
        limit = self._sampling.max_new_tokens
        self._budget = room if limit is None else min(limit, room)
        self._stop_ids = self._find_stop_ids()
        self.sequence: SequenceState = model.start(
            params, stop_ids=self._stop_ids, counts_prompt=self.counts_prompt, logprobs_of=self._logprobs_of
        )
        self._text = self._make_text()
        self.reply: Reply = self._make_reply()
        self._writer = self._make_writer()
        self._due: deque[int] = deque()  # token counts at which events are due
        self._known = 0  # tokens that the frontend has received from the engine
        self._failure: tuple[int, str] | None = None
        self._last_events: deque[bytes] | None = None
        self._delivered = False

    @property
    @abstractmethod
    def _logprobs_of(self) -> LogprobsOf:
        """The distribution whose logprobs it reports."""

    @abstractmethod
    def _find_stop_ids(self) -> Collection[int]:
        """Return the tokens that stop it."""

    @abstractmethod
    def _make_text(self) -> VisibleText:
        """Return the text, still empty."""

    @abstractmethod
    def _make_reply(self) -> Reply:
        """Return the reply, without tokens, with a list for each value per token that is returned."""

    @abstractmethod
    def _make_writer(self) -> EventWriter:
        """Return the writer of the reply."""

    @abstractmethod
    def _accept(self, token: int) -> Finish | None:
        """Add a sampled token to the text; return the finish reason if it is the last one."""

    @abstractmethod
    def _add_experts(self) -> None:
        """Add the routed experts to a reply that has all of its tokens, if they are returned."""

    @abstractmethod
    def _logprob_text(self, token: int) -> str:
        """Return the text of a token in the logprobs; the token is in the text already."""

    @abstractmethod
    def _is_due(self, n: int) -> bool:
        """Return whether the engine hands over its first ``n`` tokens to the frontend now."""

    @abstractmethod
    def _failure_event(self, status: int, message: str) -> bytes:
        """Return the event of a request that failed."""

    @abstractmethod
    def abort_now(self) -> None:
        """Abort without another step, so without another token."""

    @abstractmethod
    def reject_queue_full(self) -> None:
        """Finish before the start, because the queue is full."""

    @abstractmethod
    def body(self, label: str) -> dict[str, Any]:
        """Return the response body of an unstreamed request; ``label`` is the engine's current weight version."""

    def validate(self) -> bool:
        """Check what the scheduler checks; return whether the request may run. A rejected one is finished."""
        return True

    @property
    def rid(self) -> str:
        """The id of this request, unique among the live ones."""
        return self.params.rid

    @property
    def done(self) -> bool:
        """Whether it is finished; events may be left to send."""
        return self.reply.finish is not None or self._failure is not None

    @property
    def delivered(self) -> bool:
        """Whether its last event was taken."""
        return self._delivered

    @property
    def http_failure(self) -> tuple[int, str] | None:
        """HTTP status and message, if it failed with a status."""
        return self._failure

    def step(self, version: str) -> int:
        """Run one step of the engine with this weight version; return the number of tokens sampled."""
        before = len(self.reply.token_ids)
        if self._budget == 0 and not self.aborting:
            self._finish_without_tokens()
        while not self.done:
            self._sample(version)
            if len(self.reply.token_ids) - before >= self._config.tokens_per_step:
                break
        self._hand_over()
        return len(self.reply.token_ids) - before

    def fail(self, message: str, status: int = 500) -> None:
        """Finish with an error event."""
        self._failure = status, message
        self.notify()

    def next_event(self, label: str) -> bytes | None:
        """Take the next event that is due, written with the current state; None if none is due.

        ``label`` is the engine's current weight version. The Python frontends join all waiting events into one.
        """
        self.reply.label = label
        if self._delivered:
            return None
        if self._failure is not None:
            self._delivered = True
            return self._failure_event(*self._failure)
        finished = self.reply.finish is not None
        if self._due and (self._config.rust or not finished):
            return self._writer.event(self._due.popleft())
        if not finished:
            return None
        if self._last_events is None:
            self._last_events = deque(self._writer.last_events())
        event = self._last_events.popleft() if self._last_events else None
        self._delivered = not self._last_events
        return event

    def _sample(self, version: str) -> None:
        reply = self.reply
        token = self.sequence.draw()
        reply.token_ids.append(token)
        reply.versions.append(version)
        self._add_logprobs()
        self._add_sampling_mask()
        if reply.pieces is not None:
            reply.pieces.append("")
        finish = self._accept(token)
        if reply.logprob_texts is not None:
            reply.logprob_texts.append(self._logprob_text(token))
        if finish is not None:
            reply.finish = finish
            self._text.close()
            self._add_experts()

    def _add_logprobs(self) -> None:
        reply, sequence = self.reply, self.sequence
        if reply.logprobs is not None:
            position = len(reply.token_ids) - 1
            reply.logprobs.append(None if position in self.params.null_logprobs_at else sequence.logprob)
        if reply.top_logprobs is not None:
            reply.top_logprobs.append(self._candidates())
        if reply.ranks is not None:
            reply.ranks.append(sequence.rank)

    def _candidates(self) -> list[tuple[float | None, int]]:
        """The ids that are reported beside the sampled one, with their logprobs."""
        return [*self.sequence.candidates(self.params.top_logprobs)]

    def _add_sampling_mask(self) -> None:
        reply, sequence = self.reply, self.sequence
        if reply.top_p is None and reply.sampling_mask is None:
            return
        kept = sequence.kept
        if reply.top_p is not None:
            reply.top_p.append(kept)
        if reply.sampling_mask is not None:
            reply.sampling_mask.append(kept)
        if reply.sampling_logprobs is not None:
            reply.sampling_logprobs.append(sequence.kept_logprob)

    def _finish_without_tokens(self) -> None:
        self.reply.finish = length(0)
        self._add_experts()

    def _hand_over(self) -> None:
        """Let the frontend know all tokens, if it is time."""
        n, finished = len(self.reply.token_ids), self.reply.finish is not None
        if not finished and (self._text.withheld or not self._is_due(n)):
            return
        if self.reply.pieces is not None and n > self._known:
            self.reply.pieces[n - 1] = self._text.take()
        self._known = n
        if not self._sends_each_delta:
            self._due.clear()
        if self.params.stream and not finished:
            self._due.append(n)
        self.notify()

    @property
    def _sends_each_delta(self) -> bool:
        """Whether the frontend sends each hand-over as one event, even to a slow reader."""
        return self._config.rust
