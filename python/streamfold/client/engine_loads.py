"""EngineLoads: how many requests run or wait on an engine, or on all engines of a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from streamfold.client.control_requests import EndpointMissing, Unreachable
from streamfold.engines.base import LoadMissing
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold.client.abort_signal import AbortSignal
    from streamfold.client.control_requests import ControlRequests
    from streamfold.engines.base import EngineSpec

__all__ = ["EngineLoads"]

_logger = logging.getLogger("streamfold")


class EngineLoads:
    """Asks workers for their load.

    Args:
        requests: sends the questions.
    """

    def __init__(self, requests: ControlRequests) -> None:
        self._requests = requests
        self._counting: set[tuple[str, str]] = set()  # workers, and paths that have reported more than 0
        self._telling: set[str] = set()  # workers that need no flag
        self._left_out: set[str] = set()  # dead workers that were logged

    async def total(self, engine: EngineSpec, workers: Sequence[str]) -> int:
        """Requests that run or wait, over all workers that can be reached. The others are logged once, and left out.

        Raises:
            Unreachable: no worker can be reached.
            EngineError: a worker that can be reached does not report its load.
        """
        asking = [self.of(engine, worker) for worker in workers]
        loads = await asyncio.gather(*asking, return_exceptions=True)  # wait for all of them
        dead: dict[str, Unreachable] = {}
        total = 0
        for worker, load in zip(workers, loads, strict=True):
            if isinstance(load, Unreachable):
                dead[worker] = load
            elif isinstance(load, BaseException):
                raise load
            else:
                total += load
        if dead and len(dead) == len(workers):
            raise next(iter(dead.values()))
        for worker in dead.keys() - self._left_out:
            _logger.warning("%s is listed by the router and left out of the load: %s", worker, dead[worker])
        self._left_out = set(dead)
        return total

    async def has_queue(self, engine: EngineSpec, workers: Sequence[str]) -> bool:
        """Whether requests wait at any worker that tells it."""
        asking = [self._waiting(engine, worker) for worker in workers]
        return any(await asyncio.gather(*asking))

    async def _waiting(self, engine: EngineSpec, worker: str) -> int:
        for path in engine.loads:
            with contextlib.suppress(EngineError):
                if waiting := engine.read_waiting(await self._requests.send("GET", worker, path)):
                    return waiting
        return 0

    async def of(self, engine: EngineSpec, worker: str, stop: AbortSignal | None = None) -> int:
        """Requests that run or wait at one worker.

        Raises:
            EngineError: it does not answer before ``stop`` is set, or does not report its load.
        """
        missing: EngineError | None = None
        for path in engine.loads:
            try:
                load = engine.read_load(await self._requests.send("GET", worker, path, stop=stop))
            except LoadMissing as error:  # noqa: PERF203  # there are two paths at most
                missing = error
            except EndpointMissing as error:
                missing = missing or error
            else:
                self._check_count(engine, worker, path, load, missing)
                return load
        raise missing or EngineError("the engine has no endpoint that reports its load")

    async def watch_count(self, engine: EngineSpec, worker: str, stop: AbortSignal) -> None:
        """Ask a worker, while it may be busy, what needs a flag: a 0 that follows more is to be believed."""
        if worker in self._telling:
            return
        for path in engine.load_flags:
            if (worker, path) not in self._counting:
                with contextlib.suppress(EngineError):
                    if engine.read_load(await self._requests.send("GET", worker, path, stop=stop)):
                        self._counting.add((worker, path))

    def _check_count(self, engine: EngineSpec, worker: str, path: str, load: int, missing: EngineError | None) -> None:
        """Raise for a 0 that may mean that the server does not count. What has counted once goes on counting."""
        flag = engine.load_flags.get(path)
        if flag is None:
            self._telling.add(worker)
            return
        if (worker, path) in self._counting:
            return
        if not load:
            reason = "" if missing is None else f"{missing}; "
            raise EngineError(f"{reason}{path} says 0, as it does without {flag}, so {worker} may be busy")
        self._counting.add((worker, path))
