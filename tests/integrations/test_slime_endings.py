"""Calls of the integrations that fail: what the sample keeps, and what is raised."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.loopback import Loopback
from support import bodies, replay
from support.host import installed
from support.host.slime.observability.trace_utils import spans
from support.host.slime.rollout.sglang_rollout import generate_and_rm
from support.host.slime.utils.types import Sample
from support.host_calls import (
    HOSTS,
    PARAMS,
    TEXT,
    TOP_P,
    Server,
    Status,
    Written,
    aligned,
    ask,
    assert_undisturbed,
    decoding,
    event,
    events,
    partial,
    response_of,
    sample_of,
    sent_request,
    streaming,
    text_of,
)
from support.replay import DONE, FIN, HANG, LAST_CHUNK, PROMPT, RST, answer_json, chunk, head, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.replay import Request, Step

BOTH_LOOPS = True

slime_only = pytest.mark.parametrize("host", ["slime"], indirect=True)


@pytest.fixture(autouse=True, params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


def two(*rest: Step) -> list[Step]:
    """Two tokens, and then something else."""
    return [head(), *map(chunk, events(2, finish=None)), *rest]


async def failed(
    error: type[Exception], steps: Sequence[Step], params: dict[str, Any] | None = None, **settings: Any
) -> Written:
    """Generate a sample whose call fails; check what every failure must leave, and return the sample."""
    tokens, metadata = list(PROMPT), {"mine": 1}
    sample = Written(prompt="x", tokens=tokens, metadata=metadata)
    async with Server(steps) as server:
        with pytest.raises(error):
            await ask(streaming(server, **settings), sample, params)
        assert len(server.generates) == 1, "it is not retried"
    assert sample.status is Status.ABORTED
    assert sample.reward is None
    assert (tokens, metadata) == (PROMPT, {"mine": 1}), "what may be shared with others stays as it was"
    assert aligned(sample)
    assert spans[-1].closed
    assert isinstance(spans[-1].error, error)
    return sample


# Streams that stop (vllm-project/vime#410, macanderson/stella#362).


@pytest.mark.parametrize("rest", ["fin", "reset", "last chunk", "[DONE]", "half an event"])
async def test_a_stream_without_a_finish_reason_leaves_its_prefix_and_raises(rest: str) -> None:
    steps: dict[str, list[Step]] = {
        "fin": [FIN],
        "reset": [RST],
        "last chunk": [LAST_CHUNK, FIN],
        "[DONE]": [chunk(DONE), LAST_CHUNK, FIN],
        "half an event": [chunk(event([3], 3)[:-30]), LAST_CHUNK, FIN],
    }
    sample = await failed(StreamTruncated, two(*steps[rest]))
    assert (response_of(sample), sample.rollout_log_probs) == ([1, 2], [-0.125, -0.25])
    assert sample.response == text_of(1, 2)
    assert sample.writes == 1


CUMULATIVE = [bodies.event([1], 1, text="b"), bodies.event([1, 2], 2, text="bc")]
INCREMENTAL = [bodies.event([1], 1, text="b"), bodies.event([2], 2, text="c")]

WRONG = {
    # sgl-project/sglang#19977, ai-dynamo/dynamo#7642, sgl-project/sglang#39645, lightseekorg/tokenspeed#584
    "a hole": bodies.event([4], 4),
    "a jump back": bodies.event([1], 1),
    "ids and pairs of unlike number": bodies.event([3], 3, top={"output_ids": [3, 4]}),
    "ids and pairs of unlike value": bodies.event([3], 3, top={"output_ids": [4]}),
    "one logprob short": bodies.event([3], 3, completion_tokens=4),
    "a null logprob": bodies.event([3], 3, output_token_logprobs=[[None, 3, None]]),
    "the other mode": bodies.event([1, 2, 3], 3),
    "no JSON": b"data: {this is not json}\n\n",
    "no meta_info": bodies.sse({"text": "d", "output_ids": [3]}),  # NVIDIA-NeMo/ProRL-Agent-Server#52
    "an empty meta_info": bodies.sse({"text": "d", "output_ids": [3], "meta_info": {}}),
    "an unknown finish": bodies.event([3], 3, reason=bodies.finish("timeout")),  # vllm-project/vllm#57082
}


@slime_only
@pytest.mark.parametrize("wrong", WRONG)
async def test_an_invalid_event_adds_nothing(wrong: str) -> None:
    sample = await failed(DecodeError, [head(), *map(chunk, [*INCREMENTAL, WRONG[wrong]]), HANG])
    assert (response_of(sample), sample.response) == ([1, 2], "bc")
    assert sample.writes == 1


@slime_only
@pytest.mark.parametrize(
    "wrong",
    [bodies.event([1], 1), bodies.event([3], 3), bodies.event([1, 9, 3], 3), bodies.event([9, 2, 3], 3)],
    ids=["shorter", "the other mode", "another prefix", "another beginning"],
)
async def test_a_cumulative_stream_must_not_change_its_prefix(wrong: bytes) -> None:
    sample = await failed(DecodeError, [head(), *map(chunk, [*CUMULATIVE, wrong]), HANG])
    assert (response_of(sample), sample.response) == ([1, 2], "bc")


@pytest.mark.parametrize("status", [400, 404, 503])
async def test_a_refusal_changes_only_the_status_of_the_sample(status: int) -> None:
    """THUDM/slime#1542: a request that is not retryable is sent once."""
    sample = await failed(EngineError, answer_json({"error": {"message": "no"}}, status=status))
    assert response_of(sample) == []


