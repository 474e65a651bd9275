"""What becomes of a group: it is one task, and its samples end, go back and start again by rules that exist once."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client
from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import prompt_groups, samples_of
from streamfold.rollout.rollout import RolloutConfig
from streamfold.samples.metadata import add_counts
from streamfold.samples.sample import Sample
from support.host.slime.utils.types import Sample as HostSample
from support.replay import DONE, HANG, Replay, chunk, event, head, stream
from support.rollouts import (
    Counted,
    HostSource,
    NoEngine,
    Scripted,
    append,
    bounded,
    endless,
    groups_of,
    nothing_left,
    rollout,
    snapshot,
)

if TYPE_CHECKING:
    from support.replay import Request

BOTH_LOOPS = True

Status = Sample.Status

# A group of four: complete, truncated, cut after three tokens, cut before the first.
MIXED: dict[int, Any] = {0: (2, Status.COMPLETED), 1: (8, Status.TRUNCATED), 2: (3, "hang"), 3: (0, "hang")}


async def cut_mixed(source: Any, **options: Any) -> tuple[list[Any], dict[str, float]]:
    """A first rollout, which cuts the group of :data:`MIXED` and gives another; the source and what it told."""
    rewards = Counted()
    script = Scripted(dict(MIXED), wait=0.01)
    given = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "reward": rewards, **options}
    result = await bounded(rollout(script, **given).run(source, 5))
    assert [group[0].group_index for group in result.groups] == [1]
    return rewards.asked, result.metrics


async def test_a_group_of_all_kinds_goes_back_as_one_and_its_finished_members_stay_as_they_are() -> None:
    """THUDM/slime#2272, radixark/miles#2589."""
    group, *others = groups_of(2, 4)
    source = Buffer([group, *others])
    async with nothing_left():
        judged, told = await cut_mixed(source)
        assert [s.status.name for s in group] == ["COMPLETED", "TRUNCATED", "ABORTED", "ABORTED"]
        assert [s.response_length for s in group] == [2, 8, 3, 0]
        assert [s.reward for s in group] == [2.0, 8.0, None, None]
        assert [s.metadata.get("start_rollout_id") for s in group] == [5, 5, 5, None]
        assert told["streamfold/groups/put_back"] == 1
        assert told["streamfold/tokens/kept"] == 3
        finished = [snapshot(sample) for sample in group[:2]]

        second, rewards = Scripted(), Counted()
        result = await bounded(rollout(second, groups=1, partial_rollout=True, reward=rewards).run(source, 6))
    assert result.groups == [group]
    assert [vars(sample) for sample in group[:2]] == finished
    assert sorted(second.asked) == [2, 3]
    assert [s.tokens for s in group[2:]] == [[5, 6, 7, 100, 1, 2, 3, 4, 5], [5, 6, 7, 100, 1, 2]]
    assert [s.status for s in group[2:]] == [Status.COMPLETED] * 2
    assert sorted(judged) == sorted(
        [*[(i, s.response) for i, s in enumerate(group[:2])], *[(i, "xx") for i in range(4, 8)]]
    )
    assert sorted(rewards.asked) == [(2, "xxxxx"), (3, "xx")], "once, and on the whole text (THUDM/slime#200)"
    assert [s.metadata.get("start_rollout_id") for s in group] == [5, 5, 5, None], "set once"
    assert result.metrics["streamfold/samples/resumed"] == 1


@pytest.mark.parametrize(("came", "goes_back"), [(0, False), (1, True)])
async def test_a_group_goes_back_to_a_host_for_what_was_cut_and_not_for_what_is_finished(
    came: int, goes_back: bool
) -> None:
    """THUDM/slime#2272: only a sample that was cut, and has a response, is something to go on with."""
    group, other = groups_of(2)
    source, script = HostSource([group, other]), Scripted({0: (2, Status.COMPLETED), 1: (came, "hang")}, wait=0.01)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True}
    result = await bounded(rollout(script, **options).run(source))
    assert result.groups == [other]
    assert source.back == ([group] if goes_back else [])
    assert result.metrics["streamfold/groups/dropped"] == (not goes_back)


