"""Load balancing: chooses a worker for each request, retries on another one, skips workers that are down."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import TYPE_CHECKING, Literal

from streamfold.loopback.router.worker import Worker, WorkerDisconnected, WorkerRequest, WorkerUnreachable

if TYPE_CHECKING:
    from streamfold.loopback.router.worker import Headers

__all__ = ["ROUTING_KEY", "SESSION_KEY", "Balancer", "Policy", "RouterError"]

Policy = Literal["round_robin", "least_load", "hash"]

ROUTING_KEY, SESSION_KEY = b"x-smg-routing-key", b"x-session-id"  # SGLang's router, vLLM's
# Statuses that are retried, on another worker or on the same one a little later.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
FIRST_BACKOFF, BACKOFF_FACTOR = 0.05, 1.5  # seconds


class RouterError(Exception):
    """No worker's response can be passed on. ``status``, ``code`` and the message are sent to the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Balancer:
    """Sends requests to the workers of a router. Must be used in one event loop.

    Args:
        workers: all workers, in the order of round robin.
        policy: how a worker is chosen.
        tries: maximum number of attempts per request.
        down_seconds: how long a worker that refuses connections gets no requests.
    """

    def __init__(self, workers: list[Worker], policy: Policy, *, tries: int, down_seconds: float) -> None:
        self.workers = workers
        self._policy = policy
        self._tries = tries
        self._down_seconds = down_seconds
        self._turns = itertools.count()

    def up(self) -> list[Worker]:
        """Return the workers that did not refuse a connection within the last ``down_seconds``."""
        now = asyncio.get_running_loop().time()
        return [worker for worker in self.workers if worker.down_until <= now]

    async def generate(self, path: str, headers: Headers, body: bytes) -> WorkerRequest:
        """Send a request that generates to one worker after another, until one responds or ``tries`` are used up.

        The caller must close the result. Its status may be an error, that of the last attempt.

        Raises:
            RouterError: no worker accepts connections, or the last attempt was disconnected.
        """
        by_name = dict(headers)
        key = by_name.get(ROUTING_KEY, by_name.get(SESSION_KEY))
        headers = [*headers, (b"content-type", b"application/json")]
        failures = 0
        while (worker := self._choose(key)) is not None:
            request = WorkerRequest(worker)
            disconnect = None
            try:
                await request.start("POST", path, headers, body)
            except WorkerUnreachable:
                self._mark_down(worker)
                continue
            except WorkerDisconnected as error:
                disconnect = error
            if disconnect is None and request.status not in RETRIED:
                return request
            failures += 1
            if failures == self._tries:
                if disconnect is not None:
                    raise _failed(worker, disconnect) from disconnect
                return request
            request.close()
            await asyncio.sleep(FIRST_BACKOFF * BACKOFF_FACTOR ** (failures - 1))
        raise RouterError(503, "no_available_workers", "no worker takes connections at present")

    async def info(self, headers: Headers, path: str) -> WorkerRequest:
        """Send a request whose response is the same for all workers to the first one that is up.

        The caller must close the result.

        Raises:
            RouterError: it does not respond, or no worker is up.
        """
        up = self.up()
        if not up:
            raise RouterError(503, "no_workers", "no worker takes connections at present")
        request = WorkerRequest(up[0])
        try:
            await request.start("GET", path, headers)
        except (WorkerUnreachable, WorkerDisconnected) as error:
            if isinstance(error, WorkerUnreachable):
                self._mark_down(up[0])
            raise _failed(up[0], error) from error
        return request

    def _choose(self, key: bytes | None) -> Worker | None:
        up = self.up()
        if not up:
            return None
        if self._policy == "hash" and key is not None:
            # Rendezvous hashing: a worker that goes down or returns moves only its own keys.
            return max(up, key=lambda worker: _hash(key, self.workers.index(worker)))
        turn = next(self._turns) % len(up)
        if self._policy == "least_load":
            return min(up[turn:] + up[:turn], key=lambda worker: worker.running)
        return up[turn]

    def _mark_down(self, worker: Worker) -> None:
        worker.down_until = asyncio.get_running_loop().time() + self._down_seconds


def _hash(key: bytes, worker: int) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=b"%d" % worker).digest()


def _failed(worker: Worker, error: Exception) -> RouterError:
    return RouterError(500, "call_upstream_request_error", f"no answer from {worker.url}: {error}")
