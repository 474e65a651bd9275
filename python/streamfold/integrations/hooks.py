"""The trainer's functions as our rollouts call them: generate functions, sample hooks, rewards and filters.

They are those of ``--custom-generate-function-path``, ``--rollout-sample-hook-path``, ``--custom-rm-path``,
``--group-rm``, ``--dynamic-sampling-filter-path``, ``--rollout-sample-filter-path`` and
``--rollout-all-samples-process-path``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamfold.client.abort_signal import AbortSignal
from streamfold.rollout.groups import restart_samples, sort_key, unfinished_samples
from streamfold.rollout.rewards import check_reward
from streamfold.samples.metadata import LastWrite, add_counts
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamfold.client.client import Client
    from streamfold.integrations.base import Integration, TrainerSample
    from streamfold.integrations.settings import Args
    from streamfold.rollout.groups import Group

__all__ = ["GroupFilters", "RewardModel", "SampleGenerator", "masks_offpolicy"]

_logger = logging.getLogger("streamfold")

State: TypeAlias = Any  # the trainer's GenerateState


class SampleGenerator:
    """Generates a sample with the function that the trainer would use, then calls the trainer's sample hooks.

    Samples that the engine aborted by itself, as it does before it loads new weights, are resumed or restarted, up to
    ``client.retries.tries`` times.

    Args:
        integration: the trainer.
        args: its options.
        state: its ``GenerateState``.
        client: of its router.
        reward_model: is told which samples were made of one.
        resumes: whether samples are resumed; otherwise they are restarted.
    """

    def __init__(
        self,
        integration: Integration,
        args: Args,
        state: State,
        client: Client,
        reward_model: RewardModel,
        *,
        resumes: bool,
    ) -> None:
        self._integration = integration
        self._args = args
        self._state = state
        self._retries = client.retries
        self._reward_model = reward_model
        self._resumes = resumes
        self._hooks = integration.find("rollout.sample_hooks", "apply_rollout_sample_hooks")
        if not getattr(args, "rollout_sample_hook_path", None):
            self._hooks = None

    def abort_mode(self, sample: TrainerSample) -> str:
        """How the sample's generate function is aborted: "request" or "server"."""
        return str(getattr(self._function(sample), "abort_mode", "server"))

    async def __call__(
        self, sample: TrainerSample, sampling_params: dict[str, Any], *, aborted: Callable[[], bool]
    ) -> Any:  # noqa: ANN401
        """The sample, or the list of samples that the function made of it."""
        try:
            made = await self._generate(sample, sampling_params, AbortSignal.of(aborted))
        except asyncio.CancelledError:
            if not (is_finished(sample) and self._is_final(sample)):
                raise
            made = sample  # it finished before the cancel took effect
        if self._hooks is not None and made and not unfinished_samples([made]):
            made = await _finish_despite_cancel(self._hooks(self._args, made, evaluation=False))
        if isinstance(made, list):
            self._reward_model.judge_together(made)
        return made

    async def truncate(self, sample: TrainerSample, _sampling_params: dict[str, Any]) -> Any:  # noqa: ANN401
        """Finish a sample that has reached its time limit: the sample, or what the trainer's hooks made of it."""
        sample.status = type(sample.status).TRUNCATED
        if self._hooks is None:
            return sample
        return await _finish_despite_cancel(self._hooks(self._args, sample, evaluation=False))

    def _function(self, sample: TrainerSample) -> Callable[..., Awaitable[Any]]:
        path = getattr(sample, "generate_function_path", None)
        path = path or getattr(self._args, "custom_generate_function_path", None)
        return self._integration.load_function(path or self._integration.generate_path)

    def _is_final(self, sample: TrainerSample) -> bool:
        """Whether a finished sample is all that its function makes: one with turns may go on behind each."""
        is_ours = self._function(sample) is self._integration.load_function(self._integration.generate_path)
        return is_ours or LastWrite.of(sample) is None

    async def _generate(self, sample: TrainerSample, sampling_params: dict[str, Any], abort: AbortSignal) -> Any:  # noqa: ANN401
        function = self._function(sample)
        options = {"evaluation": False} if "evaluation" in inspect.signature(function).parameters else {}
        if "sampling_seed" in sampling_params:  # the rollout's name for it; the trainer's generators know the engine's
            sampling_params[self._integration.seed_param] = sampling_params.pop("sampling_seed")
        failures = 0
        for tries in itertools.count(1):
            before = sample.response_length
            with self._dp_rank():
                made = await function(self._args, sample, copy.deepcopy(sampling_params), **options)
            if not _is_aborted_sample(made) or abort.is_set() or self._retries.is_last(tries):
                break
            sample = made
            failures = 1 if sample.response_length > before else failures + 1
            self._prepare_retry(sample)
            await abort.wait(self._retries.pause(failures))
        return made

    def _prepare_retry(self, sample: TrainerSample) -> None:
        """Prepare a sample that the engine aborted to be resumed or restarted."""
        _logger.info("the engine aborted sample %s after %d tokens; retrying", sample.index, sample.response_length)
        if not self._resumes:
            restart_samples([sample])
        elif sample.response_length and masks_offpolicy(self._args):
            sample.loss_mask = [0] * sample.response_length
        add_counts(sample, resumed=1)

    def _dp_rank(self) -> contextlib.AbstractContextManager[Any]:
        """The trainer's own balancing of data-parallel ranks, which generate functions may use."""
        context = getattr(self._state, "dp_rank_context", contextlib.nullcontext)
        rank: contextlib.AbstractContextManager[Any] = context()
        return rank


