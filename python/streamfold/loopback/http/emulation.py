"""What the HTTP application needs of an emulated engine; each engine's folder provides one :class:`Emulation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.routing import BaseRoute

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Reply
    from streamfold.loopback.core.scheduler import Scheduler
    from streamfold.loopback.core.wire_format import WireFormat

__all__ = ["Emulation", "Undisturbed"]


class Undisturbed(Protocol):
    """Generates without HTTP, clock or faults."""

    def __call__(
        self, config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
    ) -> Reply:
        """Return the finished reply to one request."""


@dataclass(frozen=True)
class Emulation:
    """One emulated engine.

    Attributes:
        wire_format: returns how an engine with this configuration writes.
        routes: returns the routes of an engine with this scheduler.
        needs_api_key: whether a path, without the base path, needs the API key.
        undisturbed: generates without HTTP.
        exception_handlers: Starlette's, by HTTP status.
    """

    wire_format: Callable[[Config], WireFormat]
    routes: Callable[[Scheduler], list[BaseRoute]]
    needs_api_key: Callable[[str], bool]
    undisturbed: Undisturbed
    exception_handlers: Mapping[Any, Any] = field(default_factory=dict)
