"""What comes beside the tokens: top-p sets, routed experts, weight versions, and the rest of meta_info."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from support.bodies import DONE, LEFT_OUT, Shape, event, finish, queued_abort
from support.folding import Folded, agreed

STOP = finish(matched=2)
NAMES = [("top_p_token_ids", "top_p_token_offsets"), ("top_p_kept_token_ids", "top_p_kept_token_offsets")]


def int32(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def sets(ids: Any, offsets: Any, names: tuple[str, str] = NAMES[0]) -> dict[str, Any]:
    return dict(zip(names, (ids, offsets), strict=True))


# --- top-p -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("written", [int32, list])
def test_top_p_arrays_come_as_base64_or_lists_under_either_name(names: tuple[str, str], written: Any) -> None:
    body = event([1], 1) + event([2, 3], 3, reason=STOP, **sets(written([1, 7, 2, 3, 9]), written([0, 2, 3, 5]), names))
    reading = agreed(body).reading
    assert reading.top_p == ([1, 7, 2, 3, 9], [0, 2, 3, 5])
    assert not [key for key in reading.meta if key.startswith("top_p")]
    mixed = {"top_p_token_ids": [1], "top_p_kept_token_offsets": int32([0, 1]), "top_p_kept_token_ids": None}
    assert agreed(event([1], 1, reason=STOP, **mixed)).reading.top_p == ([1], [0, 1])


def test_top_p_arrays_for_the_new_tokens_are_appended_and_for_all_replace() -> None:
    first = event([1], 1, **sets([1, 5], [0, 2]))
    for mode, later in (("sglang-incremental", [2, 3]), ("sglang-cumulative", [1, 2, 3])):
        appended = first + event(later, 3, reason=STOP, **sets([2, 3, 6], [0, 1, 3]))
        assert agreed(appended, mode).reading.top_p == ([1, 5, 2, 3, 6], [0, 2, 3, 5])
        replaced = first + event(later, 3, reason=STOP, **sets([1, 2, 3], [0, 1, 2, 3]))
        assert agreed(replaced, mode).reading.top_p == ([1, 2, 3], [0, 1, 2, 3])
        late = event([1], 1) + event(later, 3, **sets([2, 3], [0, 1, 2]))
        for untold in (late, first + event(later, 3)):
            assert agreed(untold, mode, aborted=True).reading.top_p is None
    # A full set at the end mends what was left out before.
    gap = first + event([2], 2) + event([3], 3, **sets([3], [0, 1]))
    assert agreed(gap, aborted=True).reading.top_p is None
    full = gap + event([], 3, reason=STOP, **sets([1, 2, 3], [0, 1, 2, 3]))
    assert agreed(full).reading.top_p == ([1, 2, 3], [0, 1, 2, 3])


def test_top_p_sets_may_be_empty_and_tokens_may_be_none() -> None:
    assert agreed(event([1, 2], 2, reason=STOP, **sets([], [0, 0, 0]))).reading.top_p == ([], [0, 0, 0])
    assert agreed(event([], 0, reason=STOP, **sets([], [0]))).reading.top_p == ([], [0])
    assert agreed(event([], 0, reason=STOP, **sets("", int32([0])))).reading.top_p == ([], [0])
    assert agreed(event([1], 1, reason=STOP, **sets(None, None))).reading.top_p is None
    told = event([1], 1, **sets([1], [0, 1])) + event([], 1, reason=STOP)
    assert agreed(told).reading.top_p == ([1], [0, 1])


def test_a_sampling_mask_gives_the_same_pair() -> None:
    key = "output_token_sampling_mask"
    first = event([1], 1, **{key: [[1, 5]]})
    assert agreed(first + event([2, 3], 3, reason=STOP, **{key: [[], [3, 6, 9]]})).reading.top_p == (
        [1, 5, 3, 6, 9],
        [0, 2, 2, 5],
    )
    cumulative = first + event([1, 2], 2, reason=STOP, **{key: [[1], [2]]})
    assert agreed(cumulative, "sglang").reading.top_p == ([1, 2], [0, 1, 2])
    assert agreed(first + event([2], 2, reason=STOP, **{key: None})).reading.top_p is None
    assert agreed(first + event([2], 2, reason=STOP, **sets([2], [0, 1]))).reading.top_p == ([1, 5, 2], [0, 2, 3])


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([1, 2, 3], [0, 1, 2, 4]),  # beyond the ids
        ([1, 2, 3], [0, 1, 2, 2]),  # short of them
        ([1, 2, 3], [1, 1, 2, 3]),
        ([1, 2, 3], [0, 2, 1, 3]),
        ([1, 2, 3], [0, -1, 2, 3]),
        ([1, 2, 3], [0, 3]),  # for one token
        ([1, 2, 3], [0, 1, 2, 3, 3]),
        ([], []),
        ([1, 2, 3], []),
        ([-1, 2, 3], [0, 1, 2, 3]),
        ([2**31, 2, 3], [0, 1, 2, 3]),
        ([1.0, 2, 3], [0, 1, 2, 3]),
        ([1, 2, "3"], [0, 1, 2, 3]),
        ([1, 2, None], [0, 1, 2, 3]),
        ([1, 2, True], [0, 1, 2, 3]),
        ([1, 2, 3], [0, 1, 2, 3.0]),
        ([[1], 2, 3], [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
        ([1, 2, 3], None),
        ([1, 2, 3], LEFT_OUT),
        (5, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
        (int32([-1, 2, 3]), [0, 1, 2, 3]),
        (int32([1, 2, 3])[:-1], [0, 1, 2, 3]),
        (base64.b64encode(b"\0" * 11).decode(), [0, 1, 2, 3]),
        (int32([1, 2, 3]), int32([0, 1, 2, 4])),
        ("*" + int32([1, 2, 3]), [0, 1, 2, 3]),
    ],
)
def test_top_p_arrays_that_do_not_fit_are_an_error(ids: Any, offsets: Any) -> None:
    body = event([9], 1) + event([1, 2], 3, text="x", reason=STOP, **sets(ids, offsets))
    folded = agreed(body)
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path.startswith("meta_info.top_p_token_")
    assert (folded.reading.token_ids, folded.reading.text, folded.reading.finish_reason) == ([9], None, None)


@pytest.mark.parametrize("mask", [[[1]], [[1]] * 4, [1, 2], [[1], None], [[1], [-1]], [[1], ["x"]], 5, "", {}])
def test_a_sampling_mask_that_does_not_fit_is_an_error(mask: Any) -> None:
    folded = agreed(event([9], 1) + event([1, 2], 3, reason=STOP, output_token_sampling_mask=mask))
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path.startswith("meta_info.output_token_sampling_mask")
    assert folded.reading.token_ids == [9]


def test_the_top_p_arrays_of_an_abort_count() -> None:
    last = event([2], 2, reason=finish("abort"), **sets([1, 2], [0, 1, 2]))
    assert agreed(event([1], 1) + last).reading.top_p == ([1, 2], [0, 1, 2])
    whole = queued_abort([1, 2], 2, **sets([1, 2], [0, 1, 2]))
    assert agreed(event([1], 1) + whole).reading.top_p == ([1, 2], [0, 1, 2])


# --- routed experts --------------------------------------------------------------------------------------------------

TWO_BY_TWO = Shape(num_layers=2, top_k=2, num_experts=8)
DTYPES = ["int32", "uint8", "uint16"]


def routed(values: list[int], dtype: str = "int32") -> str:
    return base64.b64encode(np.array(values, np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def last_event(payload: Any, **told: Any) -> bytes:
    """Three prompt tokens and two sampled ones: four rows."""
    return event([1], 1) + event([2], 2, reason=STOP, routed_experts=payload, **told) + DONE


def fold_routed(payload: Any, shape: Shape | None = TWO_BY_TWO, **told: Any) -> Folded:
    return agreed(last_event(payload, **told), experts=shape, prompt_len=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_routed_experts_of_each_dtype(dtype: Any) -> None:
    values = [token % 8 for token in range(16)]
    wanted = np.array(values, dtype).reshape(4, 2, 2)
    asked_for = fold_routed(routed(values, dtype), Shape(2, 2, 8, dtype)).reading.routed_experts
    told = fold_routed(routed(values, dtype), Shape(2, 2, 8, "int32"), routed_experts_dtype=dtype).reading
    for array in (asked_for, told.routed_experts):
        assert array is not None
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
        assert (array == wanted).all()
    assert told.meta["routed_experts_dtype"] == dtype
    assert "routed_experts" not in told.meta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("told", [{}, {"routed_experts_dtype": None}])
def test_an_engine_that_does_not_know_the_dtype_asked_for_sends_int32(dtype: Any, told: dict[str, Any]) -> None:
    values = [token % 8 if token > 3 else -1 for token in range(16)]
    array = fold_routed(routed(values), Shape(2, 2, 8, dtype), **told).reading.routed_experts
    assert array is not None
    assert (array.dtype, array.shape, array.ravel().tolist()) == (np.dtype("int32"), (4, 2, 2), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_have_the_dtype_that_was_asked_for(dtype: Any) -> None:
    body = event([1], 1, reason=STOP, routed_experts="") + DONE
    array = agreed(body, experts=Shape(2, 2, 8, dtype), prompt_len=3, experts_start=3).reading.routed_experts
    assert array is not None
    assert (array.dtype, array.shape) == (np.dtype(dtype), (0, 2, 2))


@pytest.mark.parametrize(("asked", "sent"), [("uint8", "uint16"), ("uint16", "uint8"), ("int32", "uint8")])
def test_an_untold_dtype_is_never_guessed_from_another_size(asked: Any, sent: str) -> None:
    folded = fold_routed(routed([1] * 16, sent), Shape(2, 2, 8, asked))
    assert folded.decode_error is not None
    assert (folded.decode_error.kind, folded.decode_error.path) == ("metadata", "meta_info.routed_experts")


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_experts_the_array_is_flat(dtype: Any) -> None:
    array = fold_routed(routed([0, 255, 7], dtype), None, routed_experts_dtype=dtype).reading.routed_experts
    assert array is not None
    assert (array.dtype, array.tolist()) == (np.dtype(dtype), [0, 255, 7])
    untold = fold_routed(routed([5, -1]), None).reading.routed_experts
    assert untold is not None
    assert (untold.dtype, untold.tolist()) == (np.dtype("int32"), [5, -1])


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 8])
def test_another_number_of_rows_is_an_error_that_tells_both(rows: int) -> None:
    """sgl-project/sglang#24851: padding hid the shift."""
    folded = fold_routed(routed([0] * rows * 4))
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path == "meta_info.routed_experts"
    assert "4" in str(folded.decode_error)
    assert folded.reading.token_ids == [1]
    assert folded.reading.routed_experts is None


