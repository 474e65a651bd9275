"""A rollout from its first group to its last: what is asked of the source, when, who gets what, and what it tells."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from typing import Any

import pytest

from conftest import LOOPS
from streamfold import Client, StreamfoldError
from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.rollout import RolloutConfig
from streamfold.rollout.runner import RateLimiter
from streamfold.samples.sample import Sample
from support.replay import DONE, Replay, event, stream
from support.rollouts import (
    Counted,
    HostSource,
    NoEngine,
    Scripted,
    bounded,
    endless,
    everywhere,
    groups_of,
    nothing_left,
    rollout,
    snapshot,
)

Status = Sample.Status


class Asked(Buffer):
    """Notes what it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[int] = []

    def get_samples(self, n: int) -> list[Any]:
        self.asked.append(n)
        return self.take(n)


# How many, and in which order.


async def test_a_rollout_gives_as_many_groups_as_it_was_told_sorted_by_their_index() -> None:
    source = Asked(endless())
    script = Scripted({0: (1, "hang"), 1: (1, Status.COMPLETED)})
    async with nothing_left():
        result = await bounded(rollout(script, groups=3, over_sampling=5).run(source))
    assert [group[0].group_index for group in result.groups] == [1, 2, 3]
    assert source.asked == [5]
    assert everywhere(source, result.groups) == [0, 1, 2, 3, 4]
    assert source.in_flight == 0
    assert not result.is_short


async def test_the_source_is_asked_again_when_too_few_groups_are_left_to_make_up_the_number() -> None:
    source = Asked(endless())
    result = await bounded(
        rollout(Scripted(), groups=4, over_sampling=3, filter=lambda group: group[0].group_index % 2 == 0).run(source)
    )
    assert [group[0].group_index for group in result.groups] == [0, 2, 4, 6]
    assert source.asked[:2] == [3, 3], "three are fewer than four"
    assert result.metrics["streamfold/groups/dropped/filter"] >= 3
    assert source.in_flight == 0


async def test_a_source_that_runs_dry_ends_the_rollout_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    async with nothing_left():
        result = await bounded(rollout(Scripted(), groups=4, over_sampling=8).run(Buffer(groups_of(3))))
    assert len(result.groups) == 3
    assert result.is_short
    assert result.metrics["streamfold/source_dry"] == 1
    assert "ran out: rollout 0 ends with 3 of 4 groups\n" in caplog.text


async def test_a_source_without_any_group_gives_an_empty_rollout() -> None:
    result = await bounded(rollout(Scripted(), groups=4).run(Buffer()))
    assert result.groups == []
    assert result.is_short
    assert all(value == value for value in result.metrics.values())  # noqa: PLR0124  # no NaN


async def test_finished_groups_beyond_the_number_wait_for_the_next_rollout_and_are_not_asked_again() -> None:
    source, rewards = Buffer(endless()), Counted()
    first = await bounded(rollout(Scripted(wait=0.01), groups=2, over_sampling=5, reward=rewards).run(source, 0))
    assert first.metrics["streamfold/groups/kept"] == len(source) == 3
    waiting = source.take(3)
    source.put(waiting)
    before = [[snapshot(sample) for sample in group] for group in waiting]
    script = Scripted()
    second = await bounded(rollout(script, groups=3, reward=rewards).run(source, 1))
    assert second.groups == waiting
    assert [[vars(sample) for sample in group] for group in second.groups] == before
    assert script.asked == []
    assert len(rewards.asked) == len({index for index, _ in rewards.asked}) == 10
    assert second.metrics["streamfold/staleness/max"] == 1


async def test_an_option_drops_finished_groups_beyond_the_number() -> None:
    source = Buffer(endless())
    options: dict[str, Any] = {"groups": 2, "over_sampling": 5, "keep_finished": False}
    result = await bounded(rollout(Scripted(), **options).run(source))
    assert (len(source), source.in_flight) == (0, 0)
    assert result.metrics["streamfold/groups/dropped/surplus"] == 3


# Filters.


