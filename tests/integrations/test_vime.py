"""How vime's integration differs from slime's: its requests to vLLM, and how it reads the responses."""

from __future__ import annotations

import asyncio
import base64
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import DecodeError, EngineError, Retries, StreamTruncated, slime, vime
from streamfold.integrations.clients import client_handle
from streamfold.integrations.settings import Settings
from support import bodies_vllm
from support.bodies import LEFT_OUT
from support.completing import answers
from support.host import installed
from support.host.helpers import LIMIT
from support.host.slime.observability.trace_utils import spans
from support.host.slime.rollout.sglang_rollout import GenerateState, abort
from support.host.slime.utils.types import Sample
from support.host_calls import (
    PARAMS,
    TEXT,
    Server,
    Status,
    Written,
    aligned,
    arrived,
    ask,
    assert_undisturbed,
    broken_off,
    event,
    events,
    loopback_engine,
    part,
    partial,
    response_of,
    sample_of,
    sent_request,
    streaming,
    whole,
)
from support.replay import DONE, FIN, LAST_CHUNK, PROMPT, chunk, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Step

BOTH_LOOPS = True

TOP_P: dict[str, Any] = {"rollout_top_p": 0.9}
NARROW: dict[str, Any] = {**PARAMS, "top_p": 0.9}


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed("vime"):
        yield


def last(tokens: list[int], reason: str | None = "stop", *, top: dict[str, Any] | None = None, **choice: Any) -> bytes:
    """The one event of a call, as vLLM writes it."""
    counts = {"usage": bodies_vllm.usage(len(tokens)), **(top or {})}
    return bodies_vllm.event(tokens, reason, top=counts, **choice)


def npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class MetaKept(Sample):
    """A sample that keeps the ``meta_info`` of each call."""

    def append_response_tokens(self, *args: Any, **given: Any) -> None:
        vars(self).setdefault("metas", []).append(given["meta_info"])
        super().append_response_tokens(*args, **given)


async def meta_of(*payloads: bytes, **settings: Any) -> dict[str, Any]:
    """The ``meta_info`` that the sample gets of a call."""
    sample = MetaKept(prompt="x", tokens=list(PROMPT))
    async with Server(stream(*payloads, DONE)) as server:
        await ask(streaming(server, **settings), sample)
    (meta,) = vars(sample)["metas"]
    assert isinstance(meta, dict)
    return meta


# Requests.


