"""The signals of the commands that these tests start."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP as a terminal leaves it: under nohup it is ignored, which started commands would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