async def test_groups_that_the_filter_drops_are_counted_by_reason_forgotten_and_made_up_for() -> None:
    def useful(group: list[Sample]) -> bool | tuple[bool, str]:
        index = group[0].group_index or 0
        verdicts: list[bool | tuple[bool, str]] = [True, (False, "too easy"), (True, "fine"), (False, "too hard")]
        return verdicts[index % 4]

    source = Buffer(endless())
    result = await bounded(rollout(Scripted(), groups=4, filter=useful).run(source))
    assert [group[0].group_index for group in result.groups] == [0, 2, 4, 6]
    dropped = {name: value for name, value in result.metrics.items() if "/dropped/" in name}
    assert set(dropped) == {"streamfold/groups/dropped/too easy", "streamfold/groups/dropped/too hard"}
    assert sum(dropped.values()) == result.metrics["streamfold/groups/dropped"] >= 3
    assert source.in_flight == 0


async def test_the_sample_filter_sees_the_groups_of_the_rollout_once() -> None:
    seen: list[Any] = []

    def leave_out(groups: list[list[Sample]]) -> None:
        seen.append(list(groups))
        groups[0][0].remove_sample = True

    result = await bounded(
        rollout(Scripted(), groups=2, over_sampling=4, sample_filter=leave_out).run(Buffer(endless()))
    )
    assert seen == [result.groups]
    assert [s.remove_sample for group in result.groups for s in group] == [True, False, False, False]


@pytest.mark.parametrize("what", ["filter", "sample_filter"])
async def test_a_filter_that_raises_ends_the_rollout_and_nothing_is_lost(what: str) -> None:
    def broken(_groups: Any) -> bool:
        raise LookupError("the filter is broken")

    source = Buffer(groups_of(5))
    async with nothing_left():
        with pytest.raises(LookupError, match="the filter is broken"):
            await bounded(rollout(Scripted(), groups=2, over_sampling=4, **{what: broken}).run(source))
    assert source.in_flight == 0
    assert everywhere(source) == [0, 1, 2, 3]


async def test_a_source_that_raises_ends_the_rollout_and_what_it_gave_goes_back() -> None:
    def groups() -> Any:
        yield from groups_of(2)
        raise OSError("the disk is gone")

    source = Buffer(groups())
    options: dict[str, Any] = {"groups": 3, "over_sampling": 2}
    async with nothing_left():
        with pytest.raises(OSError, match="the disk is gone"):
            await bounded(rollout(Scripted(), **options).run(source))
    assert everywhere(source) == [0, 1]


# What a sample gets.


async def test_each_sample_of_a_group_has_a_seed_of_its_own_which_a_resume_keeps() -> None:
    source = Buffer(endless(3))
    script = Scripted({1: (1, "hang")}, wait=0.01)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "seed": 40, "partial_rollout": True}
    await bounded(rollout(script, **options).run(source))
    seeds = dict(zip(script.asked, (params["sampling_seed"] for params in script.params), strict=True))
    assert seeds == {0: 40, 1: 41, 2: 42, 3: 40, 4: 41, 5: 42}
    again = Scripted()
    await bounded(rollout(again, **options | {"over_sampling": 1}).run(source))
    assert again.asked[0] == 1
    assert again.params[0]["sampling_seed"] == 41


async def test_the_parameters_of_one_sample_are_its_own() -> None:
    """verl-project/verl#6364: a generator that lowers a limit lowered it for all."""
    given = {"max_new_tokens": 8, "custom_params": {"deep": [1]}}

    class Rude(Scripted):
        async def __call__(self, sample: Any, params: dict[str, Any], **more: Any) -> Any:
            assert params == {"max_new_tokens": 8, "custom_params": {"deep": [1]}}
            params["max_new_tokens"] -= 1
            params["custom_params"]["deep"].append(2)
            return await super().__call__(sample, params, **more)

    result = await bounded(rollout(Rude(), groups=3, sampling_params=given).run(Buffer(endless())))
    assert result.metrics["streamfold/groups/failed"] == 0
    assert given == {"max_new_tokens": 8, "custom_params": {"deep": [1]}}


async def test_each_sample_has_a_session_of_its_own_by_which_a_router_knows_it() -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        (group,) = [[Sample(group_index=0, index=i, tokens=[5, 6, 7]) for i in range(3)]]
        group[2].session_id = "mine"
        await bounded(rollout(client=client, groups=1).run(Buffer([group])))
        keys = sorted(request.headers["x-smg-routing-key"] for request in server.generates)
    assert keys == sorted(str(sample.session_id) for sample in group)
    assert len(set(keys)) == 3
    assert "mine" in keys


