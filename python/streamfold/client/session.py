"""Session: all that a client binds to one event loop, from its first use to its ``aclose``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfold.client._internal import Totals
from streamfold.client.attempt import Attempt
from streamfold.client.control import EngineControl
from streamfold.client.control_requests import ControlRequests
from streamfold.client.deadlines import Deadlines
from streamfold.client.limits import Slots
from streamfold.client.request import new_rid
from streamfold.client.runner import CallRunner

if TYPE_CHECKING:
    from streamfold.client.abort_signal import AbortSignal
    from streamfold.client.drivers.base import Driver, Fields
    from streamfold.client.limits import Retries
    from streamfold.client.observer import Observation
    from streamfold.client.request import CallRequest
    from streamfold.client.runner import RetryLog
    from streamfold.client.side_data import MissingSideData
    from streamfold.engines.base import EngineSpec

__all__ = ["Running", "Session"]

_STARTS_PER_PASS = 64  # of the event loop: a start takes CPU


@dataclass(frozen=True)
class Running:
    """A snapshot of one running call, from :attr:`Client.running`.

    Attributes:
        rid: request id of its current try.
        engine: base URL that the request was sent to.
        age: seconds since the start, waits for a slot and retry pauses included.
        token_count: tokens received so far.
        tokens_per_second: tokens per second since the current try's request was sent.
        ttft: time to first token: seconds from sending the current try's request. None before the first token.
        last_event: seconds since the last event that brought a token. None before the first.
        tries: tries so far, the current one included; 0 while the call waits for its first slot.
    """

    rid: str
    engine: str
    age: float
    token_count: int
    tokens_per_second: float
    ttft: float | None
    last_event: float | None
    tries: int


class Session:
    """The driver, the calls, and what they share. Bound to the running event loop.

    Args:
        base_url: of the engine or router.
        engine: how it is spoken to.
        driver: carries all requests.
        fields: the headers of control requests.
        calls: how many calls run at once.

    Attributes:
        calls: those that have not ended, by the request id of the current try.
        control: sends abort requests, and asks for load and workers.
        closing: the task that closes the session, once there is one.
        loop: the event loop.
        slots: limit how many calls run at once.
    """

    def __init__(self, base_url: str, engine: EngineSpec, driver: Driver, fields: Fields, calls: int) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.calls: dict[str, CallRunner] = {}
        self.closing: asyncio.Task[None] | None = None
        self._driver = driver
        self._deadlines = Deadlines()
        requests = ControlRequests(driver, fields, self._deadlines)
        self.control: EngineControl = EngineControl(base_url, engine, requests, self._deadlines)
        self.slots: Slots = Slots(calls, per_pass=_STARTS_PER_PASS)
        self._runners: set[CallRunner] = set()  # those that have not ended, or still clean up
        self._keeper: asyncio.Task[None] | None = None
        self._none_left: asyncio.Future[None] | None = None

    def new_rid(self, rid: str | None) -> str:
        """A caller's request id, checked; None: a new one."""
        if rid is None:
            return new_rid()
        if not rid:
            raise ValueError("rid must not be empty: an engine takes an abort of the empty id for an abort of all")
        if rid in self.calls:
            raise ValueError(f"rid {rid!r} is in use by a running call: give each call its own, or none")
        return rid

    def runner(
        self,
        request: CallRequest,
        host_abort: AbortSignal | None,
        *,
        retries: Retries,
        retry_log: RetryLog,
        missing: MissingSideData,
        observation: Observation | None,
    ) -> CallRunner:
        """What runs the call of ``request``."""
        return CallRunner(
            request,
            self._new_attempt,
            retries=retries,
            slots=self.slots,
            registry=self.calls,
            host_abort=host_abort,
            retry_log=retry_log,
            missing=missing,
            observation=observation,
            on_done=self._on_done,
        )

    def _new_attempt(self, rid: str, request: CallRequest) -> Attempt:
        return Attempt(rid, request, driver=self._driver, control=self.control, deadlines=self._deadlines)

    def start(self, runner: CallRunner) -> None:
        """Start a call."""
        self._runners.add(runner)
        if self._keeper is None:
            self._start_keeper()
        runner.start()

    def running(self, engine: str) -> list[Running]:
        """A snapshot of each call that has not ended, oldest first."""
        return [
            Running(
                rid=call.rid,
                engine=engine,
                age=call.age,
                token_count=call.token_count,
                tokens_per_second=call.tokens_per_second,
                ttft=call.ttft,
                last_event=call.last_event,
                tries=call.tries,
            )
            for call in sorted(self.calls.values(), key=lambda call: call.started_at)  # a retry moves a call to the end
        ]

    def totals(self) -> Totals:
        """All calls that have not ended, summed up."""
        calls = self.calls.values()
        slowest = min(calls, key=lambda call: call.started_at, default=None)
        if slowest is None:
            return Totals()
        tokens = sum([call.token_count for call in calls])
        return Totals(len(calls), tokens, slowest.age, slowest.token_count)

    async def aclose(self) -> None:
        """Abort all calls without draining, and close every connection."""
        for call in list(self.calls.values()):
            call.abort_soon(drain=0.0)
        try:
            while self._keeper is not None:
                await asyncio.wait({self._keeper})
            await self.control.aclose()
            await self._driver.aclose()
        finally:
            self._deadlines.close()

    # The keeper: one task for all calls, which have none. Event loops are torn down by cancelling their tasks.

    def _start_keeper(self) -> None:
        self._keeper = self.loop.create_task(self._keep(), name="streamfold calls")
        self._keeper.add_done_callback(self._after_keeper)

    async def _keep(self) -> None:
        """Wait until no call is left. If this is cancelled, end all calls, and still wait: that takes bounded time."""
        cancelled = None
        while self._runners:
            self._none_left = self.loop.create_future()
            try:
                await self._none_left
            except asyncio.CancelledError as error:
                cancelled = error
                self._interrupt(error)
        self._keeper = None
        if cancelled is not None:
            raise cancelled

    def _after_keeper(self, keeper: asyncio.Task[None]) -> None:
        if self._keeper is not keeper:
            return
        self._keeper = None  # it was cancelled before its first step
        self._interrupt(asyncio.CancelledError())
        if self._runners:
            self._start_keeper()

    def _interrupt(self, error: BaseException) -> None:
        for runner in list(self._runners):
            runner.interrupt(error)

    def _on_done(self, runner: CallRunner) -> None:
        self._runners.discard(runner)
        if not self._runners and self._none_left is not None and not self._none_left.done():
            self._none_left.set_result(None)

    def abandon(self) -> None:
        """After the event loop was closed: close what it left open."""
        self._driver.abandon()
