"""What all commands share: the two consoles, progress bars, signals, and errors that end a command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from types import ModuleType

__all__ = [
    "cancel_on_signals",
    "console",
    "error_text",
    "errors",
    "fail",
    "give_up_stdout",
    "import_loopback",
    "print_json",
    "progress_bar",
]

# Prompts, responses and paths are printed as they are, whatever brackets and colons they have, and in one line: a
# terminal wraps it, and behind a pipe it can be searched. Only tables are fitted to the width.
console: Console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
errors: Console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def progress_bar(text: str, *, target: Console, disable: bool = False) -> Progress:
    """A progress bar followed by ``text``, which may use fields of the task. It is drawn in a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn(text), TimeElapsedColumn())
    return Progress(*columns, console=target, transient=True, disable=disable or not target.is_terminal)


def cancel_on_signals(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run ``work`` in a task that Ctrl-C, SIGTERM and SIGHUP cancel, each time that they come.

    A SIGHUP that is ignored stays so: ``nohup`` asks for that.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    return task


def import_loopback() -> ModuleType:
    """Import the loopback engine; ends the command if its extra is not installed."""
    try:
        from streamfold import loopback  # noqa: PLC0415  # an extra that only two commands need
    except ImportError as error:
        fail(str(error))
    return loopback


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object in one line of ASCII; arrays of numpy become lists."""
    line = json.dumps(value, default=lambda array: array.tolist())
    print(line, flush=True)  # to nowhere, if standard output was closed before the process began


def error_text(error: BaseException) -> str:
    """Type and message of an error of anybody's code, whose message may be an error itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:  # noqa: BLE001  # as above
        return f"{type(error).__name__}, whose text raised {type(failure).__name__}"


def give_up_stdout() -> None:
    """Write what is left for standard output, which cannot be written, to nowhere, when the process ends."""
    with contextlib.suppress(OSError, ValueError):  # it is no file: a test's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def fail(message: str) -> NoReturn:
    """Print an error of the user's input, and exit with 2."""
    errors.print(f"streamfold: {message}", style="red")
    sys.exit(2)