async def test_requests_name_the_data_parallel_rank_with_the_fewest() -> None:
    gate = asyncio.Event()
    async with Replay([gate, *stream(event([1], 1, "stop"), DONE)]) as server, Client(server.url) as client:
        source = Buffer([[Sample(group_index=0, index=i, tokens=[5, 6, 7]) for i in range(7)]])
        running = asyncio.ensure_future(rollout(client=client, groups=1, dp_size=3).run(source))
        while len(server.generates) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        gate.set()
        await bounded(running)
        ranks = Counter(request.json["routed_dp_rank"] for request in server.generates)
        assert sorted(ranks) == [0, 1, 2]
        assert max(ranks.values()) - min(ranks.values()) <= 1
        await bounded(rollout(client=client, groups=1).run(Buffer(groups_of(1))))
        assert "routed_dp_rank" not in server.generates[-1].json, "older engines do not know it"


# How much at once.


async def test_no_more_samples_run_at_once_than_was_said_for_each_engine() -> None:
    class Three(NoEngine):
        async def workers(self) -> list[str]:
            return ["a", "b", "c"]

    for client, most in ((NoEngine(), 2), (Three(), 6)):
        script = Scripted(wait=0.002)
        await bounded(rollout(script, groups=6, concurrency=2, client=client).run(Buffer(endless(4))))
        assert script.most == most


async def test_starts_are_paced_in_their_order() -> None:
    pace, clock = RateLimiter(3), asyncio.get_running_loop().time
    passed: list[tuple[int, float]] = []

    async def one(i: int) -> None:
        await pace.wait()
        passed.append((i, clock()))

    await asyncio.gather(*[one(i) for i in range(14)])
    assert [i for i, _ in passed] == list(range(14))
    for (_, earlier), (_, later) in zip(passed, passed[3:], strict=False):
        assert later > earlier
    first_of_each = [when for _, when in passed[::3]]
    assert all(after - before >= 0.001 for before, after in itertools.pairwise(first_of_each))


# Failures.


async def test_a_generator_that_raises_loses_neither_its_siblings_nor_the_rollout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, rewards = Buffer(endless()), Counted()
    script = Scripted({0: (3, LookupError("a tool is gone")), 1: (2, Status.COMPLETED)})
    options: dict[str, Any] = {"groups": 2, "partial_rollout": True, "reward": rewards, "sample_retries": 0}
    async with nothing_left():
        result = await bounded(rollout(script, **options).run(source, 4))
    assert [group[0].group_index for group in result.groups] == [1, 2]
    assert result.metrics["streamfold/groups/failed"] == 1
    assert "a tool is gone" in caplog.text
    ((broken, sibling),) = source.take(1)
    assert (broken.status, broken.response_length) == (Status.ABORTED, 3)
    assert (sibling.status, sibling.reward) == (Status.COMPLETED, 2.0)
    source.put([[broken, sibling]])
    again = Scripted()
    second = await bounded(rollout(again, **options).run(source, 5))
    assert second.groups[0] == [broken, sibling]
    assert again.asked[0] == broken.index
    assert 1 not in again.asked
    assert [index for index, _ in rewards.asked].count(1) == 1


async def test_a_group_that_fails_in_rollout_after_rollout_is_dropped_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Buffer(endless())
    script = Scripted({0: (0, ValueError("the prompt is too long"))})
    trainer = rollout(script, groups=1, group_tries=3)
    told = [(await bounded(trainer.run(source, rollout_id))).metrics for rollout_id in range(4)]
    assert [metrics["streamfold/groups/failed"] for metrics in told] == [1, 1, 1, 0]
    assert told[2]["streamfold/groups/dropped/failed"] == 1
    assert script.asked.count(0) == 3
    assert "group 0 is dropped" in caplog.text
    assert source.in_flight == 0


