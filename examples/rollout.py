"""Two rollouts with over-sampling on your engine: the second one resumes the groups that the first one aborted.

Run it against any SGLang server or router, or against the loopback engine:

    streamfold serve &
    python examples/rollout.py http://127.0.0.1:30000
"""

import asyncio
import sys

from streamfold import Buffer, Client, Rollout, RolloutConfig, Sample, prompt_groups

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
    """Return the reward of a finished sample. Called once per sample, with its whole text."""
    return float("because" in sample.response)


async def main(url: str) -> None:
    """Run two rollouts, and print what a trainer would get."""
    # With your model's tokenizer: tokens=tokenizer.encode(prompt), and Client(url, tokenizer=tokenizer).
    samples = [Sample(prompt=prompt, tokens=list(prompt.encode())) for prompt in PROMPTS]
    buffer = Buffer(prompt_groups(samples, n_samples_per_prompt=2))
    async with Client(url) as client:
        rollout = Rollout(client, CONFIG, reward=reward)
        for rollout_id in range(2):
            result = await rollout.run(buffer, rollout_id)
            for group in result.groups:
                print([(sample.response_length, sample.status.value, sample.reward) for sample in group])
            resumed, lost = (result.metrics[f"streamfold/{name}"] for name in ("samples/resumed", "tokens/lost"))
            print(f"rollout {rollout_id}: {resumed:.0f} resumed, {lost:.0f} tokens lost, {len(buffer)} groups wait")
            # Train on result.groups here, and load the new weights into the engine.


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
