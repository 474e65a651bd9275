"""What the commands share: the two consoles, tables and progress, and options that need reading."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from streamfold._core import Experts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import ModuleType

    from streamfold._core import Generation
    from streamfold._types import Tokenizer
    from streamfold.cli.demo import Outcome, Report
    from streamfold.cli.journal import Encode

__all__ = [
    "check_out",
    "console",
    "errors",
    "experts_option",
    "fail",
    "import_loopback",
    "params_option",
    "print_generation",
    "print_report",
    "progress_bar",
    "tokenizer_option",
]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

_OF_A_ROLLOUT: Final = (  # words, metric, decimals
    ("groups done: they go to the trainer", "rollout/groups/done", 0),
    ("groups aborted, as there were enough", "rollout/groups/aborted", 0),
    ("groups put back, for a later rollout", "rollout/groups/put_back", 0),
    ("groups kept, done but not needed yet", "rollout/groups/kept", 0),
    ("samples started", "rollout/samples/started", 0),
    ("  of which resumed, from their tokens", "rollout/samples/resumed", 0),
    ("tokens generated", "rollout/tokens/generated", 0),
    ("tokens kept of aborted samples", "rollout/tokens/kept", 0),
    ("tokens lost", "rollout/tokens/lost", 0),
    ("rewards computed", "rollout/rewards", 0),
    ("  calls for one sample at most", "reward_calls", 0),
    ("tokens/s", "rollout/tokens_per_second", 0),
    ("seconds", "rollout/seconds", 1),
)
_SHOWN_SAMPLES: Final = 8
_WHY: Final = """\
Why it matters: a trainer that waits for its slowest samples wastes its GPUs. So a rollout begins more groups than it
needs, cuts the rest when it has enough, and the next one goes on with them, under new weights. If a token then goes
missing, comes twice or stands beside the log-probability of another one, the model learns from what was never sampled,
and nobody notices. The same on an engine of your own: examples/rollout.py in the repository."""


def print_generation(generation: Generation, size: int) -> None:
    """Print what a stream of so many bytes holds."""
    facts: dict[str, Any] = {
        "bytes": size,
        "tokens": len(generation.token_ids),
        "finish reason": generation.finish_reason or "none: the stream was cut",
        "matched": generation.matched,
        "prompt tokens": generation.prompt_tokens,
        "cached tokens": generation.cached_tokens,
        "versions": ", ".join(f"{name} [{start}, {end})" for name, start, end in generation.version_spans) or None,
        "token ids": _shortened(generation.token_ids.tolist()),
        "logprobs": None if generation.logprobs is None else _shortened(generation.logprobs.tolist()),
        "text": None if generation.text is None else json.dumps(generation.text, ensure_ascii=False),
        "experts": None if generation.routed_experts is None else _described(generation.routed_experts),
        "top-p": None if generation.top_p is None else f"{len(generation.top_p[0])} ids",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in [*facts.items(), *((f"meta.{key}", value) for key, value in generation.meta.items())]:
        if value is not None:
            table.add_row(name, str(value).replace("[", "\\["))
    console.print(table)


def print_report(report: Report) -> None:
    """Print what the demo's rollouts came to: two tables, the verdict, and what it means or what went wrong."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for number in range(1, len(report.rollouts) + 1):
        table.add_column(f"rollout {number}", justify="right", min_width=10)
    for words, metric, digits in _OF_A_ROLLOUT:
        table.add_row(words, *(f"{metrics[metric]:,.{digits}f}" for metrics in report.rollouts))
    console.print("", table, "", _sample_table(_examples(report)), "", sep="\n")
    equal = sum(outcome.equal for outcome in report.finished)
    console.print(
        f"{equal} of {len(report.finished)} finished samples equal the undisturbed generation, "
        f"{len(report.resumed)} of them were cut and resumed\n"
        f"tokens lost: {report.lost}; calls of the reward function for one sample: {report.reward_calls} at most\n"
        f"{report.groups} groups: {len(report.given)} done, {len(report.waiting)} wait for the next rollout, "
        f"{len(report.undrawn)} untouched",
        style="bold red" if report.problems else "bold green",
    )
    for problem in report.problems:
        console.print(f"NO: {problem}", style="bold red", markup=False)
    if not report.problems:
        console.print(_WHY.replace("\n", " "))