async def test_a_sample_whose_generator_says_that_it_failed_is_at_its_end() -> None:
    (group,) = groups_of(1)
    script, rewards = Scripted({0: (1, Status.FAILED)}), Counted()
    result = await bounded(rollout(script, groups=1, reward=rewards).run(Buffer([group])))
    assert (result.groups, sorted(script.asked)) == ([group], [0, 1])
    assert [sample.status for sample in group] == [Status.FAILED, Status.COMPLETED]
    assert sorted(rewards.asked) == [(0, "x"), (1, "xx")]


async def test_a_sample_that_is_cut_again_keeps_the_rollout_in_which_it_was_begun() -> None:
    source = Buffer([*groups_of(2, 4)])
    await cut_mixed(source)
    (group,) = source.take(1)
    source.put([group, *groups_of(1, 4, first=7)])
    again = Scripted({2: (1, "hang"), 3: (2, "hang")}, wait=0.01)
    await bounded(rollout(again, groups=1, over_sampling=2, partial_rollout=True).run(source, 9))
    assert [s.metadata.get("start_rollout_id") for s in group] == [5, 5, 5, 9]
    assert [s.response_length for s in group] == [2, 8, 4, 2]


async def test_without_partial_rollouts_what_was_cut_starts_again_clean_in_every_field() -> None:
    """THUDM/slime#2092: tokens of several weight versions in one sample, with nothing masked."""
    group, other = groups_of(2, 4)
    fresh = [snapshot(sample) for sample in group]
    source = Buffer([group, other])
    _, told = await cut_mixed(source, partial_rollout=False)
    assert [s.status.name for s in group] == ["COMPLETED", "TRUNCATED", "PENDING", "PENDING"]
    restarted = group[2].metadata.pop("streamfold_restarted_tokens")
    for sample, before in zip(group[2:], fresh[2:], strict=True):
        assert {**vars(sample), "session_id": None} == before
    assert restarted == told["streamfold/tokens/lost"] == 3
    assert told["streamfold/tokens/kept"] == 0


async def test_where_nothing_may_outlive_its_rollout_a_cut_group_starts_again_as_a_whole() -> None:
    group, other = groups_of(2, 4)
    await cut_mixed(source := Buffer([group, other]), partial_rollout=False, keep_finished=False)
    assert [(s.status, s.response_length, s.reward) for s in group] == [(Status.PENDING, 0, None)] * 4
    assert len(source) == 1


async def test_a_partial_group_of_an_earlier_run_starts_again_where_partial_rollouts_are_off() -> None:
    """It may come out of a file that was saved while it was in flight."""
    (group,) = groups_of(1, 1)
    append(group[0], 3)
    group[0].status = Status.ABORTED
    result = await bounded(rollout(Scripted(), groups=1).run(Buffer([group])))
    assert group[0].tokens == [5, 6, 7, 100, 1, 2]
    assert result.metrics["streamfold/tokens/lost"] == 3


async def test_the_mask_is_set_on_what_earlier_rollouts_generated_before_anything_else() -> None:
    group, other = groups_of(2, 4)
    source = Buffer([group, other])
    await cut_mixed(source)
    options: dict[str, Any] = {"partial_rollout": True, "mask_offpolicy": True}
    await bounded(rollout(Scripted(), groups=1, **options).run(source, 6))
    assert [s.loss_mask for s in group] == [[0] * 2, [0] * 8, [0] * 3 + [1] * 2, [1] * 2]


