"""GRPO: advantages within a group, and the clipped objective against the streamed log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold.rollout.groups import Group

__all__ = ["clipped_loss", "group_advantages"]


def group_advantages(groups: Sequence[Group]) -> list[float]:
    """The advantage of each sample, in the order of the groups: its reward less the group's mean, over its deviation.

    A group whose rewards are all equal says nothing: its advantages are 0.
    """
    advantages: list[float] = []
    for group in groups:
        rewards = np.array([sample.reward for sample in group], np.float64)
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    return advantages


def clipped_loss(
    log_probs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, clip: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped policy objective, averaged over all tokens of the batch that are trained on.

    Args:
        log_probs: float32 ``[batch, length]``, of the model that is trained.
        batch: of :meth:`streamfold.Batch.torch`, with ``logprobs`` and ``advantages``.
        clip: how far the ratio of new to old probability counts: from 1 - clip to 1 + clip.

    Returns:
        The loss, a scalar, and the ratio of each token, ``[batch, length]``: 1 where nothing is trained on.
    """
    mask = batch["loss_mask"].bool()
    ratio = torch.exp(torch.where(mask, log_probs - batch["logprobs"], 0.0))
    advantages = batch["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / mask.sum().clamp_min(1), ratio
