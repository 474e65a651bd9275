"""Observers: what is told of calls, and of the work around them, for traces, telemetry and metrics.

There is one hook for all of them. An observer is told of changes of state, a dozen in the life of a call; nothing is
called for an event of a stream or for a token. Observers of a client are told of its calls, those of a context
(:func:`observed`) of the calls that are started in it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from streamfold._core import Durations, Generation

__all__ = [
    "Observation",
    "ObservedCall",
    "Observer",
    "Phase",
    "Subject",
    "all_observers",
    "observed",
    "subject_of_context",
]

_logger = logging.getLogger("streamfold")

Phase: TypeAlias = Literal["queue", "connect", "prefill", "tokens", "abort", "drain", "retry"]
"""What a call does.

- ``queue``: it waits for a slot.
- ``connect``: its connection is opened.
- ``prefill``: the request was sent; the engine queues and prefills it.
- ``tokens``: from the first token to the end of the body.
- ``abort``: the abort request was posted, and is not answered.
- ``drain``: it was answered; the response is read on for what only the terminal event carries.
- ``retry``: a failed try is over; the pause before the next one.
"""


@dataclass(frozen=True)
class Subject:
    """What calls are made for: a sample.

    Attributes:
        key: the same for all calls of the sample, also in later rollouts.
        label: for people.
    """

    key: str
    label: str


class ObservedCall(Protocol):
    """What observers see of a call. Times are ``time.monotonic()``.

    Attributes:
        started_at: when it was started.
        tries: tries so far, the current one included.
        error: what it failed with; None while it runs, and if it did not fail.
    """

    started_at: float
    tries: int
    error: BaseException | None

    @property
    def failure(self) -> BaseException | None:
        """What the current try failed with; a retry may follow."""

    @property
    def rid(self) -> str: ...  # noqa: D102
    @property
    def engine_name(self) -> str: ...  # noqa: D102
    @property
    def server(self) -> tuple[str, int]:
        """Address and port of the server."""

    @property
    def base_url(self) -> str: ...  # noqa: D102
    @property
    def aborting(self) -> bool: ...  # noqa: D102
    @property
    def token_count(self) -> int: ...  # noqa: D102
    def gaps(self) -> tuple[Durations, int]: ...  # noqa: D102
    def generation(self) -> Generation: ...  # noqa: D102


class Observer:
    """Is told of calls and of the work around them, in the thread of their event loop. These methods do nothing.

    What a method raises is logged once, and reaches no call.
    """

    def on_phase(self, call: ObservedCall, subject: Subject | None, phase: Phase, at: float) -> None:
        """A phase of a call has begun; the one before has ended."""

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:
        """A call has ended; its last phase too. ``call.generation()`` is there, and ``call.error`` if it failed."""

    def on_work(self, subject: Subject, name: str, began_at: float, ended_at: float, notes: Mapping[str, Any]) -> None:
        """Something else was done for a sample: its reward was computed."""


@dataclass(frozen=True)
class _Context:
    observers: tuple[Observer, ...] = ()
    subject: Subject | None = None


_context: Final[ContextVar[_Context]] = ContextVar("streamfold_observed", default=_Context())  # noqa: B039  # it is frozen


@contextlib.contextmanager
def observed(*more: Observer, subject: Subject | None = None) -> Iterator[None]:
    """Tell ``more`` observers of the calls that are started in this context, and what these are made for."""
    outer = _context.get()
    token = _context.set(_Context(unique((*outer.observers, *more)), subject or outer.subject))
    try:
        yield
    finally:
        _context.reset(token)


def all_observers(of_client: Iterable[Observer]) -> tuple[Observer, ...]:
    """Those of a client and of this context, each once."""
    return unique((*of_client, *_context.get().observers))


def subject_of_context() -> Subject | None:
    """What the calls of this context are made for."""
    return _context.get().subject


def unique(given: Iterable[Observer]) -> tuple[Observer, ...]:
    """Each of them once."""
    return tuple({id(observer): observer for observer in given}.values())


@dataclass
class Observation:
    """Tells observers of one call, or of work for one sample.

    Attributes:
        observers: those who are told.
        subject: what it is made for; None: nothing that is known.
    """

    observers: tuple[Observer, ...]
    subject: Subject | None
    _phase: Phase | None = None
    _is_over: bool = field(default=False)

    def phase(self, call: ObservedCall, phase: Phase, at: float) -> None:
        """A phase of the call has begun."""
        if not self._is_over and phase != self._phase:
            self._phase = phase
            for observer in self.observers:
                _tell(observer, "on_phase", call, self.subject, phase, at)

    def end(self, call: ObservedCall, at: float) -> None:
        """The call has ended."""
        self._is_over = True
        for observer in self.observers:
            _tell(observer, "on_end", call, self.subject, at)

    @contextlib.contextmanager
    def work(self, name: str, **notes: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # JSON-like
        """Tell of what is done in this block; more notes can be added to the dict."""
        began_at = time.monotonic()
        try:
            yield notes
        finally:
            if self.subject is not None:
                for observer in self.observers:
                    _tell(observer, "on_work", self.subject, name, began_at, time.monotonic(), notes)


_warned_of: Final[set[type]] = set()


def _tell(observer: Observer, method: Literal["on_phase", "on_end", "on_work"], *told: object) -> None:
    try:
        getattr(observer, method)(*told)
    except Exception as error:  # no call fails because nobody could watch it
        if type(observer) not in _warned_of:
            _warned_of.add(type(observer))
            _logger.warning("%s failed, and may miss more: %r", type(observer).__name__, error, exc_info=error)
