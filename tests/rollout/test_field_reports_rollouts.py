"""What went wrong in other people's rollouts, over real HTTP: budgets, borders, versions, and who ends what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client
from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.samples.completion import complete
from streamfold.samples.merging import merge
from streamfold.samples.options import CompletionOptions
from streamfold.samples.sample import Sample
from support.completing import SOON, answers, completed, sample_of, truncated
from support.loopback_http import load
from support.replay import DONE, HANG, PROMPT, RUNNING, Replay, chunk, event, head, stream, until
from support.rollouts import Counted, bounded, nothing_left, rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.replay import Request, Step

Status = Sample.Status
LIMIT = 8


def part(ids: Sequence[int], *, prompt: int = 3, finish: str | None = None, **meta: Any) -> bytes:
    """The one event of a call."""
    return event(ids, len(ids), finish, prompt_tokens=prompt, **meta)


# Budgets.


async def test_the_budgets_of_a_sample_never_add_up_to_more_than_its_limit_wherever_it_was_cut() -> None:
    """THUDM/slime#2260, verl-project/verl#7207: a resumed call asked for the whole budget again."""
    plan: list[int] = []

    def reply(request: Request) -> list[Step]:
        kept, budget = request.json["input_ids"], request.json["sampling_params"]["max_new_tokens"]
        assert len(kept) + budget == len(PROMPT) + LIMIT
        more = min(plan.pop(0) if plan else LIMIT, budget)
        ids = list(range(len(kept), len(kept) + more))
        return stream(part(ids, prompt=len(kept), finish="length" if more == budget else "abort"), DONE)

    async with Replay(reply) as server, Client(server.url, retries=SOON) as client:
        for first in range(LIMIT + 1):
            for second in range(LIMIT + 1 - first):
                plan[:] = [first, second]
                sample = await completed(client, sample_of(max_new_tokens=LIMIT))
                assert sample.tokens == [*PROMPT, *range(3, 3 + LIMIT)]
                assert (sample.status, sample.response_length) == (Status.TRUNCATED, LIMIT)


async def test_a_sample_that_was_cut_at_its_last_token_ends_without_a_request_and_is_judged_once() -> None:
    """THUDM/slime#92, TIGER-AI-Lab/verl-tool#86: a budget of 0 was asked for, or the sample stayed aborted."""
    full: list[Step] = [head(), chunk(part([1, 2, 3, 4])), HANG]
    short = [0.05, *stream(part([9], finish="stop"), DONE)]
    groups = [[Sample(group_index=i, index=i, tokens=[i, 6, 7])] for i in range(2)]
    source, rewards = Buffer(groups), Counted()
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "reward": rewards}
    async with Replay(lambda request: full if request.json["input_ids"][0] == 0 else short) as server:
        async with Client(server.url) as client:
            again = rollout(client=client, sampling_params={"max_new_tokens": 4}, **options)
            first = await bounded(again.run(source))
            assert first.groups == [groups[1]]
            assert (groups[0][0].status, groups[0][0].response_length) == (Status.ABORTED, 4)
            second = await bounded(again.run(source))
        assert second.groups == [groups[0]]
        assert len(server.generates) == 2
    assert groups[0][0].status is Status.TRUNCATED
    assert rewards.asked == [(1, "j"), (0, "bcde")]


async def test_a_budget_of_nothing_from_the_start_is_a_truncated_sample_with_a_reward() -> None:
    source, rewards = Buffer([[Sample(group_index=0, index=0, tokens=list(PROMPT))]]), Counted()
    async with Replay() as server, Client(server.url) as client:
        none = rollout(client=client, groups=1, reward=rewards, sampling_params={"max_new_tokens": 0})
        ((sample,),) = (await bounded(none.run(source))).groups
        assert server.generates == []
    assert (sample.status, sample.response_length, rewards.asked) == (Status.TRUNCATED, 0, [(0, "")])


