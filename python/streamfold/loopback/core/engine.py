"""What stands behind one application: the scheduler, the faults, and what was asked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from streamfold.loopback.core.scheduler import Scheduler
from streamfold.loopback.faults.injector import Injector

if TYPE_CHECKING:
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.http.answer import Ending

__all__ = ["Engine", "SeenRequest"]


@dataclass
class SeenRequest:
    """One HTTP request as it arrived. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """What was read of the body up to now."""
        return b"".join(self.parts)

    def json(self) -> Any:  # noqa: ANN401  # whatever was sent
        """Read the body as JSON; None if there is none."""
        body = self.body
        return orjson.loads(body) if body else None


class Listener(Protocol):
    """What the faults need of the server around the application."""

    def stop_listening(self, seconds: float | None) -> None:
        """Refuse connects for so many seconds, or for good."""

    def die(self, seconds: float | None, how: Ending) -> None:
        """End all connections too, and lose all requests."""


@dataclass
class Engine:
    """What stands behind one application."""

    config: Config
    scheduler: Scheduler = field(init=False)
    seen: deque[SeenRequest] = field(init=False)
    faults: Injector = field(init=False)
    listener: Listener | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.seen = deque(maxlen=self.config.keep_requests)
        self.faults = Injector(self.config.faults, self.config.engine)

    @property
    def server(self) -> Listener:
        """The server around it. Raises RuntimeError where that is another one than ours."""
        if self.listener is None:
            msg = "this fault needs the server itself: run the engine with Loopback or serve()"
            raise RuntimeError(msg)
        return self.listener
