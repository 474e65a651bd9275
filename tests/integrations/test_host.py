"""The stand-in trainer alone, so that failures of tests with an integration are the integration's."""

from __future__ import annotations

import asyncio
import copy
import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback import Loopback
from support.host import arguments, installed
from support.host.helpers import LIMIT, Rewards, Waiting, append, nowhere, until
from support.host.slime.observability.trace_utils import build_sglang_meta_trace_attrs, spans, trace_span
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import (
    GenerateState,
    _prepare_prompt_ids,
    abort,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
)
from support.host.slime.utils import http_utils
from support.host.slime.utils.processing_utils import IMAGE_TOKENS
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import SimpleNamespace

BOTH_LOOPS = True

Status = Sample.Status


@pytest.fixture
def host() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture
def old_host() -> Iterator[None]:
    with installed(new=False):
        yield


def args_of(engine: Loopback, **settings: Any) -> SimpleNamespace:
    return arguments(engine.url, engine.config, **settings)


def aborts_of(engine: Loopback) -> list[Any]:
    return [request.json() for request in engine.seen() if request.path == "/abort_request"]


# Where it is found.


of_each = pytest.mark.parametrize(("package", "engine_name"), [("slime", "sglang"), ("vime", "vllm")])


@of_each
@pytest.mark.parametrize("new", [True, False])
def test_the_trainer_can_be_imported_inside_the_block_only(package: str, engine_name: str, new: bool) -> None:
    with installed(package, new=new):
        assert importlib.import_module(f"{package}.utils.types").Sample is Sample
        assert importlib.import_module(f"{package}.rollout.{engine_name}_rollout").GenerateState is GenerateState
        assert getattr(nowhere(), f"{engine_name}_server_concurrency") == 512
        assert len([name for name in vars(nowhere()) if name.endswith("_router_ip")]) == 1
    assert not [name for name in sys.modules if name.split(".")[0] == package]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.utils.types")


@of_each
@pytest.mark.parametrize("new", [True, False])
def test_span_helpers_are_where_that_release_has_them(package: str, engine_name: str, new: bool) -> None:
    newer, older = (f"{package}.{folder}.trace_utils" for folder in ("observability", "utils"))
    there, missing = (newer, older) if new else (older, newer)
    with installed(package, new=new):
        assert hasattr(importlib.import_module(there), f"build_{engine_name}_meta_trace_attrs")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(missing)


def test_a_second_stand_in_is_refused(host: None) -> None:
    with pytest.raises(RuntimeError, match="imported already"), installed():
        pass
    assert "slime" in sys.modules


def test_the_state_is_one_as_long_as_the_block_runs() -> None:
    with installed():
        state = GenerateState(nowhere())
        assert GenerateState(nowhere()) is state
    with installed():
        assert GenerateState(nowhere()) is not state


# Around the generator.


def test_the_tokenizer_has_the_defaults_of_transformers(host: None) -> None:
    tokenizer = GenerateState(nowhere()).tokenizer
    ids = tokenizer.encode("a the")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "<|begin_of_text|>a the"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a the"
    assert tokenizer.decoded == [ids, ids]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert tokenizer.decode(iter(map(int, chat))) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_prompts_ids_are_the_samples_own_list_once_it_has_one(host: None) -> None:
    state = GenerateState(nowhere())
    sample = Sample(prompt="a the")
    sample.tokens = _prepare_prompt_ids(sample, state.tokenizer, None)
    assert sample.tokens == state.tokenizer.encode("a the", add_special_tokens=False)
    assert _prepare_prompt_ids(sample, state.tokenizer, None) is sample.tokens


def test_a_span_remembers_what_it_was_given_and_how_it_ended(host: None) -> None:
    meta = {"id": "x", "cached_tokens": None, "finish_reason": {"type": "stop"}}
    with trace_span("sample", "call", attrs={"a": 1}) as span:
        span.update(build_sglang_meta_trace_attrs(meta))
    with pytest.raises(KeyError), trace_span("sample", "failed") as failed:
        failed.update(build_sglang_meta_trace_attrs({"id": "x"}))
    assert spans == [span, failed]
    assert (span.target, span.name, span.closed, span.error) == ("sample", "call", True, None)
    assert span.attrs == {"a": 1, "id": "x", "finish_reason": "stop"}
    assert failed.closed
    assert isinstance(failed.error, KeyError)