class RewardModel:
    """The trainer's ``rm_hub``: the reward of a sample, of a group, or of all samples that were made of one."""

    def __init__(self, integration: Integration, args: Args) -> None:
        self._integration = integration
        self._args = args
        self._key = getattr(args, "reward_key", None)
        self._batches: dict[int, _Batch] = {}  # by the id of each sample

    def judge_together(self, samples: list[TrainerSample]) -> None:
        """Judge samples in one call, as the trainer does with those that one generate call returned."""
        batch = _Batch(samples)
        self._batches.update({id(sample): batch for sample in samples if sample.reward is None})

    def judge_lists_together(self, groups: list[Group]) -> None:
        """Do so for each list of samples in groups that were taken from the data source."""
        elements: list[Any] = [element for group in groups for element in group]  # samples, or lists of them
        for element in elements:
            if isinstance(element, list):
                self.judge_together(element)

    async def __call__(self, judged: TrainerSample | list[TrainerSample]) -> Any:  # noqa: ANN401
        """The reward of a sample, or the rewards of a list of them.

        Raises:
            ValueError: what ``--reward-key`` names in a dict is no number.
        """
        reward = await self._judge(judged)
        samples, rewards = (judged, reward) if isinstance(judged, list) else ([judged], [reward])
        for sample, each in zip(samples, rewards, strict=False):  # the rollout compares the lengths
            if self._key and isinstance(each, dict):
                check_reward(sample, each, self._key)
        return reward

    async def _judge(self, judged: TrainerSample | list[TrainerSample]) -> Any:  # noqa: ANN401
        rm_hub: Any = self._integration.module("rollout.rm_hub")
        if isinstance(judged, list):
            with self._integration.span(judged, "group_reward_model"):
                return await rm_hub.batched_async_rm(self._args, judged)
        batch = self._batches.get(id(judged))
        if batch is None:
            with self._integration.span(judged, "reward_model"):
                return await rm_hub.async_rm(self._args, judged)

        async def judge(samples: list[TrainerSample]) -> list[Any]:
            with self._integration.span(samples, "reward_model"):
                rewards: list[Any] = await rm_hub.batched_async_rm(self._args, samples)
            return rewards

        reward = await batch.reward(judged, judge)
        del self._batches[id(judged)]
        return reward


