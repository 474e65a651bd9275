"""Generates the samples of a group and computes their rewards, with limits on concurrency and on starts per ms."""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import Slots
from streamfold.errors import StreamfoldError
from streamfold.rollout.groups import (
    copy_indices,
    is_complete,
    restart_samples,
    samples_of,
    unfinished_samples,
)  # fmt: skip
from streamfold.rollout.tasks import AbortableTasks, Aborted, wait_all
from streamfold.samples.routing import session_of
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from streamfold.rollout.callbacks import Generate, Reward
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.rewards import Rewards
    from streamfold.rollout.tasks import AbortMode
    from streamfold.samples.sample import Sample

__all__ = ["GroupOutcome", "GroupRunner", "RateLimiter"]

_logger = logging.getLogger("streamfold")

_MILLISECOND: Final = 0.001


@dataclass
class GroupOutcome:
    """What became of a group: filled while it is in flight.

    Attributes:
        group: the list that was started. Its elements are updated in place.
        version: the rollout, or in a pool the weight version, in which it was started.
        failures: what generate and reward functions raised, each with its sample.
        is_cancelled: whether something other than an abort cancelled its task.
    """

    group: Group
    version: int
    failures: list[tuple[Sample, BaseException]] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def elements(self) -> list[Sample | list[Sample]]:
        """The group, typed with the elements that it has where a generate function returned several samples."""
        return cast("list[Sample | list[Sample]]", self.group)


class RateLimiter:
    """Lets at most ``per_ms`` callers through in one millisecond, in the order in which they came."""

    def __init__(self, per_ms: int) -> None:
        self._per_ms = per_ms
        self._left = 0
        self._window_ends = 0.0
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Return when the caller may start."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if not self._left and (rest := self._window_ends - clock()) > 0:
                await asyncio.sleep(rest)
            if (now := clock()) >= self._window_ends:
                self._left, self._window_ends = self._per_ms, now + _MILLISECOND
            self._left -= 1


