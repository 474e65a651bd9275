"""What every test may use, and which tests run."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
from typing import TYPE_CHECKING

import hypothesis
import pytest
import uvloop

from streamfold.client.drivers import choose
from streamfold.client.drivers.direct import DirectDriver
from streamfold.loopback import Config
from support.carriers import ASYNCIO, CARRIERS, HTTPX
from support.speaking import SPEECHES, VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from support.carriers import Carrier
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected out of the garbage collector's way: half a million objects that live to the end.

    It would traverse them a thousand times while they are made, and at each ``gc.collect()`` of a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, runs, hint in (
        ("soak", soaking(config), "the full counts: make soak"),
        ("ray", importlib.util.find_spec("ray") is not None, "ray is not installed: make test-torch"),
        ("torch", importlib.util.find_spec("torch") is not None, "torch is not installed: make test-torch"),
    ):
        if not runs:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=hint))
    items[:] = [item for item in items if not _is_left_out(item, soaks=soaking(config))]


def _is_left_out(item: pytest.Item, *, soaks: bool) -> bool:
    """Whether more than one of its loop, its engine and its driver are not the first ones: each alone is enough.

    The full counts are for each driver on each loop, and with each engine.
    """
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    loop, engine, driver = (
        any(value is other for value in values for other in others)
        for others in ((LOOPS["uvloop"],), (VLLM,), (ASYNCIO, HTTPX))
    )
    return (loop and engine) or (driver and (loop or engine) and not soaks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the asynchronous tests of a module that says ``EACH_DRIVER = True`` with each driver."""
    if getattr(metafunc.module, "EACH_DRIVER", False) and inspect.iscoroutinefunction(metafunc.function):
        metafunc.parametrize("carrier", CARRIERS, ids=repr, indirect=True)


@pytest.fixture(autouse=True)
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Carrier | None:
    """The driver that ``transport="direct"`` stands for, in a module that says ``EACH_DRIVER = True``."""
    carrier: Carrier | None = getattr(request, "param", None)
    if carrier is not None:
        monkeypatch.setattr(choose, "_direct", carrier.make)
    return carrier


@pytest.fixture(autouse=True, scope="session")
def _one_seed_for_all_requests() -> None:
    """What is aborted and resumed is compared with undisturbed generations: loopback engines draw no seeds.

    Tests of the seeds that they draw pass ``sampling_seed``.
    """
    defaults = Config.__init__.__kwdefaults__
    assert defaults is not None
    defaults["sampling_seed"] = None


@pytest.fixture
def kept_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are kept for 0.2 s, for tests that wait until all are closed."""
    defaults = DirectDriver.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "kept_seconds", 0.2)


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
