"""A driver that answers at once, to measure what a call costs in Python without any transport."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from streamfold import Parser
from streamfold._core import Durations
from streamfold.client.drivers.base import Head

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from streamfold import Generation
    from streamfold.client.drivers.base import HttpRequest, Kind, Listener


class InstantDriver:
    """Answers each request with the same body.

    Args:
        body: of the response: a whole stream.
    """

    pipelines = False

    def __init__(self, body: bytes) -> None:
        self._body = body

    def start(self, request: HttpRequest, listener: Listener) -> InstantExchange:
        """Start a request."""
        exchange = InstantExchange(self._body, request, listener)
        asyncio.get_running_loop().call_soon(listener, "connected", None)
        return exchange

    async def aclose(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""


class InstantExchange:
    """A request and its reply, which is there once the request was sent."""

    def __init__(self, body: bytes, request: HttpRequest, listener: Listener) -> None:
        self.first_token_at = self.last_token_at = math.inf
        self._body = body
        self._parser = Parser(**(request.stream or {"dialect": "sglang"}))
        self._listener = listener

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._parser.token_count

    @property
    def passed(self) -> int:
        """None: it sends single requests."""
        return 0

    def gaps(self) -> tuple[Durations, int]:
        """One read brings all tokens."""
        return Durations(), min(1, self.token_count)

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far."""
        return self._parser.token_ids()

    def snapshot(self) -> Generation:
        """A copy of what the reply has brought so far."""
        return self._parser.snapshot()

    def notify_at(self, count: int) -> bool:
        """All tokens come at once."""
        return self.token_count >= count

    def send(self) -> None:
        """Receive the reply."""
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        self._listener("head", Head(200, is_stream=True, headers={}))
        self._parser.feed(self._body)
        self.first_token_at = self.last_token_at = time.monotonic()
        self._listener("first_token", None)
        self._listener("finished", None)
        listener, self._listener = self._listener, _ignore  # as all drivers: no circle of references is left
        listener("ended", None)

    def abort(self) -> None:
        """There is no rest."""

    def end(self) -> None:
        """There is no connection."""

    def urgent(self) -> None:
        """All is read."""

    def take(self) -> Generation:
        """The generation."""
        return self._parser.take()

    def take_body(self) -> bytes:
        """There is none."""
        return b""


def _ignore(_kind: Kind, _detail: object) -> None:
    """After the end, nothing is reported."""
