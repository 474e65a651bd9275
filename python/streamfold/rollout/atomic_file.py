"""Replaces a file atomically and durably: readers see the old or the new content, also after a crash or power loss."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["replacing", "save_error"]

_BUFFER_SIZE: Final = 1 << 20
_FULL: Final = "free space on that disk, or save to another one"
_FORBIDDEN: Final = "save to a folder that this user can write"
_ADVICE: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or save less at once",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ENOENT: "create its folder first",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file in the same folder, which replaces ``path`` if the block ends without an error.

    Both the file and its folder are synchronized to the disk. Temporary files of killed processes are removed.

    Raises:
        OSError: the file cannot be written; it has its old content. The message names it, and says what to do.
    """
    try:
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
    except OSError as error:
        raise save_error(error, path) from error


def save_error(error: OSError, path: Path) -> OSError:
    """The same error of the file that was to be written, with what can be done about it."""
    advice = _ADVICE.get(error.errno or 0)
    if error.errno is None or advice is None or advice in str(error):
        return error
    return OSError(error.errno, f"{error.strerror}: {advice}", str(path))


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