def test_rows_are_prompt_and_tokens_less_one_and_the_start() -> None:
    told = [(3, 2, 0, 4), (3, 2, 3, 1), (3, 2, 2, 2), (1, 0, 0, 0), (3, 0, 0, 2), (1, 1, 0, 1)]
    for prompt, tokens, start, rows in told:
        payload = routed([1] * rows * 4)
        body = event(range(tokens), tokens, reason=STOP, prompt_tokens=prompt, routed_experts=payload)
        reading = agreed(body, experts=TWO_BY_TWO, prompt_len=prompt, experts_start=start).reading
        assert reading.routed_experts is not None
        assert reading.routed_experts.shape == (rows, 2, 2)
        if start and rows:  # from 0 on are all of them, which an engine may send that does not know the start
            off_by_one = agreed(body, experts=TWO_BY_TWO, prompt_len=prompt, experts_start=start + 1)
            assert off_by_one.decode_error.kind == "metadata"


def test_rows_follow_the_wire_if_the_caller_told_no_prompt() -> None:
    """With images the engine's prompt is longer than ours."""
    body = event([1], 1, prompt_tokens=6) + event([2], 2, prompt_tokens=6, reason=STOP, routed_experts=routed([0] * 28))
    assert agreed(body, experts=TWO_BY_TWO).reading.routed_experts is not None
    earlier = event([1], 1, prompt_tokens=6) + event(
        [2], 2, prompt_tokens=LEFT_OUT, reason=STOP, routed_experts=routed([0] * 28)
    )
    assert agreed(earlier, experts=TWO_BY_TWO).reading.routed_experts is not None
    assert agreed(body, experts=TWO_BY_TWO, prompt_len=3).decode_error.kind == "length"
    fewer = body.replace(routed([0] * 28).encode(), routed([0] * 16).encode())
    assert agreed(fewer, experts=TWO_BY_TWO).decode_error.kind == "metadata"


