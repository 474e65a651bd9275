"""The command line: ``streamfold demo | serve | rollout | record | replay | trace``."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from streamfold._core import __version__
from streamfold.cli import demo, record, replay, rollout, serve, trace
from streamfold.cli.console import console, errors, give_up_stdout

__all__ = ["app"]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Commands(TyperGroup):
    """The commands; one that cannot print its result says so in a line, as it does of other errors."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as typer has it
        """Run a command."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # commands report those of their files themselves
            if error.errno not in _FULL or error.filename is not None:
                raise
            give_up_stdout()
            errors.print(f"streamfold: standard output cannot be written: {error.strerror}", style="red")
            sys.exit(1)


app: typer.Typer = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help and errors: rich cuts the names of options at 80 columns, and wraps errors
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


class SectionedCommand(TyperCommand):
    """A command whose help lists its options in sections, named by their ``rich_help_panel``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  # typer has moved these two types
        """Write the sections, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                name = getattr(param, "rich_help_panel", None) or f"{param.param_type_name}s".capitalize()
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


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

    "streamfold demo" runs two rollouts on loopback engines, aborts and resumes, and
    checks every sample. It takes a few seconds and needs no GPU.

    "streamfold COMMAND --help" shows the options of a command.
    """


for _name, _command, _help in (
    ("demo", demo.command, "Run two rollouts on loopback engines, and check every sample."),
    ("rollout", rollout.command, "Generate samples for a file of prompts; rerun it to resume."),
    ("record", record.command, "Send one request, and save the response byte for byte."),
    ("replay", replay.command, "Parse a recorded stream, and show where it is damaged."),
    ("trace", trace.command, "Draw the timeline of a rollout as a picture."),
    ("serve", serve.command, "Run a loopback engine, a mock of SGLang or vLLM, for tests."),
):
    _epilog = serve.EXAMPLES if _command is serve.command else None
    app.command(_name, cls=SectionedCommand, short_help=_help, epilog=_epilog)(_command)
