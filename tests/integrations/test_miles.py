"""miles's integration: how it is called, what it requests, and what it writes to miles's samples."""

from __future__ import annotations

import argparse
import asyncio
import copy
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import EngineTimeout, StreamTruncated, miles
from streamfold.integrations.settings import SETTINGS, Settings
from streamfold.loopback import Loopback
from streamfold.samples.metadata import OWN_KEYS
from support.host.slime.utils.processing_utils import IMAGE_TOKENS
from support.miles import arguments, installed
from support.miles.calls import PARAMS, ask, ask_legacy, partial, response_of, sample_of, spans, state_of
from support.miles.install import LORA, AdaptersCache
from support.miles.rollout import LegacyGenerateState, abort, generate_and_rm, load_generate_function
from support.miles.types import AdapterRef, Sample, SampleWithSpans
from support.replay import DONE, FIN, HANG, PROMPT, Replay, chunk, event, events, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Step

BOTH_LOOPS = True

Status = Sample.Status
TEXT = " the story"  # two ids


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed():
        yield


def whole(**meta: Any) -> Any:
    """A reply of three tokens."""
    return stream(event([1, 2], 2), event([3], 3, "stop", **meta), DONE)


# How it is called.


def test_miles_takes_the_one_function_for_its_own_signature_and_wraps_the_other() -> None:
    assert inspect.iscoroutinefunction(miles.generate_streaming)
    assert list(inspect.signature(miles.generate_streaming).parameters) == ["input"]
    assert load_generate_function("streamfold.miles.generate_streaming") is miles.generate_streaming
    assert list(inspect.signature(miles.generate_streaming_legacy).parameters) == [
        *("args", "sample", "sampling_params", "evaluation")
    ]
    legacy = load_generate_function("streamfold.miles.generate_streaming_legacy")
    assert legacy is not miles.generate_streaming_legacy


@pytest.mark.parametrize("function", ["generate_streaming", "generate_streaming_legacy"])
@pytest.mark.parametrize("evaluation", [True, False])
async def test_mileses_own_loop_gets_a_finished_sample_from_either_function(function: str, evaluation: bool) -> None:
    async with Replay(whole()) as server:
        state = state_of(server, custom_generate_function_path=f"streamfold.miles.{function}")
        sample = await generate_and_rm(state, sample_of(), PARAMS, evaluation)
    assert (sample.status, sample.reward, response_of(sample)) == (Status.COMPLETED, 1.0, [1, 2, 3])
    assert [request.json["return_logprob"] for request in server.generates] == [True]


def test_each_setting_of_a_generate_function_is_an_option_of_miles() -> None:
    parser = argparse.ArgumentParser()
    vars(miles.generate_streaming)["add_arguments"](parser)
    given = parser.parse_args(["--streamfold-tries", "7", "--streamfold-timeout-next-token", "none"])
    assert vars(given) == {"streamfold_tries": "7", "streamfold_timeout_next_token": "none"}
    settings = Settings.of(given)
    assert (settings.tries, settings.timeout_next_token, settings.drain) == (7, None, Settings().drain)
    with pytest.raises(SystemExit):
        parser.parse_args(["--streamfold-group-tries", "7"])  # of rollout functions
    assert all(setting.meaning in " ".join(parser.format_help().split()) for setting in SETTINGS[:1])


SCRIPT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from support.{stand_in} import installed
from support.{calls} import *
from support.replay import *
for name in {absent}:
    sys.modules[name] = None

async def main():
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server:
        {ask}
        assert len(server.generates) == 1

with installed():
    asyncio.run(main())
    print([name for name, module in sys.modules.items() if name.split(".")[0] in {absent} and module is not None])
