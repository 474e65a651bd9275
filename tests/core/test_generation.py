"""What one call produced, as a value: made, compared, pickled, never changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from streamfold import Generation, Timings
from support.folding import as_reading, check_owned

WHOLE: dict[str, Any] = {
    "token_ids": [5, 0, 2**31 - 1],
    "logprobs": [-0.5, -0.0, -5e-324],
    "text": "a\u2028\U0001f600",
    "finish_reason": "stop",
    "matched": 7,
    "routed_experts": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    "padded_rows": 2,
    "top_p": ([5, 6, 0, 9], [0, 2, 3, 4]),
    "version_spans": [("6", 0, 1), ("7", 1, 3)],
    "prompt_token_ids": [7, 0, 2**31 - 1, 9],
    "prompt_tokens": 4,
    "cached_tokens": 0,
    "clamped_logprobs": 1,
    "missing": ("routed_experts", "indexer_topk"),
    "max_tokens_per_event": 2,
    "timings": Timings(queued=1.5, connect=0.25, ttft=0.5, latency=2.0),
    "meta": {"id": "r7", "nested": {"a": [1, None]}, "big": 2**70, "zero": -0.0},
}


def whole(**changed: Any) -> Generation:
    return Generation(**{**WHOLE, **changed})


def test_every_field_is_kept() -> None:
    reading = as_reading(whole())
    for key, value in WHOLE.items():
        if key == "routed_experts":
            assert reading.routed_experts is not None
            assert reading.routed_experts.dtype == np.uint8
            assert (reading.routed_experts == value).all()
        elif key == "timings":
            assert whole().timings == value
        else:
            assert getattr(reading, key) == value
    assert reading.logprobs is not None
    assert [value.hex() for value in reading.logprobs] == [value.hex() for value in WHOLE["logprobs"]]


def test_an_empty_generation_is_one() -> None:
    for empty in (Generation([]), Generation(np.array([], np.int64)), Generation(())):
        assert empty.token_ids.shape == (0,)
        assert empty.token_ids.dtype == np.int32
        assert (empty.logprobs, empty.text, empty.finish_reason, empty.matched) == (None, None, None, None)
        assert (empty.routed_experts, empty.top_p, empty.prompt_token_ids) == (None, None, None)
        assert (empty.prompt_tokens, empty.cached_tokens) == (None, None)
        assert (empty.version_spans, empty.padded_rows, empty.clamped_logprobs, empty.meta) == ([], 0, 0, {})
        assert empty.max_tokens_per_event == 0
    asked = Generation([], [], text="", finish_reason="length", top_p=([], [0]))
    assert asked.logprobs is not None
    assert asked.logprobs.shape == (0,)
    assert asked.logprobs.dtype == np.float64
    assert (asked.text, asked.finish_reason) == ("", "length")
    assert asked.top_p is not None
    assert (asked.top_p[0].tolist(), asked.top_p[1].tolist()) == ([], [0])
    assert pickle.loads(pickle.dumps(asked)) == asked
    assert asked != Generation([])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_every_bit(protocol: int) -> None:
    for generation in (whole(), whole(routed_experts=None, padded_rows=0, top_p=None, logprobs=None), Generation([])):
        twin = pickle.loads(pickle.dumps(generation, protocol))
        assert twin == generation
        assert as_reading(twin) == as_reading(generation)
        assert not np.shares_memory(twin.token_ids, generation.token_ids) or not len(twin.token_ids)


def test_copies_are_equal() -> None:
    generation = whole()
    for twin in (copy.copy(generation), copy.deepcopy(generation)):
        assert twin == generation
        assert as_reading(twin) == as_reading(generation)
    assert not np.shares_memory(copy.deepcopy(generation).token_ids, generation.token_ids)


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [5, 0, 3]},
        {"logprobs": [-0.5, -0.0, -1.0]},
        {"logprobs": None},
        {"text": None},
        {"text": "b"},
        {"finish_reason": "length"},
        {"finish_reason": None},
        {"matched": None},
        {"matched": "7"},
        {"routed_experts": None, "padded_rows": 0},
        {"padded_rows": 0},
        {"routed_experts": np.zeros((6, 2, 2), np.uint8)},
        {"routed_experts": np.arange(24, dtype=np.uint8).reshape(3, 4, 2)},
        {"routed_experts": np.arange(24, dtype=np.int32).reshape(6, 2, 2)},
        {"top_p": None},
        {"top_p": ([5, 6, 0, 8], [0, 2, 3, 4])},
        {"top_p": ([5, 6, 0, 9], [0, 1, 3, 4])},
        {"version_spans": None},
        {"version_spans": [("6", 0, 2), ("7", 2, 3)]},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [7, 0, 2**31 - 1, 8]},
        {"prompt_tokens": None},
        {"cached_tokens": None},
        {"clamped_logprobs": 0},
        {"missing": ()},
        {"missing": ("indexer_topk", "routed_experts")},
        {"max_tokens_per_event": 3},
        {"meta": {}},
    ],
    ids=str,
)
def test_generations_that_differ_in_one_field_are_unequal(changed: dict[str, Any]) -> None:
    assert whole() == whole()
    assert whole(**changed) != whole()
    assert whole(**changed) == whole(**changed)


def test_a_generation_equals_no_other_kind_of_thing() -> None:
    for other in (None, 5, [5, 0, 2**31 - 1], WHOLE, object()):
        assert whole() != other


def test_nothing_can_be_assigned() -> None:
    generation = whole()
    for name in (*WHOLE, "anything"):
        with pytest.raises(AttributeError):
            setattr(generation, name, None)
        with pytest.raises(AttributeError):
            delattr(generation, name)
    with pytest.raises(TypeError):
        hash(generation)


def test_the_repr_fits_on_three_lines_whatever_its_size() -> None:
    assert "padded_rows" not in repr(whole(padded_rows=0))
    assert "missing=('routed_experts', 'indexer_topk')," in repr(whole())
    assert "max_tokens_per_event" not in repr(whole(max_tokens_per_event=1))
    assert repr(whole(missing=())) == (
        "<Generation of 3 tokens, finish_reason='stop', matched=7, text='a\\u2028\U0001f600' (3 characters),\n"
        " logprobs=float64[3], routed_experts=uint8[6, 2, 2], top_p=int32[4], prompt_token_ids=int32[4],\n"
        " version_spans=2, prompt_tokens=4, cached_tokens=0, padded_rows=2, max_tokens_per_event=2,"
        " ttft=500.0 ms, latency=2000.0 ms, clamped_logprobs=1, meta=4 keys>"
    )
    n = 100_000
    large = Generation(
        range(n),
        np.zeros(n),
        text="\n\0" * n,
        finish_reason="stop",
        matched="\n" * n,
        routed_experts=np.zeros((n, 61, 8), np.uint16),
        top_p=(range(n), range(n + 1)),
        version_spans=[(str(i), i, i + 1) for i in range(n)],
        prompt_token_ids=range(n),
        prompt_tokens=n,
        cached_tokens=n,
        clamped_logprobs=n,
        meta={str(i): None for i in range(n)},
    )
    lines = repr(large).split("\n")
    assert len(lines) == 3
    assert max(map(len, lines)) < 200
    assert repr(Generation([])) == (
        "<Generation of 0 tokens, finish_reason=None,\n version_spans=0, clamped_logprobs=0, meta=0 keys>"
    )


def test_arrays_are_taken_from_anything_that_numpy_takes() -> None:
    for ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint16), np.array([9, 1, 9, 2])[1::2]):
        generation = Generation(ids, [-1, -2])
        assert generation.token_ids.tolist() == [1, 2]
        check_owned(generation.token_ids, np.int32)
        assert generation.logprobs is not None
        check_owned(generation.logprobs, np.float64)
    narrow = Generation([1], np.array([-0.1], np.float32))
    assert narrow.logprobs is not None
    assert narrow.logprobs[0] == np.float32(-0.1)


def test_the_arrays_are_the_same_memory_each_time_and_writable() -> None:
    generation = whole()
    generation.token_ids[0] = 77
    assert generation.token_ids[0] == 77
    assert generation.top_p is not None
    generation.top_p[0][0] = 78
    assert generation.top_p[0][0] == 78
    kept = generation.token_ids
    del generation
    assert kept.tolist()[0] == 77


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint16])
def test_routed_experts_keep_dtype_and_shape(dtype: Any) -> None:
    for shape in ((0, 2, 2), (3, 2, 4), (12,)):
        experts = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
        kept = Generation([1], routed_experts=experts).routed_experts
        assert kept is not None
        assert (kept.dtype, kept.shape) == (experts.dtype, shape)
        assert (kept == experts).all()
        check_owned(kept, dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [[1, 2]]},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": [1.5]},
        {"token_ids": ["a"]},
        {"token_ids": None},
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5] * 4},
        {"logprobs": [[-0.5] * 3]},
        {"logprobs": ["a", "b", "c"]},
        {"finish_reason": "stopped"},
        {"finish_reason": 5},
        {"matched": 1.5},
        {"matched": []},
        {"text": 5},
        {"routed_experts": np.zeros((1, 2, 2), np.float32)},
        {"routed_experts": np.zeros((1, 2, 2), np.int64)},
        {"routed_experts": [[1]]},
        {"top_p": ([1, 2], [0, 1, 2])},
        {"top_p": ([1, 2, 3], [0, 1, 2, 4])},
        {"top_p": ([1, 2, 3], [1, 1, 2, 3])},
        {"top_p": ([1, 2, 3], [0, 2, 1, 3])},
        {"top_p": ([1, 2, -3], [0, 1, 2, 3])},
        {"top_p": [1, 2, 3]},
        {"top_p": ([1],)},
        {"version_spans": [("a", 0, 4)]},
        {"version_spans": [("a", 2, 1)]},
        {"version_spans": [("a", 1, 2), ("b", 0, 1)]},
        {"version_spans": [("a", 0, 2), ("b", 1, 3)]},
        {"version_spans": [("a", 0)]},
        {"version_spans": [(5, 0, 1)]},
        {"version_spans": "abc"},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**31]},
        {"prompt_token_ids": [[1]]},
        {"prompt_token_ids": 5},
        {"prompt_tokens": -1},
        {"prompt_tokens": "3"},
        {"cached_tokens": -1},
        {"clamped_logprobs": -1},
        {"max_tokens_per_event": -1},
        {"max_tokens_per_event": 4},
        {"padded_rows": -1},
        {"padded_rows": 7},
        {"padded_rows": 1, "routed_experts": None},
        {"meta": []},
        {"unknown": 1},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        whole(**wrong)


def test_tokens_whose_version_is_not_given_have_a_span_without_one() -> None:
    for spans in (None, [], [(None, 0, 3)], [("a", 0, 0), ("b", 3, 3)]):
        assert whole(version_spans=spans).version_spans == [(None, 0, 3)]
    gaps = [(None, 0, 1), ("a", 1, 2), (None, 2, 3)]
    assert whole(version_spans=[("a", 1, 2)]).version_spans == gaps
    assert whole(version_spans=gaps).version_spans == gaps
    assert pickle.loads(pickle.dumps(whole(version_spans=gaps))) == whole(version_spans=gaps)
    assert Generation([]).version_spans == []


@pytest.mark.torch
def test_torch_tensors_share_the_memory() -> None:
    import torch  # noqa: PLC0415 - only where it is installed

    generation = whole()
    tensors = generation.torch()
    arrays = {"token_ids", "logprobs", "routed_experts", "prompt_token_ids", "top_p_token_ids", "top_p_offsets"}
    assert set(tensors) == arrays
    assert tensors["prompt_token_ids"].tolist() == WHOLE["prompt_token_ids"]
    assert (tensors["token_ids"].dtype, tensors["logprobs"].dtype) == (torch.int32, torch.float64)
    assert tensors["routed_experts"].shape == (6, 2, 2)
    assert tensors["token_ids"].tolist() == WHOLE["token_ids"]
    tensors["token_ids"][0] = 99
    assert generation.token_ids[0] == 99
    assert tensors["top_p_offsets"].tolist() == [0, 2, 3, 4]


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint16])
def test_torch_takes_routed_experts_of_each_dtype(dtype: Any) -> None:
    experts = np.arange(24, dtype=dtype).reshape(6, 2, 2)
    tensor = whole(routed_experts=experts).torch()["routed_experts"]
    assert tensor.shape == (6, 2, 2)
    assert tensor.tolist() == experts.tolist()


@pytest.mark.torch
def test_torch_leaves_out_what_is_none() -> None:
    assert set(Generation([1]).torch()) == {"token_ids"}
    empty = Generation([], [], top_p=([], [0])).torch()
    assert {key: len(tensor) for key, tensor in empty.items()} == {
        "token_ids": 0,
        "logprobs": 0,
        "top_p_token_ids": 0,
        "top_p_offsets": 1,
    }