async def test_samples_that_share_their_parameters_do_not_lower_each_others_limit() -> None:
    """verl-project/verl#6364."""
    shared: dict[str, Any] = {"max_new_tokens": LIMIT, "min_new_tokens": 2, "stop": ["x"], "custom_params": {"a": [1]}}
    replies = [truncated(part([20, 21])), *[stream(part([22], prompt=n, finish="stop"), DONE) for n in (5, 3, 3)]]
    async with Replay(answers(*replies)) as server, Client(server.url, retries=SOON) as client:
        for _ in range(3):
            await complete(client, sample_of(), shared)
        asked = [request.json["sampling_params"] for request in server.generates]
    assert [params["max_new_tokens"] for params in asked] == [LIMIT, LIMIT - 2, LIMIT, LIMIT]
    assert shared == {"max_new_tokens": LIMIT, "min_new_tokens": 2, "stop": ["x"], "custom_params": {"a": [1]}}


# Versions.


@pytest.mark.parametrize("kind", ["restarted", "kept", "masked"])
async def test_each_token_of_a_sample_has_a_known_version_or_the_sample_has_one(kind: str) -> None:
    """THUDM/slime#2092: tokens of several weight versions in one sample, and nothing masked."""
    parts: list[list[Step]] = [
        [head(), chunk(event([1, 2], 2, prompt_tokens=3, weight_version="2")), HANG],
        [head(), chunk(event([3, 4], 2, prompt_tokens=5 if kind != "restarted" else 3, weight_version="4")), HANG],
        stream(part([5, 6, 7], prompt=7 if kind != "restarted" else 3, finish="stop", weight_version="6"), DONE),
    ]
    last: list[Step] = [0.05, *stream(part([9], finish="stop", weight_version="2"), DONE)]
    (sample,), *others = ([Sample(group_index=i, index=i, tokens=[i, 6, 7])] for i in range(3))
    source = Buffer([[sample], *others])
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": kind != "restarted"}
    async with Replay() as server, Client(server.url) as client:
        turns = iter(parts)
        server.routes["/generate"] = lambda request: next(turns) if request.json["input_ids"][0] == 0 else last
        mine = rollout(client=client, mask_offpolicy=kind == "masked", **options)
        for rollout_id in range(2):
            given = await bounded(mine.run(source, rollout_id))
            assert given.groups == [others[rollout_id]]
        assert (await bounded(mine.run(source, 2))).groups == [[sample]]
    if kind == "restarted":
        assert (sample.tokens, sample.version_spans) == ([0, 6, 7, 5, 6, 7], [("6", 0, 3)])
        assert sample.loss_mask == [1, 1, 1]
        assert sample.rollout_log_probs == [-5 / 8, -6 / 8, -7 / 8]
        assert "start_rollout_id" not in sample.metadata
        return
    assert sample.tokens == [0, 6, 7, 1, 2, 3, 4, 5, 6, 7]
    assert sample.version_spans == [("2", 0, 2), ("4", 2, 4), ("6", 4, 7)]
    assert sample.loss_mask == ([0, 0, 0, 0, 1, 1, 1] if kind == "masked" else [1] * 7)
    assert sample.metadata["start_rollout_id"] == 0


# Ends.


@pytest.mark.parametrize("delay", [0, 2.0, None], ids=["at once", "late", "never"])
async def test_a_request_that_was_cut_does_not_run_on_and_a_whole_answer_is_never_aborted(delay: float | None) -> None:
    """sgl-project/sglang#36552, vllm-project/vllm#32439; the engine notices at once, late or never who has left."""
    options: dict[str, Any] = {"token_rate": 500, "stop_probability": 0, "leave_delay": delay}
    with Loopback(**options) as engine:
        async with Client(engine.url) as client:
            for _ in range(3):
                assert (await client.generate(PROMPT, {"max_new_tokens": 5})).finish_reason == "length"
            assert engine.stats().aborts == ()
            call = client.start(PROMPT, {"max_new_tokens": 20_000})
            await until(lambda: call.token_count >= 2)
            await call.abort()
            await until(lambda: load(engine) == (0, 0), 1.5)
            assert set(engine.stats().aborts) == {call.rid}


