"""Room for many open sockets: the usual limit of a shell is 1024 for a process."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def room_for(sockets: int) -> Iterator[None]:
    """Allow so many sockets, besides what is open; skip the test where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sockets + 256
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{needed} descriptors are needed, and no more than {hard} are allowed (ulimit -Hn)")
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
