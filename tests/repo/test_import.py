"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamfold
from streamfold.loopback import Loopback

HEAVY = ("torch", "transformers", "ray", "slime", "vime", "miles", "starlette", "uvicorn", "typer", "rich", "uvloop")

SCRIPT = """
import sys
import numpy, orjson
before = set(sys.modules)
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


USE = """
import asyncio, sys
import streamfold

async def main(url):
    async with streamfold.Client(url) as client:
        generation = await client.generate([300, 301], {"max_new_tokens": 4})
        assert len(generation.token_ids) == 4
        call = client.start([300, 302], {"max_new_tokens": 30_000})
        while not call.token_count:
            await asyncio.sleep(0.001)
        await call.abort()
        await client.abort_engines()
        assert await client.load() == 0

asyncio.run(main(sys.argv[1]))
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_calls_aborts_and_load_over_plain_http_import_neither_httpx_nor_anything_heavy() -> None:
    with Loopback(incremental=True, stop_probability=0, token_rate=500) as engine:
        run = subprocess.run(
            [sys.executable, "-c", USE, engine.url], capture_output=True, text=True, check=True, timeout=60
        )
    modules = set(run.stdout.split())
    assert "streamfold" in modules
    assert not modules & {*HEAVY, "httpx", "httpcore", "anyio", "h11"}


REGISTERED = """
import atexit, os, sys
import numpy, orjson, httpx  # which may register what they like
found = []

def note(*given, **named):
    found.extend(f for f in (*given, *named.values()) if (getattr(f, "__module__", "") or "").startswith("streamfold"))
    return given[0] if given else None

atexit.register = os.register_at_fork = note
import streamfold, streamfold.{module}
import streamfold.rollout.pool, streamfold.client.client
print(found)
"""


@pytest.mark.parametrize("module", ["slime", "vime"])
def test_importing_the_integration_of_a_trainer_registers_nothing_at_exit_or_at_fork(module: str) -> None:
    script = REGISTERED.format(module=module)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert sorted(streamfold.__all__, key=str.lower) == sorted(set(streamfold.__all__), key=str.lower)
    assert all(hasattr(streamfold, name) for name in streamfold.__all__)
