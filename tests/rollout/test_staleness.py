"""Staleness: a pool starts what can be given in time, tokens have the age of their call, and no length starves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, RolloutConfig, complete
from streamfold.loopback import Faults, Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.samples.reset import restart, rewind
from streamfold.samples.sample import Sample
from streamfold.samples.staleness import call_version, mask_stale, note_version, noting_versions, stale_tokens
from support.host.slime.utils.types import Sample as HostSample
from support.rollouts import Scripted, append, bounded, endless, everywhere, groups_of, nothing_left, rollout

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.rollout.config import Stale

BOTH_LOOPS = True

Status = Sample.Status

VERSIONS = 40
BATCH = 3
TICK = 10  # tokens of every running sample
LONG = 8 * TICK  # of one group in four; the others have one tick


def spans_of(sample: Any) -> Any:
    return sample.metadata.get("streamfold_call_versions")


def is_long(group: list[Sample]) -> bool:
    return (group[0].group_index or 0) % 4 == 0


class Ticking:
    """An engine in which time passes only when the test says so: each tick gives every running sample some tokens."""

    abort_mode = "request"

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.running = 0
        self._next = asyncio.Event()

    def tick(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def __call__(self, sample: Sample, _params: Any, *, aborted: Callable[[], bool]) -> Sample:
        self.asked.add(sample.group_index or 0)
        self.running += 1
        try:
            while sample.response_length < (LONG if is_long([sample]) else TICK):
                await self._next.wait()
                append(sample, TICK)
        except asyncio.CancelledError:
            sample.status = Status.ABORTED
            raise
        finally:
            self.running -= 1
        sample.status = Status.COMPLETED
        return sample


class Storm:
    """A trainer that takes a batch of each version, and aborts everything in flight to load the next."""

    def __init__(self, stale: Stale, *, max_staleness: int = 1, in_flight: int = 64) -> None:
        self.engine = Ticking()
        self.source = Buffer(endless(1))
        self.given: list[tuple[int, list[Sample]]] = []  # with the version
        self.most_held: list[int] = []
        options: dict[str, Any] = {"max_staleness": max_staleness, "stale": stale, "partial_rollout": True}
        self.pool = Pool(
            rollout(self.engine, groups=BATCH, starts_per_ms=10_000, **options), self.source, in_flight=in_flight
        )
        self.metrics: dict[str, float] = {}

    async def run(self, versions: int = VERSIONS) -> None:
        async with nothing_left(), self.pool as pool:
            for version in range(versions):
                batch = asyncio.create_task(pool.next(BATCH))
                held = 0
                while not batch.done():
                    while self.engine.running < pool.in_flight and not batch.done():  # noqa: ASYNC110
                        await asyncio.sleep(0)  # until all that can start has started
                    held = max(held, pool.in_flight + pool.ready)
                    if not batch.done():
                        self.engine.tick()
                    await asyncio.sleep(0.001)
                self.most_held.append(held)
                self.given += [(version, group) for group in batch.result()]
                await pool.pause()
                pool.version += 1
                pool.resume()
            self.metrics = pool.metrics()


async def test_in_a_storm_of_versions_long_responses_are_delivered_and_none_starves() -> None:
    storm = Storm("keep_masked")
    await asyncio.wait_for(storm.run(), 60)
    groups = [group for _, group in storm.given]
    assert len(groups) == VERSIONS * BATCH
    indices = [group[0].group_index or 0 for group in groups]
    unfinished = storm.engine.asked - set(indices)
    assert len(unfinished) <= 2 * BATCH, "no more than may be in flight"
    assert min(unfinished, default=VERSIONS * BATCH) > (VERSIONS - LONG // TICK) * BATCH, "begun by the last versions"
    assert abs(sum(map(is_long, groups)) / len(groups) - 1 / 4) < 0.03, "as many as were asked for"
    assert all(group[0].response_length == (LONG if is_long(group) else TICK) for group in groups)
    assert storm.metrics["streamfold/tokens/lost"] == storm.metrics["streamfold/groups/dropped"] == 0
    assert storm.metrics["streamfold/groups/stale"] == 0


async def test_what_is_trained_on_is_no_older_than_the_limit_token_by_token() -> None:
    storm = Storm("keep_masked")
    await asyncio.wait_for(storm.run(), 60)
    masked = 0
    for version, (sample,) in storm.given:
        spans, mask = spans_of(sample), sample.loss_mask or []
        assert [spans[0][1], spans[-1][2], len(mask)] == [0, sample.response_length, sample.response_length]
        for sent, start, end in spans:
            assert mask[start:end] == [int(version - sent <= 1)] * (end - start)
        masked += mask.count(0)
        assert 1 in mask
    assert masked == storm.metrics["streamfold/tokens/stale"] > 0
    assert all(not sample.metadata.get("streamfold_restarted_tokens") for _, (sample,) in storm.given)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_no_more_groups_are_started_than_can_be_given_in_time(max_staleness: int) -> None:
    storm = Storm("keep", max_staleness=max_staleness)
    await asyncio.wait_for(storm.run(12), 60)
    assert max(storm.most_held) == (max_staleness + 1) * BATCH
    short = [version - spans_of(sample)[0][0] for version, (sample,) in storm.given if not is_long([sample])]
    assert max(short) <= max_staleness
    assert len(storm.given) == 12 * BATCH


async def test_kept_tokens_are_left_as_they_are_and_counted() -> None:
    storm = Storm("keep")
    await asyncio.wait_for(storm.run(20), 60)
    assert all(0 not in (sample.loss_mask or []) for _, (sample,) in storm.given)
    assert storm.metrics["streamfold/tokens/stale"] > 0
    assert any(is_long(group) for _, group in storm.given)


async def test_dropped_groups_are_counted_and_replaced() -> None:
    storm = Storm("drop")
    await asyncio.wait_for(storm.run(20), 60)
    assert len(storm.given) == 20 * BATCH
    assert storm.metrics["streamfold/groups/dropped/stale"] > 0
    assert storm.metrics["streamfold/tokens/stale"] == 0
    assert storm.source.in_flight == 0


async def test_the_second_restart_of_a_sample_warns_that_it_may_never_end(caplog: pytest.LogCaptureFixture) -> None:
    """No tick ever lets a long response end within a version or two."""
    storm = Storm("restart")
    await asyncio.wait_for(storm.run(3), 60)
    assert storm.metrics["streamfold/groups/stale"] > 0
    assert "restarted as stale" not in caplog.text
    storm = Storm("restart")
    await asyncio.wait_for(storm.run(8), 60)
    assert "restarted as stale 2 times: its samples take more than 1 versions (max_staleness)" in caplog.text
    assert storm.metrics["streamfold/tokens/lost"] > 0


async def test_a_group_without_a_token_that_is_new_enough_is_dropped_and_counted() -> None:
    source = Buffer(groups_of(3))
    async with nothing_left(), Pool(rollout(Scripted(), groups=3, max_staleness=1), source, in_flight=3) as pool:
        while pool.ready < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        pool.version = 1
        first = await bounded(pool.next(1))
        pool.version = 2
        assert await bounded(pool.next(2)) == []
        metrics = pool.metrics()
    assert first[0][0].loss_mask == [1, 1]
    assert metrics["streamfold/groups/dropped/stale"] == 2
    assert source.in_flight == 0


async def test_a_pool_whose_version_stands_still_or_that_is_asked_for_more_goes_on() -> None:
    """The limit concerns what waits: what somebody waits for is never too old."""
    async with nothing_left(), Pool(rollout(Scripted(), groups=1, max_staleness=0), Buffer(endless())) as pool:
        sizes = [len(await bounded(pool.next(n))) for n in (1, 1, 7, 2, 2)]
        several = await bounded(asyncio.gather(pool.next(3), pool.next(4)))
    assert sizes == [1, 1, 7, 2, 2]
    assert [len(groups) for groups in several] == [3, 4]


async def test_without_a_limit_as_many_are_in_flight_as_are_wished_and_no_version_is_noted() -> None:
    source = Buffer(endless())
    script = Scripted(dict.fromkeys(range(100), (1, "hang")))
    async with nothing_left(), Pool(rollout(script, groups=1, partial_rollout=True), source, in_flight=9) as pool:
        while len(script.asked) < 18:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert pool.in_flight == 9
    assert all("streamfold_call_versions" not in s.metadata for group in source.take(9) for s in group)


# In a rollout.


@pytest.mark.parametrize(
    ("stale", "masks", "dropped"),
    [("keep_masked", [[0, 0, 0, 1, 1], [0, 0]], 0), ("keep", [[1] * 5, [1] * 2], 0), ("drop", None, 1)],
)
async def test_a_rollout_treats_tokens_of_earlier_ones_alike(stale: Stale, masks: Any, dropped: int) -> None:
    source, script = Buffer(groups_of(4)), Scripted({0: (3, "hang")}, wait=0.01)
    options: dict[str, Any] = {"partial_rollout": True, "max_staleness": 1, "stale": stale}
    await bounded(rollout(script, groups=1, over_sampling=2, **options).run(source, 5))
    result = await bounded(rollout(Scripted(), groups=1, **options).run(source, 7))
    assert result.metrics["streamfold/groups/dropped"] == dropped
    (group,) = result.groups
    if masks is None:
        assert group[0].group_index == 2
    else:
        assert [spans_of(s) for s in group] == [[[5, 0, 3], [7, 3, 5]], [[5, 0, 2]]]
        assert [s.loss_mask for s in group] == masks


# Versions of tokens.


@pytest.mark.parametrize("kind", [Sample, HostSample], ids=["ours", "a host's"])
def test_each_call_of_a_sample_has_the_version_in_which_it_was_sent(kind: Any) -> None:
    """Also those that complete() makes by itself, when weights change under a call that breaks off."""
    versions = iter(range(3, 10))
    sample = kind(tokens=[1, 2, 3])

    async def train(engine: Loopback) -> None:
        call_version.set(lambda: next(versions))
        async with Client(engine.url) as client:
            await complete(client, sample, {"max_new_tokens": 50, "ignore_eos": True})

    with Loopback(faults=Faults([{"kind": "cut", "requests": [0, 1], "after_events": 8}])) as engine:
        asyncio.run(train(engine))
    spans = spans_of(sample)
    assert [version for version, _, _ in spans] == [3, 4, 5]
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == sample.response_length == 50


def filled(length: int) -> Sample:
    sample = Sample(tokens=[1, 2])
    append(sample, length)
    return sample


def test_versions_are_cut_with_their_tokens() -> None:
    sample = filled(4)
    note_version(sample, 1, 0)
    append(sample, 4)
    note_version(sample, 2, 4)
    append(sample, 2)
    note_version(sample, 2, 8)
    assert spans_of(sample) == [[1, 0, 4], [2, 4, 10]]
    rewind(sample, 6, 6)
    assert spans_of(sample) == [[1, 0, 4], [2, 4, 6]]
    rewind(sample, 3, 3)
    assert spans_of(sample) == [[1, 0, 3]]
    restart(sample)
    assert spans_of(sample) is None


def test_tokens_of_a_generator_of_the_users_own_have_the_version_in_which_it_was_called() -> None:
    call_version.set(lambda: 7)
    try:
        sample = filled(3)
        note_version(sample, 4, 0)
        with noting_versions(sample):
            append(sample, 2)
            note_version(sample, 9, 3)  # by complete(), later
            append(sample, 1)
        assert spans_of(sample) == [[4, 0, 3], [9, 3, 5], [7, 5, 6]]
        made = [filled(2), filled(4)]
        with noting_versions(sample) as noted:
            noted.extend(made)
        assert [spans_of(each) for each in made] == [[[4, 0, 2]], [[4, 0, 4]]], "as old as what they were made of"
    finally:
        call_version.set(None)


def test_tokens_without_a_version_are_as_old_as_their_sample() -> None:
    """A buffer that was saved without a limit, for example."""
    sample = filled(6)
    assert stale_tokens(sample, 100) == 0
    sample.metadata["start_rollout_id"] = 2
    note_version(sample, 5, 4)
    assert [stale_tokens(sample, oldest) for oldest in (2, 3, 5, 6)] == [0, 4, 4, 6]
    sample.loss_mask = [1, 0, 1, 1, 0, 1]
    mask_stale(sample, 3)
    assert sample.loss_mask == [0, 0, 0, 0, 0, 1]


async def test_versions_are_kept_in_a_saved_buffer(tmp_path: Any) -> None:
    source, script = Buffer(groups_of(1)), Scripted({0: (3, "hang")})
    options: dict[str, Any] = {"groups": 1, "partial_rollout": True, "max_staleness": 1}
    async with Pool(rollout(script, **options), source, version=4) as pool:
        while script.running < 1 or len(script.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await pool.pause()
    source.save(tmp_path / "buffer")
    restored = Buffer()
    restored.load(tmp_path / "buffer")
    async with Pool(rollout(Scripted(), **options), restored, version=6) as pool:
        ((sample, sibling),) = await bounded(pool.next(1))
    assert spans_of(sample) == [[4, 0, 3], [6, 3, 5]]
    assert (sample.loss_mask, sibling.loss_mask) == ([0, 0, 0, 1, 1], [0, 0])
    assert everywhere(restored) == []


def test_a_policy_that_is_unknown_is_refused_by_name() -> None:
    given: Any = "mask"
    with pytest.raises(ValueError, match="stale must be one of keep_masked, keep, drop, restart, not 'mask'"):
        RolloutConfig(groups=1, stale=given)
