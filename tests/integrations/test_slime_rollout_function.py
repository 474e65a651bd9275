"""generate_rollout with the trainer's functions, classes, options and event loops, in newer and older releases."""

from __future__ import annotations

import asyncio
import copy
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import slime, vime
from streamfold.errors import StreamfoldError
from streamfold.integrations.clients import _handles
from support.exactly import exactly
from support.host import engine as engines
from support.host import installed
from support.host.helpers import Rewards, Scripted, Waiting, append, until
from support.host.slime.rollout import sglang_rollout
from support.host.slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils import http_utils, misc
from support.host.slime.utils.misc import load_function
from support.host.slime.utils.types import Sample
from support.host_calls import HOSTS, Status, assert_undisturbed, entry_module, loopback_engine, streaming
from support.host_rolls import rolled, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

WORDS = ("the", "of", "and", "to", "in", "is", "that")

newer_and_older = pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
of_both = pytest.mark.parametrize("name", HOSTS)


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


def given(output: Any) -> list[list[Sample]]:
    """The groups of a rollout, in the type that the release has for them."""
    groups: list[list[Sample]] = output.samples if isinstance(output, RolloutFnTrainOutput) else output
    return groups


def ours(sample: Sample) -> Any:
    """All fields of a finished sample that the rollout must not change; the trainer may change the loss mask."""
    return exactly({name: value for name, value in copy.deepcopy(sample.to_dict()).items() if name != "loss_mask"})


# Against an engine.


@of_both
@newer_and_older
@pytest.mark.parametrize(("incremental", "masked"), [(True, False), (False, True)], ids=["incremental", "masked"])
def test_groups_of_several_rollouts_finish_as_if_undisturbed(
    name: str, new: bool, incremental: bool, masked: bool
) -> None:
    """THUDM/slime#2272: with the default generate function; in newer slime's event loop, or in new ones."""
    rewards = Rewards()
    options: dict[str, Any] = {"token_rate": 400, "stop_probability": 1 / 40, "seed": 3, "incremental": incremental}
    with installed(name, new=new), loopback_engine(replays=True, **options) as engine:
        args = streaming(
            engine,
            custom_generate_function_path=None,
            partial_rollout=True,
            mask_offpolicy_in_partial_rollout=masked,
            **{f"{engines.current().name}_enable_deterministic_inference": True},  # a seed for each sibling
            use_rollout_routing_replay=True,
            custom_rm_path=rewards,
            rollout_top_p=0.9,
            rollout_batch_size=3,
            over_sampling_batch_size=6,
            rollout_max_response_len=100,
            prompt_data=[f" {word} story" for word in WORDS],
        )
        state = GenerateState(args)
        source = RolloutDataSourceWithBuffer(args)
        groups: list[list[Sample]] = []
        for rollout_id in range(4):
            finished = [(s, ours(s)) for group in source.buffer for s in group if s.status is not Status.ABORTED]
            output = entry_module().generate_rollout(args, rollout_id, source)
            assert isinstance(output, RolloutFnTrainOutput if new else list)
            groups += (got := given(output))
            assert len(got) == 3
            assert not state.aborted
            assert all(ours(sample) == before for sample, before in finished)
            assert all((s.reward is None) == (s.status is Status.ABORTED) for group in source.buffer for s in group)
            assert engine.stats().running == 0
        resumed = [s for group in groups for s in group if "start_rollout_id" in s.metadata and s.loss_mask]
        assert resumed
        assert any(0 in (s.loss_mask or []) for s in resumed) == masked
        for sample, i in ((sample, i) for group in groups for i, sample in enumerate(group)):
            assert_undisturbed(engine, args, sample, {**state.sampling_params, "sampling_seed": args.rollout_seed + i})
            assert sum(call is sample for call in rewards.calls) == 1
        assert len({group[0].group_index for group in groups}) == 12
    assert _handles == {}


