"""The table and the plot of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from streamfold.training.loop import StepReport

__all__ = ["HEADER", "as_markdown", "plot_rewards", "row_of"]

_COLUMNS: Final[Mapping[str, tuple[int, Callable[[StepReport], str]]]] = {
    "step": (4, lambda report: str(report.step + 1)),
    "samples": (7, lambda report: str(report.samples)),
    "tokens": (6, lambda report: str(report.tokens)),
    "aborted": (7, lambda report: str(report.aborted)),
    "resumed": (7, lambda report: str(report.resumed)),
    "reward": (6, lambda report: f"{report.reward:.3f}"),
    "grad norm": (9, lambda report: f"{report.stats.grad_norm:.4f}"),
    "ratio": (7, lambda report: f"{report.stats.ratio:.5f}"),
    "buckets": (7, lambda report: str(report.buckets)),
    "versions": (8, lambda report: f"{report.versions:.2f}"),
    "|diff|": (7, lambda report: f"{report.stats.gap:.1e}"),
    "no replay": (9, lambda report: f"{report.stats.gap_without_replay:.1e}"),
    "seconds": (7, lambda report: f"{sum(report.seconds):.1f}"),
}

HEADER: Final = "  ".join(name.rjust(width) for name, (width, _) in _COLUMNS.items())
"""The names of the columns: groups aborted, samples resumed, weight versions per sample, and the mean absolute
difference between streamed and recomputed log-probabilities, with the streamed experts and without."""


def row_of(report: StepReport) -> str:
    """One line of the table, as wide as :data:`HEADER`."""
    return "  ".join(cell(report).rjust(width) for width, cell in _COLUMNS.values())


def as_markdown(reports: Sequence[StepReport]) -> str:
    """The table of a whole run."""
    lines = [" | ".join(_COLUMNS), " | ".join("--:" for _ in _COLUMNS)]
    lines += [" | ".join(cell(report) for _, cell in _COLUMNS.values()) for report in reports]
    return "".join(f"| {line.replace('|diff|', 'diff')} |\n" for line in lines)


def plot_rewards(runs: Mapping[str, Sequence[StepReport]], path: Path) -> None:
    """Draw the mean reward of each step, a line for each run, as a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra, and slow to import

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, reports in runs.items():
        axes.plot([report.step + 1 for report in reports], [report.reward for report in reports], label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