@pytest.mark.parametrize("kind", ["content_filter", "timeout", "error"])
async def test_an_end_of_an_unknown_kind_is_no_end_and_gets_no_reward(kind: str) -> None:
    """vllm-project/vllm#57082: whatever was not known was taken for complete."""
    source, rewards = Buffer([[Sample(group_index=0, index=0, tokens=list(PROMPT))]]), Counted()
    options: dict[str, Any] = {"groups": 1, "reward": rewards, "partial_rollout": True}
    async with Replay(stream(part([1, 2], finish=kind), DONE)) as server, Client(server.url, retries=SOON) as client:
        assert (await bounded(rollout(client=client, **options).run(source))).groups == []
        assert rewards.asked == []
        server.routes["/generate"] = stream(part([1, 2, 3], finish="stop"), DONE)
        ((sample,),) = (await bounded(rollout(client=client, **options).run(source))).groups
    assert sample.tokens == [*PROMPT, 1, 2, 3]
    assert rewards.asked == [(0, "bcd")]


async def test_generators_of_either_kind_side_by_side_are_ended_each_in_its_own_way() -> None:
    """THUDM/slime#2272: a host's abort of whole servers, beside samples that are cut one by one."""

    class Both:
        """Every second sample is cut by an abort of the server alone, and returns by itself then."""

        @staticmethod
        def abort_mode(sample: Sample) -> str:
            return "request" if (sample.index or 0) % 2 else "server"

        def __init__(self, client: Client) -> None:
            self.client = client

        async def __call__(self, sample: Any, params: Any, *, aborted: Callable[[], bool]) -> Any:
            if self.abort_mode(sample) == "request":
                return await complete(self.client, sample, params, options=CompletionOptions(aborted=aborted))
            merge(sample, await self.client.generate(sample.tokens, params))
            return sample

    with Loopback(token_rate=400, stop_probability=0, incremental=True, leave_delay=None) as engine:
        groups = [[Sample(group_index=g, index=2 * g + i, tokens=[300 + g]) for i in range(2)] for g in range(4)]
        source = Buffer(groups)
        params = {"max_new_tokens": 10_000, "temperature": 0}
        async with nothing_left(), Client(engine.url) as client:
            running = asyncio.ensure_future(
                rollout(Both(client), client=client, groups=4, partial_rollout=True, sampling_params=params).run(source)
            )
            await until(lambda: len(client.running) == 8 and all(call.token_count > 3 for call in client.running))
            one_by_one = {call.rid for call in client.running}
            running.cancel()
            await bounded(asyncio.wait({running}))
            assert running.cancelled()
            assert await client.load() == 0
        aborts = set(engine.stats().aborts)
        assert "*" in aborts, "the servers were aborted for those that end in no other way"
        assert len(aborts & one_by_one) >= 4, "and the others were told one by one"
        for sample in (sample for group in source.take(4) for sample in group):
            wanted = engine.undisturbed(sample.tokens[:1], params | {"max_new_tokens": sample.response_length})
            assert sample.response_length > 3
            assert sample.tokens[1:] == wanted.token_ids
            assert sample.status is Status.ABORTED


@pytest.mark.usefixtures("kept_briefly")
async def test_a_cancel_of_the_parent_reaches_every_call_and_nothing_is_tried_again() -> None:
    """jd/tenacity#529: a retry took the cancel for a failure that may pass."""
    async with nothing_left(), Replay(RUNNING) as server, Client(server.url, retries=SOON) as client:
        samples = [sample_of() for _ in range(5)]

        async def parent() -> None:
            await asyncio.gather(*[completed(client, sample) for sample in samples])

        task = asyncio.ensure_future(parent())
        await until(lambda: len(client.running) == 5 and all(call.token_count == 2 for call in client.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(task)
        await until(lambda: not client.running)
        await until(lambda: all(sample.status is Status.ABORTED for sample in samples))
        assert len(server.generates) == 5
        assert sorted(server.aborts) == sorted(request.json["rid"] for request in server.generates)
        await until(lambda: server.open == 0)
    assert all(sample.tokens == [*PROMPT, 1, 2] for sample in samples)