@pytest.mark.parametrize("shared", [True, False])
async def test_the_trainers_own_generation_equals_the_undisturbed_one(host: None, shared: bool) -> None:
    with Loopback(stop_probability=0) as engine:
        args = args_of(engine, rollout_top_p=0.9, use_rollout_routing_replay=True, router_policy="consistent_hashing")
        state = GenerateState(args)
        params = state.sampling_params
        given = copy.deepcopy(params)
        sample = Sample(prompt=" the story", session_id="mine")
        if shared:
            http_utils.init_http_client(args)
        await generate_and_rm(args, sample, params)
        await http_utils.close_http_client()
        prompt = state.tokenizer.encode(" the story", add_special_tokens=False)
        wanted = engine.undisturbed(prompt, params, return_logprob=True, return_routed_experts=True)
        (request,) = engine.seen()
    assert request.headers["x-smg-routing-key"] == "mine"
    assert sample.tokens == prompt + wanted.token_ids
    assert sample.rollout_log_probs == wanted.logprobs
    assert sample.response == state.tokenizer.decode(wanted.token_ids, skip_special_tokens=True)
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_ids.tolist() == [token for kept in wanted.top_p or [] for token in kept]
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tobytes() == wanted.routed_experts
    assert (sample.status, sample.reward, sample.weight_versions) == (Status.TRUNCATED, 1.0, ["default"])
    assert params == given


async def test_vimes_own_generation_equals_the_undisturbed_one() -> None:
    with installed("vime"), Loopback(engine="vllm", stop_probability=0, model_name="loopback/512") as engine:
        args = args_of(engine, router_policy="consistent_hash")
        sample = Sample(prompt=" the story", session_id="mine")
        await generate_and_rm(args, sample, GenerateState(args).sampling_params)
        (request,) = engine.seen()
        wanted = engine.undisturbed(request.json()["token_ids"], {"max_tokens": 32, "logprobs": 1})
    assert request.headers["x-session-id"] == "mine"
    assert sample.tokens == request.json()["token_ids"] + wanted.token_ids
    assert sample.rollout_log_probs == wanted.logprobs
    assert (sample.status, sample.reward) == (Status.TRUNCATED, 1.0)


async def test_the_processor_counts_images_as_the_engine_does(host: None) -> None:
    with Loopback(stop_probability=0) as engine:
        args = args_of(engine, hf_checkpoint=f"loopback-vl/{engine.config.vocab_size}", use_rollout_routing_replay=True)
        sample = Sample(prompt=" the story", multimodal_inputs={"images": [b"png"]})
        await generate_and_rm(args, sample, {"max_new_tokens": 4})
        (request,) = engine.seen()
    assert sample.multimodal_train_inputs == {"pixel_values": [3]}
    assert sample.prefix_cache_info.total_prompt_tokens == len(sample.tokens) - 4 == IMAGE_TOKENS + 2
    body = request.json()
    assert body["image_data"] == ["data:image/png;base64,cG5n"]
    assert body["text"] == sample.prompt
    assert "input_ids" not in body


async def test_without_a_budget_nothing_is_requested(host: None) -> None:
    sample = Sample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0], status=Status.ABORTED)
    await generate_and_rm(nowhere(), sample, {"max_new_tokens": 1})
    assert (sample.status, sample.tokens) == (Status.TRUNCATED, [1, 2])


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
async def test_finished_samples_come_back_untouched_with_their_reward(host: None, status: Sample.Status) -> None:
    rewards = Rewards()
    args = nowhere(custom_rm_path=rewards, custom_generate_function_path=Waiting())
    sample = Sample(tokens=[1, 2], response_length=1, status=status, reward=0.25)
    before = dict(vars(sample))
    assert await generate_and_rm(args, sample, {"max_new_tokens": 8}) is sample
    assert vars(sample) == before
    assert rewards.calls == []


@pytest.mark.parametrize(("masked", "mask"), [(True, [0, 0]), (False, [1, 1])])
async def test_what_is_resumed_is_masked_first_if_that_is_on(host: None, masked: bool, mask: list[int]) -> None:
    seen: list[Any] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        seen.append(sample.loss_mask)
        return sample

    args = nowhere(
        partial_rollout=True, mask_offpolicy_in_partial_rollout=masked, custom_generate_function_path=generate
    )
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1], status=Status.ABORTED)
    await generate_and_rm(args, sample, {})
    assert seen == [mask]


