"""Groups in flight, one task each; and the one way in which all of them are ended early."""

from __future__ import annotations

import asyncio
import copy
import logging
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import Slots
from streamfold.errors import StreamfoldError
from streamfold.rollout import groups as rules
from streamfold.rollout.tasks import Cut, Cuttable, settled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group
    from streamfold.rollout.metrics import RolloutStats
    from streamfold.rollout.rewards import Rewards

__all__ = ["Ended", "Generate", "GroupScheduler", "Pace"]

log = logging.getLogger("streamfold")

_MILLISECOND: Final = 0.001
_SWEEP_SECONDS: Final = 0.05  # between two server aborts, if requests have slipped in
_GRACE_SECONDS: Final = 5.0  # for what was cancelled as it did not end in time


class Generate(Protocol):
    """Generates one sample, or goes on with it.

    Its attribute ``abort_mode`` says how it is ended early: ``"request"`` if by cancelling it, after which the sample
    holds what had come; anything else if by aborting everything on the engines, after which it returns by itself. It
    may be a function of the sample, where samples bring generators of their own.
    """

    def __call__(
        self,
        sample: Any,  # noqa: ANN401  # ours or a host's
        sampling_params: dict[str, Any],
        /,
        *,
        aborted: Callable[[], bool],
    ) -> Awaitable[Any]:
        """Return the sample, or a list of samples that were made of it, none PENDING.

        ``sampling_params`` are its own. While ``aborted()`` it must not ask for anything.
        """


@dataclass
class Ended:
    """A group that is no longer in flight.

    Attributes:
        group: as it was started, its samples gone on with.
        now: the rollout, or weight version, in which it was started.
        failures: what generators and rewards raised, each with its sample.
        is_cancelled: whether somebody else has cancelled its task.
    """

    group: Group
    now: int
    failures: list[tuple[Any, BaseException]] = field(default_factory=list)
    is_cancelled: bool = False


class Pace:
    """Lets so many through in one millisecond, first come, first served."""

    def __init__(self, per_ms: int) -> None:
        self._per_ms = per_ms
        self._left = 0
        self._ends = 0.0
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for one's turn."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            if not self._left and (rest := self._ends - clock()) > 0:
                await asyncio.sleep(rest)
            if (now := clock()) >= self._ends:
                self._left, self._ends = self._per_ms, now + _MILLISECOND
            self._left -= 1


