"""``streamfold demo``: runs two rollouts on loopback engines, and prints metrics, some samples and the checks.

With ``--train`` it trains a model instead: see :mod:`streamfold.cli.demo_train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.table import Table

from streamfold.cli.console import console, fail, import_loopback, print_json
from streamfold.cli.demo_job import is_demo_line, read_prompts, run, write
from streamfold.cli.demo_train import run_training
from streamfold.cli.files import check_different, check_out, check_replaced, is_png
from streamfold.cli.printing import AsJson, Quiet, Verbose, output
from streamfold.client.trace import Trace
from streamfold.rollout.atomic_file import save_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamfold.cli.demo_job import Outcome, Report

__all__ = ["command"]

_ROWS: Final = (  # label, metric, decimals
    ("groups done: given to the trainer", "streamfold/groups/done", 0),
    ("groups aborted: not needed any more", "streamfold/groups/aborted", 0),
    ("groups put back, for the next rollout", "streamfold/groups/put_back", 0),
    ("groups kept: finished, but not needed yet", "streamfold/groups/kept", 0),
    ("samples started", "streamfold/samples/started", 0),
    ("  of which resumed from their tokens", "streamfold/samples/resumed", 0),
    ("tokens generated", "streamfold/tokens/generated", 0),
    ("tokens kept of aborted samples", "streamfold/tokens/kept", 0),
    ("tokens lost", "streamfold/tokens/lost", 0),
    ("rewards computed", "streamfold/rewards", 0),
    ("  calls per sample, at most", "reward_calls", 0),
    ("tokens/s", "streamfold/tokens_per_second", 0),
    ("seconds", "streamfold/seconds", 1),
)
_SHOWN_SAMPLES: Final = 8
_WHY: Final = """\
Why it matters: a trainer that waits for its slowest samples wastes GPU time. So a rollout starts more groups than it
needs, aborts the rest when it has enough, and the next rollout resumes them with new weights. If a token is lost or
doubled on the way, or paired with the log-probability of another token, the model trains on data that was never
sampled, without any error. To run the same on your own engine: examples/rollout.py in the repository."""


def command(
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='File of prompts, one JSON object per line, such as {"prompt": "..."}. Default: 32 built-in prompts.',
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            help="File for the finished samples, one JSON object per line. Samples of another demo are replaced, any "
            "other file is not.",
        ),
    ] = Path("demo.jsonl"),
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine whose HTTP API is emulated.")] = "sglang",
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental/--cumulative",
            help="Whether each SGLang event holds only the new tokens or the whole response so far. Ignored for "
            "vLLM, which sends only new tokens.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Sampling seed: another seed generates other samples.")] = 0,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Instead, train a tiny mixture-of-experts model on its own samples, with new weights in the engine "
            "after each step. Needs the extra train (torch, transformers, matplotlib), and a few minutes of two cores. "
            "The plot of the reward goes to OUT with the suffix .png.",
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps of --train.")] = 30,
    trace: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="File for a trace of all calls, which ui.perfetto.dev opens. A trace that is there is replaced, any "
            "other file is not. Default: none.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Run two rollouts on two loopback engines, abort and resume samples, and check that no token is lost.

    Exits with 0 if every sample equals the one generated without aborts, no token
    was lost, each reward was computed exactly once, and no group is missing;
    otherwise with 1.
    """
    try:
        _check_files(prompts, out, trace, train=train)
        texts = _train_prompts(engine) if train else read_prompts(prompts)
        timeline = Trace(trace) if trace else None
    except (OSError, ValueError) as error:
        fail(str(error))
    with output(verbose=verbose, quiet=quiet):
        on_step = (lambda _line: None) if as_json else console.print
        if train:
            run_training(
                prompts, out.with_suffix(".png"), steps=steps, incremental=incremental, seed=seed, as_json=as_json
            )
            return
        import_loopback()
        report = run(
            texts,
            engine=engine,
            incremental=incremental,
            seed=seed,
            trace=timeline,
            on_step=on_step,
            progress=not quiet,
        )
        if timeline is not None:
            timeline.close()
        _show(report, out, as_json=as_json)
    if report.problems:
        raise typer.Exit(1)