async def test_a_kept_group_passes_through_untouched_even_where_partial_ones_are_masked() -> None:
    (group,) = groups_of(1)
    for sample in group:
        append(sample, 2)
        sample.status, sample.reward = Status.COMPLETED, 1.0
    before = [snapshot(sample) for sample in group]
    script, rewards = Scripted(), Counted()
    options: dict[str, Any] = {"partial_rollout": True, "mask_offpolicy": True, "reward": rewards}
    result = await bounded(rollout(script, groups=1, **options).run(Buffer([group])))
    assert result.groups == [group]
    assert [vars(sample) for sample in group] == before
    assert not script.asked
    assert not rewards.asked


def test_a_mask_needs_something_to_go_on_with() -> None:
    with pytest.raises(ValueError, match="needs partial_rollout"):
        RolloutConfig(groups=1, mask_offpolicy=True)


async def test_groups_of_which_nothing_came_are_no_partial_work_but_fresh_prompts() -> None:
    groups = groups_of(3)
    before = [snapshot(sample) for group in groups[1:] for sample in group]
    source = Buffer(groups)
    script = Scripted(dict.fromkeys(range(2, 6), (0, "hang")), wait=0.01)
    result = await bounded(rollout(script, groups=1, over_sampling=3, partial_rollout=True).run(source, 1))
    assert len(source) == 2
    assert [{**vars(s), "session_id": None} for group in groups[1:] for s in group] == before
    assert (result.metrics["streamfold/groups/put_back"], result.metrics["streamfold/groups/fresh"]) == (2, 2)


@pytest.mark.parametrize("partial", [True, False])
async def test_a_host_gets_back_partial_work_alone_and_what_it_loses_is_counted(partial: bool) -> None:
    groups = groups_of(3, 1)
    source = HostSource(groups)
    script = Scripted({1: (2, "hang"), 2: (0, "hang")}, wait=0.01)
    result = await bounded(rollout(script, groups=1, over_sampling=3, partial_rollout=partial).run(source, 1))
    assert source.back == ([groups[1]] if partial else [])
    assert result.metrics["streamfold/groups/dropped/aborted"] == (1 if partial else 2)
    assert result.metrics["streamfold/tokens/lost"] == (0 if partial else 2)


async def test_samples_of_a_host_go_through_the_same_rules() -> None:
    groups: list[list[Any]] = [
        [HostSample(prompt="p", group_index=g, index=2 * g + i, tokens=[1]) for i in range(2)] for g in range(2)
    ]
    source, rewards = HostSource(groups), Counted()
    options: dict[str, Any] = {"partial_rollout": True, "mask_offpolicy": True, "reward": rewards}
    script = Scripted({0: (2, HostSample.Status.COMPLETED), 1: (3, "hang")}, wait=0.01)
    script.script |= {2: (1, HostSample.Status.COMPLETED), 3: (1, HostSample.Status.TRUNCATED)}
    await bounded(rollout(script, groups=1, over_sampling=2, **options).run(source, 3))
    assert source.back == [groups[0]]
    assert [s.status.name for s in groups[0]] == ["COMPLETED", "ABORTED"]
    assert [s.metadata for s in groups[0]] == [{"start_rollout_id": 3}] * 2
    assert all(s.session_id for s in groups[0])
    again = Scripted({1: (2, HostSample.Status.TRUNCATED)})
    await bounded(rollout(again, groups=1, **options).run(source, 4))
    assert [s.loss_mask for s in groups[0]] == [[0, 0], [0, 0, 0, 1, 1]]
    assert sorted(index for index, _ in rewards.asked) == [0, 1, 2, 3]


async def test_notes_that_samples_share_are_not_written_into_each_other() -> None:
    shared = {"source": "a book"}
    groups = groups_of(2)
    for sample in groups[0]:
        sample.metadata = shared
    script = Scripted({0: (2, "hang"), 1: (0, "hang")}, wait=0.01)
    await bounded(rollout(script, groups=1, over_sampling=2, partial_rollout=True).run(Buffer(groups), 3))
    assert shared == {"source": "a book"}
    assert [s.metadata.get("start_rollout_id") for s in groups[0]] == [3, None]


