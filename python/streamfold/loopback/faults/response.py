"""Kinds of faults that replace a response (HTTP error, dropped connection, dead worker) or act inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.faults import options
from streamfold.loopback.faults.fault import Fault

if TYPE_CHECKING:
    from starlette.types import Message

    from streamfold.loopback.core.request import EngineRequest
    from streamfold.loopback.http.response_writer import ConnectionEnd

__all__ = ["KINDS"]

_WITHOUT_BODY = (204, 304)


# In place of a response


@dataclass(kw_only=True)
class _Status(Fault):
    """Respond with an HTTP status. ``body`` is a string or any JSON; by default the engine's own error.

    A status that HTTP allows no body is sent without one, and without the headers of a body.
    """

    kind = "status"
    needs = "anything"
    status: int = field(default=500, metadata=options.count(least=200, most=599))
    headers: dict[str, str] | None = field(default=None, metadata=options.headers())
    body: Any = field(default=None, metadata=options.anything())

    async def begin(self) -> bool:
        self.happened()
        self._skip_stream_faults()
        body = self.body
        if body is None:
            body = self.target.wire_format.http_error("The engine was told to fail.", self.status)
        plain = isinstance(body, str)
        data = body.encode() if plain else orjson.dumps(body)
        headers = {"content-type": "text/plain; charset=utf-8" if plain else "application/json"}
        headers |= {"content-length": str(len(data))}
        if self.status in _WITHOUT_BODY:
            data, headers = b"", {}
        headers |= {name.lower(): value for name, value in (self.headers or {}).items()}
        raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.head({"type": "http.response.start", "status": self.status, "headers": raw_headers})
        if data:
            await self.event(data)
        await self.end()
        return False

    def _skip_stream_faults(self) -> None:
        """Remove the following faults of streams: this response is not streamed."""
        fault: Fault = self
        while isinstance(fault.following, Fault):
            if fault.following.needs in {"stream", "cumulative"}:
                fault.following = fault.following.following
            else:
                fault = fault.following


@dataclass(kw_only=True)
class _Drop(Fault):
    """Close the connection before the first byte of the response: ``how`` is "rst", a reset, or "fin"."""

    kind = "drop"
    needs = "anything"
    how: ConnectionEnd = field(default="rst", metadata=options.choice("rst", "fin"))

    async def begin(self) -> bool:
        self.happened()
        await self.response.disconnect(self.how)
        return False


@dataclass(kw_only=True)
class _Refuse(_Drop):
    """Like "drop", and refuse new connections for ``seconds``; running requests continue."""

    kind = "refuse"
    seconds: float | None = field(default=1.0, metadata=options.number(none=True))

    async def begin(self) -> bool:
        self.target.server.stop_listening(self.seconds)
        return await super().begin()


@dataclass(kw_only=True)
class _Die(Fault):
    """Kill the worker after ``after_events`` events: close and refuse connections, lose all requests.

    It returns after ``seconds``, empty, on the same port.
    """

    kind = "die"
    needs = "anything"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=1.0, metadata=options.number(none=True))
    how: ConnectionEnd = field(default="rst", metadata=options.choice("rst", "fin"))

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
        self.response.over = True
        self.target.server.die(self.seconds, self.how)
        await self.response.gone.wait()


@dataclass(kw_only=True)
class _NoAnswer(Fault):
    """Send nothing for ``seconds``, not even headers."""

    kind = "no_answer"
    needs = "anything"
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def head(self, message: Message) -> None:
        self.happened()
        await self.response.pause(self.seconds)
        await super().head(message)


# Inside the engine


@dataclass(kw_only=True)
class _QueueFull(Fault):
    """Reject the request as if the queue were full: in a stream an event with status 503 under HTTP 200."""

    kind = "queue_full"
    needs = "generate"

    async def begin(self) -> bool:
        self.schedule(0, self.scheduler.reject_queue_full)
        return True


@dataclass(kw_only=True)
class _Abort(Fault):
    """Abort the request at ``after_tokens`` tokens; one more is sampled. 0: in the queue, without tokens."""

    kind = "abort"
    needs = "generate"
    after_tokens: int = field(default=1, metadata=options.count())

    async def begin(self) -> bool:
        self.schedule(self.after_tokens, self.scheduler.abort_request)
        return True


@dataclass(kw_only=True)
class _RetractAbort(Fault):
    """Retract the request at ``after_tokens`` tokens, then abort it: that event repeats all tokens."""

    kind = "retract_abort"
    needs = "generate"
    retracts = True
    after_tokens: int = field(default=1, metadata=options.count())

    async def begin(self) -> bool:
        self.schedule(self.after_tokens, self.scheduler.retract_and_abort)
        return True


@dataclass(kw_only=True)
class _Version(Fault):
    """Change the engine's weight version when the request has ``after_tokens`` tokens; by default increment it."""

    kind = "version"
    needs = "generate"
    after_tokens: int = field(default=1, metadata=options.count())
    version: str | None = field(default=None, metadata=options.text(none=True))

    async def begin(self) -> bool:
        self.schedule(self.after_tokens, self._change)
        return True

    def _change(self, _request: EngineRequest) -> None:
        current = self.scheduler.weight_version
        incremented = str(int(current) + 1) if current.isdecimal() else "1"
        self.scheduler.weight_version = incremented if self.version is None else self.version


@dataclass(kw_only=True)
class _Park(Fault):
    """Leave the request in the queue, silent, for ``seconds``, or until it is aborted or generation is continued."""

    kind = "park"
    needs = "generate"
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def begin(self) -> bool:
        self.schedule(0, lambda request: self.scheduler.park(request, self.seconds))
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
