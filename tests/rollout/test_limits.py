"""Limits of samples, failures and draws: a rollout ends, keeps what it has, and says what it waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, RolloutConfig, StreamfoldError, complete
from streamfold.loopback import Loopback
from streamfold.rollout import watch
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.samples.sample import Sample
from support.rollouts import Counted, Scripted, append, bounded, endless, everywhere, groups_of, nothing_left, rollout

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH_LOOPS = True

Status = Sample.Status
HANGING: dict[int, Any] = dict.fromkeys(range(1000), (1, "hang"))


# The time of one sample.


@pytest.mark.parametrize("mode", ["request", "server"])
async def test_a_sample_that_reaches_its_time_limit_is_truncated_with_its_tokens_judged_and_never_resumed(
    mode: str,
) -> None:
    source, rewards, script = Buffer(groups_of(2)), Counted(), Scripted({0: (3, "hang")})
    script.abort_mode = mode
    options: dict[str, Any] = {"partial_rollout": True, "reward": rewards, "sample_seconds": 0.05}
    async with nothing_left():
        result = await bounded(rollout(script, groups=2, **options).run(source))
    (slow, sibling), _ = result.groups
    assert (slow.status, slow.response_length, slow.reward) == (Status.TRUNCATED, 3, 3.0)
    assert slow.metadata["streamfold_timed_out"] == 1
    assert sibling.status is Status.COMPLETED
    assert "streamfold_timed_out" not in sibling.metadata
    assert script.asked.count(0) == 1
    assert result.metrics["streamfold/samples/timed_out"] == 1
    assert result.metrics["streamfold/groups/failed"] == 0


async def test_a_function_that_ends_by_itself_when_it_is_cancelled_is_truncated_too() -> None:
    """One that returns an ABORTED sample, and one that raises an error of its own."""

    async def generate(sample: Sample, _params: Any, *, aborted: Callable[[], bool]) -> Sample:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            append(sample, 2)
            sample.status = Status.ABORTED
            if sample.index:
                raise LookupError("the tool was interrupted") from None
        return sample

    source = Buffer(groups_of(1))
    async with nothing_left():
        result = await bounded(rollout(generate, groups=1, partial_rollout=True, sample_seconds=0.02).run(source))
    assert [(s.status, s.response_length) for s in result.groups[0]] == [(Status.TRUNCATED, 2)] * 2
    assert result.metrics["streamfold/samples/timed_out"] == 2
    assert result.metrics["streamfold/samples/retried"] == 0


async def test_the_time_of_a_sample_is_that_of_all_rollouts_that_resume_it() -> None:
    """Otherwise one that is aborted before its limit in each rollout would never end."""
    source = Buffer(endless(1))
    script = Scripted({0: (1, "hang")}, wait=0.02)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "sample_seconds": 0.1}
    for rollout_id in range(100):
        result = await bounded(rollout(script, **options).run(source, rollout_id))
        if result.groups[0][0].index == 0:
            break
    (sample,) = result.groups[0]
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == script.asked.count(0) > 1
    assert sample.metadata["streamfold_seconds"] >= 0.1


async def test_a_sample_without_a_token_at_its_limit_fails_and_has_its_whole_time_when_it_is_tried_again() -> None:
    source, script = Buffer(groups_of(1, 1)), Scripted({0: (0, "hang")})
    trainer = rollout(script, groups=1, partial_rollout=True, sample_seconds=0.03, group_tries=3)
    first = await bounded(trainer.run(source))
    assert first.metrics["streamfold/groups/failed"] == 1
    assert first.metrics["streamfold/samples/timed_out"] == 0
    script.script = {}
    ((sample,),) = (await bounded(trainer.run(source, 1))).groups
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 2)
    assert "streamfold_timed_out" not in sample.metadata


async def test_the_time_in_a_queue_for_a_place_does_not_count() -> None:
    source, script = Buffer(groups_of(6, 1)), Scripted(wait=0.03)
    result = await bounded(rollout(script, groups=6, concurrency=1, sample_seconds=0.15).run(source))
    assert result.metrics["streamfold/samples/timed_out"] == 0


def test_a_response_that_its_limit_ends_is_the_start_of_the_undisturbed_one_with_its_whole_text() -> None:
    """Also one of several calls: their joined text is decoded as a whole."""

    async def train(engine: Loopback) -> Any:
        async with nothing_left(), Client(engine.url, tokenizer=engine.tokenizer) as client:
            trainer = rollout(
                client=client,
                groups=2,
                over_sampling=2,
                partial_rollout=True,
                sample_seconds=0.4,
                seed=3,
                sampling_params={"max_new_tokens": 4000, "ignore_eos": True},
            )
            source = Buffer(groups_of(2))
            cut = asyncio.ensure_future(trainer.run(source))
            await asyncio.sleep(0.2)
            cut.cancel()
            await asyncio.gather(cut, return_exceptions=True)
            return await bounded(trainer.run(source, 1))

    with Loopback(token_rate=300, incremental=True) as engine:
        result = asyncio.run(train(engine))
        for group in result.groups:
            for place, sample in enumerate(group):
                prompt, length = sample.tokens[: -sample.response_length], sample.response_length
                params = {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": 3 + place}
                wanted = engine.undisturbed(prompt, params, return_logprob=True)
                assert (sample.status, 0 < length < 4000) == (Status.TRUNCATED, True)
                assert sample.tokens == [*prompt, *wanted.token_ids]
                assert sample.rollout_log_probs == wanted.logprobs
                assert sample.response == engine.tokenizer.decode(list(wanted.token_ids))
        assert engine.stats().running == 0
    assert result.metrics["streamfold/samples/timed_out"] == 4


@pytest.mark.parametrize("while_it", ["calls a tool", "generates the next turn"])
def test_a_sample_of_several_turns_that_its_limit_ends_does_not_end_on_a_tools_answer(while_it: str) -> None:
    turn, answer = {"max_new_tokens": 40, "ignore_eos": True}, [7, 8, 9]

    async def train(engine: Loopback) -> Any:
        async with Client(engine.url) as client, Client(stalled.url) as slow:

            async def generate(sample: Sample, _params: Any, *, aborted: Callable[[], bool]) -> Sample:
                await complete(client, sample, turn)
                sample.append_observation(answer, "...")
                if while_it == "calls a tool":
                    await asyncio.Event().wait()
                return await complete(slow, sample, {**turn, "max_new_tokens": 90})

            trainer = rollout(generate, client=client, groups=1, partial_rollout=True, sample_seconds=0.5)
            return await bounded(trainer.run(Buffer(groups_of(1, 1))))

    with Loopback() as engine, Loopback(token_rate=0.001) as stalled:
        ((sample,),) = asyncio.run(train(engine)).groups
    assert (sample.status, sample.response_length, sample.loss_mask) == (Status.TRUNCATED, 40, [1] * 40)


# Another try of one sample.


class Failing(Scripted):
    """Raises ``error`` behind three tokens, the first ``times`` times that it generates sample 0."""

    def __init__(self, error: BaseException, times: int = 1, *, status: Status = Status.ABORTED) -> None:
        super().__init__()
        self.error = error
        self.times = times
        self.status = status
        self.lengths: list[int] = []

    async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
        if sample.index == 0:
            self.lengths.append(sample.response_length)
            if len(self.lengths) <= self.times:
                append(sample, 3)
                sample.status = self.status
                raise self.error
        return await super().__call__(sample, params, aborted=aborted)


@pytest.mark.parametrize("status", [Status.ABORTED, Status.COMPLETED, Status.PENDING])
@pytest.mark.parametrize("partial", [True, False])
async def test_a_sample_whose_function_raises_is_tried_again_in_place_from_where_it_was(
    partial: bool, status: Status
) -> None:
    """Whatever status its last turn has left: a tool raises behind a turn that complete() has finished."""
    script, rewards = Failing(LookupError("a tool is gone"), status=status), Counted()
    trainer = rollout(script, groups=1, partial_rollout=partial, reward=rewards)
    async with nothing_left():
        result = await bounded(trainer.run(Buffer(groups_of(1))))
    (sample, _) = result.groups[0]
    assert script.lengths == ([0, 3] if partial else [0, 0])
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 5 if partial else 2)
    assert sorted(index for index, _ in rewards.asked) == [0, 1]
    metrics = result.metrics
    assert (metrics["streamfold/samples/retried"], metrics["streamfold/groups/failed"]) == (1, 0)
    assert metrics["streamfold/tokens/lost"] == (0 if partial else 3)
    assert metrics["streamfold/tokens/generated"] == 7


@pytest.mark.parametrize("status", [Status.ABORTED, Status.COMPLETED])
async def test_after_its_last_try_a_sample_fails_with_its_group_and_is_resumed_by_the_next_rollout(
    status: Status,
) -> None:
    script, rewards, source = Failing(LookupError("a tool"), times=3, status=status), Counted(), Buffer(groups_of(1))
    trainer = rollout(script, groups=1, partial_rollout=True, sample_retries=2, reward=rewards)
    first = await bounded(trainer.run(source))
    assert (script.lengths, first.metrics["streamfold/groups/failed"]) == ([0, 3, 6], 1)
    assert [index for index, _ in rewards.asked] == [1], "a turn was finished, not the sample"
    again = await bounded(trainer.run(source, 1))
    assert script.lengths == [0, 3, 6, 9]
    assert [(s.status, s.response_length) for s in again.groups[0]] == [(Status.COMPLETED, 11), (Status.COMPLETED, 2)]
    assert sorted(index for index, _ in rewards.asked) == [0, 1]


@pytest.mark.parametrize(
    "error", [ValueError("a field"), TypeError("a typo"), StreamfoldError("retried by the client")], ids=repr
)
async def test_an_error_that_would_come_again_or_was_retried_already_is_not_tried_again(error: Exception) -> None:
    script = Failing(error)
    result = await bounded(rollout(script, groups=1, partial_rollout=True).run(Buffer(groups_of(1))))
    assert script.lengths == [0]
    assert result.metrics["streamfold/groups/failed"] == 1


async def test_a_cancel_is_not_an_error_that_is_tried_again() -> None:
    script = Failing(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await bounded(rollout(script, groups=1, partial_rollout=True).run(Buffer(groups_of(1))))
    assert script.lengths == [0]


async def test_nothing_is_tried_again_once_the_rollout_is_being_aborted() -> None:
    class Interrupted(Scripted):
        async def __call__(self, sample: Any, params: Any, *, aborted: Any) -> Any:
            try:
                return await super().__call__(sample, params, aborted=aborted)
            except asyncio.CancelledError:
                raise LookupError("interrupted") from None

    source, script = Buffer(endless(1)), Interrupted({0: (2, "hang")}, wait=0.01)
    async with nothing_left():
        result = await bounded(rollout(script, groups=1, over_sampling=2, partial_rollout=True).run(source))
    assert script.asked == [0, 1]
    assert result.metrics["streamfold/groups/failed"] == 0
    assert source.take(1)[0][0].response_length == 2


# How many groups may fail.


def failing_share(share: float) -> Scripted:
    """Of each 100 groups of one sample so many fail."""
    return Scripted({i: (0, LookupError(f"tool {i}")) for i in range(10_000) if i % 100 < share * 100})


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_rollout_in_which_some_groups_fail_goes_on_and_one_in_which_many_fail_ends(pooled: bool) -> None:
    async def run(script: Scripted, source: Buffer) -> int:
        trainer = rollout(script, groups=64, sample_retries=0, starts_per_ms=1000, concurrency=8)
        if not pooled:
            return len((await bounded(trainer.run(source))).groups)
        async with Pool(trainer, source) as pool:
            return len(await bounded(pool.next(64)))

    async with nothing_left():
        few = Scripted({i: (0, LookupError("a tool is gone")) for i in range(0, 10_000, 10)})
        assert await run(few, Buffer(endless(1))) == 64, "one in ten: more than 8 in all"
        many, source = failing_share(0.6), Buffer(endless(1))
        with pytest.raises(StreamfoldError, match=r"groups have failed of .* but max_failure_rate is 0.25") as caught:
            await run(many, source)
    assert isinstance(caught.value.__cause__, LookupError)
    assert source.in_flight == 0
    indices = everywhere(source)
    assert indices == list(range(len(indices)))


async def test_the_share_of_failed_groups_means_nothing_among_a_few() -> None:
    script = Scripted({i: (0, LookupError("a tool is gone")) for i in range(3)})
    options: dict[str, Any] = {"groups": 4, "sample_retries": 0}
    result = await bounded(rollout(script, **options).run(Buffer(endless(1))))
    assert result.metrics["streamfold/groups/failed"] == 3
    with pytest.raises(StreamfoldError, match="3 groups have failed, but max_failures is 2"):
        await bounded(rollout(script, max_failures=2, **options).run(Buffer(endless(1))))


async def test_failures_are_limited_only_as_far_as_is_wished() -> None:
    options: dict[str, Any] = {"groups": 4, "sample_retries": 0, "max_failure_rate": None}
    result = await bounded(rollout(failing_share(0.6), **options).run(Buffer(endless(1))))
    assert (len(result.groups), result.metrics["streamfold/groups/failed"]) == (4, 60)


# How many groups are drawn.


async def test_a_filter_that_keeps_nothing_ends_the_rollout_at_the_limit_of_draws_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Buffer(endless())
    options: dict[str, Any] = {"groups": 4, "max_groups_drawn": 10, "filter": lambda _group: (False, "too easy")}
    async with nothing_left():
        result = await bounded(rollout(Scripted(), **options).run(source, 3))
    assert (result.groups, result.is_short) == ([], True)
    why = "10 groups were drawn, as many as max_groups_drawn: rollout 3 ends with 0 of 4 groups"
    assert result.shortage == f"{why}; 10 groups dropped: too easy"
    assert result.shortage in caplog.text
    assert result.metrics["streamfold/groups/drawn"] == 10
    assert result.metrics["streamfold/drawn_out"] == 1
    assert result.metrics["streamfold/source_dry"] == 0
    assert source.take(1)[0][0].group_index == 10, "not one more was taken"


async def test_a_short_rollout_names_the_reasons_by_their_number_and_a_full_one_none() -> None:
    def keep(group: Any) -> tuple[bool, str | None]:
        index = group[0].group_index
        return index == 5, "too hard" if index % 3 else "too easy"

    short = await bounded(rollout(Scripted(), groups=2, filter=keep).run(Buffer(groups_of(6))))
    assert short.shortage == (
        "the source ran out: rollout 0 ends with 1 of 2 groups; 5 groups dropped: 3 too hard, 2 too easy"
    )
    full = await bounded(rollout(Scripted(), groups=1, filter=keep, max_groups_drawn=6).run(Buffer(groups_of(6))))
    assert (full.shortage, full.is_short, full.metrics["streamfold/drawn_out"]) == ("", False, 0)


async def test_a_pool_counts_its_draws_from_one_call_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    source = Buffer(endless())
    options: dict[str, Any] = {
        "groups": 1,
        "max_groups_drawn": 8,
        "filter": lambda group: group[0].group_index % 8 == 7,
    }
    async with nothing_left(), Pool(rollout(Scripted(), **options), source, in_flight=2) as pool:
        given = [await bounded(pool.next(2)) for _ in range(2)]
        assert [[group[0].group_index for group in groups] for groups in given] == [[7], [15]]
        assert pool.metrics()["streamfold/drawn_out"] == 1
    assert "8 groups were drawn, as many as max_groups_drawn: 1 of 2 groups are ready; 7 groups dropped" in caplog.text


def test_a_limit_of_draws_below_the_groups_of_a_rollout_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="max_groups_drawn is 3, but a rollout needs 4 groups"):
        RolloutConfig(groups=4, max_groups_drawn=3)


# What is waited for.


@pytest.mark.parametrize("pooled", [False, True])
async def test_while_no_group_comes_in_the_oldest_is_told_of_again_and_again_with_the_reasons_of_drops(
    pooled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_STALL_SECONDS", 0.05)
    caplog.set_level(logging.WARNING)
    script = Scripted({2: (5, "hang"), 3: (2, Status.COMPLETED)})
    options: dict[str, Any] = {"groups": 2, "partial_rollout": True, "filter": lambda group: group[0].group_index > 0}
    source = Buffer(groups_of(2))
    trainer = rollout(script, concurrency=3, **options)

    def stalls() -> list[str]:
        return [record.message for record in caplog.records if "no group has come in" in record.message]

    async def until_told(work: asyncio.Future[Any]) -> None:
        while len(stalls()) < 3:
            assert not work.done()
            await asyncio.sleep(0.005)

    waiting: asyncio.Task[Any]
    async with nothing_left():
        if pooled:
            async with Pool(trainer, source) as pool:
                waiting = asyncio.create_task(pool.next(2))
                await bounded(until_told(waiting))
                waiting.cancel()
        else:
            waiting = asyncio.create_task(trainer.run(source))
            await bounded(until_told(waiting))
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        told = len(stalls())
        await asyncio.sleep(0.1)
        assert len(stalls()) == told
    assert "1 in flight, 0 ready; 1 groups dropped: filter; the oldest is group 1, started " in stalls()[-1]
    assert "1 of 2 samples are generated, 1 run; 2 tokens kept so far" in stalls()[-1]


async def test_the_state_of_a_group_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place, or its rewards."""
    monkeypatch.setattr(watch, "_STALL_SECONDS", 0.02)

    async def reward(_sample: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def told(text: str, **options: Any) -> None:
        caplog.clear()
        running = asyncio.ensure_future(rollout(groups=1, **options).run(Buffer(groups_of(1, 3))))
        while text not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    queued = "0 of 3 samples are generated, 1 run, 2 wait for a place; 0 tokens kept so far"
    await bounded(told(queued, generate=Scripted(dict(HANGING)), concurrency=1))
    judged = "all 3 samples are generated, rewards are not; 6 tokens kept so far"
    await bounded(told(judged, generate=Scripted(), reward=reward))
