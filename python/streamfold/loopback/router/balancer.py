"""A router's workers together: which one gets the next request, and what happens when it does not answer."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import TYPE_CHECKING, Literal

from streamfold.loopback.router.worker import Broken, Exchange, Refused, Worker

if TYPE_CHECKING:
    from streamfold.loopback.router.worker import Headers

__all__ = ["ROUTING_KEY", "SESSION_KEY", "Fleet", "Policy", "Unanswered"]

Policy = Literal["round_robin", "least_load", "hash"]

ROUTING_KEY, SESSION_KEY = b"x-smg-routing-key", b"x-session-id"  # SGLang's router, vLLM's
# Another worker, or the same one a little later, may do better.
TRIED_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
FIRST_PAUSE, GROWTH = 0.05, 1.5


class Unanswered(Exception):
    """There is nothing of a worker's to pass on. ``status``, ``code`` and the message are for the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Fleet:
    """The workers of a router. Belongs to its event loop.

    Args:
        workers: all of them, in the order in which round robin takes them.
        policy: how one is chosen.
        tries: how often a request is sent at most.
        down_seconds: how long a worker that refuses connections is left alone.
    """

    def __init__(self, workers: list[Worker], policy: Policy, *, tries: int, down_seconds: float) -> None:
        self.workers = workers
        self._policy = policy
        self._tries = tries
        self._down_seconds = down_seconds
        self._turns = itertools.count()

    def up(self) -> list[Worker]:
        """Those that have not refused a connection just now."""
        now = asyncio.get_running_loop().time()
        return [worker for worker in self.workers if worker.down_until <= now]

    async def generate(self, path: str, headers: Headers, body: bytes) -> Exchange:
        """Ask one worker after the other to generate, until one does or the tries are used up.

        Whoever gets the exchange has to close it; its status may be that of the last refusal.

        Raises:
            Unanswered: no worker takes connections, or the last one that did broke off.
        """
        told = dict(headers)
        key = told.get(ROUTING_KEY, told.get(SESSION_KEY))
        headers = [*headers, (b"content-type", b"application/json")]
        failures = 0
        while (worker := self._choose(key)) is not None:
            exchange = Exchange(worker)
            broken = None
            try:
                await exchange.begin("POST", path, headers, body)
            except Refused:
                self._leave_alone(worker)
                continue
            except Broken as error:
                broken = error
            if broken is None and exchange.status not in TRIED_AGAIN:
                return exchange
            failures += 1
            if failures == self._tries:
                if broken is not None:
                    raise _failed(worker, broken) from broken
                return exchange
            exchange.close()
            await asyncio.sleep(FIRST_PAUSE * GROWTH ** (failures - 1))
        raise Unanswered(503, "no_available_workers", "no worker takes connections at present")

    async def info(self, headers: Headers, path: str) -> Exchange:
        """Ask the first worker that is up for what is the same for all of them.

        Raises:
            Unanswered: it does not answer, or none is up.
        """
        up = self.up()
        if not up:
            raise Unanswered(503, "no_workers", "no worker takes connections at present")
        exchange = Exchange(up[0])
        try:
            await exchange.begin("GET", path, headers)
        except (Refused, Broken) as error:
            if isinstance(error, Refused):
                self._leave_alone(up[0])
            raise _failed(up[0], error) from error
        return exchange

    def _choose(self, key: bytes | None) -> Worker | None:
        up = self.up()
        if not up:
            return None
        if self._policy == "hash" and key is not None:
            # The highest of all hashes wins, so that a worker that goes or comes moves no keys but its own.
            return max(up, key=lambda worker: _hash(key, self.workers.index(worker)))
        turn = next(self._turns) % len(up)
        if self._policy == "least_load":
            return min(up[turn:] + up[:turn], key=lambda worker: worker.running)
        return up[turn]

    def _leave_alone(self, worker: Worker) -> None:
        worker.down_until = asyncio.get_running_loop().time() + self._down_seconds


def _hash(key: bytes, worker: int) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=b"%d" % worker).digest()


def _failed(worker: Worker, error: Exception) -> Unanswered:
    return Unanswered(500, "call_upstream_request_error", f"no answer from {worker.url}: {error}")
