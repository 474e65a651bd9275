"""How a rollout is done: one frozen object, each field with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from streamfold.client.limits import check_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RolloutConfig"]

_AT_LEAST_ONE = (
    "groups", "n_samples_per_prompt", "over_sampling", "concurrency", "starts_per_ms", "reward_threads", "dp_size",
    "group_tries",
)  # fmt: skip
_AT_LEAST_NONE = ("max_failures", "max_staleness")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What a rollout gives, how it is asked for, and what becomes of groups that are not at their end.

    Attributes:
        sampling_params: as the engine has them, for the whole response of each sample. Never changed.
        groups: how many groups a rollout gives to the trainer.
        n_samples_per_prompt: how many samples a group of the source must have. None: as many as it has.
        over_sampling: how many groups the source is asked for at a time, whenever fewer than ``groups`` are finished
            or in flight. More than ``groups`` is usual: a rollout then does not wait for its slowest. None: ``groups``.
        concurrency: how many samples are in flight on each engine.
        starts_per_ms: how many samples begin in one millisecond at most.
        partial_rollout: whether a response that a rollout cut is gone on with in a later one. If not, its sample
            starts again from the prompt, clean in every field.
        mask_offpolicy: with ``partial_rollout``: set the loss mask of what earlier rollouts generated to 0, in each
            group that is gone on with.
        keep_finished: whether finished groups beyond ``groups`` wait in the source for the next rollout, and pass
            through it untouched. If not they are dropped, as some hosts do; and without ``partial_rollout`` a group
            that was cut then starts again as a whole, so that nothing outlives the rollout it was begun in.
        group_reward: whether the reward function takes all samples of a group at once, in one list, and gives as many
            rewards. A group with a sample that is not at its end gets none.
        reward_threads: in how many threads a reward function that is not ``async`` runs at the same time.
        abort_seconds: how long the end of a rollout may take, from its last group on: for engines to end what was
            aborted, for rewards that are being computed, for generators that clean up. What is left is cancelled.
        resume: what the built-in generator does when a stream breaks off: see
        :func:`~streamfold.samples.completion.complete`.
        logprobs: whether the built-in generator asks for log-probabilities.
        stop_ids: tokens that end a response besides ``stop_token_ids``, as the tokenizer's end of sequence: an engine
            that aborts a request does not look whether its last token would have ended it.
        dp_size: data-parallel ranks of each engine. With more than 1 each request names the rank with the fewest
            (``routed_dp_rank`` for SGLang 0.5.10 and newer, a header for vLLM).
        max_staleness: a group that was begun more than so many rollouts ago (in a pool: weight versions) starts again
            from its prompt. None: no limit.
        seed: the i-th sample of every group gets ``sampling_seed`` ``seed + i``. None: the engine's own choice.
        max_failures: how many groups may fail in one rollout. Those go back to the source, to be tried again in the
            next one; one more, and the rollout ends with an error, as the fault lies elsewhere.
        group_tries: how many rollouts a group may fail in, before it is dropped.
        progress: whether to show a progress bar on standard error, if that is a terminal.

    Raises:
        ValueError: a value makes no sense; the message says which and why.
    """

    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    groups: int
    n_samples_per_prompt: int | None = None
    over_sampling: int | None = None
    concurrency: int = 512
    starts_per_ms: int = 64
    partial_rollout: bool = False
    mask_offpolicy: bool = False
    keep_finished: bool = True
    group_reward: bool = False
    reward_threads: int = 8
    abort_seconds: float = 30.0
    resume: Literal["continue", "restart", "raise"] = "continue"
    logprobs: bool = True
    stop_ids: tuple[int, ...] = ()
    dp_size: int = 1
    max_staleness: int | None = None
    seed: int | None = None
    max_failures: int = 8
    group_tries: int = 3
    progress: bool = True

    def __post_init__(self) -> None:
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_NONE, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and (type(value) is not int or value < least):
                    raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        check_seconds("abort_seconds", self.abort_seconds, optional=False)
        if self.mask_offpolicy and not self.partial_rollout:
            raise ValueError("mask_offpolicy is for responses that are gone on with: it needs partial_rollout")
        if self.resume not in ("continue", "restart", "raise"):
            raise ValueError(f'resume must be "continue", "restart" or "raise", not {self.resume!r}')

    @property
    def ask(self) -> int:
        """How many groups the source is asked for at a time."""
        return self.groups if self.over_sampling is None else self.over_sampling
