"""A process that forks while streams are open: neither side disturbs the other."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from streamfold.client.drivers.direct import DirectDriver
from streamfold.client.drivers.reactor import ReactorSockets
from support.driving import Driven, asked
from support.peers import server_tls, trusting
from support.replay import DONE, END, HANG, LAST_CHUNK, Replay, Request, Steps, chunk, events, head, until
from support.ways import ALL

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor is for Linux")

BOTH_LOOPS = True

STREAMS = 64
TLS = pytest.mark.parametrize("tls", [None, server_tls()], ids=["plain", "tls"])


def wait(process: int) -> None:
    os.waitpid(process, 0)


def fork(child: Callable[[], object]) -> int:
    """Run ``child`` in a forked process. Returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests' threads may be there: they are not used
        process = os.fork()
    if process == 0:
        try:
            child()
        finally:
            os._exit(0)
    return process


@TLS
@pytest.mark.parametrize("way", ["closes its copy", "drops its copy", "only exits"])
async def test_a_child_that_ends_takes_nothing_from_its_parent(way: str, tls: ssl.SSLContext | None) -> None:
    more = asyncio.Event()

    def steps(_: Request) -> Steps:
        first, *others = events(3)
        return [head(), chunk(first), more, *map(chunk, others), chunk(DONE), LAST_CHUNK, END]

    sockets = ReactorSockets(trusting())
    driver = DirectDriver(sockets)

    def child() -> None:
        if way == "closes its copy":
            sockets.close()
        elif way == "drops its copy":
            del sockets._reactor.core
            gc.collect()

    async with Replay(steps, tls=tls) as server:
        driven = [Driven(driver, asked(server.url)) for _ in range(STREAMS)]
        for each in driven:
            await each.comes("first_token")
        wait(fork(child))
        more.set()
        assert [await each.ended() for each in driven] == [ALL] * STREAMS
        assert all(each.exchange.take().token_ids.tolist() == [1, 2, 3] for each in driven)
        # And new ones.
        driven = [Driven(driver, asked(server.url)) for _ in range(STREAMS)]
        assert [await each.ended() for each in driven] == [ALL] * STREAMS
        await driver.aclose()


@TLS
async def test_the_server_sees_the_end_while_a_child_lives(tls: ssl.SSLContext | None) -> None:
    driver = DirectDriver(ReactorSockets(trusting()))
    reading, writing = os.pipe()
    async with Replay([head(), *map(chunk, events(1, finish=None)), HANG], tls=tls) as server:
        driven = [Driven(driver, asked(server.url)) for _ in range(STREAMS)]
        for each in driven:
            await each.comes("first_token")
        process = fork(lambda: os.read(reading, 1))
        try:
            for each in driven[::2]:
                each.exchange.end()
            await until(lambda: server.open == STREAMS // 2)
            # Those that the reactor still has are heard.
            assert all("ended" not in each.kinds for each in driven[1::2])
            await driver.aclose()
            await until(lambda: server.open == 0)
        finally:
            os.write(writing, b"x")
            wait(process)
            os.close(reading)
            os.close(writing)
