"""``collate``: what belongs to token ``i`` of a sample stands at position ``i`` of its row, and nowhere else."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold import Generation, collate, merge
from streamfold.samples.sample import Sample
from support.batches import PAD, reference, sample_of, samples_of
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample as HostSample
from support.miles.types import SampleWithSpans, WeightVersionSpan, WeightVersionsPerCall

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = [Sample, HostSample]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["ours", "the host's"])
FIELDS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "routed_experts", "version_index", "advantages")


def lists(array: Any) -> Any:
    return None if array is None else array.tolist()


def spans_at(tokens: int, *spans: tuple[str, int, int]) -> Any:
    """A sample of miles: ``tokens`` of them, of which two are the prompt."""
    calls = [WeightVersionsPerCall([WeightVersionSpan(*span)]) for span in spans]
    return SampleWithSpans(tokens=[*range(tokens)], response_length=tokens - 2, weight_versions=calls)


# Against the reference.


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_batch_is_what_the_obvious_loops_over_tokens_say(data: Any, kind: Any) -> None:
    samples = data.draw(samples_of(kind))
    max_length = data.draw(st.none() | st.integers(1, 12))
    advantages = data.draw(st.none() | st.just([i / 2 - 1 for i in range(len(samples))]))
    batch = collate(samples, pad_id=PAD, advantages=advantages, max_length=max_length)
    expected = reference(samples, max_length=max_length, advantages=advantages)
    for name in FIELDS:
        assert lists(getattr(batch, name)) == expected[name], name
    assert batch.versions == expected["versions"]
    assert (None if batch.top_p is None else [lists(array) for array in batch.top_p]) == expected["top_p"]


@given(data=st.data())
def test_samples_are_not_changed_and_share_no_memory_with_the_batch(data: Any) -> None:
    samples = data.draw(samples_of(Sample))
    before = pickle.dumps([vars(sample) for sample in samples])
    batch = collate(samples, pad_id=PAD)
    for array in (batch.routed_experts, *(batch.top_p or ())):
        if array is not None:
            array[...] = 3
    assert pickle.dumps([vars(sample) for sample in samples]) == before


@each_kind
def test_a_merged_generation_is_found_at_its_tokens(kind: Any) -> None:
    experts = np.arange(16, dtype=np.int32).reshape(4, 2, 2)
    generation = Generation(
        [7, 8, 9], [-0.5, -0.25, -1.0], finish_reason="stop", routed_experts=experts, version_spans=[("1", 0, 3)]
    )
    sample = kind(tokens=[5, 6])
    merge(sample, generation, nowhere(num_layers=2, moe_router_topk=2, num_experts=None))
    batch = collate([sample], pad_id=PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [[0, 0, -0.5, -0.25, -1.0]]
    assert batch.routed_experts is not None
    assert batch.routed_experts[0].tolist() == experts.tolist()


# Types.


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint16])
def test_experts_keep_the_dtype_of_the_wire_and_its_mark_of_padding(dtype: Any) -> None:
    long, short = sample_of(4, experts=dtype), sample_of(2, experts=dtype)
    experts = collate([long, short], pad_id=PAD).routed_experts
    assert experts is not None
    assert experts.dtype == dtype
    mark = -1 if dtype is np.int32 else np.iinfo(dtype).max
    assert (experts[1, -2:] == mark).all()
    assert (experts[0] != mark).all()


def test_experts_of_different_dtypes_are_int32_where_padded_rows_are_minus_one() -> None:
    padded = np.full((4, 2, 2), 255, np.uint8)
    narrow = sample_of(3, experts=np.uint8, rollout_routed_experts=padded)
    experts = collate([narrow, sample_of(3, experts=np.int32)], pad_id=PAD).routed_experts
    assert experts is not None
    assert experts.dtype == np.int32
    assert (experts[0] == -1).all()


def test_the_arrays_have_the_types_that_are_documented() -> None:
    batch = collate([sample_of(3, top_p=True)], pad_id=PAD, advantages=[1])
    assert batch.logprobs is not None
    assert batch.top_p is not None
    assert batch.advantages is not None
    arrays = (batch.input_ids, batch.attention_mask, batch.loss_mask, batch.logprobs, *batch.top_p)
    assert [array.dtype for array in (*arrays, batch.version_index, batch.advantages)] == [
        np.int32, np.bool_, np.int8, np.float32, np.int32, np.int64, np.int16, np.float32
    ]  # fmt: skip


# Versions.


def test_samples_of_miles_with_spans_of_each_call_give_the_versions_of_their_tokens() -> None:
    batch = collate([spans_at(6, ("a", 2, 4), ("b", 5, 6)), spans_at(3, ("b", 2, 3))], pad_id=PAD)
    assert batch.versions == ("a", "b")
    assert batch.version_index.tolist() == [[-1, -1, 0, 0, -1, 1], [-1, -1, 1, -1, -1, -1]]


def test_a_sample_that_names_versions_without_tokens_has_none() -> None:
    batch = collate([HostSample(tokens=[1, 2], response_length=1, weight_versions=["3"])], pad_id=PAD)
    assert (batch.versions, batch.version_index.tolist()) == ((), [[-1, -1]])


def test_more_versions_than_int16_can_tell_apart_are_refused() -> None:
    most = 1 << 15
    spans: list[tuple[str | None, int, int]] = [(str(number), number, number + 1) for number in range(most + 1)]
    sample = Sample(tokens=[1] * (most + 1), response_length=most + 1, version_spans=spans[:-1])
    assert collate([sample], pad_id=PAD).version_index.max() == most - 1
    sample.version_spans = spans
    with pytest.raises(ValueError, match="one more than the 32768"):
        collate([sample], pad_id=PAD)


# Masks and advantages.


@each_kind
def test_nothing_is_trained_on_in_a_sample_that_is_removed(kind: Any) -> None:
    batch = collate([sample_of(3, kind=kind, remove_sample=True), sample_of(3, kind=kind)], pad_id=PAD)
    assert batch.loss_mask.sum(axis=1).tolist() == [0, 3]


def test_advantages_of_each_token_stand_at_the_response() -> None:
    batch = collate([sample_of(3), sample_of(1)], pad_id=PAD, advantages=[[1, 2, 3], np.float64(0.5)])
    assert lists(batch.advantages) == [[0, 0, 1, 2, 3], [0, 0, 0.5, 0, 0]]
    cut = collate([sample_of(3)], pad_id=PAD, advantages=[[1, 2, 3]], max_length=4)
    assert lists(cut.advantages) == [[0, 0, 1, 2]]


def test_a_sample_without_a_response_needs_nothing_that_others_have() -> None:
    batch = collate([sample_of(2, top_p=True, experts=np.int32), Sample(tokens=[4, 5, 6])], pad_id=PAD)
    assert batch.logprobs is not None
    assert batch.routed_experts is not None
    assert batch.logprobs[1].tolist() == [0.0] * 4
    assert (batch.routed_experts[1] == -1).all()


def test_rows_of_experts_may_be_missing_behind_the_last_token_that_is_trained_on() -> None:
    sample = sample_of(3, experts=np.int32, loss_mask=[1, 0, 0])
    sample.rollout_routed_experts = sample.rollout_routed_experts[:2]
    experts = collate([sample], pad_id=PAD).routed_experts
    assert experts is not None
    assert (experts[0] == -1).all(axis=(1, 2)).tolist() == [False, False, True, True]


# Errors.


BAD: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("there are no samples", lambda: {"samples": []}),
    ("pad_id is 4294967296", lambda: {"pad_id": 1 << 32}),
    ("max_length is 0", lambda: {"max_length": 0}),
    ("advantages has 3 entries for 2 samples", lambda: {"advantages": [1, 2, 3]}),
    (r"advantages\[1\] is of shape \(2,\), but samples\[1\].response_length is 3", lambda: {"advantages": [1, [1, 2]]}),
    (r"advantages\[0\] is not finite: nan", lambda: {"advantages": [float("nan"), 1]}),
    (r"samples\[1\] has no tokens", lambda: {"samples": [sample_of(3), Sample(prompt="x")]}),
    (
        r"samples\[0\]: rollout_log_probs has 2 entries, but response_length is 3",
        lambda: {"samples": [sample_of(3, rollout_log_probs=[-1.0, -2.0])]},
    ),
    (
        r"samples\[0\].rollout_log_probs is nan at token 1 of the response, which is trained on",
        lambda: {"samples": [sample_of(3, rollout_log_probs=[-1.0, None, -1.0], loss_mask=[1, 1, 1])]},
    ),
    (
        r"samples\[0\].rollout_log_probs is -inf at token 2 of the response",
        lambda: {"samples": [sample_of(3, rollout_log_probs=[-1.0, -1.0, -np.inf], loss_mask=[1, 1, 1])]},
    ),
    (
        r"samples\[1\].rollout_log_probs is None, but 3 of its tokens are trained on",
        lambda: {"samples": [sample_of(3), sample_of(3, rollout_log_probs=None)]},
    ),
    (
        r"samples\[0\].rollout_top_p_token_ids is None, but 2 of its tokens",
        lambda: {"samples": [sample_of(2), sample_of(3, top_p=True)]},
    ),
    (
        r"samples\[1\].rollout_routed_experts has 0 rows, but token 4 is trained on: 4 rows",
        lambda: {"samples": [sample_of(3, experts=np.int32), sample_of(3)]},
    ),
    (
        r"samples\[1\].rollout_routed_experts has 3 rows, but token 4 is trained on: 4 rows",
        lambda: {
            "samples": [
                sample_of(3, experts=np.int32),
                sample_of(3, rollout_routed_experts=np.zeros((3, 2, 2), np.int32)),
            ]
        },
    ),
    (
        r"samples\[1\].rollout_routed_experts is of shape \(4, 1, 2\), that of samples\[0\] .* \(4, 2, 2\)",
        lambda: {
            "samples": [
                sample_of(3, experts=np.int32),
                sample_of(3, rollout_routed_experts=np.zeros((4, 1, 2), np.int32)),
            ]
        },
    ),
    (r"samples\[0\].loss_mask .* 0 to 2", lambda: {"samples": [sample_of(3, loss_mask=[0, 2, 1])]}),
    (r"samples\[0\].tokens must be integers from 0", lambda: {"samples": [Sample(tokens=[1, -1])]}),
    (r"samples\[0\].tokens must be integers from 0", lambda: {"samples": [Sample(tokens=[1, 1 << 31])]}),
    (
        r"samples\[0\]: version '1' spans tokens 0 to 4 of the response, but response_length is 3",
        lambda: {"samples": [sample_of(3, version_spans=[("1", 0, 4)])]},
    ),
]


@pytest.mark.parametrize(("message", "changed"), BAD, ids=[message for message, _ in BAD])
def test_what_does_not_fit_is_an_error_that_names_the_field_and_both_numbers(
    message: str, changed: Callable[[], dict[str, Any]]
) -> None:
    arguments: dict[str, Any] = {"samples": [sample_of(3), sample_of(3)], "pad_id": PAD, **changed()}
    with pytest.raises(ValueError, match=message):
        collate(arguments.pop("samples"), **arguments)


def test_a_log_probability_that_is_no_number_is_in_the_way_only_where_it_is_trained_on() -> None:
    sample = sample_of(3, rollout_log_probs=[-1.0, None, np.nan], loss_mask=[1, 0, 0])
    logprobs = collate([sample], pad_id=PAD).logprobs
    assert logprobs is not None
    assert np.isnan(logprobs[0]).tolist() == [False, False, False, True, True]
    assert collate([sample_of(3, rollout_log_probs=[-1.0, None, -1.0])], pad_id=PAD, max_length=3).logprobs is not None


@pytest.mark.parametrize("arguments", [{"pad_id": 0.5}, {"pad_id": PAD, "max_length": 2.5}])
def test_lengths_and_ids_that_are_no_integers_are_not_rounded(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="float"):
        collate([sample_of(3)], **arguments)


# As an object.


def test_a_batch_shows_its_size_in_one_line_and_survives_pickling() -> None:
    batch = collate([sample_of(3, experts=np.uint8, top_p=True)], pad_id=PAD)
    shown = "<Batch: 1 samples of 5 tokens at most, logprobs, routed_experts, top_p, 1 weight versions>"
    assert repr(batch) == repr(pickle.loads(pickle.dumps(batch))) == shown


@pytest.mark.torch
def test_torch_tensors_share_the_memory_and_leave_out_what_is_none() -> None:
    import torch  # noqa: PLC0415 - only where it is installed

    batch = collate([sample_of(3, experts=np.uint16, top_p=True)], pad_id=PAD, advantages=[1.0])
    tensors = batch.torch()
    assert set(tensors) == {*FIELDS, "top_p_token_ids", "top_p_offsets"}
    assert tensors["routed_experts"].dtype == torch.uint16
    tensors["input_ids"][0, 0] = 99
    assert batch.input_ids[0, 0] == 99
    plain = collate([Sample(tokens=[1, 2])], pad_id=PAD).torch()
    assert set(plain) == {"input_ids", "attention_mask", "loss_mask", "version_index"}
