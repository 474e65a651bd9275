"""Whole rollouts: ``--rollout-function-path streamfold.slime.generate_rollout``.

For vime it is ``streamfold.vime.generate_rollout``.

Generate functions, rewards, filters and hooks are the trainer's, as its options name them; without
``--custom-generate-function-path`` our ``generate_streaming`` is used. The loop around them is
:class:`~streamfold.Rollout`: it aborts single requests in older releases too, a failed group does not end the others,
and finished groups beyond the batch wait for the next rollout.

Differences from the trainers' own rollout functions:

- ``--rollout-sample-hook-path`` is called for a sample once, when it is finished, not after each abort.
- A sample that the engine aborted by itself is resumed (with ``--partial-rollout``; otherwise restarted) instead of
  being given to the trainer.

Settings are in :mod:`streamfold.integrations.settings`: those for "rollout", and those for "all".
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from streamfold.integrations.data_source import durable_buffer
from streamfold.integrations.generate import client_for
from streamfold.integrations.hooks import RewardModel, SampleGenerator
from streamfold.integrations.settings import Settings
from streamfold.rollout import groups as rules
from streamfold.rollout.config import RolloutConfig
from streamfold.rollout.rollout import Rollout
from streamfold.rollout.tracker import GroupTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.client.client import Client
    from streamfold.integrations.base import Integration
    from streamfold.integrations.settings import Args
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.rewards import Rewards
    from streamfold.rollout.scheduler import GroupScheduler

__all__ = ["TrainerRollout", "evaluate", "generate_rollout", "open_rollout"]

# The trainer's own objects, which differ between releases.
State: TypeAlias = Any
Source: TypeAlias = Any

_TYPES: Final = "rollout.base_types"


def generate_rollout(
    integration: Integration, args: Args, rollout_id: int, data_source: Source, *, evaluation: bool
) -> Any:  # noqa: ANN401
    """Run one rollout, in the trainer's event loop if it has one, else in a new one.

    Args:
        integration: the trainer.
        args: its options. Read, never changed.
        rollout_id: the number of the rollout.
        data_source: the trainer's, or our ``DataSource``, which loses no group in a crash.
        evaluation: generate the evaluation sets instead, with the trainer's ``eval_rollout``.

    Returns:
        ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups, sorted, and metrics; for an evaluation
        ``RolloutFnEvalOutput``. Older releases have no such classes: the groups, or the evaluation's data.

    Raises:
        StreamfoldError: too many groups failed. All groups have been returned to the data source.
        Exception: what the data source, a filter, or an evaluation raised. All groups have been returned too.
        ValueError: a setting is invalid.
    """
    work = evaluate(integration, args, rollout_id) if evaluation else _train(integration, args, rollout_id, data_source)
    run = integration.find("utils.async_utils", "run") or asyncio.run
    return run(work)


async def _train(integration: Integration, args: Args, rollout_id: int, data_source: Source) -> Any:  # noqa: ANN401
    rollout = await open_rollout(integration, args, Settings.of(args), data_source)
    try:
        result = await rollout.run(data_source, rollout_id)
    finally:
        rollout.reset()
    return rollout.output(data_source, rollout_id, result.groups, result.metrics)


async def evaluate(integration: Integration, args: Args, rollout_id: int) -> Any:  # noqa: ANN401
    """The trainer's ``eval_rollout``, with our generate function unless ``args`` name another one."""
    module = integration.rollout_module
    module.GenerateState(args)  # a singleton, which keeps the args it is created with: not the copy below
    if getattr(args, "custom_generate_function_path", None) is None:
        args = copy.copy(args)
        args.custom_generate_function_path = integration.generate_path
    result = await module.eval_rollout(args, rollout_id)
    output = result[0] if isinstance(result, tuple) else result
    output_type = integration.find(_TYPES, "RolloutFnEvalOutput")
    return output if output_type is None or isinstance(output, output_type) else output_type(output)


async def open_rollout(
    integration: Integration, args: Args, settings: Settings, data_source: Source, *, pooled: bool = False
) -> TrainerRollout:
    """The rollout that ``args`` and ``settings`` describe, with the running event loop's client."""
    if (durable := durable_buffer(data_source)) is not None:
        durable.tracks_in_flight = True
    client = (await client_for(integration, args, settings)).client
    state = integration.rollout_module.GenerateState(args)
    return TrainerRollout(
        integration, args, settings=settings, client=client, state=state, data_source=data_source, pooled=pooled
    )


