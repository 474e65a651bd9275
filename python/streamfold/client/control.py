"""EngineControl: abort requests, load and worker discovery.

They have concurrency limits of their own, so that an abort never queues behind the streams that it aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import orjson

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.control_requests import EndpointMissing
from streamfold.client.urls import normalize_base_url
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from streamfold.client.control_requests import ControlRequests
    from streamfold.engines.base import EngineSpec, Post

__all__ = ["EngineControl"]

T = TypeVar("T")

_logger = logging.getLogger("streamfold")

_REPEAT_SECONDS = 0.075  # an engine ignores an abort that arrives before the request
_TRANSIT_SECONDS = 0.5  # that a request may take to its engine through a busy router
_WORKERS_TTL = 10.0  # seconds; routers gain and lose workers
_FAILED_WORKERS_TTL = 1.0
_SWEEP_SECONDS = 0.25  # between two rounds of an abort of all requests
_MAX_FAILURES = 2  # in a row, after which a worker counts as dead


class EngineControl:
    """Sends control requests to one engine, or to each worker behind a router. Bound to the running event loop.

    Args:
        base_url: the normalized base URL of the engine or router.
        engine: engine-specific paths and payloads. May be replaced.
        requests: sends them.
    """

    def __init__(self, base_url: str, engine: EngineSpec, requests: ControlRequests) -> None:
        self._base_url = base_url
        self.engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers_task: asyncio.Task[list[str]] | None = None
        self._workers_expire_at = 0.0
        self._workers = [base_url]  # as last found
        self._warned_abort: set[str] = set()  # workers whose failed aborts were logged
        self._warned_abort_all: set[str] = set()
        self._missing: set[tuple[str, str]] = set()  # workers, and paths that they do not have
        self._closed = False

    def send_abort(
        self, rid: str, *, done: asyncio.Future[None], responded: asyncio.Future[None], has_tokens: bool
    ) -> asyncio.Task[None]:
        """Abort request ``rid`` at every worker. The task ends when all have answered; failures are logged.

        Without tokens so far the generation request may not have reached the engine's queue. Then the abort is
        repeated once, unless the request is ``done`` by then: after ``responded`` (its headers were received), or
        after 0.5 s.
        """
        return self._spawn(self._abort(rid, done, responded, has_tokens=has_tokens))

    async def load(self) -> int:
        """Requests that run or wait, over all workers.

        Raises:
            EngineError: a worker cannot be reached, or does not report its load.
        """
        return await asyncio.shield(self._spawn(self._total_load()))

    async def abort_all(self, seconds: float) -> bool:
        """Abort every request of every worker, those of other clients too, for ``seconds`` at most, until all are idle.

        Returns:
            Whether all workers that answer are idle. Failures of a worker are logged.
        """
        deadline = self._loop.time() + seconds
        finding = self._spawn(self.workers(refresh=True))
        await asyncio.wait({finding}, timeout=seconds)
        workers = finding.result() if finding.done() else self._workers
        stop = AbortSignal()
        sweeps = [self._spawn(self._abort_until_idle(worker, stop)) for worker in workers]
        try:
            await asyncio.wait(sweeps, timeout=deadline - self._loop.time())
            for worker, sweep in zip(workers, sweeps, strict=True):
                if not sweep.done():
                    _logger.warning("%s did not become idle within %g s of aborting all its requests", worker, seconds)
        finally:
            stop.set()
            await asyncio.wait(sweeps)  # a late abort of all would end requests that are started next
        return all(sweep.result() for sweep in sweeps)

    async def request(
        self, method: Literal["GET", "POST"], base: str, path: str, body: dict[str, Any] | None = None
    ) -> bytes:
        """Send one small request to the server at base URL ``base``, and return the body of its response.

        Raises:
            EngineError: no response in time, or one with a status of 300 or more.
        """
        return await asyncio.shield(self._spawn(self._requests.send(method, base, path, body)))

    async def workers(self, *, refresh: bool = False) -> list[str]:
        """Base URLs of the engines: those that a router lists, otherwise the base URL itself. Cached for 10 s."""
        task = self._workers_task
        if task is None or (task.done() and (refresh or self._loop.time() >= self._workers_expire_at)):
            self._workers_task = task = self._spawn(self._find_workers())
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """Wait for the requests that have been sent; drop those that queue for a worker that hangs."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._requests.timeout)
        while self._tasks:
            self._requests.dismiss()
            await asyncio.wait(self._tasks, timeout=0.1)

    # Aborting one request.

    async def _abort(
        self, rid: str, done: asyncio.Future[None], responded: asyncio.Future[None], *, has_tokens: bool
    ) -> None:
        workers = await self.workers()
        await asyncio.gather(
            *[self._abort_at(worker, rid, done, responded, has_tokens=has_tokens) for worker in workers]
        )

    async def _abort_at(
        self, worker: str, rid: str, done: asyncio.Future[None], responded: asyncio.Future[None], *, has_tokens: bool
    ) -> None:
        await self._post_abort(worker, rid)
        if not has_tokens:
            await asyncio.wait({done}, timeout=_REPEAT_SECONDS)
            await asyncio.wait({done, responded}, timeout=_TRANSIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                await self._post_abort(worker, rid)

    async def _post_abort(self, worker: str, rid: str) -> None:
        posts = [post for post in self.engine.aborts(rid) if (worker, post[0]) not in self._missing]
        if not posts:
            return
        try:
            await self._post_first(worker, posts)
        except EndpointMissing as error:
            last = (worker, posts[-1][0])
            if last not in self._missing:  # concurrent aborts may find the same
                self._missing.add(last)
                level = logging.INFO if self.engine.abort_by_disconnect else logging.WARNING
                _logger.log(level, "%s can abort a request only by closing its stream: %s", worker, error)
        except EngineError as error:
            if worker not in self._warned_abort:  # one warning for a dead worker, not one for each of 1,000 aborts
                self._warned_abort.add(worker)
                _logger.warning("could not abort at %s, requests may keep running there: %s", worker, error)

    # Aborting all requests.

    async def _abort_until_idle(self, worker: str, stop: AbortSignal) -> bool:
        """Repeat the abort of all requests until the worker was idle twice: a request in transit may not be counted.

        Returns:
            Whether it is idle, or does not answer. Nothing is sent once ``stop`` is set.
        """
        failures = idle = 0
        while not (stop.is_set() or self._closed):
            answers = False
            try:
                await self._post_first(worker, self.engine.aborts_all(), stop)
                answers = True
                load = await self._load_of(worker, stop)
            except EngineError as error:
                failures, idle = failures + 1, 0
                if (failures >= _MAX_FAILURES or not error.retryable) and not stop.is_set():
                    if worker not in self._warned_abort_all:  # every rollout ends with an abort of all
                        self._warned_abort_all.add(worker)
                        _logger.warning("could not abort all requests at %s, some may keep running: %s", worker, error)
                    return not answers and error.status is None
            else:
                failures, idle = 0, 0 if load else idle + 1
                if idle > 1:
                    return True
            await stop.wait(_REPEAT_SECONDS if idle else _SWEEP_SECONDS)
        return False

    async def _total_load(self) -> int:
        workers = await self.workers()
        loads = await asyncio.gather(*map(self._load_of, workers), return_exceptions=True)  # wait for all of them
        for load in loads:
            if isinstance(load, BaseException):
                raise load
        return sum(cast("list[int]", loads))

    async def _load_of(self, worker: str, stop: AbortSignal | None = None) -> int:
        *others, last = self.engine.loads
        for path in others:
            with contextlib.suppress(EndpointMissing):
                return self.engine.read_load(await self._requests.send("GET", worker, path, stop=stop))
        return self.engine.read_load(await self._requests.send("GET", worker, last, stop=stop))

    # Workers.

    async def _find_workers(self) -> list[str]:
        self._warned_abort.clear()
        if not self.engine.abort_by_disconnect:
            self._missing.clear()  # a proxy may have answered for a worker that was restarting
        ttl = _WORKERS_TTL
        try:
            response = await self._requests.send("GET", self._base_url, self.engine.workers_path)
            urls = [self._worker_url(worker) for worker in self.engine.read_workers(orjson.loads(response))]
            self._workers = list(filter(None, urls)) or self._workers
        except EngineError as error:
            if error.status == 404:  # an engine without a router
                self._workers = [self._base_url]
            else:  # a router that fails: assume that its workers are the same
                ttl = _FAILED_WORKERS_TTL
        except orjson.JSONDecodeError:
            self._workers = [self._base_url]
        self._workers_expire_at = self._loop.time() + ttl
        return self._workers

    def _worker_url(self, worker: str) -> str | None:
        try:
            return normalize_base_url(worker)
        except ValueError as error:
            _logger.warning("the router lists a worker with an invalid URL, which is ignored: %s", error)
            return None

    # Requests.

    async def _post_first(self, worker: str, posts: Sequence[Post], stop: AbortSignal | None = None) -> None:
        """Send the first of ``posts`` whose path the worker has."""
        *others, last = posts
        for path, body in others:
            try:
                await self._requests.send("POST", worker, path, body, stop)
            except EndpointMissing:  # noqa: PERF203  # there are two at most
                self._missing.add((worker, path))
            else:
                return
        await self._requests.send("POST", worker, *last, stop)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, even if the caller was cancelled
