"""Routed experts from a later row on: engines that know the start, that do not, and that name it."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.bodies import DONE, Shape, event, finish
from support.bodies_vllm import event as vllm_event
from support.folding import Folded, agreed

DTYPES: list[Any] = ["int32", "uint8", "uint16"]
PROMPT, TOKENS = 6, 3
ROWS = PROMPT + TOKENS - 1
START = "meta_info.routed_experts_start_len"
engines = pytest.mark.parametrize("engine", ["sglang", "vllm"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def rows(count: int, shape: Shape, dtype: str) -> Any:
    """Distinct ids in each layer, the experts of a row unlike those of its neighbours."""
    ids = np.arange(count)[:, None, None] * 7 + np.arange(shape.num_layers)[:, None] * 3 + np.arange(shape.top_k)
    return (ids % 8).astype(np.dtype(dtype).newbyteorder("<"))


def folded(engine: str, array: Any, shape: Shape, start: int, tokens: int = TOKENS, **told: Any) -> Folded:
    asked: dict[str, Any] = {"experts": shape, "prompt_len": PROMPT, "experts_start": start}
    if engine == "sglang":
        told["routed_experts"] = base64.b64encode(array.tobytes()).decode()
        body = event(range(tokens), tokens, reason=finish(), prompt_tokens=PROMPT, **told)
        return agreed(body + DONE, **asked)
    file = io.BytesIO()
    np.save(file, array)
    told["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return agreed(vllm_event(range(tokens), "stop", **told) + DONE, "vllm", **asked)


def check(result: Folded, wanted: Any) -> None:
    experts = result.reading.routed_experts
    assert experts is not None, result.error
    assert experts.dtype == wanted.dtype.newbyteorder("=")
    assert experts.tolist() == wanted.tolist()


@engines
@each_dtype
def test_the_rows_are_those_from_the_start_on_whether_the_engine_knows_the_start_or_sends_all(
    engine: str, dtype: Any
) -> None:
    shape = Shape(2, 2, 8, dtype)
    whole = rows(ROWS, shape, dtype)
    for start in range(ROWS + 1):
        for sent in (whole[start:], whole):
            check(folded(engine, sent, shape, start), whole[start:])


@engines
@each_dtype
def test_padded_rows_are_counted_from_the_start_on(engine: str, dtype: Any) -> None:
    shape = Shape(2, 2, 8, dtype)
    whole = rows(ROWS, shape, dtype)
    whole[[0, 2, 5]] = -1 if dtype == "int32" else np.iinfo(dtype).max
    for start, padded in ((0, 3), (1, 2), (3, 1), (6, 0)):
        for sent in (whole[start:], whole):
            assert folded(engine, sent, shape, start).reading.padded_rows == padded


@engines
def test_any_other_number_of_rows_is_an_error_that_names_what_came_and_what_was_wanted(engine: str) -> None:
    shape = Shape(2, 2, 8)
    for count in {*range(ROWS + 3)} - {ROWS - 2, ROWS}:
        error = folded(engine, rows(count, shape, "int32"), shape, 2).decode_error
        assert error.kind == "metadata"
        assert f"{ROWS - 2} rows ({PROMPT} of the prompt + {TOKENS} tokens - 1 - 2), or all {ROWS}," in str(error)
        assert f"{count * 16} bytes" in str(error) or f"[{count}, 2, 2]" in str(error)


@engines
def test_damage_in_rows_before_the_start_is_an_error_too(engine: str) -> None:
    shape = Shape(2, 2, 8)
    whole = rows(ROWS, shape, "int32")
    whole[0, 1, 1] = 8
    assert folded(engine, whole, shape, 4).decode_error.kind == "metadata"


@each_dtype
def test_a_start_that_the_engine_names_says_which_rows_it_sent(dtype: Any) -> None:
    shape = Shape(2, 2, 8, dtype)
    whole = rows(ROWS, shape, dtype)
    for told, sent in ((4, whole[4:]), (0, whole), (None, whole[4:]), (None, whole)):
        result = folded("sglang", sent, shape, 4, routed_experts_start_len=told)
        check(result, whole[4:])
        assert result.reading.meta["routed_experts_start_len"] == told
    check(folded("sglang", whole, shape, 0, routed_experts_start_len=0), whole)


@pytest.mark.parametrize(
    ("told", "sent", "path", "numbers"),
    [
        (0, 4, "meta_info.routed_experts", ("64 bytes", "4 rows")),
        (4, ROWS, "meta_info.routed_experts", ("128 bytes", "4 rows")),
        (3, 4, START, ("start at 3", "from 4 on")),
        (5, ROWS, START, ("start at 5", "from 4 on")),
        ("4", 4, START, ("integer",)),
        (-4, 4, START, ("integer",)),
        (4.5, 4, START, ("integer",)),
        ([4], 4, START, ("integer",)),
    ],
)
def test_a_start_that_is_none_of_the_two_or_does_not_fit_the_rows_is_an_error(
    told: Any, sent: int, path: str, numbers: tuple[str, ...]
) -> None:
    shape = Shape(2, 2, 8)
    error = folded("sglang", rows(sent, shape, "int32"), shape, 4, routed_experts_start_len=told).decode_error
    assert (error.kind, error.path) == ("metadata", path)
    assert all(number in str(error) for number in numbers)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("num_experts", [8, None])
@pytest.mark.parametrize("names_dtype", [False, True])
def test_rows_and_dtype_are_found_where_neither_key_is_known_or_one_alone(
    dtype: Any, num_experts: int | None, names_dtype: bool
) -> None:
    """Also where as many bytes are the later rows as int32 and all rows as bytes."""
    shape = Shape(2, 2, num_experts, dtype)
    for start in range(ROWS + 1):
        for sent_as in (dtype, "int32"):
            whole = rows(ROWS, shape, sent_as)
            for sent in (whole[start:], whole):
                told: dict[str, Any] = {"routed_experts_dtype": sent_as} if names_dtype else {}
                result = folded("sglang", sent, shape, start, **told)
                if len(sent):
                    check(result, whole[start:])
                else:
                    assert result.reading.routed_experts is not None


@given(
    st.builds(Shape, st.integers(1, 3), st.integers(2, 4), st.just(8), st.sampled_from(DTYPES)),
    st.integers(0, 20),
    st.integers(0, 20),
    st.tuples(st.booleans(), st.booleans()),
)
def test_any_start_gives_the_tail_of_all_rows(shape: Shape, tokens: int, start: int, knows: tuple[bool, bool]) -> None:
    knows_start, knows_dtype = knows
    whole = rows(PROMPT + tokens - 1, shape, shape.dtype if knows_dtype else "int32")
    sent = whole[start:] if knows_start else whole
    result = folded("sglang", sent, shape, start, tokens)
    assert result.reading.routed_experts is not None
    assert result.reading.routed_experts.tolist() == whole[start:].tolist()


def test_without_a_shape_the_array_is_as_it_came() -> None:
    body = event([1], 1, reason=finish(), routed_experts=base64.b64encode(bytes(16)).decode()) + DONE
    reading = agreed(body, experts_start=2).reading
    assert reading.routed_experts is not None
    assert reading.routed_experts.tolist() == [0] * 4
