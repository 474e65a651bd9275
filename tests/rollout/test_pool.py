"""A pool: groups stay in flight across rollouts, finished ones wait, and nothing is lost around weight updates."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from conftest import LOOPS
from streamfold import Client, StreamfoldError
from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.samples.sample import Sample
from support.loopback_http import post
from support.rollouts import (
    Counted,
    HostSource,
    Scripted,
    bounded,
    endless,
    everywhere,
    groups_of,
    nothing_left,
    rollout,
    snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH_LOOPS = True

Status = Sample.Status


def pool_of(script: Any, source: Any, in_flight: int = 3, *, client: Any = None, **options: Any) -> Pool:
    given = {"groups": 1, "partial_rollout": True, **options}
    return Pool(rollout(script, client=client, **given), source, in_flight=in_flight)


async def until(true: Callable[[], object]) -> None:
    async def poll() -> None:
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    await bounded(poll())


async def test_groups_stay_in_flight_between_two_rollouts_and_finished_ones_wait() -> None:
    source, script = Buffer(endless()), Scripted({0: (2, "hang")}, wait=0.002)
    async with nothing_left():
        async with pool_of(script, source) as pool:
            first = await bounded(pool.next(2))
            await until(lambda: pool.ready >= 3 and pool.in_flight == 1)
            await asyncio.sleep(0.01)
            assert pool.in_flight == 1, "no more are begun while as many wait"
            asked = len(script.asked)
            second = await bounded(pool.next(3))
            assert len(script.asked) - asked <= 4, "those had been waiting"
            given = [group[0].group_index for group in first + second]
            assert given == [1, 2, 3, 4, 5]
        indices = everywhere(source, first, second)
        assert indices == list(range(len(indices)))
        assert source.in_flight == 0


async def test_leaving_the_pool_gives_everything_back_finished_groups_too() -> None:
    source, rewards = Buffer(groups_of(4)), Counted()
    script = Scripted({0: (3, "hang"), 1: (1, Status.TRUNCATED)})
    async with nothing_left(), pool_of(script, source, in_flight=4, reward=rewards) as pool:
        await until(lambda: pool.ready == 3)
    groups = source.take(4)
    assert [[s.response_length for s in group] for group in groups] == [[3, 1], [2, 2], [2, 2], [2, 2]]
    assert groups[0][0].status is Status.ABORTED
    before = [[snapshot(s) for s in group] for group in groups[1:]]
    source.put(groups)
    again = Scripted()
    async with pool_of(again, source, in_flight=4, reward=rewards) as pool:
        given = await bounded(pool.next(4))
    assert [[vars(s) for s in group] for group in sorted(given, key=lambda group: group[0].index)[1:]] == before
    assert again.asked == [0]
    assert sorted(index for index, _ in rewards.asked) == list(range(8))


async def test_a_pause_cuts_what_is_in_flight_keeps_it_and_begins_nothing() -> None:
    source = Buffer(groups_of(3))
    script = Scripted({0: (3, "hang"), 1: (2, Status.COMPLETED), 2: (1, "hang"), 3: (0, "hang")})
    async with nothing_left(), pool_of(script, source) as pool:
        pool.version = 7
        await until(lambda: len(script.asked) == 6 and pool.ready == 1)
        await bounded(pool.pause())
        assert (pool.in_flight, pool.ready, len(source), script.running) == (0, 1, 2, 0)
        await bounded(pool.pause())
        asked = len(script.asked)
        await asyncio.sleep(0.005)
        assert len(script.asked) == asked
        ((first, _), (third, fourth)) = source.take(2)
        source.put([[first, _], [third, fourth]])
        assert [s.metadata.get("start_rollout_id") for s in (first, third, fourth)] == [7, 7, None]
        script.script = {}
        pool.version = 8
        pool.resume()
        pool.resume()
        given = await bounded(pool.next(3))
        assert sorted(group[0].group_index for group in given) == [0, 1, 2]
        assert script.asked[asked:] == [0, 2, 3]
        assert (first.response_length, third.response_length, fourth.response_length) == (5, 3, 2)
        assert pool.metrics()["streamfold/staleness/max"] == 1
    assert source.in_flight == 0


async def test_without_partial_rollouts_a_pause_lets_what_it_cut_start_again() -> None:
    source, script = Buffer(groups_of(1)), Scripted({0: (3, "hang")})
    async with pool_of(script, source, partial_rollout=False) as pool:
        await until(lambda: len(script.asked) == 2)
        await bounded(pool.pause())
        script.script = {}
        pool.resume()
        ((sample, _),) = await bounded(pool.next(1))
        told = pool.metrics()
    assert (sample.response_length, sample.metadata["streamfold_restarted_tokens"]) == (2, 3)
    assert told["streamfold/tokens/lost"] == 3


async def test_a_partial_group_that_is_too_old_starts_again_instead_of_being_gone_on_with() -> None:
    source, script = Buffer(groups_of(1)), Scripted({0: (3, "hang")})
    async with pool_of(script, source, max_staleness=1, stale="restart") as pool:
        for version in (1, 2):
            await until(lambda: script.running == 1)
            await bounded(pool.pause())
            pool.version = version
            assert source.take(1)[0][0].response_length == (3 if version == 1 else 6)
            source.put(source_groups(source))
            if version == 2:
                script.script = {}
            pool.resume()
        ((sample, _),) = await bounded(pool.next(1))
        told = pool.metrics()
    assert sample.response_length == 2
    assert told["streamfold/groups/stale"] == 1
    assert told["streamfold/tokens/lost"] == 8


def source_groups(source: Buffer) -> list[Any]:
    return list(source._in_flight.values())


async def test_a_finished_group_that_has_waited_too_long_starts_again_and_is_not_lost() -> None:
    source, script = Buffer(groups_of(2)), Scripted()
    async with pool_of(script, source, max_staleness=2, stale="restart") as pool:
        await until(lambda: pool.ready == 2)
        pool.version = 2
        assert len(await bounded(pool.next(1))) == 1
        pool.version = 3
        ((sample, _),) = await bounded(pool.next(1))
        told = pool.metrics()
    assert script.asked == [0, 1, 2, 3, 2, 3]
    assert sample.index == 2
    assert sample.metadata["start_rollout_id"] == 3
    assert (told["streamfold/groups/stale"], told["streamfold/staleness/max"]) == (1, 2)


async def test_a_group_that_crashes_goes_back_and_is_told_of_while_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Buffer(endless())
    script = Scripted({0: (3, LookupError("a tool is gone"))})
    async with nothing_left(), pool_of(script, source, sample_retries=0) as pool:
        first = await bounded(pool.next(3))
        assert "a tool is gone" in caplog.text
        assert [group[0].group_index for group in first] == [1, 2, 3]
        script.script = {}
        later: list[Any] = []
        while not later or later[-1][0].group_index != 0:
            later += await bounded(pool.next(1))
        assert later[-1][0].response_length == 5
        assert pool.metrics()["streamfold/groups/failed"] == 1


async def test_a_pool_in_which_everything_fails_ends_with_the_cause_and_gives_everything_back() -> None:
    class Broken(Scripted):
        async def __call__(self, *_args: Any, **_more: Any) -> Any:
            raise TypeError("a typo")

    source = Buffer(endless())
    async with nothing_left(), pool_of(Broken(), source, max_failures=4) as pool:
        for _ in range(2):
            with pytest.raises(StreamfoldError, match="5 groups have failed") as caught:
                await bounded(pool.next(1))
            assert isinstance(caught.value.__cause__, TypeError)
            assert source.in_flight == 0
        pool.resume()
        assert pool.in_flight == 0
    indices = everywhere(source)
    assert indices == list(range(len(indices)))


async def test_groups_that_fail_at_the_end_of_the_source_are_tried_again_but_not_for_ever() -> None:
    source = Buffer(groups_of(3))
    script = Scripted({0: (0, LookupError("always"))})
    async with pool_of(script, source, group_tries=3, sample_retries=0) as pool:
        given = await bounded(pool.next(3))
        assert [group[0].group_index for group in given] == [1, 2]
        assert await bounded(pool.next(1)) == []
        told = pool.metrics()
    assert script.asked.count(0) == 3
    assert told["streamfold/groups/dropped/failed"] == 1
    assert source.in_flight == 0


async def test_a_source_that_fails_ends_the_pool_with_its_error_and_nothing_is_lost() -> None:
    def groups() -> Any:
        yield from groups_of(4)
        raise OSError("the disk is gone")

    source = Buffer(groups())
    async with nothing_left(), pool_of(Scripted(wait=0.002), source, in_flight=2) as pool:
        given: list[Any] = []
        with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012  # at which call is chance
            for _ in range(5):
                given += await bounded(pool.next(1))
    assert everywhere(source, given) == [0, 1, 2, 3]


async def test_a_source_that_fails_when_groups_are_given_does_not_take_them_away() -> None:
    def groups() -> Any:
        yield from groups_of(1)
        raise OSError("the disk is gone")

    source = Buffer(groups())
    async with nothing_left(), pool_of(Scripted(), source, in_flight=1) as pool:
        await until(lambda: pool.ready == 1)
        given = await bounded(pool.next(1))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                await bounded(pool.next(1))
    assert everywhere(source, given) == [0]


async def test_a_sample_filter_that_raises_takes_no_group_with_it() -> None:
    def broken(_groups: Any) -> None:
        raise LookupError("the filter is broken")

    source = Buffer(groups_of(2))
    async with nothing_left(), pool_of(Scripted(), source, sample_filter=broken) as pool:
        with pytest.raises(LookupError, match="the filter is broken"):
            await bounded(pool.next(2))
        assert pool.ready == 2
    assert everywhere(source) == [0, 1]


async def test_the_filter_sorts_out_and_the_sample_filter_sees_what_is_given() -> None:
    seen: list[Any] = []
    source = Buffer(endless())
    options: dict[str, Any] = {"filter": lambda group: (group[0].group_index % 2 == 1, "even")}
    async with pool_of(Scripted(), source, sample_filter=seen.append, **options) as pool:
        given = await bounded(pool.next(3))
        assert [group[0].group_index for group in given] == [1, 3, 5]
        assert seen == [given]
        assert pool.metrics()["streamfold/groups/dropped/even"] >= 3


async def test_who_waits_for_groups_is_served_when_somebody_else_resumes_the_pool() -> None:
    source, script = Buffer(endless()), Scripted({0: (1, "hang"), 2: (1, "hang"), 4: (1, "hang")})
    async with nothing_left(), pool_of(script, source) as pool:
        waiting = asyncio.ensure_future(pool.next(3))
        await until(lambda: len(script.asked) == 6)
        await bounded(pool.pause())
        await asyncio.sleep(0.005)
        assert not waiting.done()
        script.script = {}
        pool.resume()
        assert len(await bounded(waiting)) == 3


async def test_more_groups_may_be_asked_for_than_are_in_flight_at_a_time() -> None:
    async with nothing_left(), pool_of(Scripted(), Buffer(endless()), in_flight=2) as pool:
        given = await bounded(asyncio.gather(pool.next(9), pool.next(5)))
    assert sorted(group[0].group_index for groups in given for group in groups) == list(range(14))


async def test_several_may_wait_for_groups_and_none_gets_those_of_another() -> None:
    source = Buffer(endless())
    async with pool_of(Scripted(wait=0.001), source, in_flight=4) as pool:
        given = await bounded(asyncio.gather(*[pool.next(2) for _ in range(6)]))
        assert sorted(group[0].group_index for groups in given for group in groups) == list(range(12))


async def test_a_cancelled_wait_for_groups_takes_none_with_it() -> None:
    source, script = Buffer(groups_of(3)), Scripted({0: (1, "hang")})
    async with nothing_left(), pool_of(script, source) as pool:
        waiting = asyncio.ensure_future(pool.next(3))
        await until(lambda: pool.ready == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(await bounded(pool.next(2))) == 2


@pytest.mark.parametrize("while_it", ["waits for groups", "pauses"])
async def test_a_cancel_of_the_trainer_leaves_the_block_and_gives_everything_back(while_it: str) -> None:
    source, script = Buffer(groups_of(3)), Scripted({0: (1, "hang"), 2: (1, "hang")})
    begun = asyncio.Event()

    async def train() -> None:
        async with pool_of(script, source) as pool:
            await until(lambda: pool.ready == 1)
            begun.set()
            if while_it == "pauses":
                await pool.pause()
                await asyncio.sleep(0)
            await pool.next(3)

    async with nothing_left():
        training = asyncio.ensure_future(train())
        await bounded(begun.wait())
        await asyncio.sleep(0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(training)
    assert everywhere(source) == [0, 1, 2]
    assert sum(s.response_length for group in source.take(3) for s in group) == 10


async def test_who_still_waits_when_the_pool_is_left_is_told() -> None:
    async with nothing_left():
        async with pool_of(Scripted({0: (1, "hang")}), Buffer(groups_of(1))) as pool:
            waiting = asyncio.ensure_future(pool.next(1))
            await asyncio.sleep(0.005)
        with pytest.raises(StreamfoldError, match="use it inside"):
            await bounded(waiting)
        with pytest.raises(StreamfoldError, match="use it inside"):
            await bounded(pool.next(1))


async def test_a_pool_may_be_entered_again() -> None:
    source = Buffer(endless())
    pool = pool_of(Scripted(), source)
    with pytest.raises(StreamfoldError, match="use it inside"):
        await pool.next(1)
    given: list[Any] = []
    for _ in range(2):
        async with pool:
            given += await bounded(pool.next(2))
    indices = everywhere(source, given)
    assert indices == list(range(len(indices)))


async def test_a_dry_source_that_gets_more_groups_serves_again() -> None:
    source = Buffer(groups_of(1))
    async with pool_of(Scripted(), source) as pool:
        assert len(await bounded(pool.next(2))) == 1
        source.put(groups_of(2, first=1))
        assert len(await bounded(pool.next(2))) == 2


async def test_a_host_source_gets_back_all_that_was_cut() -> None:
    source, script = HostSource(groups_of(3)), Scripted({0: (1, "hang"), 2: (0, "hang"), 3: (0, "hang")})
    async with pool_of(script, source) as pool:
        await until(lambda: pool.ready == 1)
        await bounded(pool.pause())
        assert [group[0].group_index for group in source.back] == [0, 1]
    assert [group[0].group_index for group in source.back] == [0, 1, 2]


async def test_a_filter_that_raises_when_a_pause_comes_loses_nothing() -> None:
    def broken(_group: Any) -> bool:
        raise LookupError("the filter is broken")

    class Ending(Scripted):
        abort_mode = "server"

        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            while not aborted():  # noqa: ASYNC110  # a flag is what generators get
                await asyncio.sleep(0.001)
            return await super().__call__(sample, params, aborted=lambda: False)

    source = Buffer(groups_of(3))
    async with nothing_left(), pool_of(Ending(), source, filter=broken) as pool:
        await until(lambda: pool.in_flight == 3)
        with pytest.raises(LookupError, match="the filter is broken"):
            await bounded(pool.pause())
    assert everywhere(source) == [0, 1, 2]
    assert source.in_flight == 0


def test_at_least_one_group_must_be_in_flight() -> None:
    with pytest.raises(ValueError, match="in_flight"):
        pool_of(Scripted(), Buffer(), in_flight=0)


@pytest.mark.parametrize("loop", LOOPS)
def test_responses_that_were_cut_by_weight_updates_are_whole_and_their_versions_known(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Against an engine, with a new weight version between two calls of the trainer; the model stays the same."""
    caplog.set_level(logging.ERROR)
    source, rewards = Buffer(endless()), Counted()
    given: list[Any] = []

    async def train(engine: Loopback) -> dict[str, float]:
        async with nothing_left(), Client(engine.url) as client:
            options: dict[str, Any] = {
                "sampling_params": {"max_new_tokens": 60, "temperature": 1.0},
                "stop_ids": (engine.tokenizer.eos_token_id,),
                "seed": 5,
                "concurrency": 5,  # so that some are in the middle when others end, however slow the machine is
                "reward": rewards,
            }
            async with pool_of(None, source, in_flight=6, client=client, **options) as pool:
                for version in range(1, 7):
                    given.extend(await bounded(pool.next(2)))
                    await bounded(pool.pause())
                    assert await client.load() == 0
                    body = {"new_version": str(version), "abort_all_requests": False}
                    post(engine, "update_weight_version", body)  # of another thread
                    pool.version = version
                    pool.resume()
                return pool.metrics()

    with Loopback(token_rate=600, stop_probability=1 / 100, weight_version="0", incremental=True) as engine:
        running = LOOPS[loop]()
        try:
            told = running.run_until_complete(train(engine))
        finally:
            running.close()
        changed = 0
        for sample, place in ((sample, place) for group in given for place, sample in enumerate(group)):
            prompt = sample.tokens[: -sample.response_length]
            params = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 5 + place}
            wanted = engine.undisturbed(prompt, params, return_logprob=True)
            assert sample.tokens == [*prompt, *wanted.token_ids]
            assert sample.rollout_log_probs == wanted.logprobs
            spans = sample.version_spans
            assert [spans[0][1], spans[-1][2]] == [0, sample.response_length]
            versions = [int(version) for version, _, _ in spans]
            assert versions == sorted(versions)
            assert sample.metadata["start_rollout_id"] <= versions[0]
            changed += len(versions) > 1
        assert changed
        assert engine.stats().running == 0
    assert told["streamfold/samples/resumed"]
    assert told["streamfold/tokens/lost"] == 0
    assert len(rewards.asked) == len({index for index, _ in rewards.asked})
    indices = everywhere(source, given)
    assert indices == list(range(len(indices)))
