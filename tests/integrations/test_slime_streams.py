"""The sample is the same for every mode, chunking and side data of an engine's stream."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import DecodeError
from streamfold.loopback import Config, Loopback, undisturbed
from streamfold.loopback.core.reply import Reply, stopped
from streamfold.loopback.sglang.wire import SglangFormat
from streamfold.loopback.sglang.wire import stream as written
from streamfold.slime import generate_streaming
from support import bodies
from support.host import arguments, installed
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils.types import Sample
from support.host_calls import (
    TEXT,
    TOP_P,
    Status,
    aligned,
    ask,
    assert_undisturbed,
    decoding,
    partial,
    response_of,
    sample_of,
    streaming,
    text_of,
)
from support.replay import DONE, PROMPT, Replay, chunk, dripped, event, events, head, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH_LOOPS = True

INTERVALS = (1, 20, 64)
MODES = {"cumulative": False, "incremental": True}


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed():
        yield


def served(reply: Reply, *, incremental: bool, interval: int) -> list[Any]:
    """The steps of a whole reply that has an event every ``interval`` tokens."""
    cuts = range(interval, len(reply.token_ids), interval)
    return stream(*written(reply, SglangFormat(incremental=incremental), cuts))


# Modes, intervals, top-p ids and experts.


@pytest.mark.parametrize("per_chunk", [True, False], ids=["top-p per chunk", "top-p at the end"])
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("mode", MODES)
async def test_the_sample_is_the_same_in_every_mode_at_every_interval(
    mode: str, interval: int, per_chunk: bool
) -> None:
    config = Config(stop_probability=0)
    params = {"max_new_tokens": 150, **TOP_P}
    options = {"return_logprob": True, "return_routed_experts": True, "return_sampling_mask": True}
    wanted = undisturbed(config, PROMPT, params, **options)
    assert wanted.top_p == wanted.sampling_mask
    reply = replace(wanted, top_p=None) if per_chunk else replace(wanted, sampling_mask=None, sampling_logprobs=None)
    async with Replay(served(reply, incremental=MODES[mode], interval=interval)) as server:
        args = arguments(server.url, config, use_rollout_routing_replay=True, num_experts=None)
        sample = sample_of()
        assert await generate_streaming(args, sample, params) is sample
    assert sample.tokens == PROMPT + wanted.token_ids
    assert sample.rollout_log_probs == wanted.logprobs
    assert sample.response == "".join(wanted.pieces or [])
    assert (sample.status, sample.loss_mask) == (Status.TRUNCATED, [1] * 150)
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_ids.tolist() == [token for kept in wanted.top_p or [] for token in kept]
    assert np.diff(sample.rollout_top_p_token_offsets).tolist() == [len(kept) for kept in wanted.top_p or []]
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tobytes() == wanted.routed_experts


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("frontend", ["python", "rust"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_running_engine_gives_the_undisturbed_sample_in_one_call_and_in_two(
    mode: str, frontend: Any, interval: int
) -> None:
    options: dict[str, Any] = {"incremental": MODES[mode], "frontend": frontend, "stream_interval": interval}
    with Loopback(stop_probability=0, shuffle_keys=1, **options) as engine:
        replays = frontend == "python"  # the other frontend sends neither experts nor top-p ids
        args = streaming(engine, use_rollout_routing_replay=replays)
        params: dict[str, Any] = {"max_new_tokens": 100, **(TOP_P if replays else {})}
        whole = await ask(args, Sample(prompt=TEXT), params)
        assert_undisturbed(engine, args, whole, params)
        parts = await ask(args, Sample(prompt=TEXT), {**params, "max_new_tokens": 37})
        parts.status = Status.ABORTED
        await ask(args, parts, params)
        assert_undisturbed(engine, args, parts, params)
    assert parts.response_length == 100
    if replays:
        assert parts.rollout_top_p_token_offsets is not None
        assert whole.rollout_top_p_token_offsets is not None
        assert parts.rollout_top_p_token_offsets.tolist() == whole.rollout_top_p_token_offsets.tolist()


# Text.


@pytest.mark.parametrize("mode", MODES)
async def test_every_character_is_kept_wherever_packets_split_it(mode: str) -> None:
    pieces = ["é\u2028", "\u0085中文", "🙂", "\ufeff\n\ndata: [DONE]\n\n", '\\"\x00']
    ids = [201, 202, 203, 204, 205]
    logprobs: list[float | None] = [-0.5] * 5
    reply = Reply(prompt_tokens=3, token_ids=ids, logprobs=logprobs, pieces=pieces, finish=stopped(205))
    steps = served(reply, incremental=MODES[mode], interval=2)
    text_of_token = dict(zip(ids, pieces, strict=True))
    async with Replay(lambda _: dripped(steps, size=7)) as server:
        args = streaming(server)
        decoding(args, lambda tokens: "".join(text_of_token.get(token, "") for token in tokens))
        sample = await ask(args, sample_of())
    assert sample.response == "".join(pieces)
    assert response_of(sample) == ids
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize("skip", [True, False, None], ids=["skipped", "shown", "by default"])
async def test_special_tokens_are_in_the_text_if_they_are_wanted(skip: bool | None) -> None:
    """In the engine's text, and in ours if the engine has no tokenizer (sgl-project/sglang#7727)."""
    params: dict[str, Any] = {"max_new_tokens": 400}
    if skip is not None:
        params["skip_special_tokens"] = skip
    texts = []
    for without in (False, True):
        with Loopback(stop_probability=0, skip_tokenizer_init=without) as engine:
            args = streaming(engine)
            decoded = GenerateState(args).tokenizer.decoded
            decoded.clear()
            sample = await ask(args, Sample(prompt=TEXT), params)
        texts.append(sample.response)
        ids, before = response_of(sample), sample.tokens[: -sample.response_length][-5:]
        wanted = [ids] if without else [before, [*before, *ids]]
        assert decoded == wanted, (
            "once, all at once: behind the prompt's last tokens if it is compared with the engine's"
        )
        assert ("<|" in sample.response) == (skip is False)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("absent", [None, bodies.LEFT_OUT], ids=["null", "no key"])
