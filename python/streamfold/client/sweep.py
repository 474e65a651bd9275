"""Sweep: aborts every request of one worker until it is idle."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.control_requests import EndpointMissing, Unreachable
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.control_requests import ControlRequests
    from streamfold.client.engine_loads import EngineLoads
    from streamfold.engines.base import EngineSpec, Pausing

__all__ = ["REPEAT_SECONDS", "Sweep"]

REPEAT_SECONDS = 0.075  # an engine ignores an abort that arrives before the request
_SWEEP_SECONDS = 0.25  # between two rounds
_MAX_FAILURES = 2  # in a row, of a worker that answers
_BUSY_ROUNDS = 3  # in a row, after which the abort is taken to miss some requests; a gauge is a round late
_RESUME_TRIES = 5

_logger = logging.getLogger("streamfold")


class Sweep:
    """Repeats the abort of all requests until the worker was idle twice: a request in transit may not be counted.

    A worker that cannot be reached is tried until ``stop`` is set. Where the abort leaves requests running, an engine
    that can be paused is paused and resumed, which ends them; never if it is paused already, or does not tell.

    Args:
        worker: its base URL.
        engine: what kind it is.
        requests: sends the requests.
        loads: asks for the worker's load.
        closed: whether the client is being closed, so that no round begins any more.

    Attributes:
        stop: nothing but a resume is sent once this is set.
        is_idle: whether the worker was seen idle.
        gave_up: whether it ended before ``stop``, for a failure that is not expected to pass.
        reason: why the worker was not seen idle so far.
    """

    def __init__(
        self,
        worker: str,
        *,
        engine: EngineSpec,
        requests: ControlRequests,
        loads: EngineLoads,
        closed: Callable[[], bool],
    ) -> None:
        self.worker: str = worker
        self.stop: AbortSignal = AbortSignal()
        self.is_idle: bool = False
        self.gave_up: bool = False
        self.reason: str = "no reply yet"
        self._engine = engine
        self._requests = requests
        self._loads = loads
        self._closed = closed
        self._failures = self._idle = self._busy = 0  # rounds in a row
        self._may_ask_state = True
        self._has_said_pause = False

    async def run(self) -> None:
        """Sweep until the worker is idle, ``stop`` is set, or the client is being closed."""
        await self._loads.watch_count(self._engine, self.worker, self.stop)
        while not (self.stop.is_set() or self._closed()):
            answers = False
            try:
                await self._abort_all()
                answers = True
                await self._look()
            except EngineError as error:
                self._fail(error, answers=answers)
            if self.is_idle or self.gave_up:
                return
            await self.stop.wait(REPEAT_SECONDS if self._idle else _SWEEP_SECONDS)

    async def _look(self) -> None:
        """See whether the worker is idle after an abort, and pause it if it never gets so."""
        load = await self._loads.of(self._engine, self.worker, self.stop)
        self._idle, self._busy = (0, self._busy + 1) if load else (self._idle + 1, 0)
        self.reason = f"{load} requests run or wait there" if load else "it was seen idle once only"
        self.is_idle = self._idle > 1
        pausing = self._engine.pausing
        if self._busy >= _BUSY_ROUNDS and pausing is not None and await self._pause(pausing):
            self._busy = 0
        self._failures = 0

    def _fail(self, error: EngineError, *, answers: bool) -> None:
        """Note a failure; ``answers``: the abort was answered before it."""
        if self.stop.is_set():
            return
        answers = not isinstance(error, Unreachable) and (answers or error.status is not None)
        self._failures, self._idle, self._busy = self._failures + 1 if answers else 0, 0, 0
        self.reason = str(error)
        self.gave_up = not error.retryable or self._failures >= _MAX_FAILURES

    async def _abort_all(self) -> None:
        """Send the first of the engine's POSTs whose path the worker has."""
        *others, last = self._engine.aborts_all()
        for path, body in others:
            try:
                await self._requests.send("POST", self.worker, path, body, self.stop)
            except EndpointMissing:  # there are two at most
                continue
            return
        await self._requests.send("POST", self.worker, *last, self.stop)

    # What an abort of all misses.

    async def _pause(self, pausing: Pausing) -> bool:
        """Pause the engine, which ends all its requests, and resume it. Whether that was done."""
        if not await self._may_pause(pausing):
            return False
        if not self._has_said_pause:
            self._has_said_pause = True
            _logger.warning(
                "%s still runs requests after an abort of all; it is paused and resumed, and new requests wait in "
                "between",
                self.worker,
            )
        try:
            await self._requests.send("POST", self.worker, pausing.pause, stop=self.stop)
        finally:
            await self._resume(pausing)  # the pause may have taken effect without a reply
        return True

    async def _may_pause(self, pausing: Pausing) -> bool:
        """Whether nobody has paused the engine: a pause may belong to an update of the weights."""
        if not self._may_ask_state:
            self.reason += ", and it does not tell whether somebody has paused it"
            return False
        try:
            is_paused = pausing.read_state(await self._requests.send("GET", self.worker, pausing.state, stop=self.stop))
        except EngineError as error:
            self._may_ask_state = not isinstance(error, EndpointMissing)
            self.reason += f", and it does not tell whether somebody has paused it: {error}"
            return False
        if is_paused:
            self.reason += ", and somebody has paused it, perhaps to update its weights"
        return not is_paused and not self.stop.is_set()

    async def _resume(self, pausing: Pausing) -> None:
        """Resume the engine, also when this task is cancelled meanwhile: a paused engine serves nobody."""
        cancelled: asyncio.CancelledError | None = None
        reason = ""
        for _ in range(_RESUME_TRIES):
            try:
                await self._requests.send("POST", self.worker, pausing.resume)
            except EngineError as error:  # noqa: PERF203  # it seldom takes a second one
                reason = str(error)
                await asyncio.sleep(REPEAT_SECONDS)
            except asyncio.CancelledError as error:
                cancelled, reason = error, "it was cancelled"
            else:
                break
        else:
            reason = f"it was paused and could not be resumed: POST {pausing.resume} to it; {reason}"
            _logger.error("%s: %s", self.worker, reason)
            if cancelled is None:
                raise EngineError(reason)
        if cancelled is not None:
            raise cancelled
