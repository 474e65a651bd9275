"""What a driver reports of an exchange, and requests for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from streamfold.client.drivers.base import HttpRequest
from streamfold.client.urls import BaseUrl
from support.replay import until

if TYPE_CHECKING:
    from streamfold.client.drivers.base import Driver, Exchange, Kind

STREAM = {"dialect": "sglang"}
BODY = b'{"input_ids": [5, 6, 7]}'


class Driven:
    """An exchange whose request is sent as soon as it can leave, unless ``holds``."""

    def __init__(self, driver: Driver, request: HttpRequest, *, holds: bool = False) -> None:
        self.events: list[tuple[Kind, Any]] = []
        self.holds = holds
        self._ended = asyncio.get_running_loop().create_future()
        self.exchange: Exchange = driver.start(request, self._on_event)
        assert not self.events, "nothing is reported before start() returns"

    def _on_event(self, kind: Kind, detail: Any) -> None:
        assert not self._ended.done(), "nothing is reported after the end"
        self.events.append((kind, detail))
        if kind == "connected" and not self.holds:
            self.exchange.send()
        if kind == "ended":
            self._ended.set_result(None)

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _ in self.events]

    def detail(self, kind: Kind) -> Any:
        """What came with the event of that kind; there has to be exactly one."""
        (detail,) = [detail for other, detail in self.events if other == kind]
        return detail

    async def ended(self) -> list[Kind]:
        """Wait for the end. Returns the kinds of all events."""
        await asyncio.wait_for(asyncio.shield(self._ended), 30)
        return self.kinds

    async def comes(self, kind: Kind) -> Any:
        await until(lambda: kind in self.kinds)
        return self.detail(kind)


def asked(
    url: str,
    target: str = "/generate",
    *,
    body: bytes = BODY,
    stream: dict[str, Any] | None = STREAM,
    connect_timeout: float | None = 10.0,
    fresh: bool = False,
) -> HttpRequest:
    """A request for a stream."""
    return HttpRequest(
        origin=BaseUrl.parse(url).origin,
        method="POST",
        target=target,
        fields=(("content-type", "application/json"),),
        body=body,
        stream=stream,
        connect_timeout=connect_timeout,
        fresh=fresh,
    )


def told(url: str, target: str = "/abort_request", *, connect_timeout: float | None = 10.0) -> HttpRequest:
    """A control request: its reply is no stream."""
    return asked(url, target, body=b"{}", stream=None, connect_timeout=connect_timeout)
