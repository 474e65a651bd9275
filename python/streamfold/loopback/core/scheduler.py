"""The engine's inside: which requests run, which wait, and one task that steps them all."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING

from streamfold.loopback.core.request_params import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import Milestone, Request

__all__ = ["Scheduler"]

# How long a request that is to be aborted in the queue is there: enough to tell the client what it had.
RETRACTED_SECONDS = 0.01


class Scheduler:
    """Runs requests in batches, one token each per step, as many at once as the batch holds.

    All methods belong to one event loop. :meth:`run` is the task that steps; without it nothing moves.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.weight_version = config.weight_version
        self.requests = 0  # ever accepted
        self.tokens = 0  # ever generated
        self.aborts: deque[str] = deque(maxlen=config.keep_requests)  # ids as they were sent; "*" for all
        self.leavers: deque[str] = deque(maxlen=config.keep_requests)  # ids, as they are told, whose client left
        self.failure: BaseException | None = None  # what ended the task
        self._running: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._held = False  # nobody leaves the queue: paused
        self._frozen = False  # no steps either
        self._open = asyncio.Event()  # new requests come in
        self._open.set()
        self._drained = asyncio.Event()  # nothing runs
        self._drained.set()
        self._wake = asyncio.Event()
        self._abort_all_at = -math.inf

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
        return sum(len(r.ask.prompt) + len(r.reply.token_ids) for r in self._running.values())

    @property
    def full(self) -> bool:
        """Whether there is no room for another request, not even in the queue."""
        most = self.config.max_queued_requests
        return most is not None and self.waiting >= most and not self._has_room

    @property
    def live(self) -> list[Request]:
        """All requests that have not ended, those in the queue first."""
        return [*self._waiting.values(), *self._running.values()]

    def is_live(self, rid: str) -> bool:
        """Whether there is a request of this id."""
        return rid in self._running or rid in self._waiting

    def submit(self, requests: Sequence[Request], milestones: Sequence[Milestone] = ()) -> None:
        """Take requests in; ``milestones`` are what is to happen to each of them on its way.

        Raises InvalidRequest if an id is not theirs alone, and then takes in none of them.
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

    def _enqueue(self, request: Request) -> None:
        self.requests += 1
        if not request.inspect():
            return
        if self.full:
            request.turn_away()
        else:
            self._waiting[request.rid] = request
            self._reach(request)
            self._admit()
            self._wake.set()

    @staticmethod
    def _reach(request: Request) -> None:
        """Do what was to be done when the request has as many tokens as it has now."""
        while request.milestones and not request.done and request.milestones[0][0] <= len(request.reply.token_ids):
            _, act = request.milestones.pop(0)
            act(request)

    def abort(self, asked: str, requests: Iterable[Request], *, at_once: bool = False) -> None:
        """Abort some requests; ``asked`` is the id that came, as it is remembered."""
        self.aborts.append(asked)
        for request in requests:
            self.abort_request(request, at_once=at_once)

    def abort_all(self, *, at_once: bool = False) -> None:
        """Abort every request that was taken in."""
        self._abort_all_at = asyncio.get_running_loop().time()
        self.abort("*", self.live, at_once=at_once)

    @property
    def since_abort_all(self) -> float:
        """Seconds since all requests were aborted."""
        return asyncio.get_running_loop().time() - self._abort_all_at

    def abort_request(self, request: Request, *, at_once: bool = False) -> None:
        """Abort one request. If it runs and need not end ``at_once``, one more token comes."""
        if request.done:
            return
        if at_once or self._waiting.get(request.rid) is request:
            self._forget(request)
            request.abort_now()
        else:
            # It takes effect with a step, which samples one more token.
            request.aborting = True
            self._wake.set()

    def retract_and_abort(self, request: Request) -> None:
        """Send a running request back to the queue, and abort it there a little later."""
        if self._running.pop(request.rid, None) is not None:
            self._waiting[request.rid] = request
            self._note_drained()
        request.reply.retractions += 1
        request.parked = True
        asyncio.get_running_loop().call_later(RETRACTED_SECONDS, self.abort_request, request)

    def turn_away(self, request: Request) -> None:
        """Refuse a request as if the queue were full."""
        self._forget(request)
        request.turn_away()

    def park(self, request: Request, seconds: float | None) -> None:
        """Leave a request in the queue, for ever if None, or until it is aborted or all requests go on."""
        request.parked = True
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._unpark, request)

    def _unpark(self, request: Request) -> None:
        request.parked = False
        self._admit()
        self._wake.set()

    def die(self) -> None:
        """Lose all requests and all state, as a process does that is killed and started again."""
        for request in self.live:
            self._forget(request)
        self.weight_version = self.config.weight_version
        self.resume()

    def leave(self, request: Request) -> None:
        """Take note that the client of a request has left."""
        self.leavers.append(request.reply.rid)
        delay = self.config.leave_delay
        if delay == 0:
            self._forget(request)
        elif delay is not None:
            asyncio.get_running_loop().call_later(delay, self._forget, request)

    def _forget(self, request: Request) -> None:
        for place in (self._running, self._waiting):
            # The id may belong to a later request by now.
            if place.get(request.rid) is request:
                del place[request.rid]
        self._note_drained()
        self._wake.set()

    def _note_drained(self) -> None:
        if self._running:
            self._drained.clear()
        else:
            self._drained.set()

    @property
    def paused(self) -> bool:
        """Whether requests are held back."""
        return self._held

    def shut(self) -> None:
        """Take in no requests until :meth:`resume`: who asks waits in :meth:`opened`."""
        self._open.clear()

    def freeze(self) -> None:
        """Let no request start and no running one take a step until :meth:`resume`."""
        self._held = self._frozen = True

    async def drain(self, *, abort: bool) -> None:
        """Let no request start until :meth:`resume`, and wait until none runs; ``abort`` has all of them end now."""
        self._held, self._frozen = True, False
        if abort:
            self.abort_all()
        self._wake.set()
        await self._drained.wait()

    def retract(self) -> None:
        """Send all running requests back to the queue, to its front: they go on first."""
        for request in self._running.values():
            request.reply.retractions += 1
        self._waiting = {**self._running, **self._waiting}
        self._running = {}
        self._note_drained()

    def resume(self) -> None:
        """Undo :meth:`shut`, :meth:`freeze` and :meth:`drain`."""
        self._held = self._frozen = False
        self._open.set()
        for request in self._waiting.values():
            request.parked = False
        self._admit()
        self._wake.set()

    async def opened(self) -> None:
        """Wait until requests are taken in."""
        await self._open.wait()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Step for as long as this context is open: the lifespan of an ASGI application."""
        task = asyncio.create_task(self.run())
        task.add_done_callback(self._stopped)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _stopped(self, task: asyncio.Task[None]) -> None:
        # Without the task nothing would ever end: nobody shall wait for that.
        self.failure = None if task.cancelled() else task.exception()
        for request in self.live:
            request.fail("the engine was stopped" if self.failure is None else f"the engine died: {self.failure!r}")

    async def run(self) -> None:
        """Step the batch for ever, at the configured rate."""
        clock = asyncio.get_running_loop().time
        rate = self.config.token_rate
        period = self.config.tokens_per_step / rate if rate else 0.0
        due = clock()  # when the batch decodes next
        while True:
            now = clock()
            decoding = any(not request.prefilling for request in self._running.values())
            tick = decoding and now >= due
            stepped = self._step(now, tick=tick)
            if tick:
                due = max(due + period, now)
            elif stepped and not decoding:
                due = now + period
            await self._wait(self._next_step(due))

    def _step(self, now: float, *, tick: bool) -> bool:
        """Step what decodes if it is time, what ends its prefill, and what is aborted; whether there was any."""
        if self._frozen:
            return False
        ready = [r for r in self._running.values() if r.aborting or (r.ready_at <= now if r.prefilling else tick)]
        for request in ready:
            request.prefilling = False
            self.tokens += request.step(self.weight_version)
            self._reach(request)
            if request.done:
                self._forget(request)
        self._admit()
        return bool(ready)

    def _next_step(self, due: float) -> float | None:
        if self._frozen or not self._running:
            return None
        return min(request.ready_at if request.prefilling else due for request in self._running.values())

    async def _wait(self, deadline: float | None) -> None:
        """Wait for a moment, or for news before it; one turn of the loop at least."""
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
