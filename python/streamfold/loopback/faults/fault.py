"""Base class of all faults, and what a fault needs of the engine and of the server that it disturbs.

A response passes through its faults in the order of the script; each one receives what the one before it let through.
Faults act behind the writer, or have the scheduler do something: the model's output does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from starlette.types import Message

    from streamfold.loopback.core.request import EngineRequest
    from streamfold.loopback.core.scheduler import Scheduler
    from streamfold.loopback.core.wire_format import WireFormat
    from streamfold.loopback.http.response_writer import ConnectionEnd, ResponseWriter

__all__ = ["Fault", "FaultTarget", "Listener", "Needs"]

# The responses that a fault can disturb: any, a generation, a stream, or a cumulative stream.
Needs = Literal["anything", "generate", "stream", "cumulative"]


class Listener(Protocol):
    """The server around the application, as faults use it."""

    def stop_listening(self, seconds: float | None) -> None:
        """Refuse new connections for ``seconds`` (None: until the server stops)."""

    def die(self, seconds: float | None, how: ConnectionEnd) -> None:
        """Refuse new connections, close all connections and lose all requests."""


class FaultTarget(Protocol):
    """The engine that is disturbed."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of its requests."""

    @property
    def wire_format(self) -> WireFormat:
        """How it writes errors."""

    @property
    def server(self) -> Listener:
        """The server around it. Raises RuntimeError if it runs in another server than Loopback's."""


@dataclass(kw_only=True)
class Fault:
    """One fault in one response. This base class lets everything through; each kind overrides what it disturbs."""

    target: FaultTarget
    response: ResponseWriter
    following: Fault | ResponseWriter  # receives what this one lets through
    chance: random.Random
    note: Callable[[str], None]  # counts a kind that happened
    events: int = field(default=0, init=False)  # let through
    noted: bool = field(default=False, init=False)

    kind: ClassVar[str]
    needs: ClassVar[Needs] = "stream"
    retracts: ClassVar[bool] = False  # needs an engine that retracts requests

    async def begin(self) -> bool:
        """Act before the engine receives the request; return whether the engine receives it."""
        return True

    async def head(self, message: Message) -> None:
        """Pass the status and the headers on."""
        await self.following.head(message)

    async def event(self, data: bytes) -> None:
        """Pass on an event, or the whole body of an unstreamed response."""
        self.events += 1
        await self.following.event(data)

    async def partial(self, data: bytes, size: int) -> None:
        """Pass on the first bytes of an event of ``size`` bytes."""
        await self.following.partial(data, size)

    async def end(self) -> None:
        """Pass on the end of the response."""
        await self.following.end()

    def happened(self) -> None:
        """Count the response as disturbed, once."""
        if not self.noted:
            self.noted = True
            self.note(self.kind)

    @property
    def scheduler(self) -> Scheduler:
        """The engine's scheduler."""
        return self.target.scheduler

    def schedule(self, tokens: int, act: Callable[[EngineRequest], None]) -> None:
        """Have the engine do something when the request has ``tokens`` tokens; the fault counts from then on."""

        def reached(request: EngineRequest) -> None:
            self.happened()
            act(request)

        self.response.milestones.append((tokens, reached))
