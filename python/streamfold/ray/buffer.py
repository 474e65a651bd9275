"""``BufferActor``: the actor that holds the buffer, and gives its groups to the workers and to the trainer.

A group that a worker generates stays here, in the state that the worker reported last, with what its open calls had
streamed. If the worker dies, another one gets the group as it is here. Only what a call reports is used, so no group
comes back twice.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from streamfold.errors import StreamfoldError
from streamfold.ray.worker import means_death, pack_group, unpack_group
from streamfold.rollout.groups import restart_samples, samples_of, unfinished_samples
from streamfold.rollout.parts import RolloutHooks
from streamfold.rollout.pool import Pool
from streamfold.rollout.scheduler import Scheduler
from streamfold.rollout.tasks import wait_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamfold.ray.worker import Packed, Report, Setup
    from streamfold.rollout.buffer import Buffer
    from streamfold.rollout.callbacks import Filter, SampleFilter
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.outcome import GroupOutcome

__all__ = ["BufferActor", "RemoteScheduler", "WorkerSet"]

_logger = logging.getLogger("streamfold")

_REVIVE_SECONDS: Final = 0.1  # between two looks for a worker that Ray starts again
_OPEN_SECONDS: Final = 60.0  # for a worker that has died while it was opened: then that is an error
_GRACE_SECONDS: Final = 15.0  # beyond the limits of an abort, which the worker keeps itself


@dataclass(eq=False)
class WorkerHandle:
    """An actor that generates groups.

    Attributes:
        actor: the handle of Ray.
        in_flight: samples that it was given and that have not ended.
        is_alive: whether it can be given groups.
    """

    actor: Any
    in_flight: int = 0
    is_alive: bool = True


@dataclass(eq=False)
class _Reported:
    """What a worker has reported of a group in flight.

    It is unpacked when it is used: that takes the time of the one actor that all workers report to, and most reports
    are followed by another one.

    Attributes:
        outcome: of the group.
        elements: the latest ones, packed, by their position.
    """

    outcome: GroupOutcome
    elements: dict[int, Packed] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Keep what a report has brought."""
        for position, packed in zip(report.positions, report.elements, strict=True):
            self.elements[position] = packed.copy()  # it would stay in the object store

    def apply(self) -> None:
        """Bring the group to the state that was reported last."""
        for position, packed in self.elements.items():
            self.outcome.group[position] = unpack_group(packed)[0]
        self.elements.clear()