class TrainerRollout(Rollout):
    """A rollout of which everything but the loop is the trainer's.

    Args:
        integration: the trainer.
        args: its options.
        settings: ours.
        client: of its router.
        state: its ``GenerateState``; ``aborted`` is set while the rollout is being aborted.
        data_source: passed to the function of ``--rollout-all-samples-process-path``.
        pooled: whether it is for a pool, which has no batch that could be too small.

    Attributes:
        integration: the trainer.
        drops: how many groups the dynamic filter dropped, by its reasons.
    """

    def __init__(
        self,
        integration: Integration,
        args: Args,
        *,
        settings: Settings,
        client: Client,
        state: State,
        data_source: Source,
        pooled: bool,
    ) -> None:
        self.integration: Final = integration
        self.state: Final = state
        self.drops: Counter[str] = Counter()
        self._args = args
        self._dynamic_filter = _function(integration, args, "dynamic_sampling_filter_path")
        self._on_groups = _function(integration, args, "rollout_sample_filter_path")
        self._on_all = _function(integration, args, "rollout_all_samples_process_path")
        self._data_source = data_source
        self._is_pooled = pooled
        self._finished: list[Group] = []  # all that the filter was called with, for --rollout-all-samples-process-path
        self._reward_model = reward_model = RewardModel(integration, args)
        super().__init__(
            client,
            _config(integration, args, settings, state.sampling_params),
            reward=reward_model,
            filter=self._keeps,
            sample_filter=self._show,
            generate=SampleGenerator(integration, args, state, client, reward_model),
            on_abort=self._begin_abort,
        )

    async def engines(self) -> int:
        """How many engines the trainer has."""
        count = self.integration.find("utils.http_utils", "get_rollout_num_engines")
        if count is not None:
            return max(1, int(count(self._args)))
        gpus, each = (getattr(self._args, f"rollout_num_gpus{of}", None) for of in ("", "_per_engine"))
        return max(1, gpus // each) if gpus and each else await super().engines()

    def tracker(self, source: Source, stats: RolloutStats, *, gives_back_all: bool = False) -> GroupTracker:
        """As of any rollout; the filter needs to know how many groups there are."""
        self._tracker = _HostTracker(
            source, self.config, self._keeps, stats, judged=True, gives_back_all=gives_back_all
        )
        self._tracker.rewards = self._reward_model
        return self._tracker

    def scheduler(self, stats: RolloutStats, rewards: Rewards | None, engines: int) -> GroupScheduler:
        """Likewise."""
        self._scheduler = super().scheduler(stats, rewards, engines)
        return self._scheduler

    def output(self, data_source: Source, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> Any:  # noqa: ANN401
        """Groups and metrics as the trainer takes them; a durable buffer notes that they were delivered."""
        if (durable := durable_buffer(data_source)) is not None:
            durable.delivered(groups, rollout_id)
        output_type = self.integration.find(_TYPES, "RolloutFnTrainOutput")
        drops = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.drops.items()}
        self.drops.clear()
        return groups if output_type is None else output_type(groups, {**metrics, **drops})

    def reset(self) -> None:
        """Let the trainer's state say that no rollout is being aborted any more."""
        getattr(self.state, "reset", lambda: None)()
        self.state.aborted = False

    def _begin_abort(self) -> None:
        self.state.aborted = True

    def _keeps(self, group: Group) -> tuple[bool, str | None]:
        if self._on_all is not None:
            self._finished.append(group)
        if self._dynamic_filter is None:
            return True, None
        verdict = self._dynamic_filter(self._args, group)
        if getattr(verdict, "keep", verdict) or (getattr(verdict, "keep_when_insufficient", False) and self._is_short):
            return True, None
        reason = getattr(verdict, "reason", None)
        if reason:
            self.drops[reason] += 1
        return False, reason

    @property
    def _is_short(self) -> bool:
        """Whether without the group that has just ended more would have to be requested."""
        return not self._is_pooled and len(self._tracker.ready) + len(self._scheduler) + 1 <= self.config.groups

    def _show(self, groups: list[Group]) -> None:
        """Call the trainer's functions that see the groups of a rollout, and all that the filter saw."""
        finished, self._finished = self._finished, []
        if self._on_groups is not None:
            self._on_groups(self._args, groups)
        if self._on_all is not None:
            self._on_all(self._args, sorted(finished, key=rules.index_of), self._data_source)


class _HostTracker(GroupTracker):
    """A tracker that knows which samples were made of one, when a group of them comes back."""

    rewards: RewardModel

    def take(self, n: int, now: int) -> list[Group]:
        taken = super().take(n, now)
        self.rewards.judge_lists_together(taken)
        return taken


def _function(integration: Integration, args: Args, option: str) -> Callable[..., Any] | None:
    """The function whose dotted path an option gives."""
    path = getattr(args, option, None)
    return None if path is None else integration.load_function(path)


def _config(integration: Integration, args: Args, settings: Settings, sampling_params: dict[str, Any]) -> RolloutConfig:
    partial_rollout = bool(getattr(args, "partial_rollout", False))
    is_seeded = integration.engine_option(args, "enable_deterministic_inference", None)
    return RolloutConfig(
        sampling_params=sampling_params,
        groups=args.rollout_batch_size,
        n_samples_per_prompt=args.n_samples_per_prompt,
        over_sampling=getattr(args, "over_sampling_batch_size", None),
        concurrency=integration.engine_option(args, "server_concurrency", RolloutConfig.concurrency),
        partial_rollout=partial_rollout,
        mask_offpolicy=partial_rollout and bool(getattr(args, "mask_offpolicy_in_partial_rollout", False)),
        keep_finished=settings.keep_finished,
        abort_seconds=settings.abort_seconds,
        group_reward=bool(getattr(args, "group_rm", False)),
        seed=args.rollout_seed if is_seeded else None,
        max_staleness=settings.max_staleness,
        max_failures=settings.max_failures,
        group_tries=settings.group_tries,
    )
