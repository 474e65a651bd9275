"""Train a tiny mixture-of-experts model on its own samples, on a CPU: rollout, train, update, again.

    python examples/tiny_moe/train.py --seed 0 --out run

It makes the model, starts a loopback engine that runs it, and trains for 30 steps of GRPO. Each rollout aborts what is
not needed any more; the next one resumes it with the new weights. The loop itself is
``python/streamfold/training/loop.py``. In ``--out`` are the table (``table.md``), the plot (``reward.png``), and the
trained model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from streamfold.loopback import Loopback
from streamfold.training.config import TrainConfig
from streamfold.training.loop import FIRST_VERSION, StepReport, train
from streamfold.training.report import HEADER, as_markdown, plot_rewards, row_of
from streamfold.training.task import read_prompts
from streamfold.training.tiny_model import make_model

PROMPTS = Path(__file__).parent / "prompts.jsonl"
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
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = TrainConfig()
    for name, meaning in OPTIONS.items():
        value: Any = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{meaning} ({value})")
    parser.add_argument("--mask-offpolicy", action="store_true", help="do not train on tokens of older weights")
    parser.add_argument("--no-replay", action="store_true", help="let the trainer's routers choose the experts")
    parser.add_argument("--incremental", action="store_true", help="of the stream: new tokens, not the whole response")
    parser.add_argument("--engine-dtype", choices=["float32", "bfloat16"], default="float32", help="of the engine")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the engine's sampling")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="with prompt and label in each line")
    parser.add_argument("--out", type=Path, help="folder for the table, the plot and the model")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> list[StepReport]:
    """Make the model, start the engine, and train."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    prompts = read_prompts(args.prompts)
    path = make_model(folder, [prompt["prompt"] for prompt in prompts], seed=args.seed, dtype=args.engine_dtype)
    config = TrainConfig(
        **{name: getattr(args, name) for name in OPTIONS},
        mask_offpolicy=args.mask_offpolicy,
        replays_experts=not args.no_replay,
    )
    engine: dict[str, Any] = {
        "model": f"hf:{path}",
        "incremental": args.incremental,
        "sampling_seed": args.seed,
        "max_running_requests": config.concurrency,
        "weight_version": FIRST_VERSION,
    }
    print(HEADER)
    with Loopback(**engine) as loopback:
        return asyncio.run(
            train(loopback.url, path, prompts, config, on_step=lambda report: print(row_of(report), flush=True))
        )


def main() -> None:
    """Run, and write what came out."""
    args = arguments()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        reports = run(args, Path(folder) if args.out is None else args.out / "model")
    few = min(5, len(reports))
    first, last = (sum(report.reward for report in part) / few for part in (reports[:few], reports[-few:]))
    print(f"mean reward {first:.3f} (first {few} steps), {last:.3f} (last {few}): {last - first:+.3f}")
    print(f"{time.perf_counter() - started:.0f} s")
    if args.out is not None:
        (args.out / "table.md").write_text(as_markdown(reports), encoding="utf-8")
        plot_rewards({f"seed {args.seed}": reports}, args.out / "reward.png")


if __name__ == "__main__":
    main()