def _examples(report: Report) -> list[Outcome]:
    """A few finished samples, one of a group; most of them were cut, if there are so many."""
    chosen: dict[int | None, Outcome] = {}
    for most, outcomes in ((_SHOWN_SAMPLES - 2, report.resumed), (_SHOWN_SAMPLES, report.finished)):
        for outcome in outcomes:
            if len(chosen) < most:
                chosen.setdefault(outcome.sample.group_index, outcome)
    return list(chosen.values())


def _sample_table(outcomes: Iterable[Outcome]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("prompt", no_wrap=True, max_width=20)
    for name in ("tokens", "mean\nlogprob", "calls", "tokens of\nweights", "as if\nundisturbed"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    for outcome in outcomes:
        sample = outcome.sample
        table.add_row(
            Text(str(sample.prompt)),  # brackets in it are no markup
            str(sample.response_length),
            f"{outcome.mean_logprob:.2f}",
            str(outcome.calls) if outcome.calls < 2 else f"{outcome.calls} (cut {outcome.calls - 1}x)",
            ", ".join(f"v{version}: {end - start}" for version, start, end in sample.version_spans),
            "yes" if outcome.equal else "NO",
        )
    return table


def _shortened(values: list[Any], most: int = 12) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown if len(values) <= most else f"{shown}, … ({len(values)} in all)"


def _described(array: Any) -> str:  # noqa: ANN401  # an array of any dtype
    return f"{array.dtype} {array.shape}"


def experts_option(text: str | None) -> Experts | None:
    """Read LAYERS,TOP_K[,EXPERTS[,DTYPE]].

    Raises:
        ValueError: that is not what it says.
    """
    if text is None:
        return None
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts[:3]]
        return Experts(*numbers, *parts[3:])  # type: ignore[arg-type]  # it checks the dtype itself
    except (TypeError, ValueError) as error:
        raise ValueError(f"--experts {text}: LAYERS,TOP_K[,EXPERTS[,DTYPE]] was expected ({error})") from None


def params_option(text: str | None) -> dict[str, Any]:
    """Read a JSON object of sampling parameters.

    Raises:
        ValueError: it is none.
    """
    try:
        params = json.loads(text or "{}", parse_constant=_refuse)  # which Python takes for JSON
    except ValueError as error:
        raise ValueError(f"--sampling-params is no JSON: {error}") from None
    if not isinstance(params, dict):
        raise ValueError('--sampling-params: a JSON object like {"min_p": 0.1} was expected')
    return params


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number there")


def tokenizer_option(name: str | None) -> tuple[Tokenizer | None, Encode | None, list[int]]:
    """What makes text of ids and ids of a prompt, and the tokens that end a response."""
    if name is None:
        return None, None, []
    try:
        transformers = importlib.import_module("transformers")  # heavy, and not needed otherwise
    except ImportError:
        raise ValueError("--tokenizer needs transformers: pip install transformers") from None
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)

    def encode(prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return tokenizer, encode, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def progress_bar(text: str, *, target: Console = console) -> Progress:
    """A bar with ``text`` beside it, which may name the task's fields."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn(text), TimeElapsedColumn())
    return Progress(*columns, console=target, transient=True)


def check_out(path: Path) -> None:
    """See that a file can be written there, before there is something to lose.

    Raises:
        ValueError: it cannot.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--out {path} cannot be written")


def import_loopback() -> ModuleType:
    """The engine in a box; without its extra this ends the command."""
    try:
        from streamfold import loopback  # noqa: PLC0415  # an extra: only two commands need it
    except ImportError as error:
        fail(str(error))
    return loopback


def fail(message: str) -> NoReturn:
    """Say what is wrong with what was asked for, and exit with 2."""
    errors.print(f"streamfold: {message}", style="red", markup=False)
    sys.exit(2)
