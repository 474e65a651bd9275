"""Train a tiny mixture-of-experts model on its own samples, on a CPU: rollout, train, update, again.

    python examples/tiny_moe/train.py --seeds 0 1 2 --out run

For each seed it makes a model, starts a loopback engine that runs it, and trains for 30 steps of GRPO. Each rollout
aborts what is not needed any more; the next one resumes it with the new weights. The loop itself, the part to copy, is
python/streamfold/training/loop.py. --out gets a table of each run, and a plot of the rewards.

Columns: groups that were aborted, samples that were resumed, mean reward, gradient norm, mean ratio of new to old
probability, buckets of weights sent, weight versions of a sample, mean absolute difference between streamed and
recomputed log-probabilities, the same without routing replay, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from streamfold.loopback import Loopback
from streamfold.training.config import TrainConfig
from streamfold.training.loop import FIRST_VERSION, RolloutParts, StepReport, in_this_process, train
from streamfold.training.report import HEADER, as_markdown, plot_rewards, row_of
from streamfold.training.task import read_prompts
from streamfold.training.tiny_model import make_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from streamfold import RolloutResult

PROMPTS = Path(__file__).parent / "prompts.jsonl"
FEW = 5  # steps at the start and at the end whose rewards are compared
OPTIONS = {
    "steps": "rollouts, each with an optimizer step",
    "groups": "groups of each step",
    "over_sampling": "groups that are started; the rest is aborted and resumed",
    "n_samples": "samples of each group",
    "concurrency": "samples in flight",
    "max_new_tokens": "of each sample",
    "temperature": "of the sampling",
    "top_p": "of the sampling; below 1 the kept ids are streamed and replayed",
    "learning_rate": "of AdamW",
    "clip": "of the ratio of new to old probability",
    "epochs": "passes over each batch",
}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = TrainConfig()
    for name, meaning in OPTIONS.items():
        value: Any = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{meaning} ({value})")
    parser.add_argument("--mask-offpolicy", action="store_true", help="do not train on tokens of older weights")
    parser.add_argument("--no-replay", action="store_true", help="let the trainer's routers choose the experts")
    parser.add_argument("--incremental", action="store_true", help="stream new tokens, not the whole response so far")
    parser.add_argument("--engine-dtype", choices=["float32", "bfloat16"], default="float32", help="of its weights")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the weights and of the sampling: a run each"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch; for more, the matrices are too small (1)")
    parser.add_argument("--workers", type=int, default=0, help="processes that generate, on Ray; 0: this one does (0)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="with prompt and label in each line")
    parser.add_argument("--out", type=Path, help="folder for the tables and the plot")
    return parser.parse_args()


class Workers:
    """Rollouts by many processes, on Ray."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    @contextlib.asynccontextmanager
    async def __call__(self, parts: RolloutParts) -> AsyncIterator[Callable[[int], Awaitable[RolloutResult]]]:
        """Start the workers; yields what runs the rollout of a step."""
        from streamfold.ray import RolloutWorkers  # noqa: PLC0415 - needs the extra ray

        async with RolloutWorkers(
            self.num_workers,
            client=parts.client,
            config=parts.config,
            source=parts.source,
            reward=parts.reward,
            worker_options={"num_cpus": 0},  # they mostly wait for the engine
        ) as workers:
            yield workers.run


def run(args: argparse.Namespace, seed: int) -> list[StepReport]:
    """Make a model, start an engine with it, and train."""
    prompts = read_prompts(args.prompts)
    config = TrainConfig(
        **{name: getattr(args, name) for name in OPTIONS},
        mask_offpolicy=args.mask_offpolicy,
        replays_experts=not args.no_replay,
    )
    with tempfile.TemporaryDirectory() as folder:
        texts = [prompt["prompt"] for prompt in prompts]
        path = make_model(Path(folder), texts, seed=seed, dtype=args.engine_dtype)
        engine = Loopback(
            model=f"hf:{path}",
            incremental=args.incremental,
            sampling_seed=seed,
            max_running_requests=config.concurrency,
            weight_version=FIRST_VERSION,
        )
        with engine:
            return asyncio.run(
                train(
                    engine.url,
                    path,
                    prompts,
                    config,
                    on_step=lambda report: print(row_of(report), flush=True),
                    rollouts=Workers(args.workers) if args.workers else in_this_process,
                )
            )


def summary(reports: list[StepReport], seconds: float, cpu: float) -> str:
    """What a run has brought, in one line."""
    first, last = (sum(report.reward for report in part) / len(part) for part in (reports[:FEW], reports[-FEW:]))
    spent = f"{seconds:.0f} s, {cpu:.0f} s of CPU"
    return f"mean reward {first:.3f} in the first {FEW} steps, {last:.3f} in the last: {last - first:+.3f} ({spent})"


def main() -> None:
    """Run, and write what came out."""
    args = arguments()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    runs: dict[str, list[StepReport]] = {}
    for seed in args.seeds:
        started, began = time.perf_counter(), time.process_time()
        print(f"seed {seed}", HEADER, sep="\n")
        runs[f"seed {seed}"] = reports = run(args, seed)
        told = summary(reports, time.perf_counter() - started, time.process_time() - began)
        print(told)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"seed-{seed}.md").write_text(f"{as_markdown(reports)}\n{told}\n", encoding="utf-8")
    if args.out is not None:
        plot_rewards(runs, args.out / "reward.png")


if __name__ == "__main__":
    main()