async def test_an_error_event_keeps_what_was_received_before() -> None:
    """vllm-project/guidellm#743."""
    error = b'data: {"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    sample = await failed(EngineError, stream(*events(2, finish=None), error, DONE))
    assert response_of(sample) == [1, 2]


@slime_only
@pytest.mark.parametrize("status", [400, 503])
async def test_an_abort_with_a_status_is_an_error(status: int) -> None:
    """sgl-project/sglang#28175."""
    reason = bodies.finish("abort", message="The request queue is full.", status_code=status)
    sample = await failed(EngineError, stream(replay.event([], 0, reason, logprobs=False), DONE))
    assert response_of(sample) == []


async def test_an_engine_that_is_not_there_is_an_error() -> None:
    async with Server() as server:
        args = streaming(server)
    sample = sample_of()
    with pytest.raises(EngineError):
        await ask(args, sample)
    assert (sample.status, sample.tokens) == (Status.ABORTED, PROMPT)


@pytest.mark.parametrize(
    ("setting", "steps", "kept"),
    [("first_token", [HANG], []), ("first_token", [head(), HANG], []), ("next_token", None, [1, 2])],
)
async def test_a_silent_engine_times_out_and_its_tokens_are_kept(
    setting: str, steps: list[Step] | None, kept: list[int]
) -> None:
    settings: dict[str, Any] = {f"streamfold_timeout_{setting}": 0.1}
    sample = await failed(EngineTimeout, two(HANG) if steps is None else steps, **settings)
    assert response_of(sample) == kept
    assert sample.writes == 1