@pytest.mark.parametrize("everywhere", [True, False])
async def test_where_text_is_missing_all_of_it_is_decoded(absent: Any, everywhere: bool) -> None:
    smile = list("🙂".encode())
    first, rest = smile[:2], smile[2:]
    body = bodies.event(first, 2, text=absent) + bodies.event(
        rest, 4, text=absent if everywhere else "x", reason=bodies.finish()
    )
    async with Replay(stream(body, DONE)) as server:
        args = streaming(server)
        sample = await ask(args, sample_of())
        decoded = GenerateState(args).tokenizer.decoded
    assert sample.response == "🙂"
    assert decoded == [smile]


async def test_without_tokens_nothing_is_decoded() -> None:
    async with Replay(stream(bodies.event([], 0, reason=bodies.finish()), DONE)) as server:
        args = streaming(server)
        sample = await ask(args, sample_of())
        assert GenerateState(args).tokenizer.decoded == []
    assert (sample.response, sample.status) == ("", Status.COMPLETED)


# Ends.


ENDS = {
    "with the last token": ([event([1, 2], 2), event([3], 3, "stop")], [1, 2, 3]),
    "in an event of its own": ([event([1, 2], 2), event([3], 3), event([], 3, "stop")], [1, 2, 3]),
    "without a token": ([event([], 0, "stop")], []),
    "with the stop token alone": ([bodies.event([2], 1, text="", reason=bodies.finish(matched=2))], [2]),
    "at a stop string": ([event([1, 2], 2, {"type": "stop", "matched": "b"})], [1, 2]),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_stop_completes_the_sample_with_the_engines_tokens_and_no_other(end: str) -> None:
    """NovaSky-AI/SkyRL#758, verl-project/verl-omni#497, vllm-project/vllm#35705."""
    body, tokens = ENDS[end]
    async with Replay(stream(*body, DONE)) as server:
        sample = await ask(streaming(server), sample_of())
    assert sample.status is Status.COMPLETED
    assert response_of(sample) == tokens
    assert (sample.rollout_log_probs, sample.loss_mask or []) == ([-t / 8 for t in tokens], [1] * len(tokens))


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_length_truncates_the_sample_in_a_later_call_too(resumed: bool) -> None:
    """OpenRLHF/OpenRLHF#1327."""
    sample = partial(8) if resumed else sample_of()
    async with Replay(stream(event([9, 10], 2, "length", prompt_tokens=len(sample.tokens)), DONE)) as server:
        await ask(streaming(server), sample)
    assert sample.status is Status.TRUNCATED
    assert response_of(sample)[-2:] == [9, 10]
    assert aligned(sample)


async def test_empty_events_change_nothing() -> None:
    body = [event([], 0), event([1], 1), event([], 1), event([2], 2), event([], 2, "stop"), DONE, event([3], 3)]
    async with Replay(stream(*body)) as server:
        args = streaming(server)
        decoding(args, lambda tokens: text_of(*tokens))
        sample = await ask(args, sample_of())
    assert (response_of(sample), sample.response) == ([1, 2], "bc")


# Versions (rllm-org/rllm#622).


@pytest.mark.parametrize(
    ("sent", "kept"),
    [(["3", "3", "4"], ["4"]), (["3", None, None], ["3"]), ([None] * 3, []), (["default"] * 3, ["default"])],
)
async def test_the_latest_weight_version_of_a_call_is_kept_and_may_be_missing(
    sent: list[str | None], kept: list[str]
) -> None:
    versions: list[dict[str, Any]] = [{} if version is None else {"weight_version": version} for version in sent]
    body = [event([i + 1], i + 1, "stop" if i == 2 else None, **version) for i, version in enumerate(versions)]
    async with Replay(stream(*body, DONE)) as server:
        sample = await ask(streaming(server), sample_of())
    assert sample.weight_versions == kept


# Experts of a resumed call (verl-project/verl#6029, strands-rl/strands-sglang#72).


@pytest.mark.parametrize("rows", [7, 3, 5], ids=["of the whole sequence", "of the new tokens only", "of neither"])
async def test_experts_of_a_resumed_call_are_added_to_those_kept_or_refused(rows: int) -> None:
    experts = base64.b64encode(np.arange(rows, dtype="<i4").tobytes()).decode()
    body = event([1, 2, 3], 3, "stop", prompt_tokens=5, routed_experts=experts)
    sample = partial(8, 9)
    sample.rollout_routed_experts = np.full((4, 1, 1), 90, np.int32)
    async with Replay(stream(body, DONE)) as server:
        args = streaming(
            server,
            use_rollout_routing_replay=True,
            num_layers=1,
            moe_router_topk=1,
            num_experts=None,
            streamfold_resume="raise",
        )
        if rows == 5:
            with pytest.raises(DecodeError, match=r"found 20 bytes, .*3 rows .*, or all 7,"):
                await ask(args, sample)
        else:
            await ask(args, sample)
        assert server.requests[0].json["routed_experts_start_len"] == 4
    if rows == 5:
        assert sample.rollout_routed_experts.ravel().tolist() == [90] * 4
        assert (sample.status, response_of(sample)) == (Status.ABORTED, [8, 9])
    else:
        assert sample.rollout_routed_experts.ravel().tolist() == [90] * 4 + [*range(rows)][-3:]
        assert sample.status is Status.COMPLETED


async def test_after_the_finish_reason_the_stream_may_break_off() -> None:
    async with Replay([head(), *map(chunk, events(3)), 0.01, "RST"]) as server:
        sample = await ask(streaming(server), sample_of())
    assert (sample.status, response_of(sample)) == (Status.COMPLETED, [1, 2, 3])
