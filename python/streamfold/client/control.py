"""EngineControl: abort requests, load and worker discovery.

They have concurrency limits of their own, so that an abort never queues behind the streams that it aborts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson

from streamfold.client.abort_batches import AbortBatches, PendingAbort
from streamfold.client.engine_loads import EngineLoads
from streamfold.client.sweep import Sweep
from streamfold.client.urls import normalize_base_url
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from streamfold.client.control_requests import ControlRequests
    from streamfold.client.deadlines import Deadlines
    from streamfold.engines.base import EngineSpec

__all__ = ["EngineControl"]

T = TypeVar("T")

_logger = logging.getLogger("streamfold")

_WORKERS_TTL = 10.0  # seconds; routers gain and lose workers
_FAILED_WORKERS_TTL = 1.0
_FIND_SECONDS = 0.25  # between two questions to a router that does not list its workers
_CLOSING_SECONDS = 30.0  # for the aborts that were asked for; a worker that is silent does not take so long
_NO_ROUTER = (404, 405)
_LATE_SECONDS = 1.0  # after an abort of all, in which the end of a stream may still be on its way


class EngineControl:
    """Sends control requests to one engine, or to each worker behind a router. Bound to the running event loop.

    Args:
        base_url: the normalized base URL of the engine or router.
        engine: engine-specific paths and payloads. May be replaced.
        requests: sends them.
        deadlines: of the client.

    Attributes:
        abort_event_at: when a call that is being aborted last got its terminal event, by the clock of the event loop.
        draining: calls whose terminal event is drained for.
    """

    def __init__(self, base_url: str, engine: EngineSpec, requests: ControlRequests, deadlines: Deadlines) -> None:
        self._base_url = base_url
        self.engine = engine
        self.abort_event_at: float = -math.inf
        self.draining: int = 0
        self._requests = requests
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers_task: asyncio.Task[list[str]] | None = None
        self._workers_expire_at = 0.0
        self._workers = [base_url]  # as last found
        self._are_workers_known = False
        self._workers_error: EngineError | None = None  # of the last question for them
        self._loads = EngineLoads(requests)
        self._batches: dict[str, AbortBatches] = {}  # by worker
        self._unassigned: list[PendingAbort] = []  # aborts that wait until it is known which workers there are
        self._assigning: asyncio.Task[list[str]] | None = None
        self._warned_sweep: dict[str, str] = {}  # workers that were not seen idle, and the reason that was logged
        self._closed = False
        self._queue_task: asyncio.Task[bool] | None = None
        self._sweeping = 0  # aborts of all that are under way
        self._swept_at = -math.inf  # by time.monotonic()

    def send_abort(self, rid: str, *, has_tokens: bool, answered: Callable[[], object]) -> PendingAbort:
        """Abort request ``rid`` at every worker. ``answered`` is called when all have answered; failures are logged.

        Without tokens so far the generation request may not have reached the engine's queue. Then the abort is
        repeated once, unless the request is finished by then: after its headers were received, or after 0.5 s.
        """
        abort = PendingAbort(rid, has_tokens=has_tokens, answered=answered)
        self._unassigned.append(abort)
        if self._assigning is None:
            self._assigning = self._spawn(self.workers())
            self._assigning.add_done_callback(self._assign)  # also if it is cancelled before it begins
        return abort

    async def load(self) -> int:
        """Requests that run or wait, over all workers that can be reached; the others are logged.

        Raises:
            EngineError: no worker can be reached, or one that can be does not report its load.
        """
        return await asyncio.shield(self._spawn(self._total_load()))

    def ask_for_queue(self, on_answer: Callable[[bool], object]) -> None:
        """Call ``on_answer`` with whether requests wait at any worker. Those who ask meanwhile share one question."""
        if self._queue_task is None or self._queue_task.done():
            self._queue_task = self._spawn(self._has_queue())
        self._queue_task.add_done_callback(
            lambda task: on_answer(not task.cancelled() and task.exception() is None and task.result())
        )

    async def _has_queue(self) -> bool:
        return await self._loads.has_queue(self.engine, await self.workers())

    async def abort_all(self, seconds: float) -> bool:
        """Abort every request of every worker, those of other clients too, for ``seconds`` at most, until all are idle.

        What cannot be reached is tried again within ``seconds``.

        Returns:
            Whether it is known which workers there are, and each was seen idle. If not, the log says why.
        """
        self._sweeping += 1
        try:
            return await self._sweep_all(seconds)
        finally:
            self._sweeping -= 1
            self._swept_at = time.monotonic()

    def may_have_ended(self, sent_at: float) -> bool:
        """Whether an abort of all, under way or just over, may have ended a request that was sent at that time.

        Args:
            sent_at: by ``time.monotonic()``.
        """
        was_there = sent_at <= self._swept_at and time.monotonic() < self._swept_at + _LATE_SECONDS
        return self._sweeping > 0 or was_there

    async def _sweep_all(self, seconds: float) -> bool:
        deadline = self._loop.time() + seconds
        sweeps: dict[str, Sweep] = {}
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            workers = await self._start_sweeps(sweeps, tasks, deadline)
            for worker in sweeps.keys() - set(workers):  # a router that was taken for an engine
                sweeps[worker].stop.set()
            await asyncio.wait([tasks[worker] for worker in workers], timeout=deadline - self._loop.time())
        finally:
            for sweep in sweeps.values():
                sweep.stop.set()
            if tasks:
                await asyncio.wait(tasks.values())  # a late abort of all would end requests that are started next
        reasons = self._reasons([sweeps[worker] for worker in workers])
        if not self._closed:
            self._log_sweeps(seconds, reasons)
        return not reasons

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
        """Post the aborts that were asked for; drop those for a worker that is silent, or cannot be reached."""
        self._closed = True
        while self._assigning is not None:
            await asyncio.wait({self._assigning})
        busy = [self._spawn(batches.wait_idle()) for batches in self._batches.values() if not batches.is_idle]
        if busy:
            await asyncio.wait(busy, timeout=_CLOSING_SECONDS)
        for batches in self._batches.values():
            batches.drop(f"they took longer than {_CLOSING_SECONDS:g} s")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._requests.timeout)
        while self._tasks:
            self._requests.dismiss()
            await asyncio.wait(self._tasks, timeout=0.1)

    # Aborting single requests.

    def _assign(self, finding: asyncio.Task[list[str]]) -> None:
        """Post the aborts that were asked for to each worker."""
        self._assigning = None
        aborts, self._unassigned = self._unassigned, []
        is_known = not (finding.cancelled() or finding.exception())  # otherwise the event loop is torn down
        batches = [self._batches_of(worker) for worker in finding.result()] if is_known else []
        PendingAbort.post_all(aborts, batches)

    def _batches_of(self, worker: str) -> AbortBatches:
        if worker not in self._batches:
            self._batches[worker] = AbortBatches(
                worker,
                engine=lambda: self.engine,
                requests=self._requests,
                deadlines=self._deadlines,
                spawn=self._spawn,
            )
        return self._batches[worker]

    # Aborting all requests.

    async def _start_sweeps(
        self, sweeps: dict[str, Sweep], tasks: dict[str, asyncio.Task[None]], deadline: float
    ) -> list[str]:
        """Start to sweep each worker, and return them; ask for them until it is known which there are."""
        while True:
            finding = self._spawn(self.workers(refresh=True))
            await asyncio.wait({finding}, timeout=deadline - self._loop.time())
            workers = self._workers
            for worker in workers:
                if worker not in sweeps:
                    sweeps[worker] = self._sweep(worker)
                    tasks[worker] = self._spawn(sweeps[worker].run())
            if self._are_workers_known or not self._may_find_workers(deadline):
                return workers
            await asyncio.sleep(_FIND_SECONDS)

    def _sweep(self, worker: str) -> Sweep:
        return Sweep(
            worker, engine=self.engine, requests=self._requests, loads=self._loads, closed=lambda: self._closed
        )

    def _may_find_workers(self, deadline: float) -> bool:
        """Whether to ask once more which workers there are."""
        is_refused = self._workers_error is not None and not self._workers_error.retryable
        return not (is_refused or self._closed) and self._loop.time() + _FIND_SECONDS < deadline

    def _reasons(self, sweeps: Sequence[Sweep]) -> dict[str, tuple[str, bool]]:
        """Why each worker is not known to be idle, and whether its sweep gave up."""
        reasons = {sweep.worker: (sweep.reason, sweep.gave_up) for sweep in sweeps if not sweep.is_idle}
        if not self._are_workers_known:
            error = self._workers_error or "no reply in the time given"
            reasons[self._base_url] = f"which engines it has is not known: {error}", False
        return reasons

    def _log_sweeps(self, seconds: float, reasons: dict[str, tuple[str, bool]]) -> None:
        for worker, (reason, gave_up) in reasons.items():
            # A rollout repeats an abort that gives up many times.
            is_new = not gave_up or self._warned_sweep.get(worker) != reason
            _logger.log(
                logging.WARNING if is_new else logging.DEBUG,
                "could not abort all requests at %s, some may keep running: %s"
                if gave_up
                else "%s was not seen idle, some requests may keep running: %s",
                worker,
                reason if gave_up else f"{reason} (within {seconds:g} s)",
            )
        self._warned_sweep = {worker: reason for worker, (reason, _) in reasons.items()}

    async def _total_load(self) -> int:
        return await self._loads.total(self.engine, await self.workers())

    # Workers.

    async def _find_workers(self) -> list[str]:
        for batches in self._batches.values():
            batches.forget()
        ttl = _WORKERS_TTL
        try:
            response = await self._requests.send("GET", self._base_url, self.engine.workers_path)
            urls = [self._worker_url(worker) for worker in self.engine.read_workers(orjson.loads(response))]
            self._workers = list(filter(None, urls)) or self._workers
            self._are_workers_known = True
        except EngineError as error:
            self._workers_error = error
            if error.status in _NO_ROUTER:  # an engine without a router
                self._workers, self._are_workers_known = [self._base_url], True
            else:  # a router that fails: assume that its workers are the same
                ttl = _FAILED_WORKERS_TTL
        except orjson.JSONDecodeError:
            self._workers, self._are_workers_known = [self._base_url], True
        self._workers_expire_at = self._loop.time() + ttl
        return self._workers

    def _worker_url(self, worker: str) -> str | None:
        try:
            return normalize_base_url(worker)
        except ValueError as error:
            _logger.warning("the router lists a worker with an invalid URL, which is ignored: %s", error)
            return None

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, even if the caller was cancelled
