"""What a worker reports while its calls run: the state that an abort would leave, at a bounded cost."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError

from streamfold import StreamfoldError, append_observation, complete
from streamfold.loopback import Loopback
from streamfold.ray import worker as worker_module
from streamfold.ray.buffer import RemoteScheduler, WorkerSet
from streamfold.ray.worker import Report, Setup, Worker, pack_group, unpack_group
from streamfold.rollout.metrics import RolloutStats
from streamfold.samples.sample import Sample
from support.ray_jobs import Make, config, undisturbed
from support.replay import until
from support.rollouts import append, bounded, groups_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from streamfold import Client
    from streamfold.rollout.outcome import GroupOutcome

pytestmark = pytest.mark.ray

TOKENS = 120
LONG = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


async def reports_of(worker: Worker) -> list[Report]:
    """All reports of one group."""
    try:
        return [report async for report in worker.run(0, pack_group(groups_of(1)[0]), 0, None)]
    finally:
        await worker.close()


def worker_for(engine: Loopback, generate: Any = None, **options: Any) -> Worker:
    settings = config(1, **{"sampling_params": LONG, **options})
    return Worker(Setup(Make(engine.url, 1).client, settings, None, generate), 1)


def samples_in(reports: list[Report]) -> list[Sample]:
    return [unpack_group(packed)[0] for report in reports for packed in report.elements]


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "_REST_SHARE", 0.0)


@pytest.mark.usefixtures("_often")
async def test_reports_hold_the_tokens_of_open_calls_as_an_abort_would_keep_them() -> None:
    with Loopback(token_rate=300) as engine:
        *early, last = await bounded(reports_of(worker_for(engine, max_staleness=3, sample_seconds=60.0)))
        assert engine.stats().requests == 2, "no report has disturbed a call"
        ended = samples_in([last])
        for sample in ended:
            assert sample.tokens == undisturbed(engine, sample, LONG).tokens
    partial = [sample for sample in samples_in(early) if sample.response_length < TOKENS]
    for which in ended:
        lengths = [sample.response_length for sample in partial if sample.index == which.index]
        assert lengths == sorted(set(lengths)), "only what has changed is reported"
        assert len(lengths) > 3
    for sample in partial:
        whole = ended[(sample.index or 0) % 2]
        n = sample.response_length
        assert sample.status is Sample.Status.ABORTED
        assert sample.tokens == whole.tokens[: len(sample.tokens)]
        assert len(sample.tokens) == len(whole.tokens) - TOKENS + n
        assert (sample.rollout_log_probs or []) == (whole.rollout_log_probs or [])[:n]
        assert sample.loss_mask == [1] * n or not n
        assert sample.rollout_routed_experts is None, "the call that resumes it brings them"
        assert sample.metadata.get("streamfold_call_versions", []) == ([[0, 0, n]] if n else [])
        assert sample.metadata["streamfold_seconds"] > 0
        sample.check()


@pytest.mark.usefixtures("_often")
async def test_what_is_of_no_use_is_not_reported() -> None:
    with Loopback(token_rate=300) as engine:
        reports = await bounded(reports_of(worker_for(engine, partial_rollout=False)))
    assert {sample.response_length for sample in samples_in(reports)} == {TOKENS}, "it would start again"


class ToolBetween:
    """Generates a turn, waits for its tool, and generates another one."""

    abort_mode = "request"

    def __init__(self, client: Client, waits: asyncio.Event) -> None:
        self.client = client
        self.waits = waits

    async def __call__(self, sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
        await complete(self.client, sample, params, max_new_tokens_per_turn=8)
        await self.waits.wait()
        append_observation(sample, [5, 5])
        return await complete(self.client, sample, params, max_new_tokens_per_turn=8)


@pytest.mark.usefixtures("_often")
async def test_a_sample_between_two_turns_is_reported_as_interrupted_and_not_as_finished() -> None:
    waits = asyncio.Event()
    with Loopback() as engine:
        worker = worker_for(engine, lambda client: ToolBetween(client, waits))
        early: list[Report] = []
        async for report in worker.run(0, pack_group(groups_of(1)[0]), 0, None):
            early.append(report)
            if {sample.index for sample in samples_in(early) if sample.response_length == 8} == {0, 1}:
                waits.set()
        await worker.close()
    *reported, one, two = samples_in(early)
    assert [sample.response_length for sample in (one, two)] == [18, 18]
    assert {sample.status for sample in reported if sample.response_length == 8} == {Sample.Status.ABORTED}


@pytest.mark.usefixtures("_often")
async def test_what_a_generate_function_has_written_is_reported_without_what_its_own_calls_stream() -> None:
    def make(client: Client) -> Any:
        async def generate(sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
            append(sample, 3)
            await client.generate(sample.tokens, params)
            append(sample, 2)
            sample.status = Sample.Status.COMPLETED
            return sample

        return generate

    with Loopback(token_rate=300) as engine:
        *early, last = await bounded(reports_of(worker_for(engine, make)))
    assert {sample.response_length for sample in samples_in(early)} <= {3, 5}
    assert {sample.status for sample in samples_in(early) if sample.response_length == 3} == {Sample.Status.ABORTED}
    assert [sample.response_length for sample in samples_in([last])] == [5, 5]


async def test_all_groups_together_take_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def pack_slowly(group: Any) -> Any:
        clock[0] += 0.1
        return pack_group(group)

    rests: list[tuple[float, int]] = []
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(worker_module, "_REPORT_SECONDS", 0.02)
    monkeypatch.setattr(worker_module, "pack_group", pack_slowly)
    with Loopback(token_rate=300) as engine:
        worker = worker_for(engine)
        rest = worker._rest

        def noted() -> float:
            rests.append((rest(), len(worker._costs)))
            return 0.02

        monkeypatch.setattr(worker, "_rest", noted)
        groups = groups_of(3)

        async def run(group: Any) -> None:
            async for _ in worker.run(0, pack_group(group), 0, None):
                pass

        await bounded(asyncio.gather(*map(run, groups)))
        assert worker._costs == {}, "a group that has ended costs nothing"
        await worker.close()
    assert rests[0] == (0.02, 0)
    # A group has two samples: its report takes 0.2 s here, or 0.1 s if only one has changed.
    full = [seconds for seconds, groups in rests if groups == 3]
    assert max(full) == pytest.approx(19 * 0.6)
    assert min(full) > 19 * 0.29


class ScriptedActor:
    """Stands for a worker's actor: reports so many tokens of each sample, one report after the other, and dies or not.

    Attributes:
        given: the tokens of the samples that it was given.
    """

    def __init__(self, *reports: tuple[int, ...], dies_of: RayError | None = None, is_gone: bool = False) -> None:
        self.reports = reports
        self.dies_of = dies_of
        self.is_gone = is_gone  # it had died before it was given anything
        self.given: list[list[int]] = []
        self.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._run))
        self.open = SimpleNamespace(remote=self._open)
        self.version = SimpleNamespace(remote=self._version)

    async def _open(self) -> None:
        raise ActorDiedError

    async def _version(self) -> int:
        if self.is_gone:
            raise ActorDiedError
        return 0

    async def _run(self, _epoch: int, packed: Any, _started: int, _version: int | None) -> AsyncIterator[Any]:
        self.given = [sample.tokens for sample in unpack_group(packed)]
        for lengths in self.reports:
            group = unpack_group(packed)
            for sample, length in zip(group, lengths, strict=True):
                append(sample, length)
                sample.status = Sample.Status.ABORTED
            changed = [place for place, length in enumerate(lengths) if length]
            elements = [pack_group([group[place]]) for place in changed]
            for array in elements:
                array.flags.writeable = False  # as what comes out of the object store
            yield _ready(Report(changed, elements))
        if self.dies_of is not None:
            raise self.dies_of


async def _ready(report: Report) -> Report:
    return report


@pytest.mark.parametrize(
    "error", [RayActorError(), OutOfMemoryError("killed"), NodeDiedError("gone"), ObjectLostError("ab" * 28, "", "")]
)
async def test_the_next_worker_gets_each_sample_as_the_dead_one_has_reported_it_last(error: RayError) -> None:
    dead = ScriptedActor((2, 0), (5, 0), (0, 3), dies_of=error)
    alive = ScriptedActor((1, 1))
    group = groups_of(1)[0]
    prompts = [list(sample.tokens) for sample in group]
    workers = WorkerSet([dead, alive])
    scheduler = RemoteScheduler(config(1), workers, RolloutStats(), None)
    scheduler.start(group, 0)
    outcome = await bounded(scheduler.next_outcome())
    workers.close()
    assert dead.given == prompts
    assert [len(tokens) - len(prompt) for tokens, prompt in zip(alive.given, prompts, strict=True)] == [5, 3]
    assert [sample.response_length for sample in outcome.group] == [6, 4]


async def outcome_of(group: Any, tries: int, *actors: ScriptedActor) -> GroupOutcome | None:
    """What becomes of a group on these workers, if ``tries`` may die with it."""
    workers = WorkerSet(actors)
    scheduler = RemoteScheduler(config(1, group_tries=tries), workers, RolloutStats(), None)
    scheduler.start(group, 0)
    try:
        outcome: GroupOutcome | None = await bounded(scheduler.next_outcome())
    finally:
        workers.close()
    return outcome


async def test_workers_that_were_dead_before_they_got_a_group_are_no_try_of_it() -> None:
    gone = [ScriptedActor(is_gone=True) for _ in range(3)]
    alive = ScriptedActor((1, 1))
    outcome = await outcome_of(groups_of(1)[0], 2, ScriptedActor((2, 0), dies_of=NodeDiedError("gone")), *gone, alive)
    assert outcome is not None
    assert outcome.failures == []
    assert [sample.response_length for sample in outcome.group] == [3, 1]
    assert all(actor.given == [] for actor in gone)


async def test_a_group_with_which_too_many_workers_died_fails_only_if_another_one_is_alive() -> None:
    def dying() -> ScriptedActor:
        return ScriptedActor((1, 0), dies_of=RayActorError())

    alive = ScriptedActor((1, 1))
    outcome = await outcome_of(groups_of(1)[0], 2, dying(), dying(), alive)
    assert outcome is not None
    assert ["2 workers have died with group" in str(error) for _, error in outcome.failures] == [True]
    assert alive.given == []
    group = groups_of(1)[0]
    with pytest.raises(StreamfoldError, match="all workers have died for good"):
        await outcome_of(group, 2, dying(), dying(), ScriptedActor(is_gone=True))
    assert [sample.response_length for sample in group] == [2, 0]


async def test_a_report_of_a_group_in_flight_is_in_the_group_once_it_is_asked_for() -> None:
    actor = ScriptedActor((2, 0), (5, 1))
    goes_on = asyncio.Event()
    run = actor._run

    async def held(*args: Any) -> AsyncIterator[Any]:
        async for reference in run(*args):
            yield reference
        await goes_on.wait()

    actor.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=held))
    group = groups_of(1)[0]
    scheduler = RemoteScheduler(config(1), WorkerSet([actor]), RolloutStats(), None)
    scheduler.start(group, 0)

    def lengths() -> list[int]:
        scheduler.apply_reports()
        return [sample.response_length for sample in group]

    await until(lambda: lengths() == [5, 1])
    goes_on.set()
    await bounded(scheduler.next_outcome())
    assert lengths() == [5, 1]