@pytest.mark.parametrize(
    "kind", ["a generator that raises", "one that is no coroutine function", "samples left PENDING"]
)
async def test_a_fault_of_all_groups_ends_the_rollout_with_its_cause_and_everything_goes_back(kind: str) -> None:
    class Broken(Scripted):
        async def __call__(self, sample: Any, params: dict[str, Any], **more: Any) -> Any:
            if kind == "a generator that raises":
                raise TypeError("a typo")
            return sample

    generate: Any = Broken() if kind != "one that is no coroutine function" else lambda sample, _params, aborted: sample
    source = Buffer(endless())
    async with nothing_left():
        with pytest.raises(StreamfoldError, match="3 groups have failed") as caught:
            await bounded(rollout(generate, groups=4, max_failures=2).run(source))
    assert isinstance(caught.value.__cause__, TypeError if "PENDING" not in kind else ValueError)
    assert source.in_flight == 0
    waiting = source.take(len(source))
    assert [group[0].group_index for group in waiting] == list(range(len(waiting)))
    assert all("streamfold_failures" not in s.metadata for group in waiting for s in group), "it is not theirs"


async def test_a_sample_that_comes_back_aborted_though_nobody_aborted_is_a_failure_that_is_told() -> None:
    source = Buffer(endless(1))
    script = Scripted({0: (2, Status.ABORTED)})
    result = await bounded(rollout(script, groups=1, partial_rollout=True).run(source))
    assert result.metrics["streamfold/groups/failed"] == 1
    ((sample,),) = source.take(1)
    assert (sample.index, sample.response_length) == (0, 2)


# What it tells.


async def test_the_metrics_are_floats_and_agree_with_what_happened() -> None:
    source, rewards = Buffer(endless()), Counted()
    script = Scripted({0: (3, "hang"), 1: (2, Status.COMPLETED), 2: (0, "hang"), 3: (0, "hang")}, wait=0.01)
    options: dict[str, Any] = {"groups": 2, "over_sampling": 4, "reward": rewards, "partial_rollout": True}
    first = (await bounded(rollout(script, **options).run(source, 0))).metrics
    assert all(type(value) is float and name.startswith("streamfold/") for name, value in first.items())
    told = {name.removeprefix("streamfold/"): value for name, value in first.items()}
    assert (told["groups/done"], told["groups/aborted"], told["groups/put_back"], told["groups/fresh"]) == (2, 2, 2, 1)
    assert (told["tokens/generated"], told["tokens/kept"], told["tokens/lost"]) == (13, 3, 0)
    assert (told["samples/started"], told["samples/resumed"], told["rewards"]) == (8, 0, 5)
    assert told["tokens_per_second"] == pytest.approx(13 / told["seconds"])
    assert 0 <= told["abort_seconds"] <= told["seconds"]
    second = (await bounded(rollout(Scripted(), **options | {"over_sampling": 2}).run(source, 2))).metrics
    assert second["streamfold/samples/resumed"] == 1
    assert (second["streamfold/staleness/max"], second["streamfold/staleness/mean"]) == (2, 1)


async def test_a_pause_of_the_event_loop_is_seen() -> None:
    def slow(_group: Any) -> bool:
        time.sleep(0.08)
        return True

    script = Scripted(wait=0.03)
    result = await bounded(rollout(script, groups=2, concurrency=2, filter=slow).run(Buffer(endless())))
    assert result.metrics["streamfold/longest_pause"] >= 0.05


async def test_a_group_begun_too_many_rollouts_ago_starts_again() -> None:
    for max_staleness, restarted in ((1, True), (2, False)):
        source = Buffer(endless())
        script = Scripted({0: (3, "hang")}, wait=0.01)
        options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True}
        await bounded(rollout(script, **options).run(source, 5))
        limited = options | {"max_staleness": max_staleness, "over_sampling": 1, "stale": "restart"}
        result = await bounded(rollout(Scripted(), **limited).run(source, 7))
        (sample, sibling) = result.groups[0]
        assert (sample.index, sample.response_length) == (0, 2 if restarted else 5)
        assert "start_rollout_id" not in sample.metadata if restarted else sample.metadata["start_rollout_id"] == 5
        assert sibling.response_length == 2
        assert result.metrics["streamfold/groups/stale"] == restarted
        assert result.metrics["streamfold/tokens/lost"] == (5 if restarted else 0)


def test_a_progress_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    async def once(*, progress: bool) -> None:
        async with nothing_left():
            await bounded(rollout(Scripted(wait=0.01), groups=2, progress=progress).run(Buffer(endless())))

    for terminal, progress in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        asyncio.run(once(progress=progress))
        drawn = capfd.readouterr().err
        assert ("2/2" in drawn) == (terminal and progress)