async def test_evaluation_is_passed_to_generators_that_take_it_and_a_sample_may_name_its_own(host: None) -> None:
    received: list[Any] = []

    async def asks(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        received.append(evaluation)
        return sample

    async def asks_not(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        received.append(None)
        return sample

    args = nowhere(custom_generate_function_path=asks)
    await generate_and_rm(args, Sample(), {}, evaluation=True)
    await generate_and_rm(args, Sample(generate_function_path=asks_not), {}, evaluation=True)
    assert received == [True, None]


# Aborts.


async def abort_during(args: SimpleNamespace, generating: Callable[[], bool], count: int = 1) -> list[Sample]:
    """Start one group, abort it once it is generating, return its samples."""
    state = GenerateState(args)
    group = [Sample(prompt=" the story", generate_function_path=path) for path in args.generators]
    state.submit_generate_tasks([group])
    (task,) = state.pendings
    await until(generating)
    await asyncio.wait_for(abort(args, 0), LIMIT)
    assert task.done()
    assert not state.generating
    return task.result()


async def test_a_request_abort_cancels_the_task_and_leaves_the_server_alone(host: None) -> None:
    generator = Waiting()
    rewards = Rewards()
    with Loopback() as engine:
        args = args_of(engine, generators=[generator] * 2, custom_rm_path=rewards)
        samples = await abort_during(args, lambda: generator.running == 2)
        assert engine.seen() == []
    assert generator.cancels == 2
    assert [sample.status for sample in samples] == [Status.ABORTED] * 2
    assert [sample.tokens for sample in samples] == [[300, 301, 302]] * 2
    assert rewards.calls == []


async def test_beside_a_generator_that_needs_it_the_server_is_aborted_too(host: None) -> None:
    generator = Waiting()
    with Loopback(token_rate=200, stop_probability=0) as engine:
        args = args_of(engine, generators=[generator, None], rollout_max_response_len=20_000)
        mine, other = await abort_during(args, lambda: generator.running == 1 and engine.stats().tokens > 3)
        assert {"abort_all": True} in aborts_of(engine)
    assert (mine.status, other.status) == (Status.ABORTED, Status.ABORTED)
    assert other.response_length > 3
    assert (generator.cancels, other.reward) == (1, None)


async def test_older_releases_abort_servers_for_every_generator(old_host: None) -> None:
    release = asyncio.Event()
    cancels = 0

    class Released(Waiting):
        async def __call__(self, args: SimpleNamespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            nonlocal cancels
            self.running += 1
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancels += 1
                raise
            return sample

    generator = Released()
    with Loopback() as engine:
        args = args_of(engine, generators=[generator])
        state = GenerateState(args)
        state.submit_generate_tasks([[Sample(generate_function_path=generator)]])
        await until(lambda: generator.running == 1)
        aborting = asyncio.create_task(abort(args, 0))
        await until(lambda: bool(aborts_of(engine)))
        release.set()
        await asyncio.wait_for(aborting, LIMIT)
        paths = [request.path for request in engine.seen()]
    assert cancels == 0
    assert paths == ["/workers", "/abort_request", "/v1/loads"]


async def test_what_has_not_started_when_the_abort_comes_never_does(host: None) -> None:
    generator = Waiting()
    args = nowhere(generators=[generator] * 3, sglang_server_concurrency=1, partial_rollout=True)
    samples = await abort_during(args, lambda: generator.running == 1)
    assert generator.cancels == 1
    assert [sample.status for sample in samples] == [Status.ABORTED] * 3
    assert [sample.response_length for sample in samples] == [2, 0, 0]
    assert [sample.metadata for sample in samples] == [{"start_rollout_id": 0}, {}, {}]


async def test_a_cancel_by_another_task_propagates_even_during_an_abort(host: None) -> None:
    class Draining(Waiting):
        async def __call__(self, args: SimpleNamespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
            try:
                return await super().__call__(args, sample, sampling_params)
            except asyncio.CancelledError:
                self.running = 2
                await asyncio.Event().wait()
                raise

    for aborted in (False, True):
        generator = Draining()
        args = nowhere(custom_generate_function_path=generator)
        sample = Sample()
        task = asyncio.create_task(generate_and_rm(args, sample, {}))
        await until(lambda: generator.running == 1)  # noqa: B023  # it is over before the next one
        if aborted:
            await abort(args, 0)
        else:
            task.cancel()
        await until(lambda: generator.running == 2)  # noqa: B023  # as above
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        assert sample.status is Status.PENDING
        GenerateState(args).reset()


async def test_a_cancelled_error_that_a_generator_raises_itself_is_no_abort(host: None) -> None:
    async def cancels(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        raise asyncio.CancelledError

    sample = Sample()
    with pytest.raises(asyncio.CancelledError):
        await generate_and_rm(nowhere(custom_generate_function_path=cancels), sample, {})
    assert sample.status is Status.PENDING


async def test_a_failure_ends_its_siblings_and_leaks_nothing(host: None) -> None:
    async def fails(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await until(lambda: generator.running == 1)
        raise OSError("the engine is gone")

    generator = Waiting()
    args = nowhere(prompt_data=[Sample(generate_function_path=path) for path in (generator, fails)])
    args.n_samples_per_prompt = 1
    with pytest.raises(OSError, match="gone"):
        await generate_rollout_async(args, 0, RolloutDataSourceWithBuffer(args))
    assert (generator.running, generator.cancels) == (0, 1)
    group = [Sample(generate_function_path=path) for path in (generator, fails)]
    with pytest.raises(OSError, match="gone"):
        await generate_and_rm_group(args, group, {})
    assert (generator.running, generator.cancels) == (0, 2)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# The rollout.


def test_the_buffer_is_served_first(host: None) -> None:
    args = nowhere(prompt_data=["a", "b"])
    source = RolloutDataSourceWithBuffer(args)
    first, second = source.get_samples(2)
    assert [(s.prompt, s.group_index, s.index) for s in first + second] == [
        *[("a", 0, 0), ("a", 0, 1)],
        *[("b", 1, 2), ("b", 1, 3)],
    ]
    source.add_samples([second])
    served, new = source.get_samples(2)
    assert served is second
    assert (new[0].prompt, new[0].group_index, new[0].index) == ("a", 2, 4)
    with pytest.raises(ValueError, match="2 samples"):
        source.add_samples([[Sample()]])


@pytest.mark.parametrize("new", [True, False])
def test_partial_groups_go_back_and_finish_as_if_undisturbed(new: bool) -> None:
    """Each rollout in an event loop of its own, finished and aborted siblings in one group."""
    rewards = Rewards()
    with installed(new=new), Loopback(token_rate=400, stop_probability=1 / 40, seed=3) as engine:
        args = args_of(
            engine,
            partial_rollout=True,
            sglang_enable_deterministic_inference=True,  # a seed for each sibling
            custom_rm_path=rewards,
            rollout_batch_size=3,
            over_sampling_batch_size=6,
            rollout_max_response_len=100,
            prompt_data=[f" {word} story" for word in ("the", "of", "and", "to", "in", "is", "that")],
        )
        state = GenerateState(args)
        source = RolloutDataSourceWithBuffer(args)
        groups: list[list[Sample]] = []
        resumed = mixed = 0
        for rollout_id in range(4):
            groups += (got := generate_rollout(args, rollout_id, source))
            assert len(got) == 3
            resumed += sum("start_rollout_id" in s.metadata for group in got for s in group)
            for group in source.buffer:
                assert any(s.status is Status.ABORTED and s.response_length for s in group)
                assert all(("start_rollout_id" in s.metadata) == bool(s.response) for s in group)
                assert all((s.reward is None) == (s.status is Status.ABORTED) for s in group)
                mixed += any(s.status is not Status.ABORTED for s in group)
        for group in groups:
            for i, sample in enumerate(group):
                prompt = state.tokenizer.encode(str(sample.prompt), add_special_tokens=False)
                params = {**state.sampling_params, "sampling_seed": args.rollout_seed + i}
                wanted = engine.undisturbed(prompt, params, return_logprob=True)
                assert sample.rollout_log_probs is not None
                assert wanted.logprobs is not None
                count = len(wanted.token_ids)
                # An abort may come with a stop token, which this generator does not see: it resumes.
                assert sample.response_length == count or "start_rollout_id" in sample.metadata
                assert sample.tokens[: len(prompt) + count] == prompt + wanted.token_ids
                assert sample.rollout_log_probs[:count] == wanted.logprobs
                assert sum(call is sample for call in rewards.calls) == 1
    assert resumed
    assert mixed


@pytest.mark.parametrize(
    ("partial_rollout", "empty", "kept"), [(True, False, True), (True, True, False), (False, False, False)]
)
async def test_only_groups_with_a_partial_response_go_back(
    host: None, partial_rollout: bool, empty: bool, kept: bool
) -> None:
    waiting = Waiting()

    async def nothing_yet(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        waiting.running += 1
        await asyncio.Event().wait()
        return sample

    async def at_once(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await until(lambda: waiting.running == 1)
        append(sample, args, [5], meta_info={"finish_reason": {"type": "stop"}}, text="x")
        return sample

    nothing_yet.__dict__["abort_mode"] = "request"
    args = nowhere(
        partial_rollout=partial_rollout,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        prompt_data=[Sample(generate_function_path=path) for path in (at_once, nothing_yet if empty else waiting)],
    )
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in (7, 8):  # the second time the buffer is served, and keeps the first rollout id
        ((sample,),) = await generate_rollout_async(args, rollout_id, source)
        assert (sample.response, sample.reward) == ("x", 1.0)
        assert bool(source.buffer) == kept
        if kept:
            ((partial,),) = source.buffer
            assert partial.metadata == {"start_rollout_id": 7}
            assert partial.response == " of and" * (rollout_id - 6)
        waiting.running = 0
