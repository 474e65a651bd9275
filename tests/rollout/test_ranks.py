"""Data-parallel ranks: a sample keeps the one whose prefix cache it has filled."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Buffer, Client, EngineError, Retries, Rollout, RolloutConfig, Sample
from streamfold.loopback import Loopback
from streamfold.rollout.generate import CompleteSample
from streamfold.samples.reset import restart
from support.completing import answers, truncated
from support.replay import DONE, PROMPT, Replay, event, stream
from support.rollouts import bounded, groups_of, rollout

if TYPE_CHECKING:
    from pathlib import Path

    from support.replay import Step

BOTH_LOOPS = True

PARAMS = {"max_new_tokens": 6, "ignore_eos": True}
NOTE = "streamfold_dp_rank"


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**{"groups": 1, "sampling_params": PARAMS, "dp_size": 4, "progress": False, **changes})


def never() -> bool:
    return False


def rank_of(request: Any) -> int | None:
    named = request.json().get("routed_dp_rank")
    named = request.headers.get("x-data-parallel-rank") if named is None else named
    return None if named is None else int(named)


async def test_a_sample_keeps_its_rank_over_calls_turns_and_restarts_although_others_are_free() -> None:
    replies: list[list[Step]] = [
        truncated(event([1], 1)),
        stream(event([2], 1, "stop", prompt_tokens=4), DONE),
        stream(event([3], 1, "stop", prompt_tokens=5), DONE),
        stream(event([1], 1, "stop"), DONE),
    ]
    async with Replay(answers(*replies)) as server, Client(server.url, retries=Retries(first=0.001)) as client:
        generate = CompleteSample(client, config())
        generate._requests_of_rank = [3, 1, 0, 2]
        sample = Sample(tokens=list(PROMPT))
        await generate(sample, PARAMS, aborted=never)
        generate._requests_of_rank = [0, 0, 9, 0]
        sample.status = Sample.Status.PENDING
        await generate(sample, PARAMS, aborted=never)
        restart(sample)
        await generate(sample, PARAMS, aborted=never)
        assert [request.json["routed_dp_rank"] for request in server.generates] == [2, 2, 2, 2]
        assert generate._requests_of_rank == [0, 0, 9, 0]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_it_keeps_its_rank_over_rollouts_and_in_the_buffers_file(engine: Any, tmp_path: Path) -> None:
    with Loopback(engine=engine, dp_size=4, token_rate=200, stop_probability=0) as server:
        async with Client(server.url, engine=engine) as client:
            options: dict[str, Any] = {"partial_rollout": True, "sampling_params": {"max_new_tokens": 40}}
            source = Buffer(groups_of(6, 2))
            first = rollout(client=client, groups=1, over_sampling=6, dp_size=4, **options)
            given = (await bounded(first.run(source, 0))).groups
            source.save(tmp_path / "buffer")
            loaded = Buffer(groups_of(6, 2))
            loaded.load(tmp_path / "buffer")
            second = rollout(client=client, groups=5, dp_size=4, **options)
            given += (await bounded(second.run(loaded, 1))).groups
        ranks: dict[tuple[int, ...], set[int | None]] = {}
        for request in server.seen():
            if request.method == "POST" and (ids := request.json().get("input_ids") or request.json().get("token_ids")):
                ranks.setdefault((ids[len(PROMPT)], request_key(request)), set()).add(rank_of(request))
    assert len(given) == 6
    samples = [sample for group in given for sample in group]
    assert {len(found) for found in ranks.values()} == {1}, "one rank for each"
    assert len(ranks) == len(samples)
    assert {sample.metadata[NOTE][1] for sample in samples} == {4}


def request_key(request: Any) -> Any:
    return request.headers.get("x-smg-routing-key") or request.headers.get("x-session-id")


async def test_another_number_of_ranks_gives_another_rank_and_one_rank_is_not_named() -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        sample = Sample(tokens=list(PROMPT), metadata={NOTE: [3, 4]})
        for size in (4, 2, 1):
            restart(sample)
            await CompleteSample(client, config(dp_size=size))(sample, PARAMS, aborted=never)
        assert [request.json.get("routed_dp_rank") for request in server.generates] == [3, 0, None]


@pytest.mark.parametrize("noted", [[9, 4], [-1, 4], [1], "1", [1.5, 4], None])
async def test_a_note_that_is_no_rank_is_replaced(noted: Any) -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        sample = Sample(tokens=list(PROMPT), metadata={NOTE: noted})
        await CompleteSample(client, config())(sample, PARAMS, aborted=never)
        assert server.generates[0].json["routed_dp_rank"] == 0
        assert sample.metadata[NOTE] == [0, 4]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23", "0.28", "0.33"])
async def test_a_sample_whose_rank_an_engine_refuses_gets_another_one_and_keeps_that(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = "sglang" if version.startswith("0.5") else "vllm"
    with Loopback(engine=engine, version=version, dp_size=2, stop_probability=0) as server:
        async with Client(server.url, engine=engine) as client:
            generate = CompleteSample(client, config())
            samples = [Sample(tokens=[*PROMPT, i], metadata={NOTE: [rank, 4]}) for i, rank in enumerate((3, 3, 1))]
            with caplog.at_level(logging.WARNING, "streamfold"):
                for sample in samples:
                    await bounded(generate(sample, PARAMS, aborted=never))
        assert [sample.response_length for sample in samples] == [6] * 3
        assert [sample.metadata[NOTE] for sample in samples] == [[0, 4], [0, 4], [1, 4]]
        ranks = [rank_of(request) for request in server.seen() if request.method == "POST"]
    assert ranks == [3, 0, 3, 0, 1]
    assert [record.getMessage() for record in caplog.records if "data-parallel rank 3" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ], "said once"


async def test_where_all_ranks_are_refused_the_engines_words_are_raised() -> None:
    refusal = stream(
        b'data: {"error":{"message":"routed_dp_rank=0 is isolated by fault tolerance","code":400}}\n\n', DONE
    )
    async with Replay(refusal) as server, Client(server.url) as client:
        sample = Sample(tokens=list(PROMPT))
        with pytest.raises(EngineError, match="isolated by fault tolerance"):
            await bounded(CompleteSample(client, config())(sample, PARAMS, aborted=never))
        assert [request.json["routed_dp_rank"] for request in server.generates] == [0, 1, 2, 3]
        assert NOTE not in sample.metadata
        assert sample.status is Sample.Status.ABORTED


async def test_any_other_refusal_leaves_the_rank() -> None:
    refusal = stream(b'data: {"error":{"message":"the prompt is too long","code":400}}\n\n', DONE)
    async with Replay(refusal) as server, Client(server.url) as client:
        sample = Sample(tokens=list(PROMPT))
        with pytest.raises(EngineError, match="too long"):
            await bounded(CompleteSample(client, config())(sample, PARAMS, aborted=never))
        assert len(server.generates) == 1
        assert sample.metadata[NOTE] == [0, 4]


async def test_a_rank_that_is_named_twice_is_refused() -> None:
    async with Client("127.0.0.1:9") as client:
        generate = CompleteSample(client, config(extra={"routed_dp_rank": 1}))
        with pytest.raises(ValueError, match="extra must not hold routed_dp_rank"):
            await generate(Sample(tokens=list(PROMPT)), PARAMS, aborted=never)


async def test_the_header_of_the_key_is_the_configurations() -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        for header in ("X-Mine", None):
            run = Rollout(client, config(dp_size=1, routing_header=header))
            await asyncio.wait_for(run.run(Buffer([[Sample(tokens=list(PROMPT))]])), 30)
        mine, none = server.generates
    assert "x-mine" in mine.headers
    assert "x-smg-routing-key" not in mine.headers
    assert "x-smg-routing-key" not in none.headers