@pytest.mark.parametrize("k", range(6))
async def test_after_a_reset_the_response_resumes_from_its_own_tokens(k: int) -> None:
    """aden-hive/hive#5923: it neither restarts from the prompt nor repeats a token."""
    every = [1, 2, 3, 4, 5, 6]

    def reply(request: Request) -> list[Any]:
        ids, budget = sent_request(request).ids, sent_request(request).budget
        done = ids[len(PROMPT) :]
        assert budget is not None
        assert done == every[: len(done)]
        rest = every[len(done) : len(done) + budget]
        body = [event([t], i + 1, prompt_tokens=len(ids)) for i, t in enumerate(rest)]
        if not done and k < 6 and len(server.generates) == 1:
            return [head(), *map(chunk, body[:k]), 0.01, RST]
        return stream(*body, event([], len(rest), "length", prompt_tokens=len(ids)), DONE)

    sample = sample_of()
    async with Server(reply) as server:
        args = streaming(server)
        decoding(args, lambda tokens: text_of(*tokens))
        with pytest.raises(StreamTruncated):
            await ask(args, sample, {"max_new_tokens": 6})
        assert (response_of(sample), sample.status) == (every[:k], Status.ABORTED)
        await ask(args, sample, {"max_new_tokens": 6})
    assert response_of(sample) == every
    assert sample.rollout_log_probs == [-t / 8 for t in every]
    assert sample.response == text_of(*every)
    assert sample.status is Status.TRUNCATED


# Aborts by the engine itself (vllm-project/vllm#57082, sgl-project/sglang#32456).


ABORTS = {
    "with a token": bodies.event([3], 3, text="d", reason=bodies.finish("abort"), prompt_tokens=4),
    "bare": bodies.event(None, 2, reason=bodies.finish("abort"), prompt_tokens=4),
    "with everything again": bodies.queued_abort([1, 2], 2, text="bc", top={"output_ids": [2]}),
}


@slime_only
@pytest.mark.parametrize("abort", ABORTS)
async def test_an_abort_by_the_engine_is_a_result(abort: str) -> None:
    sample = partial(8)
    body = [bodies.event([t], t, text=chr(97 + t), prompt_tokens=4) for t in (1, 2)]
    async with Server(stream(*body, ABORTS[abort], DONE)) as server:
        await generate_and_rm(streaming(server), sample, {})
        assert len(server.generates) == 1, "the host resumes it, not we"
    assert response_of(sample) == ([8, 1, 2, 3] if abort == "with a token" else [8, 1, 2])
    assert sample.response == ("ibcd" if abort == "with a token" else "ibc")
    assert (sample.status, sample.reward) == (Status.ABORTED, None)
    assert aligned(sample)


async def test_an_abort_before_the_first_token_leaves_an_empty_sample() -> None:
    """vllm-project/vllm#47933."""
    async with Server(stream(event([], 0, "abort"), DONE)) as server:
        sample = await ask(streaming(server), sample_of(), {**PARAMS, **TOP_P})
    assert (sample.status, sample.tokens, sample.metadata) == (Status.ABORTED, PROMPT, {})


# Missing side data.


@slime_only
async def test_without_their_top_p_ids_tokens_are_counted_and_not_written() -> None:
    sample = await failed(StreamTruncated, two(FIN), TOP_P)
    assert (sample.tokens, sample.response, sample.rollout_log_probs) == (PROMPT, "", None)
    assert sample.metadata == {"mine": 1, "streamfold_lost_side_data": 2}
    assert sample.writes == 0
    sample.status = Status.PENDING
    async with Server(stream(event([1, 2, 3], 3, "abort"), DONE)) as server:
        await ask(streaming(server), sample, TOP_P)
    assert sample.metadata == {"mine": 1, "streamfold_lost_side_data": 5}
    assert (sample.status, sample.writes) == (Status.ABORTED, 0)


@slime_only
async def test_a_later_call_that_loses_its_top_p_ids_leaves_the_earlier_as_they_were() -> None:
    with Loopback(stop_probability=0) as engine:
        params = {"max_new_tokens": 9, **TOP_P}
        sample = await ask(streaming(engine), Sample(prompt=TEXT), {**params, "max_new_tokens": 4})
        sample.status = Status.ABORTED
        before = {**vars(sample), "metadata": {**sample.metadata, "streamfold_lost_side_data": 2}}
        broken: list[Any] = [head(), *(chunk(event([i], i, prompt_tokens=6)) for i in (1, 2)), FIN]
        async with Server(broken) as server:
            with pytest.raises(StreamTruncated):
                await ask(streaming(server), sample, params)
        assert vars(sample) == before
        await ask(streaming(engine), sample, params)
        assert_undisturbed(engine, streaming(engine), sample, params)