@pytest.mark.parametrize("name", ["mine", "resumed", "failures"])
async def test_a_generator_that_holds_the_notes_of_its_sample_keeps_what_it_writes(name: str) -> None:
    """Also while streamfold writes its own, in one rollout and in the next; other samples do not see it."""
    shared: dict[str, Any] = {"source": "a book"}
    groups = groups_of(1)
    for sample in groups[0]:
        sample.metadata = shared
    held: dict[Any, Any] = {}

    async def generate(sample: Sample, params: Any, *, aborted: Any) -> Sample:
        notes = held.setdefault(sample.index, sample.metadata)
        notes[name] = f"written by {sample.index}"
        add_counts(sample, restarted_tokens=1)
        notes["after"] = notes.get("after", 0) + 1
        if notes["after"] == 1:
            raise OSError("once")
        sample.status = Sample.Status.COMPLETED
        return sample

    buffer = Buffer(groups)
    await bounded(rollout(generate, groups=1).run(buffer, 3))
    await bounded(rollout(generate, groups=1).run(buffer, 4))
    assert shared == {"source": "a book"}
    for sample in groups[0]:
        assert sample.metadata is held[sample.index]
        ours = {key: value for key, value in sample.metadata.items() if not key.startswith("streamfold_")}
        assert ours == {"source": "a book", name: f"written by {sample.index}", "after": 2}
        assert sample.metadata["streamfold_restarted_tokens"] == 2


async def test_a_source_may_give_its_groups_one_by_one() -> None:
    class Lazy(HostSource):
        def get_samples(self, num_samples: int) -> Any:
            yield from super().get_samples(num_samples)

    result = await bounded(rollout(Scripted(), groups=2).run(Lazy(groups_of(3))))
    assert [group[0].group_index for group in result.groups] == [0, 1]
    assert (await bounded(rollout(Scripted(), groups=2).run(Lazy(groups_of(1))))).is_short


async def test_a_source_that_refuses_to_take_groups_back_gets_them_once_more() -> None:
    class Busy(HostSource):
        refusals = 1

        def add_samples(self, samples: list[Any]) -> None:
            if self.refusals:
                self.refusals -= 1
                raise OSError("the queue is busy")
            super().add_samples(samples)

    script = Scripted({4: (1, ValueError("broken")), 6: (3, "hang"), 7: (3, "hang")}, wait=0.001)
    source = Busy(groups_of(5))
    options: dict[str, Any] = {"groups": 2, "over_sampling": 5, "partial_rollout": True}
    async with nothing_left():
        with pytest.raises(OSError, match="the queue is busy"):
            await bounded(rollout(script, **options).run(source))
    assert [group[0].group_index for group in source.back] == [0, 1, 2, 3, 4]


async def test_samples_without_notes_may_fail_too() -> None:
    groups = groups_of(2)
    for sample in (sample for group in groups for sample in group):
        sample.metadata = None  # type: ignore[assignment]
    source = Buffer(groups)
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "group_tries": 2}
    script = Scripted({0: (0, ValueError("broken"))}, wait=0.001)
    given = [(await bounded(rollout(script, **options).run(source, i))).groups for i in range(2)]
    assert given == [[groups[1]], []]
    assert script.asked.count(0) == 2


# Generators that make several samples of one.


