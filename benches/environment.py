"""Where figures were measured: date, command, machine, versions."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES: Final = ("streamfold", "httpx", "aiohttp", "uvloop", "orjson", "numpy")


def described(command: str) -> Iterator[str]:
    """Give the lines of a list."""
    yield f"- `{command}` on {datetime.now(timezone.utc):%Y-%m-%d}"
    yield f"- {_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.release()} {platform.machine()}"
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    yield f"- {platform.python_implementation()} {platform.python_version()}, {packages}"
    yield f"- ten million additions in a Python loop take {_additions():.2f} s here, at the best of three"


def _additions() -> float:
    """What tells a slow machine, or a busy one, from a slow client."""
    times = []
    for _ in range(3):
        began, total = time.process_time(), 0
        for number in range(10_000_000):
            total += number
        times.append(time.process_time() - began)
    return min(times)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
