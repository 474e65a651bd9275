"""What a fault is, and the kinds that come instead of an answer or happen inside the engine.

An answer passes through its faults in the order of the script, and each sees what the one before it left. They act
behind the writer, or tell the scheduler what to do: the model goes on undisturbed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from streamfold.loopback.faults import options

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from starlette.types import Message

    from streamfold.loopback.core.request import Request
    from streamfold.loopback.core.scheduler import Scheduler
    from streamfold.loopback.http.answer import Answer, Ending

__all__ = ["KINDS", "Fault", "Needs"]

# What an answer must be for a fault: any at all, one that is generated, a stream of it, or a stream that repeats.
Needs = Literal["anything", "generate", "stream", "cumulative"]

_WITHOUT_BODY = (204, 304)


@dataclass(kw_only=True)
class Fault:
    """One fault in one answer; this one lets everything pass. Kinds override what they disturb."""

    answer: Answer
    then: Fault | Answer  # who gets what this one lets through
    chance: random.Random
    note: Callable[[str], None]  # counts a kind that happened
    events: int = field(default=0, init=False)  # let through
    noted: bool = field(default=False, init=False)

    kind: ClassVar[str]
    needs: ClassVar[Needs] = "stream"
    retracts: ClassVar[bool] = False  # which not every engine does

    async def begin(self) -> bool:
        """Act before the engine hears of the request; whether it shall hear of it."""
        return True

    async def head(self, message: Message) -> None:
        """Pass the status and the headers on."""
        await self.then.head(message)

    async def event(self, data: bytes) -> None:
        """Pass an event on, or the whole body of what is no stream."""
        self.events += 1
        await self.then.event(data)

    async def partial(self, data: bytes, size: int) -> None:
        """Pass the beginning of an event of so many bytes on."""
        await self.then.partial(data, size)

    async def end(self) -> None:
        """Pass the end of the answer on."""
        await self.then.end()

    def happened(self) -> None:
        """Take note that the answer is disturbed now; it counts once."""
        if not self.noted:
            self.noted = True
            self.note(self.kind)

    @property
    def scheduler(self) -> Scheduler:
        """The engine's inside."""
        return self.answer.engine.scheduler

    def order(self, tokens: int, act: Callable[[Request], None]) -> None:
        """Have the engine do something when the request has so many tokens; then it happened."""

        def reached(request: Request) -> None:
            self.happened()
            act(request)

        self.answer.milestones.append((tokens, reached))


# Instead of an answer


@dataclass(kw_only=True)
class _Status(Fault):
    """Answer with an HTTP status. ``body`` is a string, or an object for JSON; else it is the engine's own.

    A status that HTTP allows no body comes without one, and without headers that tell of one.
    """

    kind = "status"
    needs = "anything"
    status: int = field(default=500, metadata=options.count(least=200, most=599))
    headers: dict[str, str] | None = field(default=None, metadata=options.headers())
    body: Any = field(default=None, metadata=options.anything())

    async def begin(self) -> bool:
        self.happened()
        self._leave_streams_out()
        body = self.body
        if body is None:
            body = self.answer.engine.config.dialect.http_error("The engine was told to fail.", self.status)
        plain = isinstance(body, str)
        data = body.encode() if plain else orjson.dumps(body)
        headers = {"content-type": "text/plain; charset=utf-8" if plain else "application/json"}
        headers |= {"content-length": str(len(data))}
        if self.status in _WITHOUT_BODY:
            data, headers = b"", {}
        headers |= {name.lower(): value for name, value in (self.headers or {}).items()}
        told = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.head({"type": "http.response.start", "status": self.status, "headers": told})
        if data:
            await self.event(data)
        await self.end()
        return False

    def _leave_streams_out(self) -> None:
        """Keep the faults of streams away from what is none."""
        fault: Fault = self
        while isinstance(fault.then, Fault):
            if fault.then.needs in {"stream", "cumulative"}:
                fault.then = fault.then.then
            else:
                fault = fault.then


