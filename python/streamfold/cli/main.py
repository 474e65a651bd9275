"""The command line: ``streamfold demo | serve | rollout | record | replay``."""

from __future__ import annotations

from typing import Annotated

import typer

from streamfold._core import __version__
from streamfold.cli import demo, record, replay, rollout, serve
from streamfold.cli.console import console

__all__ = ["app"]

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it with one positional argument
    if wanted:
        console.print(f"streamfold {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Turn streamed LLM generations into training samples, without losing a token.

    [bold]streamfold demo[/] runs two rollouts on loopback engines, aborts and
    resumes, and checks every sample. It takes a few seconds and needs no GPU.

    [bold]streamfold rollout[/] generates samples for a file of prompts on your
    engine. Rerun it to resume.

    [bold]streamfold record[/] saves the stream of one request, byte for byte.
    [bold]streamfold replay[/] parses it and shows where it is damaged, if it is.

    [bold]streamfold serve[/] runs a loopback engine for tests: the HTTP API of
    SGLang or vLLM with a deterministic mock model, without GPU or weights.
    """


for _name, _command in (
    ("demo", demo.command),
    ("serve", serve.command),
    ("rollout", rollout.command),
    ("record", record.command),
    ("replay", replay.command),
):
    app.command(_name)(_command)
