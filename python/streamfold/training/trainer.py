"""``Trainer``: one optimizer step on the groups of a rollout, after checking what was streamed with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from streamfold.rollout.groups import samples_of
from streamfold.samples.batch import collate
from streamfold.training.loss import clipped_loss, group_advantages
from streamfold.training.replay import batch_log_probs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from streamfold.rollout.groups import Group
    from streamfold.samples.batch import Batch
    from streamfold.samples.sample import Sample
    from streamfold.training.config import TrainConfig

__all__ = ["StepStats", "Trainer", "check_samples"]


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step has seen and done.

    Attributes:
        loss: of the first pass over the batch.
        grad_norm: before clipping, of the first pass.
        ratio: mean ratio of new to old probability over the tokens that are trained on, in the first pass.
        clipped: share of those tokens whose ratio was out of the clip range, in the first pass.
        gap: mean absolute difference between the log-probability that was streamed and the recomputed one, over the
            tokens that the current weights have sampled in samples without older ones; NaN if there are none.
        gap_without_replay: the same with experts that the trainer's own routers choose; NaN if it was not measured.
    """

    loss: float
    grad_norm: float
    ratio: float
    clipped: float
    gap: float
    gap_without_replay: float


class _Pass(NamedTuple):
    """What one pass over a batch gave, before its optimizer step."""

    loss: float
    grad_norm: float
    log_probs: torch.Tensor
    ratio: torch.Tensor


class Trainer:
    """A model of transformers, its optimizer, and GRPO.

    Args:
        path: the folder of the model; trained in float32, in whatever dtype the engine runs it.
        config: of the run.
    """

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        self._config = config
        self._pad_id: int = self.model.config.pad_token_id

    @property
    def experts_shape(self) -> tuple[int, int, int]:
        """Layers, experts of each token, and experts of each layer."""
        shape = self.model.config
        return shape.num_hidden_layers, shape.num_experts_per_tok, shape.num_experts

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, under the names that the engine knows."""
        return {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}

    def step(self, groups: Sequence[Group], version: str) -> StepStats:
        """Check the samples, and train on them.

        Args:
            groups: of a rollout, with rewards.
            version: of the weights that the model has, and the engine too.

        Raises:
            ValueError: a check failed; the message names the sample.
        """
        samples = samples_of([sample for group in groups for sample in group])
        check_samples(samples, self.experts_shape)
        batch = collate(samples, pad_id=self._pad_id, advantages=group_advantages(groups))
        tensors = batch.torch()
        own = self._own_log_probs(tensors)
        first, *_ = [self._pass(tensors) for _ in range(self._config.epochs)]
        current = torch.from_numpy(_of_version(batch, version))
        trained = first.ratio[tensors["loss_mask"].bool()]
        return StepStats(
            loss=first.loss,
            grad_norm=first.grad_norm,
            ratio=trained.mean().item(),
            clipped=((trained - 1).abs() > self._config.clip).float().mean().item(),
            gap=_mean_gap(first.log_probs, tensors, current),
            gap_without_replay=float("nan") if own is None else _mean_gap(own, tensors, current),
        )

    def _pass(self, tensors: dict[str, torch.Tensor]) -> _Pass:
        """One forward and backward pass, and an optimizer step."""
        log_probs = self.log_probs(tensors)
        loss, ratio = clipped_loss(log_probs, tensors, clip=self._config.clip)
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm).item()
        if not math.isfinite(norm):
            raise ValueError(f"the gradient norm is {norm}: the weights were not changed")
        self._optimizer.step()
        return _Pass(loss.item(), norm, log_probs.detach(), ratio.detach())

    def log_probs(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The log-probabilities of a batch under the weights of now, ``[batch, length]``, with replay as configured."""
        return batch_log_probs(
            self.model, tensors, temperature=self._config.temperature, replays_experts=self._config.replays_experts
        )

    def _own_log_probs(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Those with experts that the routers choose; None if they are not to be measured."""
        if not self._config.measures_gap:
            return None
        with torch.no_grad():
            return batch_log_probs(self.model, tensors, temperature=self._config.temperature, replays_experts=False)


def check_samples(samples: Sequence[Sample], experts_shape: tuple[int, int, int]) -> None:
    """Check what was streamed with each sample, before anything is trained on.

    Args:
        samples: finished ones.
        experts_shape: of the model: layers, experts of each token, experts of each layer.

    Raises:
        ValueError: routed experts are not of shape ``(len(tokens) - 1, layers, top_k)``, padded or out of range,
            log-probabilities are missing or above 0, or tokens have no weight version.
    """
    for sample in samples:
        sample.check()
        place = f"sample {sample.index}"
        _check_experts(place, sample, experts_shape)
        values = sample.rollout_log_probs
        if values is None or max(values, default=0.0) > 0:
            raise ValueError(f"{place}: log-probabilities are missing, or above 0")
        told = sum(end - start for version, start, end in sample.version_spans if version is not None)
        if told != sample.response_length:
            raise ValueError(f"{place}: {told} of {sample.response_length} tokens have a weight version")


def _check_experts(place: str, sample: Sample, experts_shape: tuple[int, int, int]) -> None:
    layers, top_k, experts = experts_shape
    rows, wanted = sample.rollout_routed_experts, (len(sample.tokens) - 1, layers, top_k)
    if rows is None or rows.shape != wanted:
        found = None if rows is None else rows.shape
        raise ValueError(f"{place}: routed experts are of shape {found}, not {wanted}")
    if rows.size and not 0 <= rows.min() <= rows.max() < experts:
        raise ValueError(f"{place}: experts are {rows.min()} to {rows.max()}, not 0 to {experts - 1}")


def _of_version(batch: Batch, version: str) -> npt.NDArray[np.bool_]:
    """Where the tokens stand of samples whose tokens are all of one version: bool ``[batch, length]``."""
    if version not in batch.versions:
        return np.zeros(batch.version_index.shape, np.bool_)
    index = batch.version_index
    is_current: npt.NDArray[np.bool_] = index == batch.versions.index(version)
    has_others = (~is_current & (index >= 0)).any(axis=1)
    is_current[has_others] = False
    return is_current


def _mean_gap(log_probs: torch.Tensor, tensors: dict[str, torch.Tensor], where: torch.Tensor) -> float:
    return float((log_probs - tensors["logprobs"])[where].abs().mean())
