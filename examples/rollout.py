"""Two rollouts on an engine of your own: begin more groups than needed, cut the rest, go on with them in the next one.

Run it against any SGLang server or router, or against the loopback engine:

    streamfold serve &
    python examples/rollout.py http://127.0.0.1:30000
"""

import asyncio
import sys

from streamfold import Client
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import prompt_groups
from streamfold.rollout.rollout import Rollout, RolloutConfig
from streamfold.samples.sample import Sample

PROMPTS = [f"What is {n} times {n}?" for n in range(11, 23)]
CONFIG = RolloutConfig(
    groups=4,
    over_sampling=8,
    n_samples_per_prompt=2,
    partial_rollout=True,
    seed=0,
    sampling_params={"max_new_tokens": 400, "temperature": 1.0},
)


def reward(sample: Sample) -> float:
    """Judge a finished sample: called once for each, with all of its text."""
    return float("because" in sample.response)


async def main(url: str) -> None:
    """Run the rollouts, and print what a trainer would get."""
    # With your model's tokenizer: tokens=tokenizer.encode(prompt), and Client(url, tokenizer=tokenizer).
    samples = [Sample(prompt=prompt, tokens=list(prompt.encode())) for prompt in PROMPTS]
    buffer = Buffer(prompt_groups(samples, n_samples_per_prompt=2))
    async with Client(url) as client:
        rollout = Rollout(client, CONFIG, reward=reward)
        for rollout_id in range(2):
            result = await rollout.run(buffer, rollout_id)
            for group in result.groups:
                print([(sample.response_length, sample.status.value, sample.reward) for sample in group])
            resumed, lost = (result.metrics[f"rollout/{name}"] for name in ("samples/resumed", "tokens/lost"))
            print(f"rollout {rollout_id}: {resumed:.0f} resumed, {lost:.0f} tokens lost, {len(buffer)} groups wait")
            # Train on result.groups here, and give the engine its new weights.


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
