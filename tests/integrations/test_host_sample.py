"""The stand-in's sample: what it accepts, what it refuses, and how a refused call has changed it."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.host.helpers import append, nowhere
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Sample.Status
LAYERS, TOP_K = 2, 3
SHAPE = {"num_layers": LAYERS, "moe_router_topk": TOP_K}


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def test_appended_tokens_extend_everything_together() -> None:
    sample = Sample(tokens=[1, 2])
    append(sample, None, [3, 4], text="ab")
    append(sample, None, [5], text="c")
    assert sample.tokens == [1, 2, 3, 4, 5]
    assert (sample.response, sample.response_length) == ("abc", 3)
    assert sample.loss_mask == [1, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, -0.5]
    assert sample.status is Status.PENDING


def test_tokens_of_a_tool_are_masked_and_have_no_top_p_ids() -> None:
    sample = Sample(tokens=[1])
    append(sample, None, [2], meta_info={"top_p_token_ids": [2, 7], "top_p_token_offsets": [0, 2]})
    sample.append_response_tokens(None, tokens=[3, 4], trainable=False)
    assert sample.loss_mask == [1, 0, 0]
    assert sample.rollout_log_probs == [-0.5, 0.0, 0.0]
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize(("before", "after"), [([0], [0, 1]), ([1], [1, 1]), (None, [1, 1])])
def test_earlier_masks_stay_as_they_are(before: list[int] | None, after: list[int]) -> None:
    sample = Sample(tokens=[1, 2], response_length=1, loss_mask=before, rollout_log_probs=[-1.0])
    append(sample, None, [3])
    assert sample.loss_mask == after


class Tensor:
    """The part of a torch tensor that is used."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, np.int64)

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> Any:
        return self.values


@pytest.mark.parametrize(
    "written",
    [
        list,
        np.array,
        Tensor,
        lambda values: np.array(values, np.uint8),
        lambda values: int32(*values),
        lambda values: base64.b64encode(int32(*values)).decode(),
    ],
    ids=["list", "numpy", "tensor", "uint8", "bytes", "base64"],
)
@pytest.mark.parametrize("prefix", ["top_p", "top_p_kept"])
def test_arrays_are_read_however_they_are_written(written: Callable[[list[int]], Any], prefix: str) -> None:
    sample = Sample(tokens=[1])
    experts = list(range(2 * LAYERS * TOP_K))
    meta = {
        f"{prefix}_token_ids": written([2, 7, 3]),
        f"{prefix}_token_offsets": written([0, 2, 3]),
        "routed_experts": written(experts),
    }
    append(sample, nowhere(**SHAPE), [2, 3], meta_info=meta)
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_top_p_token_ids.tolist() == [2, 7, 3]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    assert sample.rollout_routed_experts.shape == (2, LAYERS, TOP_K)
    assert sample.rollout_routed_experts.ravel().tolist() == experts


def test_arrays_of_a_later_call_are_appended_to_the_earlier_ones() -> None:
    sample, args = Sample(tokens=[1, 2]), nowhere(**SHAPE)
    row = LAYERS * TOP_K
    top_p = {"top_p_token_ids": [3, 9], "top_p_token_offsets": [0, 2]}
    append(sample, args, [3], meta_info={**top_p, "routed_experts": [1] * (2 * row)})
    later = {"routed_experts": [2] * row, "routed_experts_start_len": 2}
    append(sample, args, [4], meta_info={**top_p, **later})
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 4]
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("log_probs", "meta"),
    [
        ([-0.5], {}),
        ([-0.5] * 2, {"top_p_token_ids": [2], "top_p_token_offsets": [0, 1]}),
        ([-0.5] * 2, {"top_p_token_ids": [2], "top_p_token_offsets": [0, 1, 2]}),
        ([-0.5] * 2, {"top_p_token_ids": [2, 3]}),
        ([-0.5] * 2, {"routed_experts": [0] * (LAYERS * TOP_K)}),
        ([-0.5] * 2, {"routed_experts": [0] * (LAYERS * TOP_K), "routed_experts_start_len": 1}),
    ],
)
def test_lengths_that_disagree_raise_only_after_shared_lists_have_grown(log_probs: list[float], meta: Any) -> None:
    shared = [1]
    sample = Sample(tokens=shared)
    with pytest.raises(ValueError, match=r"."):
        sample.append_response_tokens(nowhere(**SHAPE), tokens=[2, 3], log_probs=log_probs, meta_info=meta)
    assert shared == [1, 2, 3]
    assert sample.response_length == 2


def test_a_call_without_arrays_after_one_with_them_is_refused() -> None:
    sample = Sample(tokens=[1])
    append(sample, None, [2], meta_info={"top_p_token_ids": [2], "top_p_token_offsets": [0, 1]})
    with pytest.raises(ValueError, match="top_p_token_offsets"):
        append(sample, None, [3])


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)],
)
def test_terminal_fields_are_taken_from_the_metadata_on_request(reason: str, status: Sample.Status) -> None:
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": "7",
        "prompt_tokens": 5,
        "cached_tokens": 4,
        "spec_verify_ct": 3,
    }
    sample, args = Sample(tokens=[1]), nowhere(**SHAPE, sglang_speculative_algorithm="EAGLE")
    append(sample, args, [2], meta_info=meta, update_terminal_info=False)
    assert (sample.status, sample.weight_versions) == (Status.PENDING, [])
    for _ in range(2):
        append(sample, args, [], meta_info=meta)
    assert (sample.status, sample.weight_versions) == (status, ["7", "7"])
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 8, "total_prompt_tokens": 10}
    assert sample.spec_info.spec_verify_ct == 6


def test_a_count_without_a_value_is_an_error() -> None:
    meta = {"finish_reason": {"type": "stop"}, "cached_tokens": None}
    with pytest.raises(TypeError):
        append(Sample(tokens=[1]), nowhere(**SHAPE), [2], meta_info=meta)


def test_a_sample_survives_a_dictionary_with_unknown_keys() -> None:
    sample = Sample(prompt="a", status=Status.ABORTED, metadata={"k": 1})
    sample.prefix_cache_info.cached_tokens = 3
    again = Sample.from_dict({**sample.to_dict(), "theirs": 5})
    assert vars(again) == {**vars(sample), "theirs": 5}
