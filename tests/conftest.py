"""What every test may use, and which tests run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from typing import TYPE_CHECKING

import hypothesis
import pytest
import uvloop

from support.speaking import SPEECHES, VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from support.speaking import Speech

hypothesis.settings.register_profile("patient", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("patient")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help="run the tests at their full counts (or set STREAMFOLD_SOAK=1)"
    )


def soaking(config: pytest.Config) -> bool:
    return bool(config.getoption("--soak")) or os.environ.get("STREAMFOLD_SOAK", "0") not in ("", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, runs, hint in (
        ("soak", soaking(config), "the full counts: make soak"),
        ("torch", importlib.util.find_spec("torch") is not None, "torch is not installed: make test-torch"),
    ):
        if not runs:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=hint))
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    """Whether both its loop and its engine are the second ones: each alone is enough."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return all(any(value is second for value in values) for second in (VLLM, LOOPS["uvloop"]))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the asynchronous tests of a module that says ``BOTH_LOOPS = True`` on asyncio and on uvloop."""
    module = item.getparent(pytest.Module)
    both = module is not None and getattr(module.obj, "BOTH_LOOPS", False)
    return LOOPS if both else {"asyncio": LOOPS["asyncio"]}


@pytest.fixture(params=SPEECHES.values(), ids=[*SPEECHES])
def speech(request: pytest.FixtureRequest) -> Speech:
    """How an engine speaks. A test that asks for it is run with each, the second one on asyncio alone."""
    speech: Speech = request.param
    return speech


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether the full counts are asked for."""
    return soaking(request.config)


@pytest.fixture(autouse=True)
def _no_proxy_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own use of httpx must reach the loopback, whatever the shell says."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