# The configuration.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", 0), ("over_sampling", 0), ("concurrency", -1), ("starts_per_ms", 0), ("reward_threads", 0),
        ("dp_size", 0), ("n_samples_per_prompt", 0), ("group_tries", 0), ("max_failures", -1), ("max_staleness", -1),
        ("abort_seconds", -1.0), ("resume", "perhaps"), ("groups", 2.5), ("reward_seconds", -1.0),
        ("reward_seconds", None), ("sample_seconds", 0), ("sample_seconds", -1.0), ("sample_retries", -1),
        ("max_failure_rate", 1.5), ("max_failure_rate", "0.5"), ("max_failure_rate", True), ("max_groups_drawn", 0),
        ("stale", "mask"),
        ("routing_header", "X Mine"), ("extra", {"text": "x"}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        RolloutConfig(**{"groups": 1, field: value})


@pytest.mark.parametrize("headers", [{"Host": "x"}, {"X-Mine": "a\nb"}])
def test_a_header_that_cannot_be_sent_is_refused_by_its_name(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"header {next(iter(headers))} "):
        RolloutConfig(groups=1, headers=headers)


def test_the_built_in_generator_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        rollout(groups=1, sampling_params={})


# Over HTTP.


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("masked", [False, True])
def test_groups_that_are_cut_and_gone_on_with_end_as_if_undisturbed(loop: str, masked: bool) -> None:
    """Each rollout in an event loop of its own, with a client of its own."""
    source, rewards = Buffer(endless(3)), Counted()
    given: list[Any] = []
    resumed = 0
    with Loopback(token_rate=400, stop_probability=1 / 40, seed=3, incremental=masked) as engine:
        options: dict[str, Any] = {
            "groups": 3,
            "over_sampling": 8,
            "concurrency": 7,  # so that some are in the middle when others end, however slow the machine is
            "partial_rollout": True,
            "mask_offpolicy": masked,
            "seed": 11,
            "reward": rewards,
            "sampling_params": {"max_new_tokens": 100, "temperature": 1.0},
            "stop_ids": (engine.tokenizer.eos_token_id,),
        }

        async def once(rollout_id: int) -> Any:
            async with nothing_left(), Client(engine.url) as client:
                return await bounded(rollout(client=client, **options).run(source, rollout_id))

        for rollout_id in range(4):
            result = run(loop, once(rollout_id))
            assert len(result.groups) == 3
            assert result.metrics["streamfold/tokens/lost"] == 0
            resumed += result.metrics["streamfold/samples/resumed"]
            given += result.groups
        for group in given:
            for place, sample in enumerate(group):
                prompt = sample.tokens[: -sample.response_length]
                params = {**options["sampling_params"], "sampling_seed": 11 + place}
                wanted = engine.undisturbed(prompt, params, return_logprob=True)
                assert sample.tokens == [*prompt, *wanted.token_ids]
                assert sample.rollout_log_probs == wanted.logprobs
                mask = sample.loss_mask
                assert mask == sorted(mask), "what an earlier rollout gave stands first"
                assert masked or 0 not in mask
        judged = Counter(index for index, _ in rewards.asked)
        assert engine.stats().running == 0
    assert resumed
    assert set(judged.values()) == {1}
    assert source.in_flight == 0
    indices = everywhere(source, given)
    assert indices == list(range(len(indices)))


def run(loop: str, work: Any) -> Any:
    running = LOOPS[loop]()
    try:
        return running.run_until_complete(work)
    finally:
        running.close()


async def test_a_host_source_serves_again_what_it_got_back() -> None:
    source = HostSource(groups_of(4))
    script = Scripted({0: (3, "hang")}, wait=0.01)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True}
    await bounded(rollout(script, **options).run(source, 0))
    result = await bounded(rollout(Scripted(), **options | {"over_sampling": 1}).run(source, 1))
    assert result.groups[0][0].index == 0
    assert result.groups[0][0].response_length == 5


def test_a_failed_try_is_logged_as_a_warning_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    script = Scripted({0: (0, LookupError("once"))})
    asyncio.run(rollout(script, groups=1).run(Buffer(endless())))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.exc_info is not None