class WorkerSet:
    """The workers, and which of them can be given a group. Ray starts those that die again."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._workers = [WorkerHandle(actor) for actor in actors]
        self._changed = asyncio.Event()
        self._revivals: set[asyncio.Task[None]] = set()
        self._last_error: BaseException | None = None  # of the worker that was given up last
        self._epoch = -1

    @property
    def alive(self) -> list[WorkerHandle]:
        """Those that can be given a group."""
        return [worker for worker in self._workers if worker.is_alive]

    def next_epoch(self) -> int:
        """The number of the next scheduler."""
        self._epoch += 1
        return self._epoch

    async def pick(self, scheduler: Scheduler) -> WorkerHandle | None:
        """The worker with the fewest samples in flight, when there is one.

        None once the scheduler is being aborted, or all workers have died for good.
        """
        while self._workers and not scheduler.aborted:
            if alive := self.alive:
                return min(alive, key=lambda worker: worker.in_flight)
            await self._changed.wait()
        return None

    async def answers(self, worker: WorkerHandle) -> bool:
        """Whether a worker that counts as alive is. If not, that is noted."""
        try:
            await worker.actor.version.remote()
        except RayError as error:
            if not means_death(error):
                raise
            self.lose(worker, error)
            return False
        return True

    def check(self) -> None:
        """Raise StreamfoldError if all workers have died for good."""
        if not self._workers:
            raise StreamfoldError(
                "all workers have died for good: Ray starts none of them again. All groups are with the buffer, with "
                "the tokens that were reported: save() writes them, and new RolloutWorkers can go on with that file. "
                "How often Ray starts a worker again, max_restarts of worker_options says (-1, the default: always). "
                "Why they died is in Ray's log"
            ) from self._last_error

    def lose(self, worker: WorkerHandle, error: RayError) -> None:
        """Note that a worker has died. It can be given groups again when Ray has started it again."""
        if worker.is_alive:
            worker.is_alive = False
            _logger.warning("a worker has died, other workers get its groups: %s", error)
            task = asyncio.get_running_loop().create_task(self._revive(worker))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    def wake(self) -> None:
        """Wake those that wait for a worker."""
        self._changed.set()
        self._changed.clear()  # those that were waiting have been woken

    def close(self) -> None:
        """Wait for no worker any more."""
        for task in self._revivals:
            task.cancel()

    async def _revive(self, worker: WorkerHandle) -> None:
        try:
            while not await _is_up(worker.actor):  # noqa: ASYNC110  # Ray has no event for it
                await asyncio.sleep(_REVIVE_SECONDS)
            worker.is_alive = True
        except Exception as error:
            _logger.exception("a worker that has died cannot be used any more")
            self._workers.remove(worker)
            self._last_error = error
        self.wake()


class RemoteScheduler(Scheduler):
    """Runs groups on workers.

    Args:
        config: limits and rules.
        workers: that generate.
        stats: counts, to which those of the workers are added.
        version: the weight version of now; None: that in which a group was started.
    """

    def __init__(
        self, config: RolloutConfig, workers: WorkerSet, stats: RolloutStats, version: Callable[[], int] | None
    ) -> None:
        super().__init__()
        self._config = config
        self._workers = workers
        self._stats = stats
        self._version = version
        self._epoch = workers.next_epoch()
        self._is_aborted = False
        self._is_stranded = False  # a group has ended because no worker is left
        self._reported: set[_Reported] = set()

    @property
    def aborted(self) -> bool:
        """Whether an abort has begun."""
        return self._is_aborted

    async def abort(self, *, now: bool = False, keeps_rewards: Callable[[Group], bool] | None = None) -> None:  # noqa: ARG002
        """Abort the groups on all workers, and wait for what they have generated.

        Which rewards are of use each worker decides itself, as it knows more of its groups. One that does not end
        within its limits is killed; its groups stay as it has reported them last.
        """
        started_at, self._is_aborted = self._loop.time(), True
        self._workers.wake()
        alive = self._workers.alive
        aborts = [self._loop.create_task(_quietly(each.actor.abort.remote(self._epoch, now=now))) for each in alive]
        limit = max(self._config.abort_seconds, self._config.reward_seconds) + _GRACE_SECONDS
        try:
            if self._running and (await asyncio.wait(self._running, timeout=limit))[1]:
                _logger.error("workers did not end their groups within %g s: all are started again", limit)
                for worker in alive:
                    ray.kill(worker.actor, no_restart=False)
                await asyncio.wait(self._running)
        finally:
            for task in (*aborts, *self._running):
                task.cancel()
            cancelled = await wait_all([*aborts, *self._running])
            self._stats.abort_seconds += self._loop.time() - started_at
        if cancelled is not None:
            raise cancelled

    def apply_reports(self) -> None:
        """Bring all groups in flight to the state that was reported last."""
        for reported in self._reported:
            reported.apply()

    def _check(self) -> None:
        if self._is_stranded:
            self._workers.check()

    async def _run(self, outcome: GroupOutcome) -> None:
        deaths = 0
        while (worker := await self._workers.pick(self)) is not None:
            samples = len(unfinished_samples(outcome.elements))
            worker.in_flight += samples
            try:
                # Many workers may die at once, with their node. One that was dead before tells nothing of the group.
                if deaths and not await self._workers.answers(worker):
                    continue
                if deaths == self._config.group_tries:
                    raise StreamfoldError(f"{deaths} workers have died with group {outcome.index}")
                if await self._run_on(worker, outcome):
                    return
            finally:
                worker.in_flight -= samples
            deaths += 1
            if not self._config.partial_rollout:
                self._stats.lost += restart_samples(unfinished_samples(outcome.elements))
        self._is_stranded = not self._is_aborted

    async def _run_on(self, worker: WorkerHandle, outcome: GroupOutcome) -> bool:
        """Run a group on a worker until it has ended; False if the worker has died."""
        reported = _Reported(outcome)
        self._reported.add(reported)
        try:
            version = None if self._version is None else self._version()
            run = worker.actor.run.options(num_returns="streaming")
            async for reference in run.remote(self._epoch, pack_group(outcome.group), outcome.version, version):
                report: Report = await reference
                reported.add(report)
                self._note(report, reported)
        except RayError as error:
            if not means_death(error):
                raise
            self._workers.lose(worker, error)
            return False
        finally:
            self._reported.remove(reported)
            reported.apply()
        return True

    def _note(self, report: Report, reported: _Reported) -> None:
        """Note how a group has ended."""
        outcome = reported.outcome
        if report.failures:
            reported.apply()  # they are those of samples
        samples = samples_of(outcome.elements)
        outcome.failures += [(samples[failure.position], failure.exception()) for failure in report.failures]
        outcome.is_cancelled = report.is_cancelled
        self._stats.add(report.stats)


class BufferActor:
    """Holds the buffer, and runs rollouts or a pool over the workers.

    Args:
        setup: of the workers' rollouts; also of the one here, whose client sends nothing.
        source: makes the buffer.
        filter: of the rollout.
        sample_filter: of the rollout.
        in_flight: of the pool.
    """

    def __init__(
        self,
        setup: Setup,
        source: Callable[[], Buffer],
        filter: Filter | None,  # noqa: A002  # the field's name for it
        sample_filter: SampleFilter | None,
        in_flight: int | None,
    ) -> None:
        self._setup = setup
        self._source = source
        self._filters: dict[str, Any] = {"filter": filter, "sample_filter": sample_filter}
        self._in_flight = in_flight
        self._version = 0
        self._pool: Pool | None = None
        self._current: RemoteScheduler | None = None
        self._given: dict[int, list[Group]] = {}  # by the ticket of the call that was given them, until it has them
        self._void: set[int] = set()  # tickets of calls that were cancelled before they got any

    async def open(self, actors: Sequence[Any], version: int) -> list[int]:
        """Make the buffer and open the workers; returns their process ids."""
        self._buffer = self._source()
        self._actors, self._workers = actors, WorkerSet(actors)
        self._version = version
        hooks = RolloutHooks(count_engines=lambda: 1, scheduler=self._scheduler)
        self._rollout = self._setup.rollout(**self._filters, hooks=hooks)
        return list(await asyncio.gather(*map(_open, actors)))

    def _scheduler(self, stats: RolloutStats, version: Callable[[], int] | None) -> RemoteScheduler:
        self._current = RemoteScheduler(self._setup.config, self._workers, stats, version)
        return self._current

    async def run(self, rollout_id: int, ticket: int) -> tuple[list[Packed], dict[str, float], str]:
        """One rollout: its groups, metrics and shortage."""
        if self._pool is not None:
            raise StreamfoldError("run() and next() do not go together: next() keeps groups in flight, run() none")
        result = await self._rollout.run(self._buffer, rollout_id)
        return self._give(result.groups, ticket), result.metrics, result.shortage

    async def next(self, n: int, ticket: int) -> list[Packed]:
        """The next ``n`` groups of the pool, which is opened by the first call."""
        if self._pool is None:
            self._pool = Pool(self._rollout, self._buffer, in_flight=self._in_flight, version=self._version)
            await self._pool.__aenter__()
        return self._give(await self._pool.next(n), ticket)

    def _give(self, groups: list[Group], ticket: int) -> list[Packed]:
        """The groups for a call, which are kept here until it has them: Ray may drop the result of a cancelled call."""
        if ticket in self._void:
            self._buffer.put(groups)
            return []
        self._given[ticket] = groups
        return [pack_group(group) for group in groups]

    async def received(self, ticket: int) -> None:
        """A call has got its groups."""
        self._given.pop(ticket, None)

    async def give_back(self, ticket: int) -> None:
        """Take the groups back that a cancelled call was given, or would be given."""
        groups = self._given.pop(ticket, None)
        if groups is None:
            self._void.add(ticket)
        else:
            self._buffer.put(groups)

    async def pause(self) -> None:
        """Abort what is in flight on all workers; nothing starts until :meth:`resume`."""
        if self._pool is not None:
            await self._pool.pause()

    async def resume(self) -> None:
        """Start groups again."""
        if self._pool is not None:
            self._pool.resume()

    async def set_version(self, version: int) -> None:
        """Set the weight version here and on all workers."""
        self._version = version
        if self._pool is not None:
            self._pool.version = version
        await asyncio.gather(*(_quietly(each.actor.set_version.remote(version)) for each in self._workers.alive))

    async def metrics(self) -> dict[str, float]:
        """Metrics of the pool since the last call."""
        return {} if self._pool is None else self._pool.metrics()

    async def save(self, path: str) -> None:
        """Write the buffer to a file of this node."""
        if self._current is not None:
            self._current.apply_reports()
        await asyncio.to_thread(self._buffer.saving(path))

    async def close(self) -> None:
        """Abort everything, and close the workers."""
        try:
            if self._pool is not None:
                await self._pool.__aexit__(None, None, None)
        finally:
            await asyncio.gather(*(_quietly(each.actor.close.remote()) for each in self._workers.alive))
            self._workers.close()


async def _open(actor: Any) -> int:  # noqa: ANN401  # an actor handle
    """Open a worker, again if Ray has to start it again; returns its process id."""
    began_at = None
    while True:
        try:
            pid: int = await actor.open.remote()
        except RayError as error:
            if not means_death(error):
                raise
            now = asyncio.get_running_loop().time()
            if began_at is None:
                began_at = now
                _logger.warning("a worker has died while it opened its client: %s", error)
            if isinstance(error, ActorDiedError) or now > began_at + _OPEN_SECONDS:
                raise StreamfoldError(
                    "a worker has died while it opened its client, and did not come back: Ray starts it again as "
                    "often as max_restarts of worker_options says (-1: always). Why it died is in Ray's log; its "
                    f"error: {error}"
                ) from error
        else:
            return pid
        await asyncio.sleep(_REVIVE_SECONDS)


async def _is_up(actor: Any) -> bool:  # noqa: ANN401  # an actor handle
    """Whether Ray has started an actor again. Raises the error if it will not."""
    try:
        await actor.open.remote()
    except ActorDiedError:
        raise
    except RayActorError:
        return False
    return True


async def _quietly(call: Any) -> None:  # noqa: ANN401  # an ObjectRef
    """Await a call of a worker. If it has died there is nothing to do: its groups have been taken from it."""
    try:
        await call
    except RayError as error:
        if not means_death(error):
            raise
        _logger.info("a worker has died: %s", error)