class GroupScheduler:
    """Runs groups, each in a task of its own, until it is aborted; then it is over, and another one is needed.

    Samples of a group run at the same time, bounded and paced over all groups. Those that are at their end are not
    touched. A generator or reward that raises ends nothing else: its siblings go on, as what they bring is kept.

    Args:
        config: the rules.
        generate: called for each sample that is not at its end.
        rewards: called for each sample at its end, or each group if the config says so. None: there are none.
        at_once: how many samples run at the same time.
        abort_engines: ends everything on the engines, in so many seconds at most.
        on_abort: called when the end begins, before anything is cut.
        stats: what is counted.
    """

    def __init__(
        self,
        config: RolloutConfig,
        generate: Generate,
        *,
        rewards: Rewards | None,
        at_once: int,
        abort_engines: Callable[[float], Coroutine[Any, Any, object]],
        on_abort: Callable[[], object],
        stats: RolloutStats,
    ) -> None:
        self._abort = AbortSignal()
        self._config = config
        self._generate = generate
        self._rewards = rewards
        self._abort_engines = abort_engines
        self._on_abort = on_abort
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._slots = Slots(at_once)
        self._pace = Pace(config.starts_per_ms)
        self._running: dict[asyncio.Task[None], Ended] = {}
        self._ended: deque[Ended] = deque()
        self._news = asyncio.Event()
        self._work = Cuttable()  # generators and rewards
        self._hurries = False  # no reward is begun any more
        self._has_warned = False

    @property
    def aborted(self) -> bool:
        """Whether the end has begun."""
        return self._abort.is_set()

    def __len__(self) -> int:
        """Groups in flight, those included whose end has not been taken note of."""
        return len(self._running) + len(self._ended)

    def start(self, group: Group, now: int) -> None:
        """Begin with a group, in the rollout or weight version ``now``."""
        if self.aborted:
            raise RuntimeError("the flight is over: start groups in a new one")
        ending = Ended(group, now)
        task = self._loop.create_task(self._run(ending), name=f"streamfold group {rules.index_of(group)[0]}")
        self._running[task] = ending
        task.add_done_callback(self._on_end)

    async def ended(self) -> Ended | None:
        """Wait for the next group to end, and give it; None if none is in flight."""
        while not self._ended and self._running:
            self._news.clear()
            await self._news.wait()
        return self.take_ended()

    def take_ended(self) -> Ended | None:
        """The next group that has ended, and has not been given yet."""
        return self._ended.popleft() if self._ended else None

    # Ending early.

    async def abort(self, *, now: bool = False) -> None:
        """End everything that runs, in ``config.abort_seconds`` at most, and then cancel what is left.

        Nothing is begun any more. Generators that are ended by request are cancelled, engines aborted as long as
        others run, rewards waited for, unless it is to be ``now``. Cancelling this cuts all of them, which ends drains
        too; the ``CancelledError`` comes when nothing is left.
        """
        if not self.aborted:
            self._abort.set()  # from here on nothing is begun: what runs now is all there is
            try:
                self._on_abort()
            except Exception:
                log.exception("what was to be told of the abort failed")
            self._slots.dismiss()
        began = self._loop.time()
        if now:
            self._hurry()
        self._work.cut("request")
        sweeper = None
        if self._work.has("server"):
            sweeper = self._loop.create_task(self._sweep(began + self._config.abort_seconds))
        cancelled = await self._wait(self._config.abort_seconds)
        if self._running:
            log.warning(
                "%d groups did not end within %g s and are cancelled", len(self._running), self._config.abort_seconds
            )
            for task in self._running:
                task.cancel()
            cancelled = await self._wait(_GRACE_SECONDS) or cancelled
        if sweeper is not None:
            sweeper.cancel()
            cancelled = await settled([sweeper]) or cancelled
        self._stats.abort_seconds += self._loop.time() - began
        if cancelled is not None:
            raise cancelled

    def abandon(self) -> list[tuple[Group, Group]]:
        """After an abort: the groups whose tasks take no notice of being cancelled, each with a copy to go on with."""
        lost = [ending.group for ending in self._running.values()]
        for group in lost:
            log.error("group %d takes no notice of being cancelled: it is left alone", rules.index_of(group)[0])
        self._running.clear()
        return [(group, copy.deepcopy(group)) for group in lost]

    def _hurry(self) -> None:
        self._hurries = True
        self._work.cut("reward")

    async def _wait(self, seconds: float) -> asyncio.CancelledError | None:
        """Wait for all groups, but not longer. A cancel cuts everything that runs, and is handed on."""
        cancelled = None
        until = self._loop.time() + seconds
        while self._running and (left := until - self._loop.time()) > 0:
            try:
                await asyncio.wait(self._running, timeout=left)
            except asyncio.CancelledError as error:  # noqa: PERF203  # one round, and one for each cancel
                cancelled = error
                self._hurry()
                self._work.cut("request", "server")
        return cancelled

    async def _sweep(self, until: float) -> None:
        """Abort the engines as long as somebody waits for that."""
        while self._work.has("server") and (left := until - self._loop.time()) > 0:
            try:
                await self._abort_engines(left)
            except Exception:
                log.exception("the engines could not be aborted; what runs there is waited for")
            await asyncio.sleep(_SWEEP_SECONDS)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        ending = self._running.pop(task, None)
        if ending is None:  # abandoned
            return
        if task.cancelled():
            ending.is_cancelled = True
        elif (error := task.exception()) is not None:
            ending.failures.append((rules.samples_of(ending.group)[0], error))
        self._ended.append(ending)
        self._news.set()

    # One group.

    async def _run(self, ending: Ended) -> None:
        group, config = ending.group, self._config
        if self.aborted or rules.is_over(group, judged=self._rewards is not None):
            return  # one that was kept passes untouched
        work = [self._member(ending, place) for place in range(len(group))]
        await self._together(work)
        if config.group_reward and self._rewards is not None and not ending.failures:
            await self._judge_group(self._rewards, ending)

    async def _together(self, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        if len(work) == 1:
            return await work[0]
        tasks = [self._loop.create_task(each) for each in work]
        cancelled = await settled(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        if cancelled is not None or any(task.cancelled() for task in tasks):
            raise cancelled or asyncio.CancelledError
        return None

    async def _member(self, ending: Ended, place: int) -> None:
        """Bring one element to its end, and judge it."""
        element = ending.group[place]
        for sample in rules.samples_of([element]):
            if self._config.mask_offpolicy and sample.response_length:
                sample.loss_mask = [0] * sample.response_length
        if isinstance(element, list):
            branches: list[Any] = list(element)

            async def go_on(i: int) -> None:
                branches[i] = await self._generated(ending, branches[i], place)

            await self._together([go_on(i) for i in range(len(branches))])
            ending.group[place] = rules.samples_of(branches)
        else:
            ending.group[place] = await self._generated(ending, element, place)
        made, rewards = rules.samples_of([ending.group[place]]), self._rewards
        if rewards is None or self._config.group_reward or rules.open_ones(made):
            return
        await self._together([self._judge(rewards, ending, sample) for sample in made if sample.reward is None])

    async def _generated(self, ending: Ended, sample: Any, place: int) -> Any:  # noqa: ANN401
        """The sample, or what was made of it; ABORTED if it was cut or its generator raised."""
        if rules.is_finished(sample):
            return sample
        if sample.response_length and not self._config.partial_rollout:
            self._stats.lost += rules.start_again([sample])
        made = sample
        try:
            made = await self._in_turn(sample, place)
            if problem := self._problem(made):
                ending.failures.append((sample, problem))
        except Cut:
            pass
        except Exception as error:  # noqa: BLE001  # anybody's generator; it is told with the group's end
            self._failed(ending, sample, error)
        if made is sample and not rules.is_finished(sample):
            sample.status = type(sample.status).ABORTED  # PENDING, if nothing could be written
        return made

    def _failed(self, ending: Ended, sample: Any, error: Exception) -> None:  # noqa: ANN401
        """Take note of what was raised; after an abort as of a consequence of it, which is nobody's fault."""
        if not self.aborted:
            ending.failures.append((sample, error))
            return
        # One word, not one for each of a thousand: an engine that dies under an abort fails them all.
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(level, "sample %s failed while it was being aborted", sample.index, exc_info=error)

    def _problem(self, made: Any) -> Exception | None:  # noqa: ANN401
        """What is wrong with what a generator returned."""
        statuses = {sample.status.name for sample in rules.samples_of([made])}
        if "PENDING" in statuses:
            return ValueError("the generator left a sample PENDING: it must set the status of all that it returns")
        if "ABORTED" in statuses and not self.aborted:
            return StreamfoldError("a sample came back ABORTED, and nobody here had asked for that")
        return None

    async def _in_turn(self, sample: Any, place: int) -> Any:  # noqa: ANN401
        """Generate, when it is this sample's turn."""
        if self.aborted or not await self._slots.wait(self._slots.request()):
            raise Cut
        try:
            await self._pace.wait()
            if self.aborted:
                raise Cut
            if getattr(sample, "session_id", "") is None:
                sample.session_id = uuid.uuid4().hex
            params = copy.deepcopy(dict(self._config.sampling_params))
            if self._config.seed is not None:
                params["sampling_seed"] = self._config.seed + place
            mode = getattr(self._generate, "abort_mode", "server")
            mode = mode(sample) if callable(mode) else mode
            with self._stats.generating(sample) as counted:
                work = self._generate(sample, params, aborted=self._abort)
                made = await self._work.run(work, "request" if mode == "request" else "server")
                if made is None or made == []:
                    raise TypeError(f"the generator returned {made}: it must return the sample, or those made of it")
                counted.extend(rules.samples_of([made]))
                rules.keep_indices(sample, counted)
            return made
        finally:
            self._slots.release()

    async def _judge(self, rewards: Rewards, ending: Ended, sample: Any) -> None:  # noqa: ANN401
        """Give a sample its reward."""
        if self._hurries:
            return
        try:
            self._reward(sample, await self._work.run(rewards.of(sample), "reward"))
        except Cut:
            pass  # it is computed when the group is taken up again
        except Exception as error:  # noqa: BLE001  # anybody's function; likewise
            self._failed(ending, sample, error)

    async def _judge_group(self, rewards: Rewards, ending: Ended) -> None:
        """Give all samples of a group their rewards, if all are at their end."""
        samples = rules.samples_of(ending.group)
        if self._hurries or rules.open_ones(samples) or all(sample.reward is not None for sample in samples):
            return
        try:
            given = await self._work.run(rewards.of(samples), "reward")
            if len(given) != len(samples):
                raise ValueError(f"the reward function gave {len(given)} rewards for {len(samples)} samples")
            for sample, reward in zip(samples, given, strict=True):
                self._reward(sample, reward)
        except Cut:
            pass
        except Exception as error:  # noqa: BLE001  # likewise
            self._failed(ending, samples[0], error)

    def _reward(self, sample: Any, reward: Any) -> None:  # noqa: ANN401  # whatever trainers take
        if reward is not None:
            sample.reward = reward
        elif sample.reward is None:
            raise ValueError("the reward function gave None: it must give a reward, or set the sample's")
        self._stats.rewards += 1
