"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import streamfold

HEAVY = ("torch", "transformers", "ray", "slime", "vime", "starlette", "uvicorn", "typer", "rich", "uvloop")

SCRIPT = """
import sys
import httpx, numpy, orjson
before = set(sys.modules)  # httpx brings rich along where it finds it
import streamfold
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def imported() -> set[str]:
    """What ``import streamfold`` loads in a fresh interpreter, beside its dependencies."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_is_light_and_brings_nothing_heavy_along() -> None:
    modules = imported()
    assert "streamfold" in modules
    assert not modules & set(HEAVY)
    # Whatever else it loads is the standard library's.
    assert modules - {"streamfold"} <= set(sys.stdlib_module_names)


def test_every_public_name_is_there() -> None:
    assert sorted(streamfold.__all__, key=str.lower) == sorted(set(streamfold.__all__), key=str.lower)
    assert all(hasattr(streamfold, name) for name in streamfold.__all__)
