"""What a test may have left behind: tasks and open files."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a Path would open one more


async def settled() -> tuple[set[asyncio.Task[Any]], int]:
    """The tasks and the number of descriptors once a first call's have gone (uvloop keeps one of its own)."""
    await asyncio.sleep(0.1)
    gc.collect()
    return asyncio.all_tasks(), open_files()
