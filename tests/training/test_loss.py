"""GRPO: advantages are relative to the group, and the objective is clipped against the streamed log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamfold import Sample
from streamfold.training.loss import clipped_loss, group_advantages

pytestmark = pytest.mark.torch


def group(*rewards: float) -> list[Sample]:
    return [Sample(reward=reward) for reward in rewards]


def batch(mask: Any, old: Any, advantages: Any) -> dict[str, torch.Tensor]:
    return {
        "loss_mask": torch.tensor(mask, dtype=torch.int8),
        "logprobs": torch.tensor(old, dtype=torch.float32),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
    }


def test_advantages_have_mean_0_and_deviation_1_in_each_group_and_are_0_where_all_rewards_are_equal() -> None:
    found = np.array(group_advantages([group(0.0, 1.0, 0.5, 0.25), group(5.0, 7.0), group(0.3, 0.3, 0.3)]))
    for part in (found[:4], found[4:6]):
        assert part.mean() == pytest.approx(0, abs=1e-9)
        assert part.std() == pytest.approx(1, abs=1e-4)
    assert (np.argsort(found[:4]) == [0, 3, 2, 1]).all()
    assert np.abs(found[6:]).max() < 1e-6


def test_the_loss_is_the_mean_over_trained_tokens_of_the_clipped_objective() -> None:
    rng = np.random.default_rng(0)
    mask, advantages = rng.integers(0, 2, (3, 7)), rng.normal(size=(3, 7))
    old, new = -rng.random((3, 7)), -rng.random((3, 7))
    loss, ratio = clipped_loss(torch.tensor(new, dtype=torch.float32), batch(mask, old, advantages), clip=0.2)
    gains = []
    for place in np.ndindex(3, 7):
        if mask[place]:
            change = float(np.exp(new[place] - old[place]))
            assert ratio[place].item() == pytest.approx(change, rel=1e-5)
            gains.append(min(change * advantages[place], min(max(change, 0.8), 1.2) * advantages[place]))
        else:
            assert ratio[place].item() == 1
    assert loss.item() == pytest.approx(-sum(gains) / len(gains), rel=1e-5)


def test_a_token_beyond_the_clip_range_has_no_gradient_if_its_advantage_points_further() -> None:
    new = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]])).requires_grad_()
    loss, _ = clipped_loss(new, batch([[1] * 5], [[0.0] * 5], [[1, -1, 1, -1, 1]]))
    loss.backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [[False, True, True, False, True]]


def test_what_stands_at_masked_tokens_changes_neither_loss_nor_gradient() -> None:
    new = torch.tensor([[-1.0, -torch.inf, -2.0]]).requires_grad_()
    loss, _ = clipped_loss(new, batch([[1, 0, 1]], [[-1.0, 0.0, -2.0]], [[1, 9, 1]]))
    loss.backward()
    assert loss.item() == -1
    assert new.grad is not None
    assert new.grad.tolist() == [[-0.5, 0, -0.5]]


def test_a_batch_with_nothing_to_train_on_has_a_loss_of_0() -> None:
    loss, _ = clipped_loss(torch.tensor([[-1.0]]), batch([[0]], [[0.0]], [[1.0]]))
    assert loss.item() == 0