@pytest.mark.parametrize(
    "payload",
    [
        routed([0] * 16, "uint8"),  # the right values, another item size
        routed([0] * 16, "uint16"),
        routed([0] * 17),
        routed([0] * 15),
        "",
        "*" + routed([0] * 16),
        routed([0] * 16)[:10] + "\n" + routed([0] * 16)[10:],
        routed([0] * 16)[:10] + "\r\n*" + routed([0] * 16)[10:],
        routed([0] * 16).rstrip("="),
        routed([0] * 16) + "=",
        routed([0] * 16) + "====",
        routed([0] * 16)[:-3] + "B==",  # bits left over
        routed([7, -1] * 8).replace("/", "_").replace("+", "-"),
        base64.b64encode(routed([0] * 16).encode()).decode(),
        base64.b64encode(b"\x93NUMPY" + b"\0" * 58).decode(),
        "A",
        "====",
        " ",
        "é",
    ],
)
def test_routed_experts_that_are_not_what_they_should_be_are_an_error(payload: str) -> None:
    """sgl-project/sglang#31219, ai-dynamo/dynamo#9657: read leniently or as another dtype they are nonsense."""
    folded = fold_routed(payload)
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path == "meta_info.routed_experts"
    assert (folded.reading.token_ids, folded.reading.routed_experts) == ([1], None)