class Fan(Scripted):
    """Makes three samples of each fresh one, the last of which is cut on the first occasion."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut

    async def __call__(self, sample: Any, params: dict[str, Any], *, aborted: Any) -> Any:
        if sample.response_length:  # a branch that is gone on with
            return await super().__call__(sample, params, aborted=aborted)
        branches = [copy.deepcopy(sample) for _ in range(3)]
        for branch in branches:
            await super().__call__(branch, params, aborted=aborted)
        if self.cut and sample.group_index == 0:
            branches[2].status = Status.ABORTED
            while not aborted():  # noqa: ASYNC110  # a flag is what generators get
                await asyncio.sleep(0.001)
        return branches


async def test_each_of_the_samples_that_a_generator_made_of_one_gets_a_reward() -> None:
    rewards = Counted()
    group: list[Any] = [*groups_of(1)[0]]
    result = await bounded(rollout(Fan(cut=False), groups=1, reward=rewards).run(Buffer([group])))
    assert result.groups == [group], "the same list, though its elements are other ones"
    assert [[s.reward for s in element] for element in group] == [[2.0] * 3] * 2
    assert len(rewards.asked) == 6


@pytest.mark.parametrize("several", [False, True])
async def test_samples_that_a_generator_makes_anew_belong_to_the_group_they_were_made_for(several: bool) -> None:
    async def anew(sample: Any, params: Any, *, aborted: Any) -> Any:
        made = [Sample(tokens=[*sample.tokens], status=Status.COMPLETED) for _ in range(2)]
        return made if several else made[0]

    source = Buffer(groups_of(2))
    result = await bounded(rollout(anew, groups=1, over_sampling=2).run(source))
    (group,) = result.groups
    each = 2 if several else 1
    assert [(s.group_index, s.index) for s in samples_of(group)] == [(0, 0)] * each + [(0, 1)] * each
    assert (source.in_flight, len(source)) == (0, 1), "the source knows which group is done"


async def test_samples_made_of_one_get_no_reward_while_one_of_them_is_not_at_its_end() -> None:
    rewards = Counted()
    fan = Fan(cut=True)
    fan.abort_mode = "server"
    groups: list[list[Any]] = [*groups_of(2, 1)]
    source = Buffer(groups)
    options: dict[str, Any] = {"partial_rollout": True, "reward": rewards}
    await bounded(rollout(fan, groups=1, over_sampling=2, **options).run(source, 3))
    (element,) = groups[0]
    assert [s.status.name for s in element] == ["COMPLETED", "COMPLETED", "ABORTED"]
    assert [s.reward for s in element] == [None] * 3
    assert [s.metadata["start_rollout_id"] for s in element] == [3] * 3
    finished = [s.tokens for s in element[:2]]
    rewards.asked.clear()
    await bounded(rollout(fan, groups=1, **options).run(source, 4))
    (element,) = groups[0]
    assert [s.tokens for s in element[:2]] == finished
    assert element[2].response_length == 4
    assert [text for _, text in rewards.asked] == ["xx", "xx", "xxxx"]


# Over HTTP.


async def test_a_resumed_sample_asks_for_its_own_tokens_and_what_is_left_of_the_budget() -> None:
    """THUDM/slime#2260. Two rollouts over a server that writes down what it is asked."""
    script: dict[int, list[Any]] = {
        10: stream(event([1, 2], 2, "stop", prompt_tokens=1), DONE),
        11: stream(event([3, 4], 2, "length", prompt_tokens=1), DONE),
        12: [head(), chunk(event([5], 1, prompt_tokens=1)), HANG],
        13: [head(), HANG],
        20: [0.05, *stream(event([9], 1, "stop", prompt_tokens=1), DONE)],
    }

    def reply(request: Request) -> list[Any]:
        ids = request.json["input_ids"]
        resumed = len(ids) > 1 or len(server.generates) > 5
        return stream(event([7], 1, "stop", prompt_tokens=len(ids)), DONE) if resumed else script[ids[0]]

    group = [Sample(group_index=0, index=i, tokens=[10 + i]) for i in range(4)]
    other = [Sample(group_index=1, index=4, tokens=[20])]
    source, rewards = Buffer([group, other]), Counted()
    options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "reward": rewards}
    options["sampling_params"] = {"max_new_tokens": 6, "stop": ["never"]}
    async with Replay(reply) as server, Client(server.url) as client:
        first = await bounded(rollout(client=client, **options).run(source, 5))
        assert first.groups == [other]
        assert [s.tokens for s in group] == [[10, 1, 2], [11, 3, 4], [12, 5], [13]]
        finished = [snapshot(sample) for sample in group[:2]]
        second = await bounded(rollout(client=client, **options).run(source, 6))
        assert second.groups == [group]
        assert len(server.generates) == 7
        asked = {request.json["input_ids"][0]: request.json for request in server.generates[5:]}
    assert [vars(sample) for sample in group[:2]] == finished
    assert {key: body["input_ids"] for key, body in asked.items()} == {12: [12, 5], 13: [13]}
    assert {key: body["sampling_params"]["max_new_tokens"] for key, body in asked.items()} == {12: 5, 13: 6}
    assert [s.tokens for s in group[2:]] == [[12, 5, 7], [13, 7]]
    assert [s.rollout_log_probs for s in group[2:]] == [[-5 / 8, -7 / 8], [-7 / 8]]
    assert sorted(index for index, _ in rewards.asked) == [0, 1, 2, 3, 4]
    rids = [request.json["rid"] for request in server.generates]
    assert len(set(rids)) == len(rids)


