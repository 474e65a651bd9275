"""How far streamed and recomputed log-probabilities are apart, with routing replay and without.

    python examples/tiny_moe/measure_replay.py

An engine generates with the tiny model in float32 and in bfloat16; a trainer scores the samples in float32, through the
streamed experts and through those that its own routers choose.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from streamfold import Batch, Client, Experts, Sample, collate, complete
from streamfold.loopback import Loopback
from streamfold.training.replay import batch_log_probs
from streamfold.training.task import read_prompts
from streamfold.training.tiny_model import make_model

PROMPTS = Path(__file__).parent / "prompts.jsonl"


async def generate(url: str, experts: Experts, prompts: list[list[int]], params: dict[str, Any]) -> list[Sample]:
    """One sample of each prompt."""
    samples = [Sample(tokens=tokens) for tokens in prompts]
    async with Client(url, experts=experts) as client:
        await asyncio.gather(*(complete(client, sample, {**params}) for sample in samples))
    return samples


def measure(dtype: Literal["float32", "bfloat16"], args: argparse.Namespace) -> None:
    """Print a line for each way of scoring."""
    texts = [prompt["prompt"] for prompt in read_prompts(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), texts, seed=args.seed, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
        prompts = [tokenizer.encode(text) for text in texts] * args.repeat
        with Loopback(model=f"hf:{path}") as engine:
            shape = engine.config
            experts = Experts(shape.num_layers, shape.top_k, num_experts=shape.num_experts)
            params = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0}
            batch = collate(asyncio.run(generate(engine.url, experts, prompts, params)), pad_id=tokenizer.pad_token_id)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for replays in (True, False):
        differences = score(model, batch, replays_experts=replays)
        shown = " | ".join(
            f"{value:.1e}" for value in (differences.mean(), np.quantile(differences, 0.99), differences.max())
        )
        print(f"| {dtype} | {'yes' if replays else 'no'} | {shown} | {(differences > 0.1).mean():.2%} |", flush=True)


def score(model: Any, batch: Batch, *, replays_experts: bool) -> np.ndarray[Any, np.dtype[np.float32]]:  # noqa: ANN401
    """The absolute differences of all response tokens."""
    with torch.no_grad():
        found = batch_log_probs(model, batch.torch(), replays_experts=replays_experts).numpy()
    return np.abs(found - batch.logprobs)[batch.loss_mask == 1]


def main() -> None:
    """Measure both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--repeat", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of each sample")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(
        "| engine | replay | mean | 99th percentile | largest | above 0.1 |",
        "| --- | --- | --: | --: | --: | --: |",
        sep="\n",
    )
    for dtype in ("float32", "bfloat16"):
        measure(dtype, args)


if __name__ == "__main__":
    main()
