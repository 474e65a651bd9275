"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import streamfold

HEAVY = ("torch", "transformers", "ray", "slime", "vime", "starlette", "uvicorn", "typer", "rich", "uvloop")

SCRIPT = """
import sys, time
import httpx, numpy, orjson
before = set(sys.modules)  # httpx brings rich along where it finds it
start = time.process_time()
import streamfold
print(time.process_time() - start)
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def imported() -> tuple[float, set[str]]:
    """The seconds of CPU that ``import streamfold`` takes in a fresh interpreter, and what it loads."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    seconds, modules = run.stdout.splitlines()
    return float(seconds), set(modules.split())


def test_importing_is_light_and_brings_nothing_heavy_along() -> None:
    seconds, modules = imported()
    assert "streamfold" in modules
    assert not modules & set(HEAVY)
    # CPU time, and the best of a few: what else this machine does is not to count.
    assert min(seconds, *(imported()[0] for _ in range(4))) < 0.06


def test_every_public_name_is_there() -> None:
    assert sorted(streamfold.__all__, key=str.lower) == sorted(set(streamfold.__all__), key=str.lower)
    assert all(hasattr(streamfold, name) for name in streamfold.__all__)