@dataclass(kw_only=True)
class _Drop(Fault):
    """Close the connection before a byte of the answer: ``how`` is "rst", a reset, or "fin"."""

    kind = "drop"
    needs = "anything"
    how: Ending = field(default="rst", metadata=options.choice("rst", "fin"))

    async def begin(self) -> bool:
        self.happened()
        await self.answer.hang_up(self.how)
        return False


@dataclass(kw_only=True)
class _Refuse(_Drop):
    """The same, and for ``seconds`` connects are refused; what runs goes on."""

    kind = "refuse"
    seconds: float | None = field(default=1.0, metadata=options.number(none=True))

    async def begin(self) -> bool:
        self.answer.engine.server.stop_listening(self.seconds)
        return await super().begin()


@dataclass(kw_only=True)
class _Die(Fault):
    """After so many events of this answer the worker dies: connections end, connects are refused, requests are lost.

    It returns after ``seconds``, empty, on the same port.
    """

    kind = "die"
    needs = "anything"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=1.0, metadata=options.number(none=True))
    how: Ending = field(default="rst", metadata=options.choice("rst", "fin"))

    async def begin(self) -> bool:
        if self.after_events == 0:
            await self._die()
        return self.after_events > 0

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events:
            await self._die()
        else:
            await super().event(data)

    async def _die(self) -> None:
        self.happened()
        self.answer.over = True
        self.answer.engine.server.die(self.seconds, self.how)
        await self.answer.gone.wait()


@dataclass(kw_only=True)
class _NoAnswer(Fault):
    """Say nothing for ``seconds``, not even headers."""

    kind = "no_answer"
    needs = "anything"
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def head(self, message: Message) -> None:
        self.happened()
        await self.answer.pause(self.seconds)
        await super().head(message)


# Inside the engine


@dataclass(kw_only=True)
class _QueueFull(Fault):
    """Turn the request away as a full queue does: in a stream an event with status 503 under HTTP 200."""

    kind = "queue_full"
    needs = "generate"

    async def begin(self) -> bool:
        self.order(0, self.scheduler.turn_away)
        return True


@dataclass(kw_only=True)
class _Abort(Fault):
    """Abort the request when it has so many tokens; one more comes, as ever. 0: while it waits, with none."""

    kind = "abort"
    needs = "generate"
    after_tokens: int = field(default=1, metadata=options.count())

    async def begin(self) -> bool:
        self.order(self.after_tokens, self.scheduler.abort_request)
        return True


@dataclass(kw_only=True)
class _RetractAbort(Fault):
    """Retract the request when it has so many tokens, and abort it then: that event repeats everything."""

    kind = "retract_abort"
    needs = "generate"
    retracts = True
    after_tokens: int = field(default=1, metadata=options.count())

    async def begin(self) -> bool:
        self.order(self.after_tokens, self.scheduler.retract_and_abort)
        return True


@dataclass(kw_only=True)
class _Version(Fault):
    """Change the engine's weight version when the request has so many tokens; by default it counts up."""

    kind = "version"
    needs = "generate"
    after_tokens: int = field(default=1, metadata=options.count())
    version: str | None = field(default=None, metadata=options.text(none=True))

    async def begin(self) -> bool:
        self.order(self.after_tokens, self._change)
        return True

    def _change(self, _request: Request) -> None:
        now = self.scheduler.weight_version
        following = str(int(now) + 1) if now.isdecimal() else "1"
        self.scheduler.weight_version = following if self.version is None else self.version


@dataclass(kw_only=True)
class _Park(Fault):
    """Take the request in and leave it in the queue, silent, for ``seconds``, or until an abort or a "continue"."""

    kind = "park"
    needs = "generate"
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def begin(self) -> bool:
        self.order(0, lambda request: self.scheduler.park(request, self.seconds))
        return True


KINDS: tuple[type[Fault], ...] = (
    _Status,
    _Drop,
    _Refuse,
    _Die,
    _NoAnswer,
    _QueueFull,
    _Abort,
    _RetractAbort,
    _Version,
    _Park,
)
