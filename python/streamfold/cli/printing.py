"""How much a command prints, and in what form: ``-v``, ``-q``, ``--json``, and the log on standard error."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Annotated, Final

import typer

from streamfold.cli.console import console, error_text, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AsJson", "Quiet", "Verbose", "output"]

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text, on standard output. Errors stay text.")
]

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, help="Log what is retried and resumed; -vv: everything, with tracebacks."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only: no progress, no summary.")]

_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)
_STYLES: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


class _ConsoleHandler(logging.Handler):
    """Prints records as lines of standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        try:
            errors.print(self.format(record), style=_STYLES.get(record.levelno))
        except Exception:  # noqa: BLE001  # as every handler of logging does
            self.handleError(record)


class _ShortFormatter(logging.Formatter):
    """The message, and in place of a traceback the error alone."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        error = record.exc_info[1] if record.exc_info else None
        return record.getMessage() if error is None else f"{record.getMessage()}: {error_text(error)}"


@contextlib.contextmanager
def output(*, verbose: int = 0, quiet: bool = False) -> Iterator[None]:
    """Print the log of the package during the block: warnings, lines of progress, and with ``verbose`` more.

    Raises:
        typer.BadParameter: both are given.
    """
    if verbose and quiet:
        raise typer.BadParameter("--verbose and --quiet contradict each other")
    level = _LEVELS[min(verbose, len(_LEVELS) - 1)]
    handler = _ConsoleHandler()
    handler.setFormatter(_ShortFormatter() if level > logging.DEBUG else logging.Formatter("%(asctime)s %(message)s"))
    levels = {"streamfold": level, "streamfold.progress": logging.WARNING if quiet else logging.INFO}
    loggers = [(logging.getLogger(name), level) for name, level in levels.items()]
    before = [logger.level for logger, _ in loggers]
    for logger, level in loggers:
        logger.setLevel(level)
    loggers[0][0].addHandler(handler)
    console.quiet = quiet
    try:
        yield
    finally:
        console.quiet = False
        loggers[0][0].removeHandler(handler)
        for (logger, _), level in zip(loggers, before, strict=True):
            logger.setLevel(level)
