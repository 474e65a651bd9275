"""``Worker``: the actor that generates groups, in a process of its own with a client and an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ray import cloudpickle
from ray.exceptions import RayTaskError, TaskCancelledError

from streamfold.errors import StreamfoldError
from streamfold.rollout import serialization
from streamfold.rollout.buffer import decode_group, encode_group
from streamfold.rollout.groups import restart_samples, samples_of, unfinished_samples
from streamfold.rollout.metrics import RolloutStats
from streamfold.rollout.outcome import GroupOutcome
from streamfold.rollout.rollout import Rollout, parts_of
from streamfold.samples.running import running_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import numpy as np
    import numpy.typing as npt
    from ray.exceptions import RayError

    from streamfold.client.client import Client
    from streamfold.rollout.callbacks import Generate, RewardFunction
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import AnyGroup, Group
    from streamfold.rollout.scheduler import Scheduler

    Packed = npt.NDArray[np.uint8]

__all__ = ["Failure", "Report", "Setup", "Worker", "means_death", "pack_group", "unpack_group"]

_REPORT_SECONDS: Final = 0.5  # between two reports of a group, at least: what a worker that dies may take along
# A report copies all tokens of the samples that have changed, so it takes longer as these grow. All groups report so
# rarely that together they take a twentieth of the worker's time at most.
_REST_SHARE: Final = 19.0


def pack_group(group: AnyGroup) -> Packed:
    """A group as one array ``[bytes]``, in the form of a buffer's file: in Ray's object store there are no lists."""
    return serialization.pack(encode_group(group))


def unpack_group(packed: Packed) -> Group:
    """The group of which :func:`pack_group` made an array."""
    return decode_group(serialization.unpack(packed))


def means_death(error: RayError) -> bool:
    """Whether a call of an actor has failed because its process or its node is lost, not because the call raised.

    Ray has many names for it, as for a process that it has killed because the node was short of memory.
    """
    return not isinstance(error, (RayTaskError, TaskCancelledError))


@dataclass(frozen=True)
class Setup:
    """What each worker makes its rollout of."""

    client: Callable[[], Client]
    config: RolloutConfig
    reward: RewardFunction | None
    generate: Callable[[Client], Generate] | None

    def rollout(self, **options: Any) -> Rollout:  # noqa: ANN401  # of Rollout
        """The rollout, in this process."""
        client = self.client()
        generate = None if self.generate is None else self.generate(client)
        return Rollout(client, self.config, reward=self.reward, generate=generate, **options)


@dataclass(frozen=True)
class Failure:
    """What a generate or reward function raised in another process.

    Attributes:
        position: of its sample in the group.
        error: the pickled exception; None: it cannot be pickled.
        text: its traceback.
    """

    position: int
    error: bytes | None
    text: str

    @classmethod
    def of(cls, position: int, error: BaseException) -> Failure:
        """Pack an exception."""
        try:
            data = cloudpickle.dumps(error)
            cloudpickle.loads(data)
        except Exception:  # noqa: BLE001  # whatever a user's class raises
            data = None
        return cls(position, data, "".join(traceback.format_exception(type(error), error, error.__traceback__)))

    def exception(self) -> BaseException:
        """The exception, caused by one whose text is the traceback in the worker."""
        last_line = self.text.rstrip().rpartition("\n")[2]
        error: BaseException = StreamfoldError(last_line) if self.error is None else cloudpickle.loads(self.error)
        error.__cause__ = StreamfoldError(f"in a worker:\n{self.text}")
        return error


@dataclass(frozen=True)
class Report:
    """The state of a group in flight, or its outcome.

    Attributes:
        positions: of the elements that have changed.
        elements: these elements, each packed as a group of its own.
        failures: of its samples.
        is_cancelled: whether something other than an abort cancelled it.
        stats: counts since the last report of the worker.
    """

    positions: list[int]
    elements: list[Packed]
    failures: list[Failure] = field(default_factory=list)
    is_cancelled: bool = False
    stats: RolloutStats = field(default_factory=RolloutStats)


class Worker:
    """Generates the groups that it is given, each in a call of :meth:`run`.

    Args:
        setup: of its rollout.
        num_workers: how many workers share ``config.concurrency``.
    """

    def __init__(self, setup: Setup, num_workers: int) -> None:
        share = -(-setup.config.concurrency // num_workers)
        self._setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, concurrency=share))
        self._opening: asyncio.Task[None] | None = None
        self._scheduler: Scheduler | None = None
        self._epoch = -1  # of the scheduler
        self._aborted = -1  # the last epoch that has been aborted
        self._version = 0
        self._retried = 0  # of the client, as far as they were reported
        self._stats = RolloutStats()
        self._ended: dict[int, asyncio.Future[GroupOutcome]] = {}  # by the id of the group's list
        self._collector: asyncio.Task[None] | None = None
        self._costs: dict[int, float] = {}  # CPU seconds of each group's latest report, by the id of its list

    async def open(self) -> int:
        """Open the client, if it is not open; returns the process id."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.get_running_loop().create_task(self._open())
        await asyncio.shield(self._opening)
        return os.getpid()

    async def _open(self) -> None:
        self._parts = parts_of(self._setup.rollout())
        await self._parts.client.__aenter__()
        self._engines = await self._parts.count_engines()
        self._rewards = self._parts.rewards()

    async def run(self, epoch: int, packed: Packed, started: int, version: int | None) -> AsyncIterator[Report]:
        """Generate a group: yields what has changed in it now and then, and at its end its outcome.

        What the calls of :func:`~streamfold.complete` have received so far is part of it, as an abort would keep it.

        Args:
            epoch: of the scheduler that sends it; one that has been aborted gets nothing.
            packed: the group.
            started: the rollout or weight version in which the group was started.
            version: the weight version of now; None: it is ``started``.
        """
        await self.open()
        if epoch <= self._aborted:
            return
        group = unpack_group(packed)
        if version is not None:
            self._version = max(self._version, version)
        scheduler, ended = self._start(epoch, group, started, changes=version is not None)
        streams = self._setup.config.partial_rollout  # otherwise a sample whose worker dies starts again
        states = [_state(element, streams=streams) for element in group]
        try:
            while not (await asyncio.wait([ended], timeout=self._rest()))[0]:
                began_at = time.thread_time()
                before, states = states, [_state(element, streams=streams) for element in group]
                changed = [at for at, state in enumerate(states) if state != before[at]]
                if changed:
                    report = Report(changed, [pack_group([_snapshot(scheduler, group[at])]) for at in changed])
                    self._costs[id(group)] = time.thread_time() - began_at
                    yield report
        finally:
            self._costs.pop(id(group), None)
        yield self._report(ended.result())

    def _rest(self) -> float:
        """Seconds between two reports of a group."""
        return max(_REPORT_SECONDS, _REST_SHARE * sum(self._costs.values()))

    async def abort(self, epoch: int, *, now: bool) -> None:
        """End the groups of an epoch, as :meth:`GroupScheduler.abort <GroupScheduler>`: their runs end with that."""
        self._aborted = max(self._aborted, epoch)
        scheduler, collector = self._scheduler, self._collector
        if scheduler is None or collector is None or self._epoch > epoch:
            return
        self._scheduler = self._collector = None
        config = self._setup.config
        keeps_unfinished = config.partial_rollout or config.keep_finished
        await scheduler.abort(now=now, keeps_rewards=lambda group: keeps_unfinished or not unfinished_samples(group))
        collector.cancel()
        while (outcome := scheduler.pop_outcome()) is not None:
            self._ended.pop(id(outcome.group)).set_result(outcome)
        for group, replacement in scheduler.abandon_running():
            self._stats.lost += restart_samples(samples_of(replacement))
            self._ended.pop(id(group)).set_result(GroupOutcome(replacement, epoch))

    async def set_version(self, version: int) -> None:
        """Note the weight version with the tokens of calls that are sent from now on."""
        self._version = version

    async def version(self) -> int:
        """The weight version that was set."""
        return self._version

    async def close(self) -> None:
        """Abort everything, and close the client."""
        await self.abort(self._epoch, now=True)
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if self._opening.exception() is None:
                await self._parts.client.aclose()

    def _start(
        self, epoch: int, group: Group, started: int, *, changes: bool
    ) -> tuple[Scheduler, asyncio.Future[GroupOutcome]]:
        if self._scheduler is None:
            version = (lambda: self._version) if changes else None
            self._scheduler = self._parts.scheduler(self._stats, self._rewards, self._engines, version)
            self._epoch = epoch
        loop = asyncio.get_running_loop()
        ended = self._ended[id(group)] = loop.create_future()
        self._scheduler.start(group, started)
        if self._collector is None or self._collector.done():
            self._collector = loop.create_task(self._collect(self._scheduler))
        return self._scheduler, ended

    async def _collect(self, scheduler: Scheduler) -> None:
        """Pass on the outcomes of groups, while any is in flight."""
        while (outcome := await scheduler.next_outcome()) is not None:
            self._ended.pop(id(outcome.group)).set_result(outcome)

    def _report(self, outcome: GroupOutcome) -> Report:
        """All of a group that has ended."""
        places = {id(sample): at for at, sample in enumerate(samples_of(outcome.elements))}
        failures = [Failure.of(places.get(id(sample), 0), error) for sample, error in outcome.failures]
        positions = list(range(len(outcome.group)))
        elements = [pack_group([element]) for element in outcome.group]
        return Report(positions, elements, failures, outcome.is_cancelled, self._take_stats())

    def _take_stats(self) -> RolloutStats:
        retried = self._parts.client.retried
        taken = dataclasses.replace(self._stats, abort_seconds=0.0, retries=retried - self._retried)
        self._retried = retried
        self._stats.clear()
        return taken


def _state(element: Any, *, streams: bool) -> list[tuple[object, ...]]:  # noqa: ANN401  # a sample, or a list of them
    """What tells whether an element of a group has changed; ``streams``: what calls have received so far counts."""
    samples = samples_of([element])
    return [(id(s), s.status, s.response_length, s.reward is None, streams and running_tokens(s)) for s in samples]


def _snapshot(scheduler: Scheduler, element: Any) -> Any:  # noqa: ANN401  # a sample, or a list of them
    """An element of a group as an abort at this moment would leave it."""
    if isinstance(element, list):
        return [scheduler.snapshot(sample) for sample in element]
    return scheduler.snapshot(element)
