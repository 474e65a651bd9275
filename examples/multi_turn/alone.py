"""Rollouts of the calculator's agent with streamfold alone, on your engine.

Run it against any SGLang server or router, or against the loopback engine:

    streamfold serve &
    python examples/multi_turn/alone.py http://127.0.0.1:30000
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from calculator import TOKENS_PER_TURN, play

from streamfold import Buffer, Client, CompletionOptions, Rollout, RolloutConfig, Sample, complete, prompt_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROMPTS = [f"What is {n} times {n}?" for n in range(11, 23)]
CONFIG = RolloutConfig(
    groups=4,
    over_sampling=8,
    n_samples_per_prompt=2,
    partial_rollout=True,
    seed=0,
    sampling_params={"max_new_tokens": 1000, "temperature": 1.0},
)


def encode(text: str) -> list[int]:
    """The bytes of a text: with your model's tokenizer, its ``encode``, and ``Client(url, tokenizer=tokenizer)``."""
    return list(text.encode())


class Agent:
    """The generate function of the rollout. ``abort_mode = "request"``: an abort cancels it, wherever it is."""

    abort_mode = "request"

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(
        self, sample: Sample, sampling_params: Mapping[str, Any], *, aborted: Callable[[], bool]
    ) -> Sample:
        """Return the sample, finished or aborted."""
        options = CompletionOptions(aborted=aborted)

        async def turn(sample: Sample) -> Sample:
            return await complete(
                self.client, sample, sampling_params, options=options, max_new_tokens_per_turn=TOKENS_PER_TURN
            )

        played: Sample = await play(sample, turn=turn, append=Sample.append_observation, encode=encode)
        return played


async def main(url: str) -> None:
    """Run two rollouts, and print what a trainer would get."""
    samples = [Sample(prompt=prompt, tokens=encode(prompt)) for prompt in PROMPTS]
    buffer = Buffer(prompt_groups(samples, n_samples_per_prompt=2))
    async with Client(url) as client:
        rollout = Rollout(client, CONFIG, generate=Agent(client))
        for rollout_id in range(2):
            result = await rollout.run(buffer, rollout_id)
            for group in result.groups:
                print([(sample.response_length, sum(sample.loss_mask or [])) for sample in group])
            resumed = result.metrics["streamfold/samples/resumed"]
            print(f"rollout {rollout_id}: {resumed:.0f} samples resumed; tokens of the response, and those to train on")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