@pytest.mark.parametrize("payload", [5, True, [], [0] * 16, {}])
def test_routed_experts_that_are_no_string_are_an_error(payload: Any) -> None:
    for shape in (TWO_BY_TWO, None):
        folded = fold_routed(payload, shape)
        assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "meta_info.routed_experts")
        assert folded.reading.token_ids == [1]
    # Types are looked at before counts.
    assert agreed(event([1], 9, routed_experts=payload)).decode_error.kind == "schema"


@pytest.mark.parametrize("payload", ["*AAA", "AAAA\n", "AAA", "AAAAA===", "AAAB==", "_AAA", "QQ==", "QUFB"])
def test_base64_is_strict_without_experts_too(payload: str) -> None:
    assert fold_routed(payload, None).decode_error.kind == "metadata"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_is_one_of_those_there_are(dtype: Any) -> None:
    for wrong in (8, 200, *([-2, -(2**31)] if dtype == "int32" else [])):
        for place in (0, 9, 15):
            values = [7] * 16
            values[place] = wrong
            folded = fold_routed(routed(values, dtype), Shape(2, 2, 8, dtype))
            assert folded.decode_error.kind == "metadata"
            assert str(wrong) in str(folded.decode_error)
    unlimited = fold_routed(routed([200] * 16, dtype), Shape(2, 2, None, dtype)).reading.routed_experts
    assert unlimited is not None


@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "", "INT32", 5, True, [], {}])
def test_an_unknown_dtype_is_an_error(dtype: Any) -> None:
    folded = fold_routed(routed([0] * 16), routed_experts_dtype=dtype)
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path == "meta_info.routed_experts_dtype"
    assert fold_routed(None, routed_experts_dtype=dtype).reading.error is None
    assert fold_routed(routed([0] * 16), routed_experts_dtype=None).reading.error is None


def test_routed_experts_that_later_tokens_outgrow_are_dropped() -> None:
    first = event([1], 1, routed_experts=routed([1] * 12))
    outgrown = first + event([2], 2, reason=STOP)
    assert agreed(outgrown, experts=TWO_BY_TWO, prompt_len=3).reading.routed_experts is None
    for later in (event([], 1, reason=STOP), event([], 1, reason=STOP, routed_experts=None)):
        array = agreed(first + later, experts=TWO_BY_TWO, prompt_len=3).reading.routed_experts
        assert array is not None
        assert array.shape == (3, 2, 2)
    again = first + event([2], 2, reason=STOP, routed_experts=routed([2] * 16))
    array = agreed(again, experts=TWO_BY_TWO, prompt_len=3).reading.routed_experts
    assert array is not None
    assert (array == 2).all()