@dataclass(eq=False)
class _Batch:
    """Samples whose rewards come from one call, which the first caller starts and the others await."""

    samples: list[TrainerSample]
    waiting: int = 0
    task: asyncio.Task[dict[int, Any]] | None = None

    async def reward(self, sample: TrainerSample, judge: Callable[[list[TrainerSample]], Awaitable[list[Any]]]) -> Any:  # noqa: ANN401
        """The reward of one of them. The call is cancelled once all callers are."""
        task = self.task = self.task or asyncio.ensure_future(self._judge(judge))
        self.waiting += 1
        try:
            await asyncio.wait([task])
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.task = None
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
        return task.result()[id(sample)]

    async def _judge(self, judge: Callable[[list[TrainerSample]], Awaitable[list[Any]]]) -> dict[int, Any]:
        samples = [sample for sample in self.samples if sample.reward is None]
        rewards = await judge(samples)
        if len(rewards) != len(samples):
            raise ValueError(f"the reward function returned {len(rewards)} rewards for {len(samples)} samples")
        return {id(sample): reward for sample, reward in zip(samples, rewards, strict=True)}


class GroupFilters:
    """The dynamic filter, and the trainer's functions that see the groups of a rollout.

    Args:
        integration: the trainer.
        args: its options.
        data_source: passed to the function of ``--rollout-all-samples-process-path``.
        batch: how many groups a rollout needs; None: a pool, which has no batch that could be too small.
    """

    def __init__(self, integration: Integration, args: Args, data_source: Any, *, batch: int | None) -> None:  # noqa: ANN401
        self._args = args
        self._data_source = data_source
        self._batch = batch
        self._drops: Counter[str] = Counter()
        self._finished: list[Group] = []  # for --rollout-all-samples-process-path
        self._dynamic = _function(integration, args, "dynamic_sampling_filter_path")
        self._on_batch = _function(integration, args, "rollout_sample_filter_path")
        self._on_finished = _function(integration, args, "rollout_all_samples_process_path")

    def keeps(self, group: Group, others: int) -> tuple[bool, str | None]:
        """Whether the trainer gets a finished group, while ``others`` are ready or in flight; if not, the reason."""
        if self._on_finished is not None:
            self._finished.append(group)
        if self._dynamic is None:
            return True, None
        verdict = self._dynamic(self._args, group)
        is_insufficient = self._batch is not None and others < self._batch
        if (keeps := getattr(verdict, "keep", verdict)) is None:
            raise TypeError(
                "the function of --dynamic-sampling-filter-path returned None: it must return whether to keep the group"
            )
        if keeps or (is_insufficient and getattr(verdict, "keep_when_insufficient", False)):
            return True, None
        reason = getattr(verdict, "reason", None)
        if reason:
            self._drops[reason] += 1
        return False, reason

    def show_batch(self, groups: list[Group]) -> None:
        """Call the function that sees the groups of a rollout, and the one that sees every group that finished."""
        finished, self._finished = self._finished, []
        if self._on_batch is not None:
            self._on_batch(self._args, groups)
        if self._on_finished is not None:
            self._on_finished(self._args, sorted(finished, key=sort_key), self._data_source)

    def take_metrics(self) -> dict[str, float]:
        """How many groups the dynamic filter has dropped since the last call, by its reasons; slime's names."""
        drops, self._drops = self._drops, Counter()
        return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in drops.items()}


def masks_offpolicy(args: Args) -> bool:
    """Whether tokens of earlier calls are masked when a response is resumed: with both of the trainer's options."""
    return all(bool(getattr(args, f"{name}partial_rollout", False)) for name in ("", "mask_offpolicy_in_"))


def _function(integration: Integration, args: Args, option: str) -> Callable[..., Any] | None:
    """The function whose dotted path an option gives."""
    path = getattr(args, option, None)
    return None if path is None else integration.load_function(path)


def _is_aborted_sample(made: Any) -> bool:  # noqa: ANN401  # of any generate function
    return made is not None and not isinstance(made, list) and made.status.name == "ABORTED"


async def _finish_despite_cancel(work: Awaitable[Any]) -> Any:  # noqa: ANN401
    """Await work that one cancel does not interrupt; a second one does."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
    return task.result()
