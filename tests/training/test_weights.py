"""New weights reach the engine bucket by bucket, all of them, and an engine that refuses one stays paused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamfold import EngineError
from streamfold.training.weights import buckets_of, send_weights
from support.training import engine, gap, generate, load, perturbed, scores, streamed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 100))
def test_each_tensor_is_in_one_bucket_in_order_and_no_bucket_could_take_the_next_one(
    sizes: list[int], limit: int
) -> None:
    tensors = [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    buckets = [*buckets_of(tensors, limit)]
    assert [name for bucket in buckets for name in bucket] == [name for name, _ in tensors]
    totals = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    firsts = [next(iter(bucket.values())).nbytes for bucket in buckets[1:]]
    assert all(total + following > limit for total, following in zip(totals[:-1], firsts, strict=True))


def test_after_an_update_the_engine_generates_with_all_of_the_new_weights(tiny: Path) -> None:
    """Noise is on every weight, so one bucket that did not arrive is seen in the scores."""
    model = perturbed(tiny)
    weights = model.state_dict()
    with engine(tiny) as server:
        buckets = asyncio.run(send_weights(server.url, weights, "1", bucket_bytes=1 << 17))
        samples = generate(server, tiny, 4)
    assert buckets == len([*buckets_of(weights.items(), 1 << 17)]) > 10
    assert {version for sample in samples for version, _, _ in sample.version_spans} == {"1"}
    assert gap(scores(model, samples), streamed(samples)) < 1e-5
    assert gap(scores(load(tiny), samples), streamed(samples)) > 0.1
    for name in ("lm_head.weight", "model.layers.3.mlp.gate.weight"):  # the scores do see a bucket that is missing
        stale = perturbed(tiny)
        stale.state_dict()[name].copy_(load(tiny).state_dict()[name])
        assert gap(scores(stale, samples), streamed(samples)) > 1e-3


def test_an_engine_that_refuses_a_bucket_is_an_error_and_generates_nothing_until_it_has_all_weights(
    tiny: Path,
) -> None:
    weights = perturbed(tiny).state_dict()
    with engine(tiny) as server:

        async def run() -> None:
            with pytest.raises(EngineError, match="no weight 'unknown'") as refused:
                await send_weights(server.url, {**weights, "unknown": torch.zeros(1)}, "1")
            assert refused.value.status == 400
            work = asyncio.create_task(asyncio.to_thread(generate, server, tiny, 1))
            assert await asyncio.wait({work}, timeout=0.3) == (set(), {work})
            await send_weights(server.url, weights, "2")
            (sample,) = await work
            assert sample.version_spans == [("2", 0, sample.response_length)]

        asyncio.run(run())


def test_an_engine_that_cannot_be_reached_is_a_retryable_error() -> None:
    with pytest.raises(EngineError) as failed:
        asyncio.run(send_weights("http://127.0.0.1:9", {"a": torch.zeros(1)}, "1"))
    assert failed.value.retryable
