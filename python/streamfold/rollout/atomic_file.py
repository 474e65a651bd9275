"""Replaces a file atomically and durably: readers see the old or the new content, also after a crash or power loss."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["replacing"]

_BUFFER_SIZE: Final = 1 << 20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file in the same folder, which replaces ``path`` if the block ends without an error.

    Both the file and its folder are synchronized to the disk. Temporary files of killed processes are removed.
    """
    _remove_stale(path)
    file, temporary = _open_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_temporary(path: Path) -> tuple[BinaryIO, Path]:
    """A new file, locked while it is open, by which other processes see that its writer is alive."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.saving")
        file = temporary.open("xb", buffering=_BUFFER_SIZE)
        with contextlib.suppress(OSError):  # no locks on this file system: then no process removes stale files either
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return file, temporary
        file.close()  # another process removed it between open and lock


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of killed processes, but none that a living process is writing."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.saving")
    for temporary in [file for file in path.parent.iterdir() if ours.fullmatch(file.name)]:
        # An OSError: it was renamed, is locked, or we may not remove it.
        with contextlib.suppress(OSError), temporary.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
