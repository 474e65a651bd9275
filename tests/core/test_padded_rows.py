"""Rows of routed experts that the engine padded, of both engines: which are, which are damage, and how many."""

from __future__ import annotations

import base64
import io
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.bodies import DONE, Shape, event, finish
from support.bodies_vllm import event as vllm_event
from support.folding import Folded, agreed

Dtype = Literal["int32", "uint8", "uint16"]
MARKS: dict[Dtype, int] = {"int32": -1, "uint8": 255, "uint16": 65535}
ENGINES = ["sglang", "vllm"]
UNSIGNED: list[Dtype] = ["uint8", "uint16"]


def folded(engine: str, rows: Any, dtype: Dtype, shape: Shape) -> Folded:
    """A prompt of one token and as many sampled ones as there are rows."""
    array = np.array(rows, np.dtype(dtype).newbyteorder("<"))
    asked: dict[str, Any] = {"experts": shape, "prompt_len": 1}
    if engine == "sglang":
        told = {"routed_experts": base64.b64encode(array.tobytes()).decode(), "routed_experts_dtype": dtype}
        last = event(range(len(rows)), len(rows), reason=finish(), prompt_tokens=1, **told)
        return agreed(last + DONE, experts=shape, prompt_len=1)
    file = io.BytesIO()
    np.save(file, array)
    last = vllm_event(range(len(rows)), "stop", routed_experts=base64.b64encode(file.getvalue()).decode())
    return agreed(last + DONE, "vllm", **asked)


def padded_rows(engine: str, rows: Any, dtype: Dtype, shape: Shape) -> int | None:
    """How many rows are padded; None: they are refused as damage."""
    result = folded(engine, rows, dtype, shape)
    if result.error is not None:
        assert result.decode_error.kind == "metadata"
        assert result.decode_error.path.endswith("routed_experts")
        assert (result.reading.token_ids, result.reading.padded_rows) == ([], 0)
        return None
    assert result.reading.routed_experts is not None
    assert result.reading.routed_experts.tolist() == rows  # as they were sent
    return result.reading.padded_rows


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", MARKS)
@pytest.mark.parametrize("num_experts", [8, None])
def test_a_row_with_the_mark_in_every_slot_is_padded_and_counted(
    engine: str, dtype: Dtype, num_experts: int | None
) -> None:
    shape, mark = Shape(2, 2, num_experts, dtype), MARKS[dtype]
    real, padding = [[1, 2], [3, 0]], [[mark, mark], [mark, mark]]
    assert padded_rows(engine, [real, real], dtype, shape) == 0
    assert padded_rows(engine, [padding, real, padding, real], dtype, shape) == 2
    assert padded_rows(engine, [padding] * 3, dtype, shape) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", MARKS)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_row_with_the_mark_in_some_slots_only_is_damage_where_it_is_no_expert(
    engine: str, dtype: Dtype, slots: int
) -> None:
    shape, real = Shape(2, 2, 8, dtype), [[1, 2], [3, 0]]
    for first in range(4):
        ids = np.array(real, np.int64).ravel()
        ids[[(first + slot) % 4 for slot in range(slots)]] = MARKS[dtype]
        assert padded_rows(engine, [real, ids.reshape(2, 2).tolist()], dtype, shape) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_minus_one_is_never_an_expert(engine: str) -> None:
    for num_experts in (None, 8):
        assert padded_rows(engine, [[[-1, 2], [3, 0]]], "int32", Shape(2, 2, num_experts)) is None
        assert padded_rows(engine, [[[1], [3]], [[-1], [-1]]], "int32", Shape(2, 1, num_experts)) == 1
        assert padded_rows(engine, [[[1], [-1]]], "int32", Shape(2, 1, num_experts)) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_the_mark_may_be_the_last_expert_too_and_the_experts_of_a_token_are_distinct(engine: str, dtype: Dtype) -> None:
    """DeepSeek's 256 experts as uint8: 255 is one of them."""
    mark = MARKS[dtype]
    for num_experts in (mark + 1, mark + 40, None):
        shape = Shape(2, 2, num_experts, dtype)
        last_expert = [[[mark, 2], [3, mark]], [[1, mark], [mark, 0]], [[1, 2], [3, mark]]]
        assert padded_rows(engine, last_expert, dtype, shape) == 0
        assert padded_rows(engine, [*last_expert, [[mark, mark], [mark, mark]]], dtype, shape) == 1
        # No token goes to an expert twice, so this one was padded in one layer only.
        for in_part in ([[mark, mark], [3, 0]], [[1, 2], [mark, mark]], [[1, mark], [mark, mark]]):
            assert padded_rows(engine, [*last_expert, in_part], dtype, shape) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_with_one_expert_a_token_only_num_experts_tells_padding_from_the_last_expert(engine: str, dtype: Dtype) -> None:
    mark = MARKS[dtype]
    rows = [[[1], [3]], [[mark], [mark]]]
    assert padded_rows(engine, rows, dtype, Shape(2, 1, mark, dtype)) == 1
    assert padded_rows(engine, rows, dtype, Shape(2, 1, mark + 1, dtype)) is None
    assert padded_rows(engine, rows, dtype, Shape(2, 1, None, dtype)) is None
    assert "num_experts" in str(folded(engine, rows, dtype, Shape(2, 1, None, dtype)).decode_error)
    # In one layer only it is an expert, if it may be one.
    assert padded_rows(engine, [[[1], [mark]]], dtype, Shape(2, 1, mark + 1, dtype)) == 0
    assert padded_rows(engine, [[[1], [mark]]], dtype, Shape(2, 1, mark, dtype)) is None


