"""The host's functions around a sample, as a rollout of ours calls them: generators, sample hooks, and rewards."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamfold.integrations.base import pause
from streamfold.rollout.groups import is_finished, restart_samples, unfinished_samples
from streamfold.samples.reset import note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamfold.client.client import Client
    from streamfold.integrations.base import Args, Host, HostSample

__all__ = ["HostGenerate", "HostRewards"]

log = logging.getLogger("streamfold")

_State: TypeAlias = Any  # the host's own, whose releases differ


class HostGenerate:
    """Generates a sample by the function that the host would take, and shows it to the host's hooks."""

    def __init__(self, host: Host, args: Args, state: _State, client: Client, rewards: HostRewards) -> None:
        self._host = host
        self._args = args
        self._state = state
        self._retries = client.retries
        self._rewards = rewards
        self._hooks = host.find("rollout.sample_hooks", "apply_rollout_sample_hooks")
        if not getattr(args, "rollout_sample_hook_path", None):
            self._hooks = None

    def abort_mode(self, sample: HostSample) -> str:
        """How the sample's generator is ended early."""
        return str(getattr(self._function(sample), "abort_mode", "server"))

    async def __call__(
        self, sample: HostSample, sampling_params: dict[str, Any], *, aborted: Callable[[], bool]
    ) -> Any:  # noqa: ANN401
        """The sample, or what was made of it."""
        try:
            made = await self._generated(sample, sampling_params, aborted)
        except asyncio.CancelledError:
            if self._hooks is None or not is_finished(sample):
                raise
            made = sample  # the engine was faster: the cancel comes too late, as in what follows
        if self._hooks is not None and made and not unfinished_samples([made]):
            made = await _whole(self._hooks(self._args, made, evaluation=False))
        if isinstance(made, list):
            self._rewards.remember(made)
        return made

    def _function(self, sample: HostSample) -> Callable[..., Awaitable[Any]]:
        path = getattr(sample, "generate_function_path", None)
        path = path or getattr(self._args, "custom_generate_function_path", None)
        return self._host.load(path or self._host.generator)

    async def _generated(self, sample: HostSample, sampling_params: dict[str, Any], aborted: Callable[[], bool]) -> Any:  # noqa: ANN401
        function = self._function(sample)
        told = {"evaluation": False} if "evaluation" in inspect.signature(function).parameters else {}
        if "sampling_seed" in sampling_params:  # our loop's name for it; the generator may be the host's
            sampling_params[self._host.seed] = sampling_params.pop("sampling_seed")
        failures = 0
        for left in range(self._retries.tries - 1, -1, -1):
            before = sample.response_length
            with self._rank():
                made = await function(self._args, sample, copy.deepcopy(sampling_params), **told)
            if isinstance(made, list) or made is None or made.status.name != "ABORTED" or aborted() or not left:
                break
            # Nobody here has asked for that: engines abort what they have before they take new weights.
            sample = made
            failures = 1 if sample.response_length > before else failures + 1
            self._make_ready(sample)
            await pause(self._retries.pause(failures), aborted)
        return made

    def _make_ready(self, sample: HostSample) -> None:
        """Let a sample go on, or start again, as after any abort."""
        log.info("sample %s was aborted by its engine after %d tokens", sample.index, sample.response_length)
        if not getattr(self._args, "partial_rollout", False):
            restart_samples([sample])
        elif sample.response_length and getattr(self._args, "mask_offpolicy_in_partial_rollout", False):
            sample.loss_mask = [0] * sample.response_length
        note(sample, resumed=1)

    def _rank(self) -> contextlib.AbstractContextManager[Any]:
        """The host's own balance of data-parallel ranks, which generators may look at."""
        context = getattr(self._state, "dp_rank_context", contextlib.nullcontext)
        rank: contextlib.AbstractContextManager[Any] = context()
        return rank


class HostRewards:
    """Asks the host for rewards: of a sample, of a group, or at once of all samples that were made of one."""

    def __init__(self, host: Host, args: Args) -> None:
        self._host = host
        self._args = args
        self._made: dict[int, _Together] = {}

    def remember(self, samples: list[HostSample]) -> None:
        """Let samples be judged together, as the host does with those that one generation made."""
        together = _Together(samples)
        self._made.update({id(sample): together for sample in samples if sample.reward is None})

    async def __call__(self, judged: HostSample | list[HostSample]) -> Any:  # noqa: ANN401
        """The reward, or one for each."""
        rm_hub: Any = self._host.module("rollout.rm_hub")
        if isinstance(judged, list):
            return await rm_hub.batched_async_rm(self._args, judged)
        together = self._made.get(id(judged))
        if together is None:
            return await rm_hub.async_rm(self._args, judged)
        reward = await together.reward(judged, lambda samples: rm_hub.batched_async_rm(self._args, samples))
        del self._made[id(judged)]
        return reward


@dataclass(eq=False)
class _Together:
    """Samples whose rewards come from one call, for whoever of them asks first."""

    samples: list[HostSample]
    waiting: int = 0
    task: asyncio.Task[dict[int, Any]] | None = None

    async def reward(self, sample: HostSample, ask: Callable[[list[HostSample]], Awaitable[list[Any]]]) -> Any:  # noqa: ANN401
        """The reward of one of them. The call is cut when nobody waits for it any more."""
        task = self.task = self.task or asyncio.ensure_future(self._ask(ask))
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

    async def _ask(self, ask: Callable[[list[HostSample]], Awaitable[list[Any]]]) -> dict[int, Any]:
        asked = [sample for sample in self.samples if sample.reward is None]
        rewards = await ask(asked)
        if len(rewards) != len(asked):
            raise ValueError(f"the reward function gave {len(rewards)} rewards for {len(asked)} samples")
        return {id(sample): reward for sample, reward in zip(asked, rewards, strict=True)}


async def _whole(work: Awaitable[Any]) -> Any:  # noqa: ANN401
    """Await what is not to be cut in the middle: a cancel comes too late for it, and only a second one cuts it."""
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