def test_the_routed_experts_of_an_abort_count_and_need_not_be_there() -> None:
    """They ride on the terminal event of a running request; a queued one has none."""
    last = event([2], 2, reason=finish("abort"), routed_experts=routed([3] * 16))
    array = agreed(event([1], 1) + last, experts=TWO_BY_TWO, prompt_len=3).reading.routed_experts
    assert array is not None
    assert array.shape == (4, 2, 2)
    for empty in (queued_abort([], 0, text=""), event(None, 0, reason=finish("abort"))):
        reading = agreed(empty, experts=TWO_BY_TWO, prompt_len=3).reading
        assert (reading.routed_experts, reading.finish_reason) == (None, "abort")


# --- weight versions -------------------------------------------------------------------------------------------------


def test_each_event_s_tokens_get_its_weight_version() -> None:
    versions = ["3", "3", 4, LEFT_OUT, None, "4", "4", "default"]
    body = b"".join(event([number], number + 1, weight_version=version) for number, version in enumerate(versions))
    reading = agreed(body, aborted=True).reading
    assert reading.version_spans == [
        ("3", 0, 2),
        ("4", 2, 3),
        (None, 3, 5),
        ("4", 5, 7),
        ("default", 7, 8),
    ]
    assert reading.meta["weight_version"] == "default"
    cumulative = event([1], 1, weight_version="a") + event([1, 2, 3], 3, weight_version="b")
    assert agreed(cumulative, "sglang", aborted=True).reading.version_spans == [("a", 0, 1), ("b", 1, 3)]
    empty = event([1], 1, weight_version="a") + event([], 1, weight_version="b") + event([2], 2, weight_version="a")
    assert agreed(empty, aborted=True).reading.version_spans == [("a", 0, 2)]
    assert agreed(event([1], 1, reason=STOP)).reading.version_spans == [(None, 0, 1)]
    assert agreed(event([], 0, reason=STOP)).reading.version_spans == []


@pytest.mark.parametrize("version", [0, -7, 12, 2**40, 1.5, ""])
def test_a_weight_version_that_is_a_number_becomes_text(version: Any) -> None:
    assert agreed(event([1], 1, weight_version=version), aborted=True).reading.version_spans == [(str(version), 0, 1)]


@pytest.mark.parametrize("version", [True, [], {}, ["1"]])
def test_a_weight_version_of_a_wrong_type_is_an_error(version: Any) -> None:
    folded = agreed(event([1], 1, weight_version=version))
    assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "meta_info.weight_version")


def spans(*told: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in told]


def with_spans(told: Any, **more: Any) -> bytes:
    return event([1], 1, weight_version="x") + event([2, 3], 3, reason=STOP, weight_versions=told, **more)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (spans(("a", 0, 3)), [("a", 0, 3)]),
        (spans(("a", 0, 1), ("b", 1, 3)), [("a", 0, 1), ("b", 1, 3)]),
        (spans(("a", 0, 0), ("b", 0, 3)), [("b", 0, 3)]),
        (spans(("a", 0, 2), ("b", 2, 2), ("c", 2, 3), ("d", 3, 3)), [("a", 0, 2), ("c", 2, 3)]),
        (spans((6, 0, 3)), [("6", 0, 3)]),
        (None, [("x", 0, 1), ("y", 1, 3)]),
    ],
)
def test_the_last_event_s_spans_are_taken_if_it_tells_them(told: Any, wanted: list[tuple[str, int, int]]) -> None:
    assert agreed(with_spans(told, weight_version="y")).reading.version_spans == wanted


