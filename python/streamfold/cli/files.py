"""Checks of the files that a command writes, before it does anything: no file of the user's is written over."""

from __future__ import annotations

import os
from itertools import combinations
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["check_different", "check_out", "check_replaced", "is_png"]

_LONGEST_LINE: Final = 1 << 20  # bytes that are read of a file to find out what it is


def check_out(path: Path) -> None:
    """Check that a file can be written at ``path``, before there is anything to write.

    Raises:
        ValueError: it cannot.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--out {path} cannot be written")


def check_different(**paths: Path | None) -> None:
    """Check that no two options name one file, also not by way of links.

    Args:
        **paths: by the names of the options; None: not given.

    Raises:
        ValueError: two of them do. The message names both.
    """
    given = [(f"--{name.replace('_', '-')}", path) for name, path in paths.items() if path is not None]
    for (first, path), (second, other) in combinations(given, 2):
        if _is_same(path, other):
            raise ValueError(f"{second} writes a file of its own, but {other} is that of {first}: give another file")


def check_replaced(option: str, path: Path, what: str, is_one: Callable[[bytes], bool]) -> None:
    """Check that what is at ``path``, and will be replaced, is what the command itself writes there.

    Args:
        option: its name, for the message.
        path: where the command will write.
        what: it writes, for the message.
        is_one: whether a file with this first line is one.

    Raises:
        ValueError: it is another file, and not empty.
        OSError: it cannot be read.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.readline(_LONGEST_LINE)
    if start and not is_one(start):
        raise ValueError(f"{option} {path}: the file there is not {what}: give another file, or move it away")


def is_png(start: bytes) -> bool:
    """Whether a file that begins so is a PNG."""
    return start.startswith(b"\x89PNG\r\n")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them is not there yet
        return path.resolve() == other.resolve()