def _check_files(prompts: Path | None, out: Path, trace: Path | None, *, train: bool) -> None:
    """Check that the files of a demo can be written, and are no other ones.

    Raises:
        ValueError: they cannot, or are.
        OSError: one cannot be read.
    """
    written = out.with_suffix(".png") if train else out
    check_different(prompts=prompts, out=written, trace=trace)
    check_out(written)
    if train:
        check_replaced("--out", written, "a plot (PNG)", is_png)
    else:
        check_replaced("--out", written, "of a demo", is_demo_line)


def _train_prompts(engine: str) -> list[str]:
    """None: --train reads prompts of its own kind.

    Raises:
        ValueError: it is not for this engine.
    """
    if engine != "sglang":
        raise ValueError(f"--train is for --engine sglang: {engine} takes no weights here")
    return []


def _show(report: Report, out: Path, *, as_json: bool) -> None:
    """Write the samples, and print the rest of the report."""
    try:
        write(report.outcomes, out)
    except OSError as error:
        fail(f"{out} cannot be written: {save_error(error, out)}")
    if as_json:
        print_json(_summary(report, out))
    else:
        _print_report(report)
        console.print(f"The finished samples are in {out}")


def _summary(report: Report, out: Path) -> dict[str, Any]:
    """The result, for ``--json``."""
    return {
        "out": str(out),
        "groups": report.groups,
        "finished": len(report.finished),
        "equal": sum(outcome.equal for outcome in report.finished),
        "resumed": len(report.resumed),
        "tokens_lost": report.lost,
        "reward_calls": report.reward_calls,
        "problems": report.problems,
        "rollouts": report.rollouts,
    }


def _print_report(report: Report) -> None:
    """Print two tables, the result of the checks, and what it means or what went wrong."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for number in range(1, len(report.rollouts) + 1):
        table.add_column(f"rollout {number}", justify="right", min_width=10)
    for label, metric, digits in _ROWS:
        table.add_row(label, *(f"{metrics[metric]:,.{digits}f}" for metrics in report.rollouts))
    console.print("", table, "", _sample_table(_examples(report)), "", sep="\n", soft_wrap=False)
    equal = sum(outcome.equal for outcome in report.finished)
    console.print(
        f"{equal} of {len(report.finished)} finished samples equal the undisturbed generation, "
        f"{len(report.resumed)} of them were aborted and resumed\n"
        f"tokens lost: {report.lost}; calls of the reward function per sample: {report.reward_calls} at most\n"
        f"{report.groups} groups: {len(report.given)} done, {len(report.waiting)} wait for the next rollout, "
        f"{len(report.undrawn)} not started",
        style="bold red" if report.problems else "bold green",
    )
    for problem in report.problems:
        console.print(f"FAILED: {problem}", style="bold red")
    if not report.problems:
        console.print(_WHY.replace("\n", " "), soft_wrap=False)


def _examples(report: Report) -> list[Outcome]:
    """Some finished samples, at most one of each group, most of them resumed if there are enough."""
    chosen: dict[int | None, Outcome] = {}
    for most, outcomes in ((_SHOWN_SAMPLES - 2, report.resumed), (_SHOWN_SAMPLES, report.finished)):
        for outcome in outcomes:
            if len(chosen) < most:
                chosen.setdefault(outcome.sample.group_index, outcome)
    return list(chosen.values())


def _sample_table(outcomes: Iterable[Outcome]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("prompt", no_wrap=True, max_width=15)
    for name in ("tokens", "mean\nlogprob", "requests", "tokens by\nweights", "equals\nundisturbed"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    for outcome in outcomes:
        sample = outcome.sample
        table.add_row(
            str(sample.prompt),
            str(sample.response_length),
            f"{outcome.mean_logprob:.2f}",
            str(outcome.calls) if outcome.calls < 2 else f"{outcome.calls} (aborted {outcome.calls - 1}x)",
            ", ".join(f"{_version(version)}: {end - start}" for version, start, end in sample.version_spans),
            "yes" if outcome.equal else "NO",
        )
    return table


def _version(version: str | None) -> str:
    return "not reported" if version is None else f"v{version}"