class GroupRunner:
    """Runs one group after the other or many at once; all share the limits and the abort.

    The samples of a group run concurrently. Finished samples are not touched. A generate or reward function that raises
    does not end the other samples of the group: what they generate is kept.

    Args:
        config: limits and rules.
        generate: called for each sample that is not finished.
        rewards: called for each finished sample, or for each finished group with ``config.group_reward``. None: there
            are no rewards.
        concurrency: how many samples may run at the same time.
        stats: counts.

    Attributes:
        tasks: the generate and reward functions that are running.
    """

    def __init__(
        self,
        config: RolloutConfig,
        generate: Generate,
        *,
        rewards: Rewards | None,
        concurrency: int,
        stats: RolloutStats,
    ) -> None:
        self._abort_signal: Final = AbortSignal()
        self.tasks: Final = AbortableTasks()
        self._config = config
        self._generate = generate
        self._rewards = rewards
        self._stats = stats
        self._slots = Slots(concurrency)
        self._limiter = RateLimiter(config.starts_per_ms)
        self._skips_rewards = False
        self._has_warned = False

    @property
    def aborted(self) -> bool:
        """Whether :meth:`stop_starting` was called."""
        return self._abort_signal.is_set()

    async def run(self, outcome: GroupOutcome) -> None:
        """Generate and judge the group of ``outcome``."""
        if self.aborted or is_complete(outcome.group, needs_reward=self._rewards is not None):
            return  # a finished group of an earlier rollout passes through untouched
        await _run_all([self._run_element(outcome, place) for place in range(len(outcome.group))])
        if self._config.group_reward and self._rewards is not None and not outcome.failures:
            await self._judge_group(self._rewards, outcome)

    def stop_starting(self) -> None:
        """Start nothing any more; samples that wait for a slot end without a request."""
        self._abort_signal.set()
        self._slots.dismiss()

    def abort_rewards(self) -> None:
        """Cancel the reward functions that are running, and start no other."""
        self._skips_rewards = True
        self.tasks.abort("reward")

    async def _run_element(self, outcome: GroupOutcome, place: int) -> None:
        """Generate one element of the group, a sample or a list of them, and compute its rewards."""
        elements = outcome.elements
        element = elements[place]
        if self._config.mask_offpolicy:
            for sample in samples_of([element]):
                if sample.response_length:
                    sample.loss_mask = [0] * sample.response_length
        elements[place] = await self._generate_element(outcome, element, place)
        made, rewards = samples_of([elements[place]]), self._rewards
        if rewards is None or self._config.group_reward or unfinished_samples(made):
            return
        await _run_all([self._judge(rewards, outcome, sample) for sample in made if sample.reward is None])

    async def _generate_element(
        self, outcome: GroupOutcome, element: Sample | list[Sample], place: int
    ) -> Sample | list[Sample]:
        if not isinstance(element, list):
            return await self._generate_sample(outcome, element, place)
        branches: list[Sample | list[Sample]] = list(element)

        async def run_branch(i: int, sample: Sample) -> None:
            branches[i] = await self._generate_sample(outcome, sample, place)

        await _run_all([run_branch(i, sample) for i, sample in enumerate(element)])
        return samples_of(branches)

    async def _generate_sample(self, outcome: GroupOutcome, sample: Sample, place: int) -> Sample | list[Sample]:
        """The sample, or the samples made of it. ABORTED if it was aborted, or if generate raised."""
        if is_finished(sample):
            return sample
        if sample.response_length and not self._config.partial_rollout:
            self._stats.lost += restart_samples([sample])
        made: Sample | list[Sample] = sample
        try:
            made = await self._generate_in_turn(sample, place)
            if problem := self._problem_of(made):
                outcome.failures.append((sample, problem))
        except Aborted:
            pass
        except Exception as error:  # noqa: BLE001  # a user's function; reported with the group's outcome
            self._record_failure(outcome, sample, error)
        if made is sample and not is_finished(sample):
            sample.status = type(sample.status).ABORTED  # PENDING if no request was sent
        return made

    async def _generate_in_turn(self, sample: Sample, place: int) -> Sample | list[Sample]:
        """Wait for a slot and for the rate limiter, then generate."""
        if self.aborted or not await self._slots.wait(self._slots.request()):
            raise Aborted
        try:
            await self._limiter.wait()
            if self.aborted:
                raise Aborted
            return await self._call_generate(sample, place)
        finally:
            self._slots.release()

    async def _call_generate(self, sample: Sample, place: int) -> Sample | list[Sample]:
        session_of(sample)  # a custom generate function may send it
        params = copy.deepcopy(dict(self._config.sampling_params))
        if self._config.seed is not None:
            params["sampling_seed"] = self._config.seed + place
        with self._stats.generating(sample) as counted:
            work = self._generate(sample, params, aborted=self._abort_signal)
            made = await self.tasks.run(work, self._abort_mode_of(sample))
            if made is None or made == []:
                raise TypeError(f"generate returned {made}: it must return the sample, or a list of samples made of it")
            counted.extend(samples_of([made]))
            copy_indices(sample, counted)
        return made

    def _abort_mode_of(self, sample: Sample) -> AbortMode:
        mode = getattr(self._generate, "abort_mode", "server")
        mode = mode(sample) if callable(mode) else mode
        return "request" if mode == "request" else "server"

    def _problem_of(self, made: Sample | list[Sample]) -> Exception | None:
        """What is wrong with the value that generate returned."""
        statuses = {sample.status.name for sample in samples_of([made])}
        if "PENDING" in statuses:
            return ValueError("generate left a sample PENDING: it must set the status of every sample that it returns")
        if "ABORTED" in statuses and not self.aborted:
            return StreamfoldError("generate returned an ABORTED sample, but the rollout was not aborted")
        return None

    def _record_failure(self, outcome: GroupOutcome, sample: Sample, error: Exception) -> None:
        """Add an error to the outcome. After an abort it is only logged, as the abort may have caused it."""
        if not self.aborted:
            outcome.failures.append((sample, error))
            return
        # One warning, not a thousand: an engine that dies during an abort fails all its samples.
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        _logger.log(level, "sample %s failed while it was being aborted", sample.index, exc_info=error)

    async def _judge(self, rewards: Rewards, outcome: GroupOutcome, sample: Sample) -> None:
        """Compute the reward of one finished sample."""
        if self._skips_rewards:
            return
        try:
            self._set_reward(sample, await self.tasks.run(rewards.compute(sample), "reward"))
        except Aborted:
            pass  # computed when the group is taken again
        except Exception as error:  # noqa: BLE001  # a user's function
            self._record_failure(outcome, sample, error)

    async def _judge_group(self, rewards: Rewards, outcome: GroupOutcome) -> None:
        """Compute the rewards of a group, if all its samples are finished."""
        samples = samples_of(outcome.group)
        is_judged = all(sample.reward is not None for sample in samples)
        if self._skips_rewards or is_judged or unfinished_samples(samples):
            return
        try:
            values = await self.tasks.run(rewards.compute(samples), "reward")
            if len(values) != len(samples):
                raise ValueError(f"the reward function returned {len(values)} rewards for {len(samples)} samples")
            for sample, reward in zip(samples, values, strict=True):
                self._set_reward(sample, reward)
        except Aborted:
            pass
        except Exception as error:  # noqa: BLE001  # a user's function
            self._record_failure(outcome, samples[0], error)

    def _set_reward(self, sample: Sample, reward: Reward) -> None:
        if reward is not None:
            sample.reward = reward
        elif sample.reward is None:
            raise ValueError("the reward function returned None: it must return a reward, or set sample.reward")
        self._stats.rewards += 1


async def _run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently, and wait until all have ended, even if some raise an error."""
    if len(work) == 1:
        return await work[0]
    tasks = [asyncio.get_running_loop().create_task(each) for each in work]
    cancelled = await wait_all(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
    if cancelled is not None or any(task.cancelled() for task in tasks):
        raise cancelled or asyncio.CancelledError
    return None
