"""The commands that these tests start, and their signals."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from support.commands import Commands

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Where a test runs ``streamfold`` in a process of its own."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Commands.ready() as commands:
        signal.signal(signal.SIGHUP, before)
        yield commands


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP as a terminal leaves it: under nohup it is ignored, which started commands would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
