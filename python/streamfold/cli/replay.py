"""``streamfold replay``: parses a recorded stream, and prints its content or the bytes around the first error."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from streamfold._core import DIALECTS
from streamfold.cli.console import console, errors, fail
from streamfold.cli.options import EXPERTS_HELP, experts_option
from streamfold.cli.recording import Recording, surroundings
from streamfold.errors import DecodeError

if TYPE_CHECKING:
    from streamfold._core import Generation

__all__ = ["command"]

_SHOWN_VALUES = 12  # of an array


def command(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Stream that streamfold record has saved.")],
    dialect: Annotated[
        str | None,
        typer.Option(
            help=f"Format of the stream: {', '.join(DIALECTS)}. sglang detects the mode. "
            "Default: that of the recorded engine."
        ),
    ] = None,
    logprobs: Annotated[
        bool | None,
        typer.Option(
            "--logprobs/--no-logprobs",
            help="Whether the request asked for log-probabilities. Default: as in the recorded request; no if there "
            "is none.",
        ),
    ] = None,
    experts: Annotated[
        str | None, typer.Option(help=f"Check the shape of the routed experts. {EXPERTS_HELP} Default: not checked.")
    ] = None,
) -> None:
    """Parse a recorded stream, in the same pieces in which it was received, and print its content.

    If the stream is damaged or truncated, print the error, and for a parse error
    the bytes around it; then exit with 1.
    """
    try:
        recording = Recording.load(file)
        parser = recording.parser(dialect, logprobs=logprobs, experts=experts_option(experts))
    except (OSError, ValueError) as failure:
        fail(str(failure))
    if recording.status not in (None, 200):
        errors.print(f"HTTP {recording.status}: the response is an error, not a stream", style="red")
    if not recording.request and logprobs is None:
        dialect_hint = "" if dialect else ", and --dialect if it is not a stream of SGLang"
        console.print(
            f"The request is unknown (there is no .json file): use --logprobs if it asked for them{dialect_hint}",
            soft_wrap=True,
        )
    generation, error = recording.replay(parser)
    _print_generation(generation, len(recording.body))
    if error is not None:
        errors.print(f"\n{type(error).__name__}: {error}", style="red")
        if isinstance(error, DecodeError):
            errors.print(surroundings(recording.body, error), soft_wrap=True)
        raise typer.Exit(1)


def _print_generation(generation: Generation, size: int) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    meta = ((f"meta.{key}", value) for key, value in generation.meta.items())
    for name, value in [*_facts(generation, size).items(), *meta]:
        if value is not None:
            table.add_row(name, str(value))
    console.print(table)


def _facts(generation: Generation, size: int) -> dict[str, Any]:
    """What is printed of a generation, whose stream has ``size`` bytes; None: nothing."""
    return {
        "bytes": size,
        "tokens": len(generation.token_ids),
        "finish reason": generation.finish_reason or "none: the stream is truncated",
        "matched": generation.matched,
        "prompt tokens": generation.prompt_tokens,
        "cached tokens": generation.cached_tokens,
        "versions": _versions(generation.version_spans),
        "token ids": _first_values(generation.token_ids),
        "logprobs": _first_values(generation.logprobs),
        "text": None if generation.text is None else json.dumps(generation.text, ensure_ascii=False),
        "experts": _shape(generation.routed_experts),
        "padded rows": generation.padded_rows or None,
        "top-p": None if generation.top_p is None else f"{len(generation.top_p[0])} ids",
    }


def _versions(spans: list[tuple[str | None, int, int]]) -> str | None:
    if all(version is None for version, _, _ in spans):
        return None
    names = (("not reported" if version is None else version, start, end) for version, start, end in spans)
    return ", ".join(f"{name} [{start}, {end})" for name, start, end in names)


def _first_values(array: Any) -> str | None:  # noqa: ANN401  # an array of any dtype, or None
    if array is None:
        return None
    shown = ", ".join(map(str, array[:_SHOWN_VALUES].tolist()))
    return shown if len(array) <= _SHOWN_VALUES else f"{shown}, … ({len(array)} in all)"


def _shape(array: Any) -> str | None:  # noqa: ANN401  # an array, or None
    return None if array is None else f"{array.dtype} {array.shape}"
