"""Generates the samples of a group and computes their rewards, with limits on concurrency and on starts per ms."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import TYPE_CHECKING, Any, Final

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import Slots
from streamfold.client.observer import Observation, observed
from streamfold.errors import StreamfoldError
from streamfold.rollout.groups import (
    copy_indices,
    is_complete,
    restart_samples,
    samples_of,
    unfinished_samples,
)  # fmt: skip
from streamfold.rollout.rewards import as_number, check_reward
from streamfold.rollout.spans import NO_SPANS
from streamfold.rollout.tasks import AbortableTasks, Aborted, CancelledByItself, TimeLimit, wait_all
from streamfold.rollout.user_code import UserCode
from streamfold.samples.metadata import SECONDS, LastWrite, add_counts, metadata_of, own_metadata, remove_keys
from streamfold.samples.reset import shorten
from streamfold.samples.routing import session_of
from streamfold.samples.running import snapshot_of
from streamfold.samples.staleness import call_version, noting_versions
from streamfold.samples.status import is_finished
from streamfold.samples.subject import subject_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from streamfold.client.observer import Observer
    from streamfold.rollout.callbacks import Generate, Reward
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.outcome import GroupOutcome
    from streamfold.rollout.rewards import Rewards
    from streamfold.rollout.spans import Spans
    from streamfold.rollout.tasks import AbortMode
    from streamfold.samples.sample import Sample

__all__ = ["GroupRunner", "RateLimiter"]

_logger = logging.getLogger("streamfold")

_MILLISECOND: Final = 0.001
# They would come again; and what the client and complete() raise, they have retried already.
_NOT_RETRIED: Final = (Aborted, StreamfoldError, TypeError, ValueError)


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
        version: the rollout or weight version of now; None: that in which a group was started.
        spans: of a trainer's trace.
        observers: are told of all calls and rewards, besides ``stats``.

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
        version: Callable[[], int] | None = None,
        spans: Spans = NO_SPANS,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._abort_signal: Final = AbortSignal()
        self.tasks: Final = AbortableTasks()
        self._config = config
        self._generate = generate
        self._rewards = rewards
        self._stats = stats
        self._version = version
        self._spans = spans
        self._observers = tuple(observers)
        self._slots = Slots(concurrency)
        self._limiter = RateLimiter(config.starts_per_ms)
        self._skips_rewards = False
        self._keeps_rewards: Callable[[Group], bool] = lambda _group: True
        self._has_warned = False
        self._generating: dict[int, float] = {}  # since when, by the id of the sample

    @property
    def aborted(self) -> bool:
        """Whether :meth:`stop_starting` was called."""
        return self._abort_signal.is_set()

    async def run(self, outcome: GroupOutcome) -> None:
        """Generate and judge the group of ``outcome``."""
        if self.aborted or is_complete(outcome.group, needs_reward=self._rewards is not None):
            return  # a finished group of an earlier rollout passes through untouched
        if self._config.max_staleness is not None:
            call_version.set(self._version or (lambda: outcome.version))  # in the context of this group's task
        with observed(self._stats, *self._observers), self._spans.group(outcome.group):
            await _run_all([self._run_element(outcome, place) for place in range(len(outcome.group))])
            if self._config.group_reward and self._rewards is not None and not outcome.failures:
                await self._judge_group(self._rewards, outcome)

    def stop_starting(self, keeps_rewards: Callable[[Group], bool] = lambda _group: True) -> None:
        """Start nothing any more but rewards; samples that wait for a slot end without a request.

        Args:
            keeps_rewards: whether rewards of a group are of use; otherwise none is started for it.
        """
        self._keeps_rewards = keeps_rewards
        self._abort_signal.set()
        self._slots.dismiss()

    def abort_rewards(self) -> None:
        """Cancel the reward functions that are running, and start no other."""
        self._skips_rewards = True
        self.tasks.abort("reward")

    def snapshot(self, sample: Sample) -> Sample:
        """A copy of a sample as an abort at this moment would leave it; itself if no generate function runs for it."""
        started_at = self._generating.get(id(sample))
        if started_at is None:
            return sample
        copied = snapshot_of(sample)
        if self._config.sample_seconds is not None:
            spent = metadata_of(copied).get(SECONDS, 0.0)
            own_metadata(copied)[SECONDS] = spent + asyncio.get_running_loop().time() - started_at
        if LastWrite.of(copied) is not None or not is_finished(copied):
            copied.status = type(copied.status).ABORTED  # as for an interrupted one, see _generate_sample
        return copied

    async def _run_element(self, outcome: GroupOutcome, place: int) -> None:
        """Generate one element of the group, a sample or a list of them, and compute its rewards."""
        elements = outcome.elements
        element = elements[place]
        with self._spans.sample(element):
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
        is_interrupted = False
        try:
            made = await self._generate_in_turn(outcome, sample, place)
            if problem := self._problem_of(made):
                outcome.failures.append((sample, problem))
        except Aborted:
            # The function has not ended, so the status that a turn has set is not that of the sample. Called again, the
            # function gets a finished turn back from complete() without a request.
            is_interrupted = LastWrite.of(sample) is not None
        except Exception as error:  # noqa: BLE001  # a user's function; reported with the group's outcome
            self._record_failure(outcome, sample, error)
            is_interrupted = not self.aborted or LastWrite.of(sample) is not None
        if made is sample and (is_interrupted or not is_finished(sample)):
            sample.status = type(sample.status).ABORTED  # PENDING if no request was sent
        return made

    async def _generate_in_turn(self, outcome: GroupOutcome, sample: Sample, place: int) -> Sample | list[Sample]:
        """Wait for a slot, then generate; again, if the function raises an error of its own."""
        if self.aborted or not await self._slots.wait(self._slots.request()):
            raise Aborted
        outcome.generating += 1
        try:
            for _ in range(self._config.sample_retries):
                try:
                    return await self._generate_now(outcome, sample, place)
                except Exception as error:  # noqa: PERF203  # each try may fail
                    if self.aborted or isinstance(error, _NOT_RETRIED):
                        raise
                    self._prepare_retry(sample, error)
            return await self._generate_now(outcome, sample, place)
        finally:
            outcome.generating -= 1
            self._slots.release()

    def _prepare_retry(self, sample: Sample, error: Exception) -> None:
        """Prepare a sample to be generated from where it was, or without ``partial_rollout`` from its prompt."""
        if is_finished(sample):  # by one of its turns: the function has not ended
            sample.status = type(sample.status).ABORTED
        if not self._config.partial_rollout:
            self._stats.lost += restart_samples([sample])
        self._stats.retried += 1
        length = sample.response_length
        _logger.info("sample %s failed; it is tried again from token %d", sample.index, length, exc_info=error)

    async def _generate_now(self, outcome: GroupOutcome, sample: Sample, place: int) -> Sample | list[Sample]:
        await self._limiter.wait()
        if self.aborted:
            raise Aborted
        session_of(sample)  # a custom generate function may send it
        params = copy.deepcopy(dict(self._config.sampling_params))
        if self._config.seed is not None:
            params["sampling_seed"] = self._config.seed + place
        with self._stats.generating(sample) as counted, noting_versions(sample) as noted:
            made = await self._call_generate(outcome, sample, params)
            counted.extend(samples_of([made]))
            noted.extend(counted)
            copy_indices(sample, counted)
        return made

    async def _call_generate(
        self, outcome: GroupOutcome, sample: Sample, params: dict[str, Any]
    ) -> Sample | list[Sample]:
        """Call the generate function, for ``config.sample_seconds`` at most, less what the sample has had of them."""
        clock, seconds = asyncio.get_running_loop().time, self._config.sample_seconds
        started_at, spent = clock(), metadata_of(sample).get(SECONDS, 0.0)
        limit = TimeLimit(None if seconds is None else max(0.0, seconds - spent))
        self._generating[id(sample)] = started_at
        try:
            with observed(subject=subject_of(sample)):
                mode = self._abort_mode_of(sample)
                work = _called(self._generate, sample, params, aborted=self._abort_signal)
                made = await self.tasks.run(work, mode, owner=outcome, limit=limit)
        except Exception:
            if not limit.is_reached:
                raise
            made = sample
        finally:
            self._generating.pop(id(sample), None)
            if seconds is not None:
                spent += clock() - started_at
                # A sum of times may be short by its rounding.
                own_metadata(sample)[SECONDS] = max(spent, seconds) if limit.is_reached else spent
        if made is None or made == []:
            raise TypeError(f"generate returned {made}: it must return the sample, or a list of samples made of it")
        if not limit.is_reached:
            return made
        if not isinstance(made, list):
            return await self._truncate(made)
        return samples_of([await self._truncate(each) for each in made])

    async def _truncate(self, sample: Sample) -> Sample | list[Sample]:
        """Finish a sample that has reached ``config.sample_seconds`` where it is; the sample, or what is made of it."""
        if is_finished(sample):
            return sample
        made: Sample | list[Sample] = sample
        try:
            written = LastWrite.of(sample)
            generated = sample.response_length if written is None else min(sample.response_length, written.tokens)
            if not generated:
                if self.aborted:
                    raise Aborted
                raise StreamfoldError(f"no token within sample_seconds ({self._config.sample_seconds:g} s)")
            if written is not None and sample.response_length > generated:
                shorten(sample, generated, written.characters)  # it does not end on a tool's answer
            truncate = getattr(self._generate, "truncate", None)
            if truncate is not None:
                params = copy.deepcopy(dict(self._config.sampling_params))
                work = _called(truncate, sample, params)
                made = await self.tasks.run(work, "reward")  # waited for like a reward
        except BaseException:
            remove_keys(sample, SECONDS)  # otherwise it would fail at once, whenever it is tried again
            raise
        for each in unfinished_samples([made]):
            each.status = type(each.status).TRUNCATED
        for each in samples_of([made]):
            add_counts(each, timed_out=1)
        self._stats.timed_out += 1
        return made

    def _abort_mode_of(self, sample: Sample) -> AbortMode:
        mode = getattr(self._generate, "abort_mode", "server")
        with UserCode("the generate function's abort_mode", mode):
            mode = mode(sample) if callable(mode) else mode
        return "request" if mode == "request" else "server"

    def _problem_of(self, made: Sample | list[Sample]) -> Exception | None:
        """What is wrong with the value that generate returned."""
        statuses = {sample.status.name for sample in samples_of([made])}
        if "PENDING" in statuses:
            return ValueError("generate left a sample PENDING: it must set the status of every sample that it returns")
        if "ABORTED" in statuses and not self.aborted:
            return StreamfoldError("generate returned an ABORTED sample, but the rollout was not aborted")
        return self._problem_of_rewards([sample for sample in samples_of([made]) if sample.reward is not None])

    def _problem_of_rewards(self, judged: Sequence[Sample]) -> Exception | None:
        """What is wrong with rewards that generate has set. Only generate can give others: samples are restarted."""
        try:
            for sample in judged:
                check_reward(sample, sample.reward)
        except ValueError as error:
            self._stats.lost += restart_samples(judged)
            return error
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
        if self._skips_rewards or not self._keeps_rewards(outcome.group):
            return
        try:
            with Observation(self._observers, subject_of(sample)).work("reward") as notes:
                reward = await self._compute(rewards, sample, outcome)
                self._set_rewards([sample], [reward])
                notes["reward"] = as_number(sample.reward)
        except Aborted:
            pass  # computed when the group is taken again
        except Exception as error:  # noqa: BLE001  # a user's function
            self._record_failure(outcome, sample, error)

    async def _judge_group(self, rewards: Rewards, outcome: GroupOutcome) -> None:
        """Compute the rewards of a group, if all its samples are finished."""
        samples = samples_of(outcome.group)
        is_judged = all(sample.reward is not None for sample in samples)
        if self._skips_rewards or is_judged or unfinished_samples(samples) or not self._keeps_rewards(outcome.group):
            return
        try:
            with Observation(self._observers, subject_of(samples[0])).work("reward"):
                values = await self._compute(rewards, samples, outcome)
            if len(values) != len(samples):
                raise ValueError(f"the reward function returned {len(values)} rewards for {len(samples)} samples")
            self._set_rewards(samples, values)
        except Aborted:
            pass
        except Exception as error:  # noqa: BLE001  # a user's function
            self._record_failure(outcome, samples[0], error)

    async def _compute(self, rewards: Rewards, judged: Any, outcome: GroupOutcome) -> Any:  # noqa: ANN401  # see compute
        """The result of the reward function. A cancel of its own is an error, as that of a function in a thread is."""
        try:
            return await self.tasks.run(rewards.compute(judged), "reward", owner=outcome)
        except CancelledByItself as error:
            raise rewards.cancel_error(error.__cause__ or error) from error

    def _set_rewards(self, samples: Sequence[Sample], rewards: Sequence[Reward]) -> None:
        """Set the rewards of samples, all or none: None stands for one that the function has set itself."""
        pairs = zip(samples, rewards, strict=True)
        values = [sample.reward if reward is None else reward for sample, reward in pairs]
        try:
            for sample, value in zip(samples, values, strict=True):
                if value is None:
                    raise ValueError("the reward function returned None: it must return a reward, or set sample.reward")
                check_reward(sample, value)
        except ValueError:
            for sample in samples:  # what the function has set is not that of a judged sample either
                sample.reward = None
            raise
        for sample, value in zip(samples, values, strict=True):
            sample.reward = value
        self._stats.rewards += len(samples)


async def _called(
    generate: Callable[..., Awaitable[Sample | list[Sample]]],
    *args: Any,  # noqa: ANN401  # those of Generate
    **kwargs: Any,  # noqa: ANN401
) -> Sample | list[Sample]:
    with UserCode("the generate function", generate):
        return await generate(*args, **kwargs)


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