async def test_a_first_request_has_every_option_under_vllms_names() -> None:
    with loopback_engine(replays=True, stop_probability=0) as engine:
        args = streaming(engine, use_rollout_routing_replay=True, router_policy="consistent_hash", **TOP_P)
        params = {**GenerateState(args).sampling_params, "max_new_tokens": 8, "seed": 7, "stop": ["no such"]}
        sample = await ask(args, Sample(prompt=TEXT, session_id="mine"), params)
        (request,) = engine.seen()
        assert_undisturbed(engine, args, sample, params)
    body = request.json()
    rid = body.pop("request_id")
    assert len(rid) == 32
    assert body == {
        "model": "loopback/512",
        "token_ids": engine.tokenizer.encode(TEXT),
        "sampling_params": {
            "n": 1,
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": -1,
            "seed": 7,
            "stop": ["no such"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": False,
            "logprobs": 1,
        },
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert request.path == "/inference/v1/generate"
    assert (request.headers["x-session-id"], request.headers["x-request-id"]) == ("mine", rid)
    assert sample.weight_versions == ["default"]
    assert sample.prefix_cache_info.total_prompt_tokens == 2
    assert sample.rollout_routed_experts is not None


async def test_slimes_parameters_and_our_seed_are_sent_under_vllms_names() -> None:
    async with Server(whole()) as server:
        params = {**PARAMS, "custom_params": {"return_top_p_token_ids": False}, "sampling_seed": 3, "top_k": -1}
        await ask(streaming(server), sample_of(), params)
        assert sent_request(server.generates[0]).params == {
            "n": 1,
            "max_tokens": 64,
            "seed": 3,
            "top_k": -1,
            "logprobs": 1,
        }


async def test_a_model_with_a_router_of_its_own_has_another_name_there_and_an_adapter_takes_its_place() -> None:
    async with Server(whole()) as server:
        args = streaming(server, vllm_model_routers={"ref": ("127.0.0.1", server.port)}, streamfold_model="ref")
        for changes in ({}, {"streamfold_model": None}, {"streamfold_extra": {"model": "math"}}):
            vars(args).update(changes)
            await ask(args, sample_of())
        assert [request.json.get("model") for request in server.generates] == [None, "loopback/512", "math"]


async def test_samples_of_a_vime_that_is_too_old_are_refused() -> None:
    sample = SimpleNamespace(status=Status.PENDING, prompt="x", tokens=[1], response_length=0, metadata={})
    async with Server(whole()) as server:
        with pytest.raises(ValueError, match="this vime have no append_response_tokens"):
            await vime.generate_streaming(streaming(server), sample, PARAMS)
        assert server.requests == []


@pytest.mark.parametrize("interval", [1, 20])
@pytest.mark.parametrize("version", ["0.22.0", "0.28.0", "0.32.0", "rust"])
async def test_every_release_gives_the_undisturbed_sample_in_one_call_and_in_two(version: str, interval: int) -> None:
    wire: dict[str, Any] = {"frontend": "rust"} if version == "rust" else {"version": version}
    with loopback_engine(stop_probability=0, stream_interval=interval, shuffle_keys=1, **wire) as engine:
        args = streaming(engine)
        params = {"max_new_tokens": 60}
        assert_undisturbed(engine, args, await ask(args, Sample(prompt=TEXT), params), params)
        parts = await ask(args, Sample(prompt=TEXT), {"max_new_tokens": 23})
        parts.status = Status.ABORTED
        await ask(args, parts, params)
        assert_undisturbed(engine, args, parts, params)
        bodies = [request.json() for request in engine.seen()]
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [60, 23, 37]
    assert len(bodies[2]["token_ids"]) == 2 + 23, "the whole prefix"


# Text.


@pytest.mark.parametrize("skip", [True, False, None], ids=["skipped", "shown", "by default"])
async def test_the_ids_of_a_call_are_decoded_once_and_all_at_once(skip: bool | None) -> None:
    params = {"max_new_tokens": 400} if skip is None else {"max_new_tokens": 400, "skip_special_tokens": skip}
    with loopback_engine(stop_probability=0) as engine:
        args = streaming(engine)
        sample = await ask(args, Sample(prompt=TEXT), params)
        decoded = GenerateState(args).tokenizer.decoded
    assert decoded == [response_of(sample)]
    assert sample.response == engine.tokenizer.decode(response_of(sample), skip_special_tokens=skip is not False)
    assert ("<|" in sample.response) == (skip is False)


async def test_a_character_split_between_two_calls_is_whole_in_the_end() -> None:
    smile = list("🙂".encode())
    async with Server(
        answers(broken_off(part(smile[:2])), stream(part(smile[2:], prompt=5, finish="stop"), DONE))
    ) as server:
        sample = await ask(streaming(server, streamfold_tries=3), sample_of())
    assert (sample.response, sample.status) == ("🙂", Status.COMPLETED)


# The metadata of a call.


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        ("stop", Status.COMPLETED, "stop"),
        ("repetition", Status.COMPLETED, "stop"),
        ("length", Status.TRUNCATED, "length"),
        ("abort", Status.ABORTED, "abort"),
        ("cancelled", Status.ABORTED, "abort"),
    ],
)
async def test_finish_reasons_have_the_trainers_names(reason: str, status: Status, kind: str) -> None:
    sample = MetaKept(prompt="x", tokens=list(PROMPT))
    async with Server(stream(last([1, 2], reason), DONE)) as server:
        await ask(streaming(server), sample)
    assert sample.status is status
    assert vars(sample)["metas"][0]["finish_reason"] == {"type": kind}
    assert response_of(sample) == [1, 2]


async def test_counts_come_from_the_usage_and_missing_ones_are_left_out() -> None:
    meta = await meta_of(last([1, 2]), bodies_vllm.usage_event(2, cached=2))
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 2)
    assert meta.keys() == {"prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"}
    assert "cached_tokens" not in await meta_of(last([1, 2]))


