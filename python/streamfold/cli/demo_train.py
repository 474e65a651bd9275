"""``streamfold demo --train``: trains a tiny mixture-of-experts model on what a loopback engine generates with it."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamfold.cli.console import console, fail, import_loopback, print_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["run_training"]

_WHY = """\
Each sample was scored again by the trainer, through the experts that the engine had streamed: |diff| is how far the
two log-probabilities are apart, "no replay" is that of a trainer whose routers choose for themselves. Samples that a
rollout had aborted went on with the new weights: they have more than one version. The loop is
python/streamfold/training/loop.py in the repository; examples/tiny_moe/train.py has options for all settings."""


def run_training(prompts: Path | None, plot: Path, *, steps: int, incremental: bool, seed: int, as_json: bool) -> None:
    """Make the model, start the engine, train, and print a line for each step.

    Args:
        prompts: with ``prompt`` and ``label`` in each line; None: those that come with the package.
        plot: where the plot of the reward goes, a PNG.
        steps: rollouts, each with an optimizer step behind it.
        incremental: whether the engine streams new tokens only.
        seed: of the weights and of the engine's sampling.
        as_json: whether to print one JSON object at the end instead of lines.
    """
    loopback = import_loopback()
    loop, report = _import_training()
    from streamfold.training.config import TrainConfig  # noqa: PLC0415  # with torch, as above
    from streamfold.training.task import read_prompts  # noqa: PLC0415
    from streamfold.training.tiny_model import make_model  # noqa: PLC0415

    try:
        texts = read_prompts(prompts)
    except (OSError, ValueError) as error:
        fail(str(error))
    config = TrainConfig(steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), [prompt["prompt"] for prompt in texts], seed=seed)
        engine = {
            "model": f"hf:{path}",
            "incremental": incremental,
            "sampling_seed": seed,
            "max_running_requests": config.concurrency,
            "weight_version": loop.FIRST_VERSION,
        }
        print_line: Callable[[str], object] = (lambda _line: None) if as_json else console.print
        print_line(report.HEADER)
        with loopback.Loopback(**engine) as server:
            work = loop.train(server.url, path, texts, config, on_step=lambda done: print_line(report.row_of(done)))
            reports: list[Any] = asyncio.run(work)
    report.plot_rewards({f"seed {seed}": reports}, plot)
    if as_json:
        print_json({"plot": str(plot), "steps": [dataclasses.asdict(done) for done in reports]})
    else:
        console.print("", _WHY.replace("\n", " "), f"The plot of the reward is {plot}", sep="\n")


def _import_training() -> tuple[ModuleType, ModuleType]:
    try:
        import_module("matplotlib")  # before the training, not behind it
        from transformers.utils import logging  # noqa: PLC0415  # extras, which no other command needs

        from streamfold.training import loop, report  # noqa: PLC0415
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        fail(f"--train needs {missing}: pip install 'streamfold[loopback,train]'")
    logging.disable_progress_bar()
    return loop, report
