"""The job of ``streamfold rollout``: which samples are missing, what became of them, and how that is shown."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import typer

from streamfold.cli.completing import complete_all
from streamfold.cli.console import cancel_on_signals, console, errors, progress_bar
from streamfold.rollout.metrics import RolloutStats
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from streamfold.cli.journal import Journal, Plan
    from streamfold.client.client import Client
    from streamfold.rollout.callbacks import RewardFunction
    from streamfold.rollout.config import RolloutConfig
    from streamfold.samples.sample import Sample

__all__ = ["RolloutJob", "report", "show"]

_REDRAW_SECONDS: Final = 0.2
_SHOWN_FAILURES: Final = 10


class RolloutJob:
    """Completes the samples of a plan that the journal lacks, and writes each of them when it ends.

    Attributes:
        client: of the engine.
        plan: all samples.
        journal: those of the output file.
        stats: counts of this run.
        failures: how often each error ended a sample.
    """

    def __init__(
        self, client: Client, plan: Plan, journal: Journal, config: RolloutConfig, reward: RewardFunction | None
    ) -> None:
        self.client = client
        self.plan = plan
        self.journal = journal
        self.stats = RolloutStats()
        self.failures: Counter[str] = Counter()
        self._config = config
        self._reward = reward

    async def run(self) -> None:
        """Complete them all."""
        await complete_all(
            self.client, self._missing(), self._end, config=self._config, stats=self.stats, reward=self._reward
        )

    def _missing(self) -> Iterator[Sample]:
        for index in range(len(self.plan)):
            if index not in self.journal.finished:
                yield self.journal.partial.get(index) or self.plan[index]

    def _end(self, sample: Sample, error: BaseException | None) -> None:
        """Count a sample and write it to the journal."""
        if error is not None:
            self.failures[f"{type(error).__name__}: {error}"] += 1
        if not (sample.response_length or is_finished(sample)):
            return
        try:
            self.journal.write(sample)
        except TypeError as failure:  # a reward function may set anything
            self.failures[f"a sample cannot be written as JSON: {failure}"] += 1

    def draw(self, progress: Progress, bar: TaskID) -> None:
        """Update the progress bar."""
        tokens = self.stats.tokens + sum(call.token_count for call in self.client.running)
        rate = tokens / (progress.tasks[bar].elapsed or 1.0)
        failed = self.failures.total()
        progress.update(bar, completed=len(self.journal.finished), total=len(self.plan), failed=failed, rate=rate)


async def show(job: RolloutJob, start: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run ``start()`` under a progress bar; returns whether a signal interrupted it."""
    text = "{task.completed} of {task.total}, {task.fields[failed]} failed, {task.fields[rate]:.0f} tokens/s"
    with progress_bar(text, target=errors) as progress:
        bar = progress.add_task("rollout", failed=0, rate=0.0)
        async with job.client:
            task = cancel_on_signals(start())  # a second signal ends the drains
            while not task.done():
                await asyncio.wait({task}, timeout=_REDRAW_SECONDS)
                job.draw(progress, bar)
    if not task.cancelled():
        task.result()
    return task.cancelled()


def report(job: RolloutJob, out: Path, *, interrupted: bool) -> None:
    """Print what was done; exits with 130 or 1 if samples are missing."""
    journal, total = job.journal, len(job.plan)
    if job.stats.lost:
        errors.print(
            f"{job.stats.lost} tokens were dropped and generated again: their prompts have no ids (use "
            "--prompt-token-ids or --tokenizer), or they ended in the middle of a stop string"
        )
    console.print(f"{len(journal.finished)} of {total} samples are in {out}")
    for message, count in job.failures.most_common(_SHOWN_FAILURES):
        errors.print(f"{count} failed: {message}", style="red")
    if missing := total - len(journal.finished):
        unjudged = sum(is_finished(sample) for sample in journal.partial.values())
        lacking = f", {unjudged} of them finished without a reward" if unjudged else ""
        console.print(
            f"{missing} are missing, {len(journal.partial) - unjudged} of them partial{lacking}: rerun the same "
            "command to resume"
        )
        raise typer.Exit(130 if interrupted else 1)