@pytest.mark.parametrize(
    ("top", "version"),
    [
        ({"top": {"weight_version": "7"}}, "7"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]}, "b"),
        ({}, None),
    ],
    ids=["one for all", "spans", "none"],
)
async def test_the_weight_version_is_the_last_tokens(top: dict[str, Any], version: str | None) -> None:
    assert (await meta_of(last([1, 2], **top))).get("weight_version") == version


SPECULATION = {"num_accepted_draft_tokens": 5, "num_draft_tokens": 9, "num_spec_steps": 3}


@pytest.mark.parametrize(
    "top",
    [
        {"metrics": {"speculative_decoding": SPECULATION}},
        {"request_spec_decode_stats": {"num_accepted_tokens": 5, "num_draft_tokens": 9, "num_verify_steps": 3}},
    ],
    ids=["vLLM's", "of the patched image"],
)
async def test_counts_of_speculative_decoding_have_the_trainers_names(top: dict[str, Any]) -> None:
    counts = {"choices": [], "usage": bodies_vllm.usage(2)}
    meta = await meta_of(last([1, 2]), bodies_vllm.event(None, top={**counts, **top}))
    assert (meta["spec_accept_token_num"], meta["spec_draft_token_num"], meta["spec_verify_ct"]) == (5, 9, 3)
    sample = sample_of()
    async with Server(stream(last([1, 2], top=top), DONE)) as server:
        await ask(streaming(server, vllm_speculative_config="{}"), sample)
    assert (sample.spec_info.spec_draft_token_num, sample.spec_info.completion_token_num) == (9, 2)


@pytest.mark.parametrize("metrics", [None, [], {"speculative_decoding": None}, {"speculative_decoding": {}}])
async def test_counts_that_are_no_numbers_are_left_out(metrics: Any) -> None:
    assert not [key for key in await meta_of(last([1], top={"metrics": metrics})) if key.startswith("spec_")]


async def test_the_span_has_the_fields_that_the_trainer_reads_from_a_response() -> None:
    async with Server(stream(last([1, 2]), bodies_vllm.usage_event(2, cached=1), DONE)) as server:
        await ask(streaming(server), sample_of())
    (span,) = spans
    assert span.attrs["cached_tokens"] == 1


# Routed experts.

EXPERTS: dict[str, Any] = {
    "use_rollout_routing_replay": True,
    "num_layers": 1,
    "moe_router_topk": 1,
    "num_experts": None,
}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
async def test_experts_are_a_npy_file_of_any_dtype(dtype: str) -> None:
    rows = npy(np.arange(4, dtype=dtype).reshape(4, 1, 1))
    async with Server(stream(last([1, 2], routed_experts=rows), DONE)) as server:
        sample = await ask(streaming(server, **EXPERTS), sample_of())
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.dtype == "int32"
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2, 3]


async def test_an_aborted_call_keeps_its_tokens_without_experts_and_the_next_returns_all_experts() -> None:
    rows = npy(np.arange(5, dtype="uint8").reshape(5, 1, 1))
    counts = {"usage": bodies_vllm.usage(1, prompt_tokens=5, total_tokens=6)}
    later = bodies_vllm.event([3], "stop", top=counts, routed_experts=rows)
    async with Server(answers(stream(last([1, 2], "abort"), DONE), stream(later, DONE))) as server:
        args = streaming(server, **EXPERTS)
        sample = await ask(args, sample_of())
        assert (response_of(sample), sample.rollout_routed_experts, sample.status) == ([1, 2], None, Status.ABORTED)
        await ask(args, sample)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2, 3, 4]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)


async def test_a_finished_call_without_the_experts_that_training_needs_is_an_error() -> None:
    """Releases up to 0.30 lose them when the last event is merged into another."""
    sample = sample_of()
    async with Server(whole()) as server:
        with pytest.raises(EngineError, match="no routed experts"):
            await ask(streaming(server, **EXPERTS), sample)
    assert (sample.tokens, sample.metadata["streamfold_lost_side_data"]) == (PROMPT, 3)


# Sampling masks.


