"""The job of ``streamfold rollout``: which samples are missing, what became of them, and how that is shown."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from streamfold.cli.completing import complete_all
from streamfold.cli.console import cancel_on_signals, console, error_text, errors, print_json
from streamfold.client._internal import totals_of
from streamfold.errors import StreamfoldError
from streamfold.rollout.metrics import RolloutStats
from streamfold.rollout.progress import ProgressView, RunState
from streamfold.rollout.rewards import RewardError
from streamfold.samples.metadata import TurnState
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from streamfold.cli.journal import Journal, Plan
    from streamfold.client.client import Client
    from streamfold.rollout.callbacks import RewardFunction
    from streamfold.rollout.config import RolloutConfig
    from streamfold.samples.sample import Sample

__all__ = ["RolloutJob", "report", "show"]

_SHOWN_FAILURES: Final = 10


@dataclass
class Failure:
    """What ended samples in one way.

    Attributes:
        message: of the first one.
        first: the index of that sample.
        count: how many there were.
        differ: whether another one had another message.
    """

    message: str
    first: int | None
    count: int = 0
    differ: bool = False

    def __str__(self) -> str:
        example = f", such as sample {self.first}" if self.differ else ""
        return f"{self.count} failed{example}: {self.message}"


class RolloutJob:
    """Completes the samples of a plan that the journal lacks, and writes each of them when it ends.

    Attributes:
        client: of the engine.
        plan: all samples.
        journal: those of the output file.
        stats: counts of this run.
        failures: what ended samples, by kind.
        joined: samples of this run whose text was joined from several calls without a tokenizer.
    """

    def __init__(
        self, client: Client, plan: Plan, journal: Journal, config: RolloutConfig, reward: RewardFunction | None
    ) -> None:
        self.client = client
        self.plan = plan
        self.journal = journal
        self.stats: RolloutStats = RolloutStats()
        self.failures: dict[str, Failure] = {}
        self.joined: int = 0
        self._started: dict[int, int] = {}  # the indices of samples that have not ended
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
                sample = self.journal.partial.get(index) or self.plan[index]
                self._started[id(sample)] = index  # which a reward function may change in the sample
                yield sample

    def _end(self, sample: Sample, error: BaseException | None) -> None:
        """Count a sample and write it to the journal."""
        index = self._started.pop(id(sample))
        if error is not None:
            self._count(index, error_text(error), _kind_of(error))
        if not (sample.response_length or is_finished(sample)):
            return
        is_joined = isinstance(sample.metadata, dict) and TurnState.of(sample).text_joined
        self.joined += is_joined
        sample.index, sample.group_index = index, self.plan[index].group_index
        if not self._write(sample, index):  # a reward function may set anything: without what it has set
            planned = self.plan[index]
            sample.reward, sample.label, sample.metadata = None, planned.label, planned.metadata
            self._write(sample, index, is_counted=True)

    def _write(self, sample: Sample, index: int, *, is_counted: bool = False) -> bool:
        """Write a sample to the journal; False if it is none that JSON can hold, which is counted as a failure.

        Args:
            sample: what is written.
            index: of it.
            is_counted: whether it has failed before, and is counted.
        """
        try:
            self.journal.write(sample)
        except OSError:
            raise  # of the file
        except Exception as error:  # noqa: BLE001  # of whatever stands in the fields
            reason = error if isinstance(error, TypeError) else error_text(error)
            if not is_counted:
                self._count(index, f"a sample cannot be written as JSON: {reason}")
            return False
        return True

    def _count(self, index: int, message: str, kind: str | None = None) -> None:
        """Count a failure, with others of its kind; None: with those of the same message."""
        failure = self.failures.setdefault(kind or message, Failure(message, index))
        failure.count += 1
        failure.differ |= message != failure.message

    def look(self) -> RunState:
        """What has been done so far, calls that run included."""
        calls = totals_of(self.client)
        return RunState(
            done=len(self.journal.finished),
            in_flight=calls.calls,
            tokens=self.stats.received,
            calls=calls,
            counts={"aborted": self.stats.aborted, "failed": sum(failure.count for failure in self.failures.values())},
        )

    def summary(self, out: Path, *, interrupted: bool, seconds: float) -> dict[str, Any]:
        """What was done, for ``--json``."""
        finished, total, unjudged = len(self.journal.finished), len(self.plan), self.unjudged
        return {
            "out": str(out),
            "samples": total,
            "finished": finished,
            "missing": total - finished,
            "partial": len(self.journal.partial) - unjudged,
            "without_reward": unjudged,
            "interrupted": interrupted,
            "failures": {failure.message: failure.count for failure in self.failures.values()},
            "tokens": self.stats.tokens,
            "dropped_tokens": self.stats.lost,
            "text_joined": self.joined,
            "retries": self.client.retried,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self.stats.tokens / seconds, 1) if seconds else 0.0,
        }

    @property
    def unjudged(self) -> int:
        """Samples that are finished and lack a reward."""
        return sum(is_finished(sample) for sample in self.journal.partial.values())


def _kind_of(error: BaseException) -> str:
    """The same for errors that differ by the sample alone: its number, its reward, its tokens and offsets."""
    text = error_text(error)
    if isinstance(error, RewardError):
        return error.kind
    if isinstance(error, StreamfoldError):
        return f"{getattr(error, 'status', None)} {re.sub(r'[0-9]+', '0', text)}"
    return text


async def show(job: RolloutJob, start: Callable[[], Coroutine[Any, Any, None]], *, quiet: bool) -> bool:
    """Run ``start()`` and show its progress; returns whether a signal interrupted it.

    Raises:
        KeyboardInterrupt: a reward function raised one. What was received has been written.
    """
    view = ProgressView("rollout", "samples", len(job.plan), job.look, console=errors, is_shown=not quiet)
    async with job.client:
        with view:
            task = cancel_on_signals(start())  # a second signal ends the drains
            await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


def report(job: RolloutJob, out: Path, *, interrupted: bool, seconds: float, as_json: bool) -> None:
    """Print what was done; exits with 130 or 1 if samples are missing."""
    journal, total = job.journal, len(job.plan)
    missing = total - len(journal.finished)
    if as_json:
        print_json(job.summary(out, interrupted=interrupted, seconds=seconds))
    else:
        _print_report(job, out, missing)
    if missing:
        raise typer.Exit(130 if interrupted else 1)


def _print_report(job: RolloutJob, out: Path, missing: int) -> None:
    journal, total = job.journal, len(job.plan)
    if job.stats.lost:
        errors.print(
            f"{job.stats.lost} tokens were dropped and generated again: their prompts have no ids (use "
            "--prompt-token-ids or --tokenizer), or they ended in the middle of a stop string"
        )
    if job.joined:
        errors.print(
            f"the text of {job.joined} samples was joined from several calls: a character that a cut split may be "
            "damaged in it, while tokens and log-probabilities are exact. Their metadata has streamfold_text_joined; "
            "with the model's --tokenizer the text is exact too"
        )
    console.print(f"{len(journal.finished)} of {total} samples are in {out}")
    failures = sorted(job.failures.values(), key=lambda failure: -failure.count)
    for failure in failures[:_SHOWN_FAILURES]:
        errors.print(str(failure), style="red")
    if others := sum(failure.count for failure in failures[_SHOWN_FAILURES:]):
        errors.print(f"{others} failed in {len(failures) - _SHOWN_FAILURES} other ways: --json names all", style="red")
    if missing:
        unjudged = job.unjudged
        lacking = f", {unjudged} of them finished without a reward" if unjudged else ""
        console.print(
            f"{missing} are missing, {len(journal.partial) - unjudged} of them partial{lacking}: rerun the same "
            "command to resume"
        )