async def test_a_response_that_ends_at_its_limit_after_a_resume_is_truncated() -> None:
    """OpenRLHF/OpenRLHF#1327: the word for it was lost between two calls."""
    with Loopback(token_rate=400, stop_probability=0, incremental=True) as engine:
        async with Client(engine.url) as client:
            source, rewards = Buffer(endless(1)), Counted()
            options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "reward": rewards}
            short = rollout(Quick(), **options)
            await bounded(short.run(source, 0))
            (group,) = source.take(1)
            source.put([group])
            assert group[0].response_length == 3
            long = rollout(client=client, **options | {"sampling_params": {"max_new_tokens": 12, "temperature": 0}})
            result = await bounded(long.run(source, 1))
    (sample,) = result.groups[0]
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == 12
    assert sample.reward is not None


class Quick(Scripted):
    """The first sample hangs with three tokens."""

    def __init__(self) -> None:
        super().__init__({0: (3, "hang")}, wait=0.01)


@pytest.mark.parametrize(("ids", "text"), [([], ""), ([2], "c")])
async def test_an_answer_of_no_token_or_of_the_stop_token_alone_is_a_sample_with_a_reward(
    ids: list[int], text: str
) -> None:
    """verl-project/verl-omni#497, awslabs/agentcore-rl-toolkit#68."""
    source, rewards = Buffer([[Sample(group_index=0, index=0, tokens=[5, 6, 7])]]), Counted()
    async with Replay(stream(event(ids, len(ids), "stop"), DONE)) as server, Client(server.url) as client:
        result = await bounded(rollout(client=client, groups=1, reward=rewards).run(source))
    ((sample,),) = result.groups
    assert (sample.status, sample.response_length, sample.response) == (Status.COMPLETED, len(ids), text)
    assert rewards.asked == [(0, text)]
    assert all(value == value for value in result.metrics.values()), "no NaN"  # noqa: PLR0124


def test_prompts_become_groups_of_copies_that_are_numbered_through() -> None:
    prompt = Sample(prompt="a", metadata={"deep": [1]})
    one, two = prompt_groups([prompt, Sample(prompt="b")], 2)
    assert [(s.group_index, s.index, s.prompt) for s in (*one, *two)] == [
        (0, 0, "a"), (0, 1, "a"), (1, 2, "b"), (1, 3, "b"),
    ]  # fmt: skip
    one[0].metadata["deep"].append(2)
    assert one[1].metadata == prompt.metadata == {"deep": [1]}
    with pytest.raises(ValueError, match="at least 1"):
        next(prompt_groups([prompt], 0))


async def test_a_group_of_another_size_is_refused_and_goes_back() -> None:
    source = Buffer(groups_of(2))
    with pytest.raises(ValueError, match="a group of 2 samples; n_samples_per_prompt is 4"):
        await rollout(Scripted(), groups=1, over_sampling=2, n_samples_per_prompt=4, client=NoEngine()).run(source)
    assert (len(source), source.in_flight) == (2, 0)