@pytest.mark.parametrize("wanted", [True, False], ids=["needed", "not needed"])
async def test_masks_are_kept_as_flat_arrays_over_all_calls_also_of_an_aborted_one(wanted: bool) -> None:
    first: list[Step] = [head(), chunk(last([1, 2], None, sampling_mask=[[1, 4], [2]])), FIN]
    counts = {"usage": bodies_vllm.usage(1, prompt_tokens=5, total_tokens=6)}
    later = bodies_vllm.event([3], "stop", top=counts, sampling_mask=[[3, 9]])
    async with Server(answers(first, stream(later, DONE))) as server:
        args = streaming(server, streamfold_tries=3, **(TOP_P if wanted else {}))
        sample = await ask(args, sample_of(), NARROW)
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_ids.tolist() == [1, 4, 2, 3, 9]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 5]
    assert "streamfold_lost_side_data" not in sample.metadata


async def test_missing_masks_that_training_needs_are_an_error() -> None:
    """vllm-project/vllm#55935: some releases send null in streams."""
    sample = sample_of()
    async with Server(whole()) as server:
        with pytest.raises(EngineError, match="no top-p ids"):
            await ask(streaming(server, **TOP_P), sample, NARROW)
        assert (sample.tokens, sample.status) == (PROMPT, Status.ABORTED)
        assert sample.metadata == {"streamfold_lost_side_data": 3}
        await ask(streaming(server), sample_of(), NARROW)  # where training does not replay them
        found = await vime.generate_streaming(streaming(server, **TOP_P), sample_of(), NARROW, evaluation=True)
    assert found.status is Status.COMPLETED


# Invalid responses.

