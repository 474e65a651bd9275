"""Generate functions of users that an abort ends behind a finished turn: the next rollout calls them again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, CompletionOptions, complete
from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.samples.sample import Sample
from support.rollouts import Counted, bounded, endless, rollout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BOTH_LOOPS = True

Status = Sample.Status
TOKENS = 6
ANSWER = [11, 12]
turns = pytest.mark.parametrize("turns", [1, 2])
ends = pytest.mark.parametrize("raises", [False, True], ids=["cancelled", "raises when it is cancelled"])


class Agent:
    """Generates turns with a tool's answer between them. Behind the first turn of sample 0 it waits to be cancelled,
    and only then sample 1 ends."""

    abort_mode = "request"

    def __init__(self, turns: int, *, raises: bool) -> None:
        self.turns, self.raises = turns, raises
        self.calls: list[int] = []
        self.waits = asyncio.Event()

    async def play(self, sample: Any, turn: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(sample.index)
        for number in range(self.turns):
            await turn()
            if sample.status.name == "ABORTED":
                return sample
            if self.calls == [0] or (self.calls == [0, 1] and sample.index == 0):
                await self._wait_for_cancel()
            if number < self.turns - 1:
                sample.append_response_tokens(None, tokens=ANSWER, log_probs=[0.0] * 2, trainable=False, text="ok")
        await self.waits.wait()
        return sample

    async def _wait_for_cancel(self) -> None:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.raises:
                raise OSError("the tool was cut") from None
            raise


def check(sample: Any, agent: Agent, requests: int) -> None:
    assert agent.calls.count(0) == 2
    assert requests == 2 * agent.turns, "no turn was generated twice"
    assert sample.response_length == agent.turns * TOKENS + (agent.turns - 1) * len(ANSWER)
    assert sample.loss_mask == ([1] * TOKENS + [0] * len(ANSWER)) * (agent.turns - 1) + [1] * TOKENS


@turns
@ends
async def test_the_sample_is_aborted_and_finished_by_the_next_call_without_a_turn_twice(
    turns: int, raises: bool
) -> None:
    agent, reward = Agent(turns, raises=raises), Counted()
    with Loopback(stop_probability=0) as engine:
        async with Client(engine.url) as client:

            async def generate(sample: Sample, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Sample:
                until = CompletionOptions(aborted=aborted)
                played: Sample = await agent.play(
                    sample, lambda: complete(client, sample, params, options=until, max_new_tokens_per_turn=TOKENS)
                )
                return played

            vars(generate)["abort_mode"] = "request"
            buffer = Buffer(endless(1))
            options: dict[str, Any] = {"client": client, "groups": 1, "partial_rollout": True, "reward": reward}
            options["sampling_params"] = {"max_new_tokens": 100}
            first = await bounded(rollout(generate, over_sampling=2, **options).run(buffer))
            assert [group[0].index for group in first.groups] == [1]
            (waiting,) = [group[0] for group in buffer.take(1)]
            assert (waiting.status, waiting.reward, waiting.response_length) == (Status.ABORTED, None, TOKENS)
            buffer.put([[waiting]])
            ((sample,),) = (await bounded(rollout(generate, **options).run(buffer))).groups
            requests = engine.stats().requests
    check(sample, agent, requests)
    assert sample.status is Status.TRUNCATED
    assert [text for index, text in reward.asked if index == 0] == [sample.response]