@slime_only
@pytest.mark.parametrize("what", ["top-p ids", "routed experts"])
async def test_a_finished_call_without_requested_side_data_is_an_error_that_names_it(what: str) -> None:
    params = TOP_P if what == "top-p ids" else {}
    sample = await failed(
        EngineError, stream(*events(3), DONE), params, use_rollout_routing_replay=what == "routed experts"
    )
    assert isinstance(spans[-1].error, EngineError)
    assert what in spans[-1].error.message
    assert (sample.tokens, sample.metadata) == (PROMPT, {"mine": 1, "streamfold_lost_side_data": 3})


@slime_only
@pytest.mark.parametrize("params", [{}, {"top_p": 1.0, "top_k": -1, "temperature": 0.7}, {"top_k": 1 << 30}])
async def test_unrestricted_sampling_needs_no_top_p_ids(params: dict[str, Any]) -> None:
    with_top_p = {**params, "custom_params": {"return_top_p_token_ids": True}}
    async with Server(stream(*events(3), DONE)) as server:
        sample = await ask(streaming(server), sample_of(), with_top_p)
    assert (sample.status, response_of(sample)) == (Status.COMPLETED, [1, 2, 3])


@slime_only
async def test_an_aborted_call_keeps_its_tokens_without_experts_and_the_next_returns_all_experts() -> None:
    def shape(rows: int) -> str:
        return base64.b64encode(np.arange(rows, dtype="<i4").tobytes()).decode()

    settings: dict[str, Any] = {
        "use_rollout_routing_replay": True,
        "num_layers": 1,
        "moe_router_topk": 1,
        "num_experts": None,
    }
    sample = await failed(StreamTruncated, two(FIN), **settings)
    assert (response_of(sample), sample.rollout_routed_experts) == ([1, 2], None)
    async with Server(stream(replay.event([3], 1, "stop", prompt_tokens=5, routed_experts=shape(5)), DONE)) as server:
        await ask(streaming(server, **settings), sample)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2, 3, 4]
    assert response_of(sample) == [1, 2, 3]


# Replies that do not fit the sample.


@slime_only
async def test_experts_that_do_not_fit_the_prompt_are_refused_and_nothing_is_written() -> None:
    with Loopback(stop_probability=0) as engine:
        args = streaming(engine, use_rollout_routing_replay=True)
        sample = Written(
            prompt=TEXT, multimodal_inputs={"images": [b"png"]}
        )  # the trainer counts no image: no processor
        with pytest.raises(ValueError, match=r"but 4 rows \(tokens - 1\) are needed"):
            await ask(args, sample, {"max_new_tokens": 3})
    assert (sample.response_length, sample.status, sample.writes) == (0, Status.ABORTED, 0)


async def test_if_the_tokens_cannot_be_written_the_calls_own_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(Written):
        def append_response_tokens(self, *args: Any, **fields: Any) -> None:
            super().append_response_tokens(*args, **fields)
            raise ValueError("not like this")

    sample = Refuses(prompt="x", tokens=list(PROMPT))
    async with Server(two(FIN)) as server:
        with pytest.raises(StreamTruncated):
            await ask(streaming(server), sample)
    assert (sample.tokens, sample.response_length, sample.status) == (PROMPT, 0, Status.ABORTED)
    assert "not like this" in caplog.text


async def test_every_error_of_a_call_carries_what_was_received() -> None:
    async with Server(two(FIN)) as server:
        with pytest.raises(StreamfoldError) as raised:
            await ask(streaming(server), sample_of())
    assert raised.value.partial is not None
    assert raised.value.partial.token_ids.tolist() == [1, 2]