"""
ALONE = {
    "miles": {
        "stand_in": "miles",
        "calls": "miles.calls",
        "absent": ["slime", "vime"],
        "ask": "await ask(state_of(server), sample_of())",
    },
    "slime": {
        "stand_in": "host",
        "calls": "host_calls",
        "absent": ["miles", "vime"],
        "ask": "await ask(streaming(server), sample_of())",
    },
}


@pytest.mark.parametrize("trainer", ALONE)
def test_a_trainer_works_where_no_other_one_is_installed(trainer: str) -> None:
    script = SCRIPT.format(**ALONE[trainer])
    command = [sys.executable, "-c", script, str(Path(__file__).parent.parent)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("[]\n", "")


# Requests.


async def test_a_first_request_has_the_prompts_ids_and_every_option_that_is_set() -> None:
    with Loopback(stop_probability=0) as engine:
        state = state_of(engine, use_rollout_routing_replay=True, sglang_output_store_backend="mooncake")
        params = {"max_new_tokens": 8, "temperature": 1.0}
        sample = await ask(state, Sample(prompt=TEXT, routing_key="mine"), params)
        (request,) = engine.seen()
        wanted = engine.undisturbed(sample.tokens[:2], params, return_logprob=True, return_routed_experts=True)
    body = request.json()
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": engine.tokenizer.encode(TEXT),
        "sampling_params": params,
        "stream": True,
        "return_logprob": True,
        "return_routed_experts": True,
    }
    assert request.headers["x-smg-routing-key"] == "mine"
    assert (response_of(sample), sample.rollout_log_probs) == (wanted.token_ids, wanted.logprobs)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.dtype == "int32"
    assert sample.rollout_routed_experts.tobytes() == wanted.routed_experts
    assert (sample.status, sample.weight_versions) == (Status.TRUNCATED, ["default"])
    assert sample.prefix_cache_info.total_prompt_tokens == 2
    sample.validate()


async def test_chat_messages_are_tokenized_as_miles_does() -> None:
    with Loopback(stop_probability=0) as engine:
        state = state_of(engine)
        sample = await ask(state, Sample(prompt=[{"role": "user", "content": "hi"}]), {"max_new_tokens": 2})
    text = state.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert sample.tokens[:-2] == state.tokenizer.encode(str(text), add_special_tokens=False)


@pytest.mark.parametrize(
    ("policy", "key", "sent"),
    [
        ("consistent_hashing", "mine", "mine"),
        ("manual", "mine", "mine"),
        ("round_robin", None, None),
        (None, None, None),
        (None, "mine", "mine"),  # as miles itself
    ],
)
async def test_a_routing_key_is_a_header(policy: str | None, key: str | None, sent: str | None) -> None:
    async with Replay(whole()) as server:
        await ask(state_of(server, sglang_router_policy=policy), sample_of(routing_key=key))
    assert server.generates[0].headers.get("x-smg-routing-key") == sent


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
async def test_a_policy_that_needs_a_routing_key_refuses_a_sample_without_one(policy: str) -> None:
    async with Replay(whole()) as server:
        with pytest.raises(ValueError, match=f"{policy}.*sample 0 has no routing_key"):
            await ask(state_of(server, sglang_router_policy=policy), sample_of())
        assert server.requests == []


@pytest.mark.parametrize(
    ("limits", "params", "budget"),
    [
        ({}, {"max_new_tokens": 9}, 7),
        ({"rollout_max_response_len": 6}, {}, 4),
        ({"rollout_max_context_len": 8}, {"max_new_tokens": 9}, 3),
        ({"rollout_max_context_len": 8}, {"max_new_tokens": 4}, 2),
    ],
)
async def test_a_resumed_request_gets_what_the_response_and_the_context_leave(
    limits: dict[str, int], params: dict[str, int], budget: int
) -> None:
    """Of a prompt of three tokens and a response of two so far."""
    async with Replay(stream(event([20], 1, "stop", prompt_tokens=5), DONE)) as server:
        sample = await ask(state_of(server, **limits), partial(1, 2), params)
    body = server.generates[0].json
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([*PROMPT, 1, 2], budget)
    assert (response_of(sample), sample.status) == ([1, 2, 20], Status.COMPLETED)
    sample.validate()


@pytest.mark.parametrize("context", [5, 4, 3, 1])
async def test_a_full_context_is_truncated_without_a_request(context: int) -> None:
    async with Replay(whole()) as server:
        sample = await ask(state_of(server, rollout_max_context_len=context), partial(1, 2))
        assert server.requests == []
    assert (sample.status, response_of(sample)) == (Status.TRUNCATED, [1, 2])


@pytest.mark.parametrize(("context", "budget"), [(10, 3), (8, 1), (100, 64), (None, 64), (7, 0), (5, 0)])
async def test_a_prompt_that_has_no_ids_yet_counts_in_the_context(context: int | None, budget: int) -> None:
    prompt = "a story"  # seven ids
    reply = stream(event([1], 1, "stop", prompt_tokens=len(prompt)), DONE)
    async with Replay(reply) as server:
        sample = sample_of(prompt=prompt, tokens=[])
        state = state_of(server, rollout_max_context_len=context)
        tokenizer: Any = state.tokenizer
        tokenizer.encode = lambda text, **_: list(text.encode())
        await ask(state, sample)
    sent = [request.json["sampling_params"]["max_new_tokens"] for request in server.generates]
    assert sent == ([budget] if budget else [])
    assert sample.status is (Status.COMPLETED if budget else Status.TRUNCATED)
    assert sample.tokens[: len(prompt)] == list(prompt.encode())
    sample.validate()


async def test_adapters_are_named_as_miles_names_them() -> None:
    AdaptersCache.served = {"math": SimpleNamespace(version=4)}
    async with Replay(whole()) as server:
        await ask(state_of(server), sample_of())
        await ask(state_of(server, lora_rank=8), sample_of())
        await ask(state_of(server, lora_rank=8, lora_train_only=True), sample_of())
        await ask(state_of(server, lora_rank=8), sample_of(adapter=AdapterRef("math", 3)))
        found = [(body.get("lora_path"), body.get("extra_key")) for body in (r.json for r in server.generates)]
        gone = await ask(state_of(server), sample_of(adapter=AdapterRef("law", 3)))
        assert len(server.generates) == 4
    assert found == [(None, None), (LORA, None), (None, None), ("slot_3", "math:v4")]
    assert (gone.status, response_of(gone)) == (Status.ABORTED, [])


# What is refused before any request.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_score_centering": True}, "streaming"),
        ({"rollout_top_logprobs_num": 4}, "rollout_top_logprobs_num .*streaming"),
        ({"rollout_top_p": 0.9}, "sampling support .*streaming"),
    ],
)
async def test_what_streaming_does_not_carry_is_refused_in_training(settings: dict[str, Any], message: str) -> None:
    def should_return_sampling_mask(args: Any, params: Any) -> bool:
        return bool(getattr(args, "rollout_top_p", 1.0) < 1)

    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        del sys.modules[name]
    newest = {"should_return_sampling_mask": should_return_sampling_mask}
    with installed(rollout__generate_utils__sampling_mask=newest):
        async with Replay(whole()) as server:
            state = state_of(server, **settings)
            sample = sample_of()
            before = copy.deepcopy(vars(sample))
            with pytest.raises(ValueError, match=message):
                await ask(state, sample)
            assert (server.requests, vars(sample)) == ([], before)
            if "use_score_centering" not in settings:
                await ask(state, sample_of(), evaluation=True)
                assert len(server.generates) == 1


async def test_a_release_whose_samples_cannot_be_written_is_refused() -> None:
    class Old:
        status = Status.PENDING
        response_length = 0
        prompt = "x"

    async with Replay(whole()) as server:
        with pytest.raises(ValueError, match="samples of this miles have no update_from_meta_info"):
            await ask(state_of(server), Old())  # type: ignore[arg-type]


# What is written.


@pytest.mark.parametrize("kind", [Sample, SampleWithSpans])
async def test_weight_versions_of_each_call_are_kept_as_strings_or_as_spans_of_the_tokens(kind: type[Sample]) -> None:
    told: dict[str, Any] = {"weight_version": "8", "weight_versions": spans(("7", 0, 1), ("8", 1, 3))}
    cut = stream(event([1, 2], 2), event([3], 3, "abort", **told), DONE)
    rest = stream(event([4], 1, "stop", prompt_tokens=6, weight_version="9"), DONE)
    async with Replay(cut) as server:
        sample = await ask(state_of(server), sample_of(kind))
        assert sample.status is kind.Status.ABORTED
        sample.validate()
        server.routes[server.path] = rest
        await ask(state_of(server), sample)
    sample.validate()
    assert (response_of(sample), sample.status) == ([1, 2, 3, 4], kind.Status.COMPLETED)
    if kind is Sample:
        assert sample.weight_versions == ["8", "9"]
    else:
        found = [[(s.version, s.abs_start, s.abs_end) for s in call.spans] for call in sample.weight_versions]
        assert found == [[("7", 3, 4), ("8", 4, 6)], [("9", 6, 7)]]


@pytest.mark.parametrize("kind", [Sample, SampleWithSpans])
async def test_what_miles_keeps_in_a_sample_stays_as_it_is(kind: type[Sample]) -> None:
    segment = {"t0": 1.0, "t1": 2.0, "turn": 0}
    kept: dict[str, Any] = {
        "rollout_id": 4,
        "non_generation_time": 1.5,
        "metadata": {"lifecycle": [segment], "messages": [{"role": "user"}]},
        "train_metadata": {"loss": "sft"},
        "reward_spec": object(),
        "routing_key": "mine",
        "label": "7",
    }
    async with Replay(whole(spec_accept_token_num=2)) as server:
        sample = await ask(state_of(server, sglang_speculative_algorithm="EAGLE"), sample_of(kind, **kept))
    for ours in OWN_KEYS:
        sample.metadata.pop(ours, None)
    assert {name: getattr(sample, name) for name in kept} == kept
    assert (sample.spec_info.spec_accept_token_num, sample.spec_info.completion_token_num) == (2, 3)


@pytest.mark.parametrize("mask", [None, [0, 0]])
async def test_tokens_are_masked_as_they_were_and_shared_lists_are_not_changed(mask: list[int] | None) -> None:
    sample = partial(1, 2, loss_mask=mask)
    shared = [sample.tokens, sample.rollout_log_probs, sample.loss_mask, sample.weight_versions]
    before = copy.deepcopy(shared)
    async with Replay(stream(event([20], 1, "stop", prompt_tokens=5, weight_version="1"), DONE)) as server:
        await ask(state_of(server), sample)
    assert sample.loss_mask == [*(mask or [1, 1]), 1]
    assert sample.rollout_log_probs == [-1 / 8, -2 / 8, -20 / 8]
    assert shared == before


async def test_a_stream_that_breaks_off_keeps_its_tokens_and_is_resumed() -> None:
    broken: list[Step] = [head(), chunk(event([1, 2], 2, weight_version="7")), FIN]
    async with Replay(broken) as server:
        sample = sample_of(SampleWithSpans)
        with pytest.raises(StreamTruncated):
            await ask(state_of(server), sample)
        assert (response_of(sample), sample.status.name) == ([1, 2], "ABORTED")
        sample.validate()
        server.routes[server.path] = stream(event([3], 1, "stop", prompt_tokens=5), DONE)
        await ask(state_of(server), sample)
    assert (response_of(sample), sample.status.name) == ([1, 2, 3], "COMPLETED")


async def test_a_timeout_keeps_what_was_received() -> None:
    async with Replay([head(), *map(chunk, events(2, finish=None)), HANG]) as server:
        sample = sample_of()
        with pytest.raises(EngineTimeout, match="next_token"):
            await ask(state_of(server, streamfold_timeout_next_token=0.05), sample)
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


# Aborts.


async def test_mileses_abort_keeps_every_token_and_the_next_call_resumes() -> None:
    with Loopback(token_rate=400, stop_probability=0, incremental=True) as engine:
        state = state_of(engine, use_rollout_routing_replay=True, partial_rollout=True)
        params = {"max_new_tokens": 400}
        samples = [Sample(prompt=f" {word}") for word in ("the", "of")]
        tasks = [asyncio.ensure_future(generate_and_rm(state, sample, params)) for sample in samples]
        await until(lambda: engine.stats().tokens > 10)
        await abort(state)
        await asyncio.gather(*tasks)
        assert all(sample.status is Status.ABORTED and 0 < sample.response_length < 400 for sample in samples)
        assert [sample.reward for sample in samples] == [None, None]
        for sample in samples:
            sample.validate()
        state.reset()
        for sample in samples:
            prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
            await generate_and_rm(state, sample, params)
            wanted = engine.undisturbed(prompt, params, return_logprob=True, return_routed_experts=True)
            assert (response_of(sample), sample.rollout_log_probs) == (wanted.token_ids, wanted.logprobs)
            assert sample.rollout_routed_experts is not None
            assert sample.rollout_routed_experts.tobytes() == wanted.routed_experts
            sample.validate()


async def test_no_request_leaves_while_miles_is_aborting() -> None:
    async with Replay(whole()) as server:
        state, other = state_of(server), state_of(server)
        state.aborted = True
        assert (await ask(state, sample_of())).status is Status.ABORTED
        assert server.requests == []
        assert (await ask(other, sample_of())).status is Status.COMPLETED, "each rollout function has its own flag"
        assert (await ask(state, sample_of())).status is Status.ABORTED
        assert len(server.generates) == 1


async def test_the_older_signature_sees_the_flag_of_the_one_state_of_older_releases() -> None:
    async with Replay(whole()) as server:
        args = arguments(server.url)
        assert (await ask_legacy(args, sample_of(), evaluation=True)).status is Status.COMPLETED
        LegacyGenerateState(args).aborted = True
        assert (await ask_legacy(args, sample_of())).status is Status.ABORTED
        assert len(server.generates) == 1


async def test_a_cancelled_task_aborts_the_request_and_keeps_the_prefix() -> None:
    async with Replay([head(), *map(chunk, events(2, finish=None)), HANG]) as server:
        sample = sample_of()
        task = asyncio.ensure_future(ask(state_of(server), sample))
        await until(lambda: server.generates)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert set(server.aborts) == {server.generates[0].json["rid"]}
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


# Images and audio.


async def test_images_are_sent_with_all_ids_and_mileses_inputs_for_training_are_kept() -> None:
    with Loopback(stop_probability=0, incremental=True) as engine:
        state = state_of(engine, hf_checkpoint=f"loopback-vl/{engine.config.vocab_size}")
        sample = Sample(prompt=TEXT, multimodal_inputs={"images": [b"png", b"png"]})
        prompt = [engine.tokenizer.image_token_id] * (2 * IMAGE_TOKENS) + engine.tokenizer.encode(TEXT)
        await ask(state, sample, {"max_new_tokens": 5})
        assert sample.multimodal_train_inputs == {"pixel_values": [3, 3]}
        sample.status = Status.ABORTED  # as if it had been aborted there
        await ask(state, sample, {"max_new_tokens": 12})
        first, later = (request.json() for request in engine.seen())
    assert first["input_ids"] == prompt
    assert later["input_ids"] == sample.tokens[: len(prompt) + 5]
    assert first["image_data"] == later["image_data"] == ["data:image/png;base64,cG5n"] * 2
    assert sample.response_length == 12


async def test_audio_is_sent_and_videos_are_refused() -> None:
    async with Replay(whole()) as server:
        await ask(state_of(server), sample_of(multimodal_inputs={"audios": [b"wav"], "images": None}))
        assert server.generates[0].json["audio_data"] == ["data:audio;base64,d2F2"]
        with pytest.raises(NotImplementedError, match="videos"):
            await ask(state_of(server), sample_of(multimodal_inputs={"videos": [b"mp4"]}))
        assert len(server.generates) == 1
