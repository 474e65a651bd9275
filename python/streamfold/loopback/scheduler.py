"""The engine's inside: which requests run, which wait, and one task that steps them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from streamfold.loopback import wire
from streamfold.loopback.params import InvalidRequest, read_asks
from streamfold.loopback.request import Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from streamfold.loopback.config import Config

__all__ = ["PAUSE_MODES", "Scheduler"]

PAUSE_MODES = ("abort", "retract", "in_place")


class Scheduler:
    """Runs requests in batches, one token each per step, as many at once as the batch holds.

    All methods belong to one event loop. :meth:`run` is the task that steps; without it nothing moves.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.weight_version = config.weight_version
        self.requests = 0  # ever accepted
        self.tokens = 0  # ever generated
        self.aborts: deque[str] = deque(maxlen=config.keep_requests)  # rids as they were sent; "*" for all
        self.leavers: deque[str] = deque(maxlen=config.keep_requests)  # rids whose client left
        self.failure: BaseException | None = None  # what ended the task
        self._running: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._frozen = False  # no steps: paused by retract or in_place
        self._open = asyncio.Event()  # new requests come in; not while paused
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._wake = asyncio.Event()

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

    def submit(self, body: Mapping[str, Any], notify: Callable[[], None]) -> list[Request]:
        """Take in what a checked body asks for. Raises InvalidRequest, and then takes in nothing of it."""
        asks = read_asks(body, self.config)
        seen: set[str] = set()
        for ask in asks:
            if ask.rid in seen or ask.rid in self._running or ask.rid in self._waiting:
                msg = f"Duplicate request ID detected: {ask.rid}"
                raise InvalidRequest(msg)
            seen.add(ask.rid)
        requests = [Request(ask, self.config, notify=notify) for ask in asks]
        for request in requests:
            self._enqueue(request)
        return requests

    def _enqueue(self, request: Request) -> None:
        ask, most = request.ask, self.config.max_queued_requests
        prompt_len = len(ask.prompt)
        self.requests += 1
        if ask.logprobs and ask.logprob_start > prompt_len:
            request.refuse(
                wire.refused(f"logprob_start_len ({ask.logprob_start}) is beyond the prompt ({prompt_len}).")
            )
        elif ask.experts and not 0 <= ask.experts_start <= prompt_len:
            request.refuse(wire.refused(f"routed_experts_start_len ({ask.experts_start}) is not in [0, {prompt_len}]."))
        elif most is not None and self.waiting >= most and not self._has_room:
            request.refuse(wire.queue_full(), in_queue=True)
        else:
            self._waiting[request.rid] = request
            self._idle.clear()
            self._admit()
            self._wake.set()

    def abort(self, rid: str) -> None:
        """Abort the request of this id, and with it every other one whose id begins so, as the engine does.

        An id that is not live, or is empty, means nothing.
        """
        self.aborts.append(rid)
        if rid in self._running or rid in self._waiting:
            self._abort(prefix=rid)

    def abort_all(self) -> None:
        """Abort every request that was taken in."""
        self.aborts.append("*")
        self._abort(prefix="")

    def _abort(self, prefix: str) -> None:
        for request in [r for rid, r in self._waiting.items() if rid.startswith(prefix)]:
            self._forget(request)
            request.abort_in_queue()
        for rid, request in self._running.items():
            if rid.startswith(prefix):
                # It takes effect with a step, which samples one more token.
                request.aborting = True
        self._wake.set()

    def leave(self, request: Request) -> None:
        """Take note that the client of a request has left."""
        self.leavers.append(request.rid)
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
        if not self._running and not self._waiting:
            self._idle.set()
        self._wake.set()

    async def pause(self, mode: str) -> None:
        """Stop taking in requests, and stop the others in one of ``PAUSE_MODES``; "abort" waits for their end."""
        self._open.clear()
        if mode == "abort":
            self._frozen = False
            self.abort_all()
            await self._idle.wait()
            return
        self._frozen = True
        if mode == "retract":
            for request in self._running.values():
                request.reply.retractions += 1
            # To the front of the queue: they go on first.
            self._waiting = {**self._running, **self._waiting}
            self._running = {}

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._frozen = False
        self._open.set()
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
        for request in (*self._running.values(), *self._waiting.values()):
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
        return len(self._running) < self.config.max_running_requests and not self._frozen

    def _admit(self) -> None:
        while self._waiting and self._has_room:
            rid, request = next(iter(self._waiting.items()))
            del self._waiting[rid]
            self._running[rid] = request
            request.prefilling = True
            request.ready_at = asyncio.get_running_loop().time() + self.config.prefill_delay