@pytest.mark.parametrize("dtype", MARKS)
def test_padding_is_found_in_an_array_of_any_size_wherever_it_is(dtype: Dtype) -> None:
    """Long arrays are decoded in blocks, whose borders are inside rows."""
    layers, top_k, mark = 61, 8, MARKS[dtype]
    rows = np.arange(300)[:, None, None] + np.arange(layers)[:, None] + np.arange(top_k)
    rows = rows % 200
    shape = Shape(layers, top_k, 200, dtype)
    for marked in ([0], [299], [0, 25, 26, 150, 299], [*range(300)]):
        padded = rows.copy()
        padded[marked] = mark
        assert folded("sglang", padded, dtype, shape).reading.padded_rows == len(marked)
        padded[marked[-1], layers - 1, top_k - 1] = 7
        assert f"row {marked[-1]} " in str(folded("sglang", padded, dtype, shape).decode_error)


def test_the_count_is_of_the_rows_that_are_kept() -> None:
    def told(*rows: list[list[int]]) -> str:
        return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()

    shape, real, padding = Shape(1, 2, 8), [[1, 2]], [[-1, -1]]
    first = event([1], 1, prompt_tokens=1, routed_experts=told(padding))
    assert agreed(first, aborted=True, experts=shape).reading.padded_rows == 1
    same = first + event([], 1, prompt_tokens=1, reason=finish())
    assert agreed(same, experts=shape).reading.padded_rows == 1
    outgrown = first + event([2], 2, prompt_tokens=1, reason=finish())
    assert agreed(outgrown, experts=shape).reading.padded_rows == 0
    replaced = first + event([2], 2, prompt_tokens=1, reason=finish(), routed_experts=told(real, real))
    assert agreed(replaced, experts=shape).reading.padded_rows == 0
    damaged = first + event([2], 2, prompt_tokens=1, reason=finish(), routed_experts=told(real, [[-1, 1]]))
    assert (agreed(damaged, experts=shape).reading.token_ids, agreed(damaged, experts=shape).reading.padded_rows) == (
        [1],
        1,
    )
    flat = agreed(first, aborted=True).reading  # of no known shape
    assert flat.routed_experts is not None
    assert flat.padded_rows == 0


@given(st.data())
def test_the_reader_agrees_on_any_rows(data: st.DataObject) -> None:
    dtype: Dtype = data.draw(st.sampled_from([*MARKS]))
    mark = MARKS[dtype]
    shape = Shape(
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([None, 2, 255, 256, 65535, 65536])),
        dtype,
    )
    ids = st.sampled_from([mark, mark, mark, 0, 1, 254])
    row = st.lists(
        st.lists(ids, min_size=shape.top_k, max_size=shape.top_k), min_size=shape.num_layers, max_size=shape.num_layers
    )
    padding = st.just([[mark] * shape.top_k] * shape.num_layers)
    rows = data.draw(st.lists(row | padding, min_size=1, max_size=3))
    folded(data.draw(st.sampled_from(ENGINES)), rows, dtype, shape)