@of_both
@newer_and_older
def test_without_partial_rollout_aborted_groups_are_not_returned(name: str, new: bool) -> None:
    """THUDM/slime#2092."""
    with installed(name, new=new), loopback_engine(token_rate=400, stop_probability=1 / 40, seed=3) as engine:
        args = streaming(
            engine, custom_generate_function_path=None, over_sampling_batch_size=6, rollout_max_response_len=100
        )
        source = RolloutDataSourceWithBuffer(args)
        for rollout_id in range(3):
            for group in given(entry_module().generate_rollout(args, rollout_id, source)):
                assert all(sample.status in {Status.COMPLETED, Status.TRUNCATED} for sample in group)
                assert all(len(sample.weight_versions) == 1 for sample in group)
            assert all(s.status is not Status.ABORTED for group in source.buffer for s in group)


@of_both
@newer_and_older
def test_the_trainers_evaluation_generates_through_ours_unless_another_is_named(name: str, new: bool) -> None:
    async def generate(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        assert evaluation
        append(sample, args, [7], text="x")
        sample.status = Status.TRUNCATED
        return sample

    with installed(name, new=new), loopback_engine(stop_probability=0) as engine:
        sets = [("a", [Sample(prompt=" the story"), Sample(prompt="no engine", generate_function_path=generate)])]
        args = streaming(engine, custom_generate_function_path=None, rollout_max_response_len=4, eval_datasets=sets)
        output = entry_module().generate_rollout(args, 0, None, evaluation=True)
        (request,) = engine.seen()
        assert args.custom_generate_function_path is None
        assert GenerateState(args).args is args
    assert request.json()["stream"] is True
    assert isinstance(output, RolloutFnEvalOutput if new else dict)
    data = output.data if isinstance(output, RolloutFnEvalOutput) else output
    assert [sample.response_length for sample in data["a"]["samples"]] == [4, 1]
    assert data["a"]["rewards"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("partial_rollout", "masked"),
    [(True, False), (True, True), (False, False)],
    ids=["resumed", "masked", "restarted"],
)
def test_a_sample_that_the_engine_aborted_is_retried(host: None, partial_rollout: bool, masked: bool) -> None:
    """vllm-project/vllm#57082: engines do so before they take new weights. One reward, on the whole response."""
    rewards = Rewards()

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        async def disturb() -> None:
            await until(lambda: engine.stats().tokens > 10)
            path, body = engines.current().abort_all
            await http_utils.post(engine.url + path, body)

        disturbs = None if "streamfold_resumed" in sample.metadata else asyncio.ensure_future(disturb())
        sample = await entry_module().generate_streaming(args, sample, sampling_params)
        if disturbs is not None:
            await disturbs
        return sample

    generate.__dict__["abort_mode"] = "request"
    with loopback_engine(token_rate=300, stop_probability=0) as engine:
        args = streaming(
            engine,
            custom_generate_function_path=generate,
            custom_rm_path=rewards,
            partial_rollout=partial_rollout,
            mask_offpolicy_in_partial_rollout=masked,
            streamfold_tries=4,
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            over_sampling_batch_size=1,
            rollout_max_response_len=90,
        )
        ((sample,),), metrics = rolled(args)
        assert_undisturbed(engine, args, sample, GenerateState(args).sampling_params)
    assert rewards.calls == [sample]
    assert sample.metadata["streamfold_resumed"] == metrics["streamfold/resumes"] == 1
    assert metrics["streamfold/groups/failed"] == 0
    lost = sample.metadata.get("streamfold_restarted_tokens", 0)
    assert (lost > 0) == (not partial_rollout)
    assert metrics["streamfold/tokens/lost"] == lost
    assert metrics["streamfold/tokens/generated"] == 90 + lost
    assert set(sample.loss_mask) == ({0, 1} if masked else {1})


# Without one.


def test_a_generator_that_makes_no_progress_is_given_up(host: None) -> None:
    generate = Scripted({0: [(0, Status.ABORTED)]})
    args = scripted(generate, streamfold_group_tries=1, streamfold_tries=2)
    groups, metrics = rolled(args)
    assert [group[0].index for group in groups] == [1]
    assert generate.calls == [0, 0, 1]
    assert metrics["streamfold/groups/dropped/failed"] == 1


@newer_and_older
@pytest.mark.parametrize("mode", ["request", "server"])
def test_the_trainers_state_says_aborted_from_the_first_abort_to_the_end_of_the_rollout(
    new: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    running = 0

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        nonlocal running
        state = GenerateState(args)
        seen.append(state.aborted)
        running += 1
        await until(lambda: running == 2)
        if sample.index == 0:
            append(sample, args, [7], text="x")
            sample.status = Status.COMPLETED
            return sample
        try:
            await until(lambda: state.aborted)
        except asyncio.CancelledError:
            seen.append(state.aborted)
            raise
        seen.append(state.aborted)
        append(sample, args, [8], text="y")
        sample.status = Status.ABORTED
        return sample

    generate.__dict__["abort_mode"] = mode
    with installed(new=new):
        args = scripted(generate, over_sampling_batch_size=2, partial_rollout=True)

        def look(args: Any, groups: Any) -> None:
            seen.append(GenerateState(args).aborted)

        args.rollout_sample_filter_path = look
        entry_module().generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        assert seen == [False, False, True, True]
        assert not GenerateState(args).aborted


@of_both
@newer_and_older
def test_a_rollout_starts_although_a_run_that_died_has_left_the_trainers_state_aborted(name: str, new: bool) -> None:
    with installed(name, new=new), loopback_engine(stop_probability=0) as engine:
        args = streaming(engine, custom_generate_function_path=None, rollout_batch_size=2, rollout_max_response_len=5)
        state = GenerateState(args)
        state.aborted = True
        groups = given(entry_module().generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
        assert [sample.response_length for group in groups for sample in group] == [5] * len(groups) * len(groups[0])
        assert len(groups) == 2
        assert not state.aborted
    assert _handles == {}


def test_servers_are_aborted_only_for_those_generators_that_need_it(host: None) -> None:
    waiting = Waiting()

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await until(lambda: waiting.running == 1 and engine.stats().tokens > 3)
        append(sample, args, [7], text="x")
        sample.status = Status.COMPLETED
        return sample

    for needed in (False, True):
        with loopback_engine(token_rate=200, stop_probability=0) as engine:
            other = "support.host.slime.rollout.sglang_rollout.generate" if needed else None
            paths = [generate, waiting, other]
            args = streaming(
                engine,
                custom_generate_function_path=None,
                prompt_data=[Sample(prompt=" the story", generate_function_path=path) for path in paths],
                n_samples_per_prompt=1,
                rollout_batch_size=1,
                over_sampling_batch_size=3,
                partial_rollout=True,
                rollout_max_response_len=20_000,
            )
            source = RolloutDataSourceWithBuffer(args)
            rolled(args, source)
            aborts = [(request.path, request.json()) for request in engine.seen() if "abort" in request.path]
        assert (engines.current().abort_all in aborts) == needed
        assert [s.status for group in source.buffer for s in group] == [Status.ABORTED] * 2
        assert source.buffer[1][0].response_length > 3
        GenerateState(args).reset()
        waiting.running = 0


def test_evaluation_is_passed_to_a_generator_that_takes_it_with_a_copy_of_the_parameters(host: None) -> None:
    received: list[Any] = []
    generate = Scripted({0: [(1, Status.ABORTED), (1, Status.COMPLETED)]})

    async def asks(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = True) -> Sample:
        received.append((evaluation, sampling_params["max_new_tokens"]))
        return await generate(args, sample, sampling_params)

    args = scripted(asks, n_samples_per_prompt=3)
    rolled(args)
    assert received == [(False, 32)] * 4
    assert GenerateState(args).sampling_params["max_new_tokens"] == 32


def test_samples_are_balanced_over_the_trainers_ranks(host: None) -> None:
    ranks: list[int] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        state = GenerateState(args)
        ranks.append(state.dp_rank)
        await until(lambda: len(ranks) == 4)
        assert state.dp_counts == [2, 2]
        return await Scripted()(args, sample, sampling_params)

    args = scripted(generate, n_samples_per_prompt=4, **{f"{engines.current().name}_dp_size": 2})
    rolled(args)
    assert ranks == [0, 1, 0, 1]
    assert GenerateState(args).dp_counts == [0, 0]


@pytest.mark.parametrize("release", ["newer", "older"])
def test_as_many_samples_are_in_flight_as_the_trainers_engines_take(
    host: None, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = most = 0

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return await Scripted()(args, sample, sampling_params)

    engines_of: dict[str, Any] = {"rollout_num_engines": 3}
    if release == "older":
        monkeypatch.delattr(http_utils, "get_rollout_num_engines")
        engines_of = {"rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2}
    engines_of[f"{engines.current().name}_server_concurrency"] = 2
    rolled(scripted(generate, n_samples_per_prompt=12, **engines_of))
    assert most == 6


def test_what_a_release_may_not_have_is_not_needed(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit for its servers in the settings, no ``reset``, and no loader of functions where it used to be."""

    args = scripted(Scripted(), over_sampling_batch_size=2, custom_generate_function_path=f"{__name__}.two_tokens")
    source = RolloutDataSourceWithBuffer(args)
    delattr(args, f"{engines.current().name}_server_concurrency")
    state = SimpleNamespace(tokenizer=None, processor=None, sampling_params={"max_new_tokens": 4}, aborted=False)
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    monkeypatch.delattr(misc, "load_function")
    output = entry_module().generate_rollout(args, 0, source)
    assert [[sample.response for sample in group] for group in output.samples] == [["xx"]]
    assert not state.aborted


async def two_tokens(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    """At the dotted path of a function."""
    return await Scripted()(args, sample, sampling_params)


# What is left.


@pytest.mark.parametrize(("setting", "kept"), [(None, 1), ("false", 0), (False, 0), ("1", 1)])
def test_finished_groups_beyond_the_batch_wait_unless_the_setting_drops_them(
    host: None, setting: Any, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = asyncio.Event()

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        if sample.index == 1:
            both.set()
        await both.wait()
        return await Scripted()(args, sample, sampling_params)

    generate.__dict__["abort_mode"] = "server"
    args = scripted(generate, over_sampling_batch_size=2)
    if isinstance(setting, str):
        monkeypatch.setenv("STREAMFOLD_KEEP_FINISHED", setting)
    elif setting is not None:
        args.streamfold_keep_finished = setting
    source = RolloutDataSourceWithBuffer(args)
    _, metrics = rolled(args, source)
    assert len(source.buffer) == metrics["streamfold/groups/kept"] == kept


def test_a_failed_group_goes_back_and_too_many_end_the_rollout(host: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    failing = Scripted({0: [(1, OSError("tool")), (1, Status.COMPLETED)]})
    args = scripted(failing, partial_rollout=True, streamfold_max_failures=1, streamfold_sample_retries=0)
    source = RolloutDataSourceWithBuffer(args)
    (((other,),), metrics), (((sample,),), _) = rolled(args, source, 0), rolled(args, source, 1)
    assert (other.index, sample.index, sample.response) == (1, 0, "xx")
    assert metrics["streamfold/groups/failed"] == 1
    assert "tool" in caplog.text
    args.custom_generate_function_path = Scripted({index: [(1, OSError("tool"))] for index in range(99)})
    with pytest.raises(StreamfoldError, match="max_failures") as caught:
        entry_module().generate_rollout(args, 2, source)
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(group[0].index or 0 for group in source.buffer) == [2, 3]
    assert not GenerateState(args).aborted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_staleness", "x"),
        ("group_tries", None),
        ("group_tries", 1.5),
        ("max_failure_rate", 2),
        ("abort_seconds", "soon"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(host: None, name: str, value: Any) -> None:
    args = scripted(Scripted(), **{f"streamfold_{name}": value})
    with pytest.raises(ValueError, match=name):
        entry_module().generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_everything_is_found_by_its_dotted_path(host: None) -> None:
    for name in ("generate_streaming", "generate_rollout", "generate_rollout_async", "DataSource", "close_rollout"):
        assert load_function(f"{entry_module().__name__}.{name}") is getattr(entry_module(), name)
    with pytest.raises(AttributeError, match="generate_nothing"):
        load_function(f"{entry_module().__name__}.generate_nothing")


@pytest.mark.parametrize("module", [slime, vime], ids=HOSTS)
def test_without_the_trainer_only_its_data_source_is_missing(module: ModuleType) -> None:
    assert callable(module.generate_rollout)
    with pytest.raises(ModuleNotFoundError, match=module.__name__.rpartition(".")[2]):
        _ = module.DataSource
