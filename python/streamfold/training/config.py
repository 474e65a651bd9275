"""``TrainConfig``: the settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from streamfold.rollout.config import RolloutConfig

__all__ = ["TrainConfig"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        steps: rollouts, each with a training step behind it.
        groups: that each step trains on.
        over_sampling: groups that are started at a time. What is unfinished when ``groups`` are done is aborted, and
            resumed by the next rollout with the new weights.
        n_samples: of each group.
        concurrency: samples in flight.
        max_new_tokens: of each sample.
        temperature: of the sampling, and of the log-probabilities that are recomputed.
        top_p: below 1, the ids that were kept are streamed and replayed.
        seed: sample i of each group is sampled with ``seed + i``. None: the engine chooses.
        learning_rate: of AdamW.
        clip: how far the ratio of new to old probability counts.
        epochs: passes over each batch, with an optimizer step each.
        max_grad_norm: at which gradients are clipped.
        mask_offpolicy: whether tokens that older weights have sampled are left out of the loss.
        replays_experts: whether the trainer takes the streamed experts.
        measures_gap: whether the difference without replay is measured too, which costs a forward pass.
        bucket_bytes: of the weights in one request.

    Raises:
        ValueError: a number is below 1.
    """

    steps: int = 30
    groups: int = 12
    over_sampling: int = 18
    n_samples: int = 8
    concurrency: int = 44
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    learning_rate: float = 8e-3
    clip: float = 0.2
    epochs: int = 1
    max_grad_norm: float = 1.0
    mask_offpolicy: bool = False
    replays_experts: bool = True
    measures_gap: bool = True
    bucket_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def rollout(self, stop_ids: tuple[int, ...]) -> RolloutConfig:
        """The settings of the rollouts; ``stop_ids`` end a response."""
        params: dict[str, object] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.top_p < 1:
            params["custom_params"] = {"return_top_p_token_ids": True}
        return RolloutConfig(
            sampling_params=params,
            groups=self.groups,
            over_sampling=self.over_sampling,
            n_samples_per_prompt=self.n_samples,
            concurrency=self.concurrency,
            partial_rollout=True,
            mask_offpolicy=self.mask_offpolicy,
            stop_ids=stop_ids,
            seed=self.seed,
            progress=False,
        )
