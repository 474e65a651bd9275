"""Mock scheduler: continuous batching, queue, abort, pause and resume, and the task that steps the batch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from streamfold.loopback.core.request_params import InvalidRequest, RequestParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from streamfold.loopback.core.causal_lm import CausalLM
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import EngineRequest, Milestone

__all__ = ["Scheduler"]

P = TypeVar("P", bound=RequestParams)

# Seconds between a retraction and the abort in the queue: enough to send the client the tokens so far.
RETRACTED_SECONDS = 0.01


class Scheduler:
    """Steps a batch of requests, up to ``max_running_requests``; the others wait in a queue.

    All methods must be called in one event loop. :meth:`run` is the task that steps the batch.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model: CausalLM = config.load_model()
        self.weight_version: str = config.weight_version
        self.requests: int = 0  # accepted since the start
        self.tokens: int = 0  # generated since the start
        self.aborts: deque[str] = deque(maxlen=config.keep_requests)  # ids as clients sent them; "*" for all
        # Ids, as the engine reports them, of requests whose client disconnected.
        self.leavers: deque[str] = deque(maxlen=config.keep_requests)
        self.failure: BaseException | None = None  # of the task
        self._seeds = random.Random(f"{config.seed}/{config.sampling_seed}")  # noqa: S311  # it has to be repeatable
        self._running: dict[str, EngineRequest] = {}
        self._waiting: dict[str, EngineRequest] = {}
        self._held = False  # paused: no request leaves the queue
        self._frozen = False  # no request is stepped either
        self._open = asyncio.Event()  # set: new requests are accepted
        self._open.set()
        self._drained = asyncio.Event()  # set: no request runs
        self._drained.set()
        self._idle = asyncio.Event()  # set: no request runs or waits
        self._idle.set()
        self._stepping = asyncio.Lock()  # held while the model computes, and while its weights are written
        # One thread, so that each step finds the threads of the one before it.
        self._executor = ThreadPoolExecutor(1, "streamfold-model") if self.model.blocking else None
        self._wake = asyncio.Event()
        self._abort_all_at = -math.inf

    def seeded(self, params: P) -> P:
        """Return the parameters with a seed: their own, or a new one of the engine's generator."""
        return params if params.seed is not None else replace(params, seed=self._seeds.getrandbits(32))

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue, retracted ones included."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """Tokens, prompts included, that the running requests hold."""
        return self.model.used_tokens([request.sequence for request in self._running.values()])

    @property
    def full(self) -> bool:
        """Whether batch and queue are full."""
        most = self.config.max_queued_requests
        return most is not None and self.waiting >= most and not self._has_room

    @property
    def live(self) -> list[EngineRequest]:
        """All unfinished requests, those in the queue first."""
        return [*self._waiting.values(), *self._running.values()]

    def is_live(self, rid: str) -> bool:
        """Whether an unfinished request has this id."""
        return rid in self._running or rid in self._waiting

    def submit(self, requests: Sequence[EngineRequest], milestones: Sequence[Milestone] = ()) -> None:
        """Accept requests; ``milestones`` are what is done to each of them at certain token counts.

        Raises:
            InvalidRequest: an id is not unique among the live requests; none of the requests was accepted.
        """
        seen: set[str] = set()
        for request in requests:
            if request.rid in seen or self.is_live(request.rid):
                msg = f"Duplicate request ID detected: {request.rid}"
                raise InvalidRequest(msg)
            seen.add(request.rid)
        for request in requests:
            request.milestones = sorted(milestones, key=lambda milestone: milestone[0])
            self._enqueue(request)

    def _enqueue(self, request: EngineRequest) -> None:
        self.requests += 1
        if not request.validate():
            return
        if self.full:
            request.reject_queue_full()
        else:
            self._waiting[request.rid] = request
            self._idle.clear()
            self._run_milestones(request)
            self._admit()
            self._wake.set()

    @staticmethod
    def _run_milestones(request: EngineRequest) -> None:
        """Run the milestones that the request has reached."""
        while request.milestones and not request.done and request.milestones[0][0] <= len(request.reply.token_ids):
            _, act = request.milestones.pop(0)
            act(request)

    def abort(self, sent_id: str, requests: Iterable[EngineRequest], *, at_once: bool = False) -> None:
        """Abort some requests; ``sent_id`` is the id that the client sent, kept in ``aborts``."""
        self.aborts.append(sent_id)
        for request in requests:
            self.abort_request(request, at_once=at_once)

    def abort_all(self, requests: Iterable[EngineRequest] | None = None, *, at_once: bool = False) -> None:
        """Abort every unfinished request, or of those only the ones that the API process holds that was asked."""
        self._abort_all_at = asyncio.get_running_loop().time()
        self.abort("*", self.live if requests is None else requests, at_once=at_once)

    @property
    def since_abort_all(self) -> float:
        """Seconds since the last :meth:`abort_all`."""
        return asyncio.get_running_loop().time() - self._abort_all_at

    def abort_request(self, request: EngineRequest, *, at_once: bool = False) -> None:
        """Abort one request. A running one samples one more token, unless ``at_once``."""
        if request.done:
            return
        if at_once or self._waiting.get(request.rid) is request:
            self._forget(request)
            request.abort_now()
        else:
            # It takes effect in the next step, which samples one more token.
            request.aborting = True
            self._wake.set()

    def retract_and_abort(self, request: EngineRequest) -> None:
        """Retract a running request to the queue, and abort it there a little later."""
        if self._running.pop(request.rid, None) is not None:
            self._waiting[request.rid] = request
            self._note_drained()
        request.sequence.retract()
        request.reply.retractions += 1
        request.parked = True
        asyncio.get_running_loop().call_later(RETRACTED_SECONDS, self.abort_request, request)

    def reject_queue_full(self, request: EngineRequest) -> None:
        """Reject a request as if the queue were full."""
        self._forget(request)
        request.reject_queue_full()

    def park(self, request: EngineRequest, seconds: float | None) -> None:
        """Leave a request in the queue for ``seconds`` (None: no limit), or until it is aborted or :meth:`resume`."""
        request.parked = True
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._unpark, request)

    def _unpark(self, request: EngineRequest) -> None:
        request.parked = False
        self._admit()
        self._wake.set()

    def lose_all(self) -> None:
        """Lose all requests and all state, as a process that is killed and restarted."""
        for request in self.live:
            self._forget(request)
        self.weight_version = self.config.weight_version
        self.model = self.config.load_model()
        self.resume()

    def client_left(self, request: EngineRequest) -> None:
        """Record that the client of a request disconnected; its request ends after ``leave_delay``."""
        self.leavers.append(request.reply.rid)
        delay = self.config.leave_delay
        if delay == 0:
            self._forget(request)
        elif delay is not None:
            asyncio.get_running_loop().call_later(delay, self._forget, request)

    def _forget(self, request: EngineRequest) -> None:
        for place in (self._running, self._waiting):
            # A later request may have the same id.
            if place.get(request.rid) is request:
                del place[request.rid]
        request.sequence.release()
        self._note_drained()
        self._wake.set()

    def _note_drained(self) -> None:
        if self._running:
            self._drained.clear()
        else:
            self._drained.set()
            if not self._waiting:
                self._idle.set()

    @property
    def paused(self) -> bool:
        """Whether requests stay in the queue."""
        return self._held

    def close(self) -> None:
        """Accept no requests until :meth:`resume`; new ones wait in :meth:`opened`."""
        self._open.clear()

    async def freeze(self) -> None:
        """Start and step no request until :meth:`resume`, once the step that is being computed has ended."""
        self._held = self._frozen = True
        async with self._stepping:
            pass

    async def drain(self, *, abort: bool) -> None:
        """Start no request until :meth:`resume`, and wait until none runs; ``abort``: abort all of them first."""
        self._held, self._frozen = True, False
        if abort:
            self.abort_all()
        self._wake.set()
        await self._drained.wait()

    def retract(self) -> None:
        """Retract all running requests to the front of the queue."""
        for request in self._running.values():
            request.sequence.retract()
            request.reply.retractions += 1
        self._waiting = {**self._running, **self._waiting}
        self._running = {}
        self._note_drained()

    def resume(self) -> None:
        """Undo :meth:`close`, :meth:`freeze` and :meth:`drain`."""
        self._held = self._frozen = False
        self._open.set()
        for request in self._waiting.values():
            request.parked = False
        self._admit()
        self._wake.set()

    async def opened(self) -> None:
        """Wait until requests are accepted."""
        await self._open.wait()

    async def write_weights(self, write: Callable[[], None], version: str | None, *, abort: bool = False) -> None:
        """Replace weights between two steps; paused at once, otherwise as soon as no request is left.

        Args:
            write: does it, in the thread of the model; what it raises is raised here.
            version: the weight version from now on; None: the same as before.
            abort: abort all requests first.
        """
        if abort:
            self.abort_all()
        closed = not self._held
        try:
            if closed:
                self.close()
                await self._idle.wait()
            async with self._stepping:
                if self._executor is None:
                    write()
                else:
                    await asyncio.get_running_loop().run_in_executor(self._executor, write)
                if version is not None:
                    self.weight_version = version
        finally:
            if closed and not self._held:
                self._open.set()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Run the stepping task while this context is open: the lifespan of an ASGI application."""
        task = asyncio.create_task(self.run())
        task.add_done_callback(self._stopped)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if self._executor is not None:
                self._executor.shutdown()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        # Without the task no request would finish: no client may wait for that.
        self.failure = None if task.cancelled() else task.exception()
        for request in self.live:
            request.fail("the engine was stopped" if self.failure is None else f"the engine died: {self.failure!r}")

    async def run(self) -> None:
        """Step the batch at the configured rate until the task is cancelled."""
        clock = asyncio.get_running_loop().time
        rate = self.config.token_rate
        period = self.config.tokens_per_step / rate if rate else 0.0
        due = clock()  # time of the next decoding step
        while True:
            now = clock()
            decoding = any(not request.prefilling for request in self._running.values())
            tick = decoding and now >= due
            async with self._stepping:
                stepped = await self._step(now, tick=tick)
            if tick:
                due = max(due + period, now)
            elif stepped and not decoding:
                due = now + period
            await self._wait(self._next_step(due))

    async def _step(self, now: float, *, tick: bool) -> bool:
        """Step decoding requests if ``tick``, prefilled ones and aborted ones; return whether any was stepped."""
        if self._frozen:
            return False
        ready = [r for r in self._running.values() if r.aborting or (r.ready_at <= now if r.prefilling else tick)]
        if ready and self._executor is not None:
            sequences = [request.sequence for request in ready]
            await asyncio.get_running_loop().run_in_executor(self._executor, self.model.forward, sequences)
        for request in ready:
            if self._running.get(request.rid) is not request:  # it left during the computation
                continue
            request.prefilling = False
            self.tokens += request.step(self.weight_version)
            self._run_milestones(request)
            if request.done:
                self._forget(request)
        self._admit()
        return bool(ready)

    def _next_step(self, due: float) -> float | None:
        if self._frozen or not self._running:
            return None
        return min(request.ready_at if request.prefilling else due for request in self._running.values())

    async def _wait(self, deadline: float | None) -> None:
        """Wait until the deadline or until woken, for at least one iteration of the event loop."""
        loop = asyncio.get_running_loop()
        if deadline is not None and deadline <= loop.time():
            await asyncio.sleep(0)
            return
        timer = None if deadline is None else loop.call_at(deadline, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            self._wake.clear()
            if timer is not None:
                timer.cancel()

    @property
    def _has_room(self) -> bool:
        return len(self._running) < self.config.max_running_requests and not self._held

    def _admit(self) -> None:
        while self._has_room:
            request = next((request for request in self._waiting.values() if not request.parked), None)
            if request is None:
                return
            del self._waiting[request.rid]
            self._running[request.rid] = request
            self._drained.clear()
            request.prefilling = True
            request.ready_at = asyncio.get_running_loop().time() + self.config.prefill_delay
