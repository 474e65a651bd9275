"""Replaces the trainer's rollout function: ``--rollout-function-path streamfold.slime.generate_rollout``.

For vime, slime's counterpart for vLLM, it is ``streamfold.vime.generate_rollout``.

Generate functions, rewards, filters and hooks are those that the trainer's options name; without
``--custom-generate-function-path`` our ``generate_streaming`` is used. The loop around them is
:class:`~streamfold.Rollout`: it aborts requests one by one, also with older releases of the trainer, which abort whole
servers; a failed group does not end the others; finished groups beyond the batch wait for the next rollout.

Differences from the trainers' own rollout functions:

- ``--rollout-sample-hook-path`` is called for a sample once, when it is finished, not after each abort.
- A sample that the engine aborted by itself is resumed (with ``--partial-rollout``; otherwise restarted) instead of
  being given to the trainer.

Settings: see :mod:`streamfold.integrations.settings`; those marked "rollout" or "all" apply here.
"""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from streamfold.integrations.data_source import durable_buffer
from streamfold.integrations.generate import client_for
from streamfold.integrations.hooks import GroupFilters, RewardModel, SampleGenerator, masks_offpolicy
from streamfold.integrations.progress import RolloutProgress
from streamfold.integrations.settings import Settings
from streamfold.rollout.config import RolloutConfig
from streamfold.rollout.parts import RolloutHooks
from streamfold.rollout.rollout import Rollout
from streamfold.rollout.spans import Spans

if TYPE_CHECKING:
    from streamfold.client.client import Client
    from streamfold.integrations.base import Integration
    from streamfold.integrations.settings import Args
    from streamfold.rollout.groups import Group

__all__ = ["TrainerRollout", "create_rollout", "evaluate", "generate_rollout"]

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
        ValueError: a setting is invalid, or ``rollout_data_transport`` is ``"straw"``.
    """
    integration.refuse_leases(args, "generate_rollout")
    work = evaluate(integration, args, rollout_id) if evaluation else _train(integration, args, rollout_id, data_source)
    run = integration.find("utils.async_utils", "run") or asyncio.run
    return run(work)


async def _train(integration: Integration, args: Args, rollout_id: int, data_source: Source) -> Any:  # noqa: ANN401
    trainer_rollout = await create_rollout(integration, args, Settings.of(args), data_source)
    try:
        with trainer_rollout.progress.shown():
            result = await trainer_rollout.rollout.run(data_source, rollout_id)
    finally:
        trainer_rollout.reset()
    return trainer_rollout.output(rollout_id, result.groups, result.metrics)


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


async def create_rollout(
    integration: Integration, args: Args, settings: Settings, data_source: Source, *, pooled: bool = False
) -> TrainerRollout:
    """The rollout that ``args`` and ``settings`` describe, with the running event loop's client.

    The trainer's state is reset, as its own rollout does: a run that died may have left ``aborted`` set.
    """
    if (durable := durable_buffer(data_source)) is not None:
        durable.tracks_in_flight = True
    client = (await client_for(integration, args, settings)).client
    state = integration.rollout_module.GenerateState(args)
    trainer_rollout = TrainerRollout(
        integration, args, settings=settings, client=client, state=state, data_source=data_source, pooled=pooled
    )
    trainer_rollout.reset()
    return trainer_rollout


class TrainerRollout:
    """A :class:`~streamfold.Rollout` with the trainer's functions and options.

    Args:
        integration: the trainer.
        args: its options.
        settings: ours.
        client: of its router.
        state: its ``GenerateState``; ``aborted`` is set while the rollout is being aborted.
        data_source: the trainer's, or ours.
        pooled: whether it is for a pool.

    Attributes:
        rollout: the rollout.
        progress: the trainer's log lines and bar.
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
        self._integration = integration
        self._state = state
        self._data_source = data_source
        self.progress: Final = RolloutProgress(integration, args)
        self._filters = GroupFilters(integration, args, data_source, batch=None if pooled else args.rollout_batch_size)
        reward_model = RewardModel(integration, args)
        # What is in flight across rollouts carries on at a weight update, without the option too, as with the trainers.
        resumes = pooled or bool(getattr(args, "partial_rollout", False))
        self.rollout: Final = Rollout(
            client,
            _config(integration, args, settings, state.sampling_params, resumes=resumes),
            reward=reward_model,
            sample_filter=self._filters.show_batch,
            generate=SampleGenerator(integration, args, state, client, reward_model, resumes=resumes),
            on_abort=self._mark_aborted,
            hooks=RolloutHooks(
                count_engines=partial(_count_engines, integration, args),
                on_taken=reward_model.judge_lists_together,
                spans=Spans(
                    group=lambda group: integration.span(group, "generate_and_rm_group", group_size=len(group)),
                    sample=lambda sample: integration.span(sample, "generate_and_rm"),
                ),
                shows_bar=self.progress.has_bar,
                filter=self._keeps,
            ),
        )

    def output(self, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> Any:  # noqa: ANN401
        """Groups and metrics as the trainer takes them; a durable buffer notes that they were delivered."""
        self.progress.finish(groups)
        if (durable := durable_buffer(self._data_source)) is not None:
            durable.delivered(groups, rollout_id)
        output_type = self._integration.find(_TYPES, "RolloutFnTrainOutput")
        metrics = {**metrics, **self._filters.take_metrics()}
        return groups if output_type is None else output_type(groups, metrics)

    def reset(self) -> None:
        """Clear ``aborted`` of the trainer's state."""
        getattr(self._state, "reset", lambda: None)()
        self._state.aborted = False

    def _keeps(self, group: Group, others: int) -> tuple[bool, str | None]:
        self.progress.note_finished(group)
        verdict = self._filters.keeps(group, others)
        if verdict[0]:
            self.progress.note_accepted(group)
        return verdict

    def _mark_aborted(self) -> None:
        self._state.aborted = True


def _count_engines(integration: Integration, args: Args) -> int | None:
    """How many engines the trainer has; None if that release does not say."""
    count = integration.find("utils.http_utils", "get_rollout_num_engines")
    if count is not None:
        return max(1, int(count(args)))
    gpus, per_engine = (getattr(args, f"rollout_num_gpus{suffix}", None) for suffix in ("", "_per_engine"))
    return max(1, gpus // per_engine) if gpus and per_engine else None


def _config(
    integration: Integration, args: Args, settings: Settings, sampling_params: dict[str, Any], *, resumes: bool
) -> RolloutConfig:
    is_seeded = integration.engine_option(args, "enable_deterministic_inference", None)
    return RolloutConfig(
        sampling_params=sampling_params,
        groups=args.rollout_batch_size,
        n_samples_per_prompt=args.n_samples_per_prompt,
        over_sampling=getattr(args, "over_sampling_batch_size", None),
        concurrency=integration.engine_option(args, "server_concurrency", RolloutConfig.concurrency),
        partial_rollout=resumes,
        mask_offpolicy=masks_offpolicy(args),
        keep_finished=settings.keep_finished,
        abort_seconds=settings.abort_seconds,
        reward_seconds=settings.reward_seconds,
        group_reward=bool(getattr(args, "group_rm", False)),
        seed=args.rollout_seed if is_seeded else None,
        max_staleness=settings.max_staleness,
        stale=settings.stale,
        sample_seconds=settings.sample_seconds,
        sample_retries=settings.sample_retries,
        max_failures=settings.max_failures,
        max_failure_rate=settings.max_failure_rate,
        group_tries=settings.group_tries,
        max_groups_drawn=settings.max_groups_drawn,
    )