WRONG = {
    "no logprobs": {"logprobs": None},
    "left-out logprobs": {"logprobs": LEFT_OUT},
    "one logprob short": {"logprobs": bodies_vllm.logprobs_of([3])},
    "a null logprob": {"logprobs": {"content": [bodies_vllm.entry(3, logprob=None), bodies_vllm.entry(4)]}},
    "a stand-in for minus infinity": {
        "logprobs": {"content": [bodies_vllm.entry(3, logprob=-9999.0), bodies_vllm.entry(4)]}
    },
    "a logprob of another token": {"logprobs": bodies_vllm.logprobs_of([3, 5])},
    "an unknown finish": {"finish_reason": "timeout"},
    "a lost event": {"token_ids": [3], "logprobs": bodies_vllm.logprobs_of([3])},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_invalid_event_adds_nothing_and_no_logprob_is_invented(wrong: str) -> None:
    bad = bodies_vllm.event([3, 4], top={"usage": bodies_vllm.usage(4)}, **WRONG[wrong])
    sample = Written(prompt="x", tokens=list(PROMPT))
    async with Server(stream(last([1, 2], None), bad, DONE)) as server:
        with pytest.raises(DecodeError):
            await ask(streaming(server), sample)
    assert (response_of(sample), sample.rollout_log_probs) == ([1, 2], [-0.125, -0.25])
    assert (sample.status, sample.writes) == (Status.ABORTED, 1)
    assert aligned(sample)


@pytest.mark.parametrize(("code", "tries"), [(400, 1), (500, 3)])
async def test_a_refusal_in_a_stream_is_an_error_and_retried_only_if_it_is_retryable(code: int, tries: int) -> None:
    error = (
        b'data: {"error": {"message": "Token id 5 is out of vocabulary", "type": "x", "param": null, "code": %d}}\n\n'
    )
    sample = sample_of()
    async with Server(stream(error % code, DONE)) as server:
        with pytest.raises(EngineError, match="out of vocabulary"):
            await ask(streaming(server, streamfold_tries=3), sample)
        assert len(server.generates) == tries
    assert (sample.status, sample.tokens) == (Status.ABORTED, PROMPT)


async def test_a_disabled_endpoint_is_an_error_that_names_the_flag() -> None:
    with loopback_engine(enable_scale_out=False) as engine, pytest.raises(EngineError, match="--enable-scale-out"):
        await ask(streaming(engine), Sample(prompt=TEXT))


# Streams that end without a finish reason.


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr("streamfold.integrations.settings.Retries", lambda tries: Retries(tries=tries, first=0.001))


@pytest.mark.parametrize("tokens", [0, 2])
async def test_without_a_finish_reason_a_stream_that_the_trainer_has_aborted_is_a_partial_sample(tokens: int) -> None:
    """vllm-project/vllm#47933: releases up to 0.31 end it with the usage and [DONE]."""
    ending = asyncio.Event()
    first = [chunk(last([1, 2], None))] if tokens else []
    rest: list[Step] = [chunk(bodies_vllm.usage_event(tokens)), chunk(DONE), LAST_CHUNK, "END"]
    steps: list[Step] = [head(), *first, ending, *rest]
    async with Server(steps) as server:
        args = streaming(server, streamfold_tries=5)
        asking = asyncio.ensure_future(ask(args, sample_of(), NARROW))
        await until(lambda: server.generates and arrived() == tokens)
        GenerateState(args).aborted = True
        ending.set()
        sample = await asking
        assert len(server.generates) == 1
    assert (sample.status, response_of(sample)) == (Status.ABORTED, [1, 2][:tokens])


async def test_without_a_finish_reason_a_stream_that_was_not_aborted_is_resumed(soon: None) -> None:
    first = stream(last([1, 2], None), bodies_vllm.usage_event(2), DONE)
    async with Server(answers(first, stream(part([3], prompt=5, finish="stop"), DONE))) as server:
        sample = await ask(streaming(server, streamfold_tries=3), sample_of())
        assert [sent_request(request).budget for request in server.generates] == [64, 62]
    assert (response_of(sample), sample.status) == ([1, 2, 3], Status.COMPLETED)
    async with Server(first) as server:
        sample = sample_of()
        with pytest.raises(StreamTruncated):
            await ask(streaming(server), sample)
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


# Aborts of a running engine.


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
@pytest.mark.parametrize("new", [True, False], ids=["newer", "older"])
async def test_the_trainers_abort_keeps_every_token_and_the_next_call_resumes(new: bool, version: str) -> None:
    replays = version == "0.32.0"
    with loopback_engine(token_rate=400, stop_probability=0, version=version, replays=replays) as engine:
        args = streaming(engine, use_rollout_routing_replay=replays, **(TOP_P if replays else {}))
        state = GenerateState(args)
        state.sampling_params |= {"max_new_tokens": 200}
        group = [Sample(prompt=f" {word}") for word in ("the", "of")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("support.host.slime.rollout.sglang_rollout.knows_request_abort", new)
            state.submit_generate_tasks([group])
            (task,) = state.pendings
            await until(lambda: engine.stats().tokens > 10)
            await asyncio.wait_for(abort(args, 0), LIMIT)
            state.reset()
        cut_ones = task.result()
        assert [sample.status for sample in cut_ones] == [Status.ABORTED] * 2
        assert all(0 < sample.response_length < 200 and aligned(sample) for sample in cut_ones)
        paths = {request.path for request in engine.seen() if "abort" in request.path}
        assert ("/abort_requests" in paths) is (not new or version == "0.28.0")
        await asyncio.gather(*[ask(args, sample, state.sampling_params) for sample in cut_ones])
        for sample in cut_ones:
            assert_undisturbed(engine, args, sample, state.sampling_params)


async def test_an_abort_of_one_request_uses_the_engines_request_id() -> None:
    async with Server([head(), *map(chunk, events(2, finish=None)), "HANG"]) as server:
        args = streaming(server)
        sample = sample_of()
        task = asyncio.ensure_future(vime.generate_streaming(args, sample, PARAMS))
        await until(lambda: arrived() == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        rid = sent_request(server.generates[0]).rid
        (abort,) = server.at("/inference/v1/abort_requests")
        assert abort.json["request_ids"] == [f"generate-tokens-{rid}", rid]
    assert (response_of(sample), sample.status) == ([1, 2], Status.ABORTED)


async def test_what_finished_during_the_abort_stays_finished() -> None:
    sample = partial(1, 2, metadata={"streamfold_written": [3, 2, 2, "TRUNCATED", 64]})
    async with Server(stream(event([9], 1, "stop", prompt_tokens=5), DONE)) as server:
        await ask(streaming(server), sample)
        assert server.requests == []
    assert sample.status is Status.TRUNCATED


def test_a_client_of_one_engine_is_not_used_for_another() -> None:
    async def engines_of(url: str) -> list[str]:
        engines = [each.engine for each in (vime.VIME, slime.SLIME, vime.VIME)]
        handles = [await client_handle(engine, url, Settings()) for engine in engines]
        assert handles[0] is handles[2]
        return [handle.client.engine for handle in handles]

    assert asyncio.run(engines_of("http://127.0.0.1:9")) == ["vllm", "sglang", "vllm"]
