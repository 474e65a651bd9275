"""What is left of a reactor when its users, its loop or all of them end, and who shares one."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from typing import Any

import pytest

from conftest import LOOPS
from streamfold import _core
from streamfold.client.drivers.descriptors import Reserve
from streamfold.client.drivers.direct import DirectDriver
from streamfold.client.drivers.reactor import ReactorSockets
from support.driving import Driven, asked
from support.leftovers import open_files, settled
from support.replay import (
    HANG,
    WHOLE,
    Replay,
    events,
    stream,
    until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor is for Linux")

BOTH_LOOPS = True

ALL = ["connected", "head", "first_token", "finished", "ended"]


def descriptors() -> set[int]:
    """The descriptors of the process; the one that this reading took is gone."""
    return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208  # a Path would open one more


async def test_a_loop_has_one_reactor_that_its_last_user_closes() -> None:
    async with Replay(stream(*events(2, finish=None), end=HANG)) as server:
        _, files = await settled()
        first, second = DirectDriver(ReactorSockets()), DirectDriver(ReactorSockets())
        assert open_files() <= files + 4, "two polls, a gate and its timer"
        driven = [Driven(each, asked(server.url)) for each in (first, second)]
        for each in driven:
            await each.comes("first_token")
        await first.aclose()
        assert driven[0].kinds[-1] == "ended"
        assert "ended" not in driven[1].kinds
        await second.aclose()
        await second.aclose()
        await until(lambda: server.open == 0)
        assert open_files() <= files


async def test_a_loop_that_cannot_watch_descriptors_is_refused_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unable:
        def add_reader(self, *_: object) -> None:
            raise NotImplementedError

        remove_reader = add_reader

        def is_closed(self) -> bool:
            return False

    monkeypatch.setattr(asyncio, "get_running_loop", Unable)
    before = open_files()
    with pytest.raises(NotImplementedError):
        ReactorSockets()
    assert open_files() == before


async def test_the_loop_watches_the_next_owner_of_a_descriptor() -> None:
    sockets = ReactorSockets()
    before = descriptors()
    sockets.close()
    heard = asyncio.Event()
    pairs = [socket.socketpair() for _ in range(4)]
    assert {sock.fileno() for pair in pairs for sock in pair} & before, "the numbers are used again"
    loop = asyncio.get_running_loop()
    for ours, theirs in pairs:
        heard.clear()
        for sock, other in ((ours, theirs), (theirs, ours)):
            sock.setblocking(False)
            loop.add_reader(sock.fileno(), heard.set)
            other.send(b"x")
            await asyncio.wait_for(heard.wait(), 30)
            loop.remove_reader(sock.fileno())
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()


def close_loops_early(count: int, new_loop: Any, port: int, kept: list[DirectDriver] | None = None) -> None:
    async def leave() -> None:
        driver = DirectDriver(ReactorSockets(), reserve=Reserve(0))
        if kept is not None:
            kept.append(driver)
        driven = Driven(driver, asked(f"http://127.0.0.1:{port}"))
        await driven.comes("head")

    for _ in range(count):
        loop = new_loop()
        loop.run_until_complete(leave())
        loop.close()


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
def test_loops_closed_without_aclose_leave_no_descriptor(new_loop: Any, is_kept: bool) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    accepted: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        for _ in range(101):
            sock, _ = listener.accept()
            sock.recv(65536)
            sock.sendall(reply)
            accepted.append(sock)

    server = threading.Thread(target=serve)
    server.start()
    close_loops_early(1, new_loop, port)  # uvloop's first loop leaves some of its own
    gc.collect()
    before = open_files() - 1  # the server's side
    kept: list[DirectDriver] | None = [] if is_kept else None
    close_loops_early(100, new_loop, port, kept)
    server.join()
    for sock in accepted:
        sock.close()
    gc.collect()
    if kept is not None:
        # The next use of a reactor closes those of closed loops.
        async def use() -> None:
            await DirectDriver(ReactorSockets()).aclose()

        asyncio.run(use())
        assert open_files() <= before
        for driver in kept:
            driver._sockets.close()
    assert open_files() <= before
    listener.close()


async def test_two_loops_in_two_threads_have_nothing_in_common() -> None:
    async def run() -> list[list[int]]:
        async with Replay(WHOLE) as server:
            driver = DirectDriver(ReactorSockets())
            tokens = []
            for _ in range(20):
                driven = [Driven(driver, asked(server.url)) for _ in range(8)]
                assert [await each.ended() for each in driven] == [ALL] * 8
                tokens += [each.exchange.take().token_ids.tolist() for each in driven]
            await driver.aclose()
            return tokens

    results = await asyncio.gather(*[asyncio.to_thread(asyncio.run, run()) for _ in range(2)], run())
    assert results == [[[1, 2, 3]] * 160] * 3


async def test_a_reactor_that_is_closed_does_nothing() -> None:
    reactor = _core.Reactor()
    assert reactor.fileno() >= 0
    assert reactor.fileno() != reactor.urgent_fileno()
    with pytest.raises(ValueError, match="localhost"):
        reactor.connect("localhost", 1)
    assert reactor.sweep() == []
    reactor.close()
    reactor.close()
    assert (reactor.fileno(), reactor.urgent_fileno()) == (-1, -1)
    assert reactor.sweep() == []
    assert reactor.sweep_urgent() == reactor.abort(1) == reactor.read_now(1) == []
    reactor.end(1)
    with pytest.raises(ValueError, match="closed"):
        reactor.connect("127.0.0.1", 1)
    exchange = _core.Exchange.reply(_core.RequestHead("GET", "/", "a"), b"", max_bytes=1)
    assert not reactor.start(1, exchange)
    assert repr(reactor) == "<Reactor, closed>"
