"""One validator for the lengths that a sample holds, ours or a trainer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamfold.samples.reset import shorten
from streamfold.samples.sample import Sample
from streamfold.samples.validation import check_expert_rows, check_lengths, check_uniform
from support.host.slime.utils.types import Sample as HostSample

BOTH = pytest.mark.parametrize("kind", [Sample, HostSample], ids=["ours", "the host's"])


def sample_with(kind: Any, **changed: Any) -> Any:
    fields: dict[str, Any] = {
        "tokens": [5, 6, 7, 1, 2],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5, -0.25],
        "rollout_top_p_token_ids": np.array([1, 9, 2], np.int32),
        "rollout_top_p_token_offsets": np.array([0, 2, 3], np.int32),
        "rollout_routed_experts": np.zeros((4, 2, 1), np.int32),
    }
    return kind(**{**fields, **changed})


@BOTH
def test_lengths_that_agree_are_accepted(kind: Any) -> None:
    check_lengths(kind())
    check_lengths(sample_with(kind))
    check_lengths(sample_with(kind, rollout_top_p_token_offsets=[0, 2, 3], rollout_routed_experts=None))
    check_lengths(sample_with(kind, rollout_routed_experts=np.zeros((2, 2, 1), np.int32)))  # of the prompt alone


class Reference:
    """A host's reference to a tensor elsewhere: it has a shape and no length."""

    def __init__(self, values: list[int]) -> None:
        self.shape = (len(values),)
        self._values = values

    def load(self) -> Any:
        return np.array(self._values, np.int32)


def test_top_p_ids_that_are_references_are_checked_and_cut() -> None:
    def sample(offsets: list[int]) -> Any:
        ids = Reference([1, 9, 2])
        return sample_with(HostSample, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=Reference(offsets))

    check_lengths(sample([0, 2, 3]))
    with pytest.raises(ValueError, match="start at 0, end at 3"):
        check_lengths(sample([0, 2, 2]))
    cut = sample([0, 2, 3])
    cut.response = "ab"
    shorten(cut, 1, 1)
    assert (cut.rollout_top_p_token_ids.tolist(), cut.rollout_top_p_token_offsets.tolist()) == ([1, 9], [0, 2])
    check_lengths(cut)


@BOTH
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"response_length": 6}, "response_length is 6, but there are 5 tokens in all"),
        ({"response_length": -1}, "response_length is -1, but there are 5 tokens in all"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, but response_length is 2"),
        ({"rollout_log_probs": []}, "rollout_log_probs has 0 entries, but response_length is 2"),
        ({"rollout_top_p_token_ids": None}, "go together: one of the two is missing"),
        ({"rollout_top_p_token_offsets": None}, "go together: one of the two is missing"),
        ({"rollout_top_p_token_offsets": np.array([0, 3], np.int32)}, "has 2 entries for 2 tokens"),
        ({"rollout_top_p_token_offsets": np.array([1, 2, 3], np.int32)}, "start at 0, end at 3"),
        ({"rollout_top_p_token_offsets": np.array([0, 2, 2], np.int32)}, "start at 0, end at 3"),
        ({"rollout_top_p_token_offsets": np.array([0, 4, 3], np.int32)}, "never decrease"),
        ({"rollout_routed_experts": np.zeros((5, 2, 1), np.int32)}, "has 5 rows, but at most 4 fit 5 tokens"),
    ],
)
def test_lengths_that_disagree_are_refused_with_both_numbers(kind: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_lengths(sample_with(kind, **changed))


@pytest.mark.parametrize(
    ("before", "has", "more", "gets", "message"),
    [
        (2, True, 3, True, None),
        (2, False, 3, False, None),
        (0, False, 3, True, None),
        (2, True, 0, False, None),
        (2, True, 3, False, "2 response tokens have top-p ids, but the next 3 lack them"),
        (2, False, 3, True, "2 response tokens lack top-p ids, but the next 3 have them"),
        (2, False, None, True, "2 response tokens lack top-p ids, but the next ones have them"),
        (0, True, 3, False, "0 response tokens have top-p ids, but the next 3 lack them"),
    ],
)
def test_either_all_tokens_have_something_or_none(
    *, before: int, has: bool, more: int | None, gets: bool, message: str | None
) -> None:
    if message is None:
        check_uniform("top-p ids", before=before, has=has, more=more, gets=gets)
        return
    with pytest.raises(ValueError, match=message):
        check_uniform("top-p ids", before=before, has=has, more=more, gets=gets)


@pytest.mark.parametrize(("shape", "kept"), [((3, 2, 1), 0), ((3, 2, 1), 2), ((1, 2, 1), 2)])
def test_routed_experts_are_of_all_rows_or_of_those_that_are_not_kept(shape: tuple[int, ...], kept: int) -> None:
    check_expert_rows(np.zeros(shape), 3, kept=kept)


@pytest.mark.parametrize(("shape", "kept"), [((2, 2, 1), 0), ((2, 2, 1), 2), ((6,), 0)])
def test_routed_experts_of_another_shape_are_refused(shape: tuple[int, ...], kept: int) -> None:
    with pytest.raises(ValueError, match=rf"3 rows \(tokens - 1\) are needed, and {kept} are kept"):
        check_expert_rows(np.zeros(shape), 3, kept=kept)
