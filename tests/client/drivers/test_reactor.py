"""Sockets in the reactor of the loop: what they share, and what is left when they, the loop or a child process end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import select
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import _core
from streamfold.client.drivers.direct import DirectDriver
from streamfold.client.drivers.reactor import ReactorSockets
from streamfold.client.drivers.sockets import Address
from streamfold.client.urls import BaseUrl
from support.driving import Driven, asked, told
from support.replay import (
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    WHOLE,
    Replay,
    Request,
    Step,
    Steps,
    answer,
    chunk,
    event,
    events,
    head,
    stream,
    until,
)
from support.ways import ALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamfold.client.drivers.sockets import Connection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor is for Linux")

BOTH_LOOPS = True

HTTP = BaseUrl.parse("http://engine").origin


@pytest.fixture
async def driver() -> AsyncIterator[DirectDriver]:
    driver = DirectDriver(ReactorSockets())
    yield driver
    await driver.aclose()


def at(port: int) -> Address:
    return Address(socket.AF_INET, "127.0.0.1", port)


def descriptors() -> set[int]:
    """The descriptors of the process; the one that this reading took is gone."""
    return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208  # a Path would open one more


async def opened(sockets: ReactorSockets, address: Address) -> Connection | OSError:
    done: asyncio.Future[Connection | OSError] = asyncio.get_running_loop().create_future()
    sockets.open(address, HTTP, done.set_result)
    assert not done.done(), "nothing is told before open() returns"
    return await asyncio.wait_for(done, 30)


# Reading.


async def test_a_stream_that_falls_silent_is_heard_again(driver: DirectDriver) -> None:
    def steps(_: Request) -> Steps:
        yield head()
        for part in events(5):
            yield chunk(part)
            yield 0.12  # more than two of the longest rests
        yield LAST_CHUNK
        yield END

    async with Replay(steps) as server:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ALL
        assert driven.exchange.take().token_ids.tolist() == [1, 2, 3, 4, 5]


async def test_what_a_bounded_sweep_leaves_is_read(driver: DirectDriver) -> None:
    # 64 times 400 kB lie in the sockets when the loop is free again: several times what one sweep reads.
    ready = asyncio.Event()
    filler = b": " + b"x" * 400_000 + b"\n\n"
    body = chunk(filler + b"".join(events(3)) + DONE) + LAST_CHUNK
    async with Replay(lambda _: [head(), ready, body, END]) as server:
        driven = [Driven(driver, asked(server.url)) for _ in range(64)]
        for each in driven:
            await each.comes("head")
        ready.set()
        assert [await each.ended() for each in driven] == [ALL] * 64
        assert all(each.exchange.take().token_ids.tolist() == [1, 2, 3] for each in driven)


async def test_an_aborted_stream_and_one_that_is_urgent_are_read_at_once() -> None:
    # No sweep of the ordinary poll comes in time.
    driver = DirectDriver(ReactorSockets(shortest_rest=3600, longest_rest=3600))
    more = asyncio.Event()
    last = [chunk(event([2], 2)), chunk(event([3], 3, "abort")), LAST_CHUNK]
    steps: list[Step] = [head(), chunk(event([1], 1)), more, *last, FIN]
    async with Replay(steps) as server:
        driven = [Driven(driver, asked(server.url)) for _ in range(2)]
        aborted, urgent = driven

        def read(*, tokens: int) -> bool:
            for each in driven:
                each.exchange.urgent()
            return all(each.exchange.token_count == tokens for each in driven)

        await until(lambda: read(tokens=1))
        aborted.exchange.abort()
        more.set()
        assert await aborted.ended() == ALL
        await until(lambda: read(tokens=3) and urgent.kinds == ALL)
        assert all(each.exchange.take().token_ids.tolist() == [1, 2, 3] for each in driven)
        for each in driven:
            each.exchange.end()
    await driver.aclose()


async def test_a_reply_to_40_megabytes_that_comes_early_ends_the_sending(driver: DirectDriver) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        driven = Driven(driver, asked(url, body=b"x" * (40 << 20)))
        sock, _ = await loop.sock_accept(listener)
        with sock:
            assert (await loop.sock_recv(sock, 100)).startswith(b"POST /generate")
            await loop.sock_sendall(sock, b"HTTP/1.1 413 No\r\nContent-Length: 9\r\n\r\ntoo large")
            assert await driven.ended() == ["connected", "head", "ended"]
            assert driven.exchange.take_body() == b"too large"
            driven.exchange.end()
    finally:
        listener.close()


async def test_40_megabytes_arrive(driver: DirectDriver) -> None:
    async with Replay(WHOLE) as server:
        driven = Driven(driver, asked(server.url, body=b"x" * (40 << 20)))
        assert await driven.ended() == ALL
        assert len(server.requests[0].body) == 40 << 20


async def test_a_handler_that_raises_disturbs_nobody_else(driver: DirectDriver) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def fails(kind: str, _: object) -> None:
        if kind == "connected":
            exchange.send()
        else:
            raise ZeroDivisionError

    async with Replay(WHOLE) as server:
        exchange = driver.start(asked(server.url), fails)
        driven = [Driven(driver, asked(server.url)) for _ in range(5)]
        assert [await each.ended() for each in driven] == [ALL] * 5
        await until(lambda: len(failures) == 4)
        assert all(isinstance(failure["exception"], ZeroDivisionError) for failure in failures)
        exchange.end()


def test_the_descriptor_is_unreadable_during_a_rest() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for rest, is_over in ((0.001, True), (3600.0, False)):
        reactor = _core.Reactor(rest_floor=rest, rest_ceiling=rest)
        connection = reactor.connect(*listener.getsockname())
        server, _ = listener.accept()
        assert readable(reactor.urgent_fileno())
        assert reactor.sweep_urgent() == [(connection, "opened", 0)]
        exchange = _core.Exchange.stream(_core.RequestHead("POST", "/", "a"), b"{}", "sglang")
        assert reactor.start(connection, exchange)
        assert not readable(reactor.fileno(), 0)
        server.sendall(head())
        assert readable(reactor.fileno())
        assert reactor.sweep() == [(connection, "head", (200, True, None))]
        server.sendall(chunk(event([1], 1)))
        assert readable(reactor.fileno(), 30 if is_over else 0.1) == is_over
        assert reactor.read_now(connection) == [(connection, "first_token", None)]
        assert exchange.token_count == 1
        reactor.close()
        server.close()
    listener.close()


def readable(descriptor: int, seconds: float = 30) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


async def test_the_body_of_a_request_is_freed_when_the_reply_begins(driver: DirectDriver) -> None:
    body = bytearray(b"x" * 100_000)
    sent = bytes(body)
    before = sys.getrefcount(sent)
    async with Replay(stream(*events(2, finish=None), end=HANG), routes={"/b": answer(b"")}) as server:
        driven = Driven(driver, asked(server.url, body=sent))
        await driven.comes("first_token")
        gc.collect()
        assert sys.getrefcount(sent) == before
        driven.exchange.end()


# Connections.


async def test_a_kept_connection_that_the_server_has_closed_is_not_used(driver: DirectDriver) -> None:
    async with Replay([*WHOLE[:-1], 0.01, FIN]) as server:
        for count in range(1, 4):
            kinds = await Driven(driver, asked(server.url)).ended()
            assert kinds[kinds.count("connected") - 1 :] == ALL, "it may have been found closed at the sending only"
            await until(lambda: server.open == 0)
            assert server.accepted == count


async def test_a_kept_connection_carries_calls_and_control_requests_in_turn(driver: DirectDriver) -> None:
    async with Replay(WHOLE) as server:
        for _ in range(3):
            assert await Driven(driver, asked(server.url)).ended() == ALL
            assert await Driven(driver, told(server.url)).ended() == ["connected", "head", "ended"]
        assert server.accepted == 1


async def test_a_unix_socket_is_opened_when_its_backlog_has_room(tmp_path: Any) -> None:
    path = str(tmp_path / "engine.sock")
    sockets = ReactorSockets()
    address = Address(socket.AF_UNIX, path, 0)
    try:
        assert getattr(await opened(sockets, address), "errno", None) == errno.ENOENT
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(0)
            waiting = [asyncio.ensure_future(opened(sockets, address)) for _ in range(4)]
            cancel = sockets.open(address, HTTP, lambda _: pytest.fail("it was cancelled"))
            await asyncio.sleep(0.05)
            assert not all(each.done() for each in waiting)
            cancel()
            accepted = [(await _accept(listener))[0] for _ in waiting]
            connections = [await each for each in waiting]
            assert not any(isinstance(each, OSError) for each in connections)
            for sock in accepted:
                sock.close()
    finally:
        sockets.close()


async def _accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    listener.setblocking(False)
    return await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), 30)


async def test_a_lack_of_descriptors_is_told_to_who_opens() -> None:
    sockets = ReactorSockets()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Replay(WHOLE) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 1, hard))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            result = await opened(sockets, at(server.port))
            assert isinstance(result, OSError)
            assert result.errno == errno.EMFILE
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        assert not isinstance(await opened(sockets, at(server.port)), OSError)
    sockets.close()


async def test_a_refused_connection_tells_its_errno() -> None:
    sockets = ReactorSockets()
    async with Replay() as server:
        pass
    result = await opened(sockets, at(server.port))
    assert isinstance(result, ConnectionRefusedError)
    assert result.errno == errno.ECONNREFUSED
    sockets.close()
