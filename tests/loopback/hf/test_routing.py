"""The routed experts of a real model: those that a fresh pass takes, one row for each token but the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.hf_generating import MODES, PROMPTS, client, experts, generate, generate_all, serve

if TYPE_CHECKING:
    from support.hf_reference import Reference

pytestmark = pytest.mark.torch

PARAMS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5}
# Where experts are this close, a rounding error may choose.
CLOSE = 1e-4


@pytest.mark.parametrize(
    ("mode", "batch_invariant"), [(MODES[0], False), (MODES[1], False), (MODES[1], True), (MODES[2], False)], ids=str
)
def test_streamed_experts_are_those_of_a_fresh_pass(
    moe: Reference, mode: dict[str, Any], batch_invariant: bool
) -> None:
    with serve(moe, batch_invariant=batch_invariant, **mode) as engine:
        generations = generate_all(engine, PROMPTS, PARAMS)
    compared = 0
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        rows = experts(generation)
        assert rows.shape == (len(prompt) + 24 - 1, 4, 2)
        assert ((rows >= 0) & (rows < 8)).all()
        ids, gaps = moe.experts([*prompt, *generation.token_ids][:-1])
        # Behind a close decision that went the other way all may differ, so compare up to the first one.
        clear = np.cumsum((gaps < CLOSE).any(axis=1)) == 0
        assert np.array_equal(np.sort(rows[clear]), np.sort(ids[clear]))
        compared += int(clear.sum())
    assert compared > 60, "close decisions have hidden nearly all"


def test_the_rows_of_a_dense_layer_are_zeros(moe: Reference) -> None:
    with serve(moe) as engine:
        rows = experts(generate(engine, PROMPTS[0], PARAMS))
    assert (rows[:, 1] == 0).all()
    assert (rows[:, [0, 2, 3]] != 0).any(axis=(0, 2)).all()


def test_rows_begin_where_the_request_says(moe: Reference) -> None:
    with serve(moe, batch_invariant=True) as engine:
        whole = experts(generate(engine, PROMPTS[2], PARAMS))
        part = experts(generate(engine, PROMPTS[2], PARAMS, experts_start=6))
    assert np.array_equal(part, whole[6:])


async def test_an_aborted_response_has_its_rows_too(moe: Reference) -> None:
    with serve(moe, token_rate=100) as engine:
        async with client(engine) as asking:
            call = asking.start(PROMPTS[0], {**PARAMS, "max_new_tokens": 240})
            await call.wait_tokens(5)
            generation = await call.abort()
    assert generation.finish_reason == "abort"
    assert len(experts(generation)) == len(PROMPTS[0]) + len(generation.token_ids) - 1