@pytest.mark.parametrize(
    "told",
    [
        [],
        spans(("a", 0, 2)),
        spans(("a", 0, 4)),
        spans(("a", 1, 3)),
        spans(("a", 0, 1), ("b", 2, 3)),
        spans(("a", 0, 2), ("b", 1, 3)),
        spans(("b", 1, 3), ("a", 0, 1)),
        spans(("a", 0, 3), ("b", 3, 2)),
        spans(("a", -1, 3)),
        spans(("a", 0, 3.0)),
        spans(("a", "0", 3)),
        spans(("a", None, 3)),
        spans((None, 0, 3)),
        spans((True, 0, 3)),
        spans(([], 0, 3)),
        [{"version": "a", "start": 0}],
        [{"start": 0, "end": 3}],
        [["a", 0, 3]],
        ["a"],
        {"version": "a", "start": 0, "end": 3},
        "a",
        5,
    ],
)
def test_spans_that_do_not_cover_the_tokens_in_order_are_an_error(told: Any) -> None:
    folded = agreed(with_spans(told))
    assert folded.decode_error.kind == "metadata"
    assert folded.decode_error.path.startswith("meta_info.weight_versions")
    assert (folded.reading.token_ids, folded.reading.version_spans) == ([1], [("x", 0, 1)])


def test_spans_of_an_earlier_event_are_not_looked_at() -> None:
    body = event([1], 1, weight_version="x", weight_versions=spans(("a", 5, 9))) + event([2], 2, reason=STOP)
    assert agreed(body).reading.version_spans == [("x", 0, 1), (None, 1, 2)]


# --- meta ------------------------------------------------------------------------------------------------------------


def test_meta_holds_the_latest_of_every_other_scalar_and_object_and_no_arrays() -> None:
    first = event([1], 1, a=1, b="x", c={"deep": [1, {"d": None}]}, d=None, e=[1], top={"f": 1, "a": 9})
    last = event([2], 2, text="t", reason=STOP, a=2.5, d=False, e="now", b=[1], top={"g": {}, "h": [1]})
    assert agreed(first).reading.meta == {
        "id": "r7",
        "finish_reason": None,
        "output_token_logprobs_length": 1,
        "completion_tokens": 1,
        "a": 1,
        "b": "x",
        "c": {"deep": [1, {"d": None}]},
        "d": None,
        "f": 1,
    }
    assert agreed(first + last).reading.meta == {
        "id": "r7",
        "finish_reason": STOP,
        "output_token_logprobs_length": 2,
        "completion_tokens": 2,
        "a": 2.5,
        "b": "x",
        "c": {"deep": [1, {"d": None}]},
        "d": False,
        "e": "now",
        "f": 1,
        "g": {},
    }


def test_the_latest_counts_of_the_prompt_are_told() -> None:
    first = event([1], 1, prompt_tokens=3, cached_tokens=1)
    reading = agreed(first + event([2], 2, prompt_tokens=4, cached_tokens=9, reason=STOP)).reading
    assert (reading.prompt_tokens, reading.cached_tokens) == (4, 9)
    kept = agreed(first + event([2], 2, prompt_tokens=None, reason=STOP)).reading
    assert (kept.prompt_tokens, kept.cached_tokens) == (3, 1)
    assert agreed(event([1], 1, prompt_tokens=LEFT_OUT, reason=STOP)).reading.prompt_tokens is None


def test_meta_is_the_caller_s_own() -> None:
    reading = agreed(event([1], 1, c={"deep": [1]}, reason=STOP)).reading
    reading.meta["c"]["deep"].append(2)
    assert reading.meta["c"] == {"deep": [1, 2]}


def test_side_data_is_applied_with_its_event_or_not_at_all() -> None:
    good = event([1], 1, text="a", weight_version="x", note="good", **sets([1], [0, 1]))
    wrongs: list[dict[str, Any]] = [{"routed_experts": "!"}, {"weight_versions": []}, sets([2], [0, 2])]
    for wrong in wrongs:
        told = {"weight_version": "y", "note": "bad", **sets([2], [0, 1]), **wrong}
        last = event([2], 2, text="b", reason=STOP, **told)
        reading = agreed(good + last).reading
        assert reading.kind == "metadata"
        assert (reading.token_ids, reading.text, reading.top_p) == ([1], "a", ([1], [0, 1]))
        assert (reading.version_spans, reading.meta["note"]) == ([("x", 0, 1)], "good")
