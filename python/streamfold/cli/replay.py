"""``streamfold replay``: parses a recorded stream, and prints its content or the bytes around the first error."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from streamfold._core import DIALECTS
from streamfold.cli.console import console, errors, fail, print_json
from streamfold.cli.options import EXPERTS_HELP, experts_option
from streamfold.cli.printing import AsJson, Quiet  # noqa: TC001  # typer reads the annotations
from streamfold.cli.recording import Recording, surroundings
from streamfold.errors import DecodeError

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold.errors import StreamfoldError

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
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Parse a recorded stream, in the same pieces in which it was received, and print its content.

    If the stream is damaged or truncated, print the error, and for a parse error
    the bytes around it; then exit with 1. With --json all arrays are printed whole,
    and the error is in the object too.
    """
    try:
        recording = Recording.load(file)
        parser = recording.parser(dialect, logprobs=logprobs, experts=experts_option(experts))
    except (OSError, ValueError) as failure:
        fail(str(failure))
    if recording.status not in (None, 200):
        errors.print(f"HTTP {recording.status}: the response is an error, not a stream", style="red")
    is_shown = not (as_json or quiet)
    if is_shown and not recording.request and logprobs is None:
        _print_hint(dialect)
    generation, error = recording.replay(parser)
    if as_json:
        print_json(_as_json(recording, generation, error))
    elif is_shown:
        _print_generation(generation, len(recording.body))
    if error is not None:
        _print_error(error, recording.body)
        raise typer.Exit(1)


def _print_hint(dialect: str | None) -> None:
    dialect_hint = "" if dialect else ", and --dialect if it is not a stream of SGLang"
    console.print(f"The request is unknown (there is no .json file): use --logprobs if it asked for them{dialect_hint}")


def _print_error(error: StreamfoldError, body: bytes) -> None:
    errors.print(f"\n{type(error).__name__}: {error}", style="red")
    if isinstance(error, DecodeError):
        errors.print(surroundings(body, error))


def _print_generation(generation: Generation, size: int) -> None:
    facts = _facts(generation, size) | {f"meta.{key}": value for key, value in generation.meta.items()}
    told = {name: str(value) for name, value in facts.items() if value is not None}
    width = max(map(len, told))
    for name, value in told.items():
        console.print(Text.assemble((f"{name:<{width}}  ", "bold"), value))


def _as_json(recording: Recording, generation: Generation, error: StreamfoldError | None) -> dict[str, Any]:
    """All of a replay. Arrays are lists, except routed experts, of which dtype and shape are told."""
    experts, top_p = generation.routed_experts, generation.top_p
    return {
        "status": recording.status,
        "bytes": len(recording.body),
        "tokens": len(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "matched": generation.matched,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
        "text": generation.text,
        "version_spans": generation.version_spans,
        "prompt_token_ids": generation.prompt_token_ids,
        "top_p": None if top_p is None else {"token_ids": top_p[0], "offsets": top_p[1]},
        "routed_experts": None if experts is None else {"dtype": str(experts.dtype), "shape": list(experts.shape)},
        "padded_rows": generation.padded_rows,
        "missing": generation.missing,
        "meta": generation.meta,
        "error": None if error is None else _error_fields(error),
    }


def _error_fields(error: StreamfoldError) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    names = ("kind", "offset", "path", "status", "code", "retryable")
    return fields | {name: getattr(error, name) for name in names if hasattr(error, name)}


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
