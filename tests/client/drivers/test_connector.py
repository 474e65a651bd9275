"""Connector: families, turns, errors, timeouts and descriptors, over asyncio's sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.base import Failure
from streamfold.client.drivers.connector import Connector, Opened, Shared
from streamfold.client.drivers.descriptors import Reserve
from streamfold.client.drivers.sockets import Address
from streamfold.client.urls import Origin
from support.descriptors import room_for
from support.leftovers import open_files, settled
from support.paths import TESTS
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from streamfold.client.drivers.connector import Opening

BOTH_LOOPS = True


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that answers no connect, as its backlog is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Opener:
    """A connector, and what it has opened."""

    def __init__(self, **options: Any) -> None:
        self.sockets = AsyncioSockets()
        self.connector = Connector(asyncio.get_running_loop(), self.sockets, lambda: None, **options)
        self.results: list[Opened | Failure] = []

    def open(self, origin: Origin, timeout: float | None = 10.0, *, is_control: bool = False) -> Opening:
        count = len(self.results)
        opening = self.connector.open(origin, timeout, self.results.append, is_control=is_control)
        assert len(self.results) == count, "nothing is reported before open() returns"
        return opening

    async def result(self) -> Opened | Failure:
        await until(lambda: self.results)
        (result,) = self.results
        return result

    async def failure(self) -> Failure:
        result = await self.result()
        assert isinstance(result, Failure)
        return result


@contextlib.asynccontextmanager
async def opener(**options: Any) -> AsyncIterator[Opener]:
    opener = Opener(**options)
    try:
        yield opener
    finally:
        opener.connector.close()
        opener.sockets.close()
        await opener.sockets.wait_closed()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield listener


@pytest.fixture
def origin(listener: socket.socket) -> Origin:
    return Origin("http", "127.0.0.1", listener.getsockname()[1])


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def known_as(opener: Opener, name: str, addresses: list[Address]) -> Origin:
    """A name whose look-up has just given these addresses."""
    origin = Origin("http", name, addresses[0].port)
    kept = opener.connector.shared.resolver._kept
    kept[name, origin.port] = (asyncio.get_running_loop().time() + 60, addresses)
    return origin


# Addresses.


async def test_a_name_is_looked_up_and_its_server_reached(origin: Origin) -> None:
    async with opener() as it:
        it.open(Origin("http", "localhost", origin.port))
        assert isinstance(await it.result(), Opened)


async def test_a_unix_socket_is_reached(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        async with opener() as it:
            for _ in range(3):
                it.open(Origin("http+unix", path, 0))
            listener.settimeout(30)
            for _ in range(3):  # the backlog was full, which is an error on a Unix socket
                (await asyncio.to_thread(listener.accept))[0].close()
            await until(lambda: len(it.results) == 3)
            assert all(isinstance(result, Opened) for result in it.results)


async def test_an_address_that_refuses_gives_way_to_the_next(origin: Origin) -> None:
    async with opener() as it:
        v6 = Address(socket.AF_INET6, "::1", origin.port)
        name = known_as(it, "two-families.invalid", [v6, Address(socket.AF_INET, "127.0.0.1", origin.port)])
        it.open(name)
        assert isinstance(await it.result(), Opened)
        assert it.connector.shared.resolver.known(name) is None, "one of its addresses failed"


async def test_an_address_that_is_silent_is_overtaken_by_the_next(origin: Origin) -> None:
    with silent_server() as port:
        async with opener() as it:
            silent = Address(socket.AF_INET, "127.0.0.1", port)
            it.open(
                known_as(it, "one-silent.invalid", [silent, Address(socket.AF_INET, "127.0.0.1", origin.port)]), None
            )
            result = await it.result()
            assert isinstance(result, Opened)
            await until(lambda: not it.sockets.openings)


# Errors.


async def test_a_failed_connect_names_its_errno() -> None:
    async with opener() as it:
        it.open(Origin("http", "127.0.0.1", closed_port()))
        failure = await it.failure()
        assert failure.message == "no connection: Connection refused"
        assert failure.retryable
        assert not failure.timed_out


async def test_errors_that_differ_are_told_with_their_addresses(tmp_path: Path) -> None:
    async with opener() as it:
        port = closed_port()
        bad = Address(socket.AF_INET, "255.255.255.255", port)
        it.open(known_as(it, "both-bad.invalid", [bad, Address(socket.AF_INET, "127.0.0.1", port)]))
        message = (await it.failure()).message
        assert "127.0.0.1: Connection refused" in message
        assert "255.255.255.255: " in message


async def test_a_missing_unix_socket_names_its_errno(tmp_path: Path) -> None:
    async with opener() as it:
        it.open(Origin("http+unix", str(tmp_path / "none.sock"), 0))
        assert (await it.failure()).message == "no connection: No such file or directory"


async def test_a_failed_look_up_is_retryable_and_has_the_words_of_the_system() -> None:
    async with opener() as it:
        it.open(Origin("http", "no-such-host.invalid", 80))
        failure = await it.failure()
        assert failure.retryable
        assert failure.message.startswith("no connection: the name 'no-such-host.invalid' could not be looked up: ")
        assert isinstance(failure.cause, socket.gaierror)
        assert failure.message.endswith(str(failure.cause.strerror))


async def test_a_zone_that_does_not_exist_is_a_failure() -> None:
    async with opener() as it:
        it.open(Origin("http", "fe80::1%nosuchif", 80))
        assert "fe80::1%nosuchif" in (await it.failure()).message


async def test_the_timeout_covers_tcp() -> None:
    with silent_server() as port:
        async with opener() as it:
            it.open(Origin("http", "127.0.0.1", port), timeout=0.2)
            failure = await it.failure()
            assert failure.timed_out
            assert failure.message == "no connection within 0.2 s: the server does not answer"


async def test_the_timeout_covers_tls(origin: Origin) -> None:
    async with opener() as it:  # it connects, and the server says nothing
        it.open(Origin("https", "127.0.0.1", origin.port), timeout=0.2)
        assert (await it.failure()).timed_out


async def test_a_cancelled_opening_reports_nothing_and_leaves_nothing(origin: Origin) -> None:
    _, files = await settled()
    for name in ("127.0.0.1", "localhost"):
        for steps in range(12):
            async with opener() as it:
                opening = it.open(Origin("http", name, origin.port))
                for _ in range(steps):
                    await asyncio.sleep(0)
                count = len(it.results)
                opening.cancel()
                opening.cancel()
                await asyncio.sleep(0.01)
                assert len(it.results) == count
    gc.collect()
    assert open_files() <= files + 1


# Turns.


def retransmissions(result: Opened | Failure) -> int:
    """How often TCP had to repeat itself."""
    assert isinstance(result, Opened)
    (sock,) = (held for held in gc.get_referents(result.connection) if isinstance(held, socket.socket))
    count: int = struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 100)[0]
    return count


async def test_a_storm_does_not_overrun_the_backlog_of_a_slow_server(soak: bool) -> None:
    count, pause = (4096, 0.001) if soak else (600, 0.0005)
    with room_for(2 * count), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        accepted: list[socket.socket] = []

        def accept() -> None:
            due = time.monotonic()
            while len(accepted) < count:
                accepted.append(listener.accept()[0])
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))

        thread = threading.Thread(target=accept)
        thread.start()
        async with opener() as it:
            for _ in range(count):
                it.open(Origin("http", "127.0.0.1", listener.getsockname()[1]))
            await until(lambda: len(it.results) == count)
            assert sum(map(retransmissions, it.results)) == 0
        await asyncio.to_thread(thread.join)
        for peer in accepted:
            peer.close()


async def test_the_wait_for_a_turn_does_not_count_to_the_timeout(origin: Origin) -> None:
    async with opener(rate=100) as it:
        for _ in range(84):
            it.open(origin, timeout=0.15)
        await until(lambda: len(it.results) == 84)
        assert all(isinstance(result, Opened) for result in it.results)


async def test_control_requests_have_their_turn_before_calls(origin: Origin) -> None:
    order: list[str] = []

    def note(name: str, _: object) -> None:
        order.append(name)

    async with opener(rate=50) as it:
        for name, is_control in [*[("call", False)] * 66, ("control", True)]:
            it.connector.open(origin, None, functools.partial(note, name), is_control=is_control)
        await until(lambda: len(order) == 67)
        assert order.index("control") < 66


async def test_clients_of_one_loop_share_their_turns(origin: Origin) -> None:
    async with opener(rate=0.01) as it, opener(rate=0.01) as other:
        for _ in range(40):
            it.open(origin)
            other.open(origin)
        await until(lambda: len(it.results) + len(other.results) == 64)
        assert it.connector.shared is other.connector.shared


async def test_what_a_loop_shares_goes_with_the_last_connector() -> None:
    loop = asyncio.get_running_loop()
    async with opener() as it:
        shared = id(it.connector.shared)
        assert id(Shared.of(loop)) == shared
    del it
    gc.collect()
    assert not Shared.of(loop).resolver._kept


# Descriptors.


def short_of_descriptors(script: str, loop: str) -> Any:
    """What a process of its own prints, whose limit of descriptors is 64."""
    command = [sys.executable, str(TESTS / "support" / "short_of_descriptors.py"), script, loop]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_with_every_descriptor_in_a_stream_each_abort_arrives(loop: str) -> None:
    told = short_of_descriptors("aborts", loop)
    assert told["streams"] >= 40
    assert told["aborts"] == told["streams"]
    assert told["failed"] == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_call_waits_for_a_descriptor_and_then_fails_naming_the_limits(loop: str) -> None:
    told = short_of_descriptors("waits", loop)
    (message,) = set(told["failed"])
    assert "too many open files" in message
    assert "ulimit -n" in message
    assert "Limits.calls" in message
    assert told["timed_out"]
    assert told["later"] == 10, "when streams end, those who wait get their descriptors"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_idle_connections_make_room_for_other_servers(loop: str) -> None:
    assert short_of_descriptors("room", loop)["reached"]


def test_a_reserve_is_lent_and_taken_back() -> None:
    before = open_files()
    reserve = Reserve(3)
    reserve.fill()
    assert open_files() == before + 3
    assert reserve.lend()
    reserve.fill()
    assert open_files() == before + 2, "a socket has the place of the lent one"
    reserve.take_back()
    reserve.fill()
    assert open_files() == before + 3
    reserve.close()
    reserve.close()
    assert open_files() == before
    assert not reserve.lend()
