"""Resolver: which names are looked up, how often, and what comes of it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.client.drivers.resolver import Resolver, interleaved, literal_address
from streamfold.client.drivers.sockets import Address
from streamfold.client.urls import Origin
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import Sequence

BOTH_LOOPS = True

V4, V6 = socket.AF_INET, socket.AF_INET6
LOCALHOST = Origin("http", "localhost", 80)
NOWHERE = Origin("http", "no-such-host.invalid", 80)


class Counted(Resolver):
    """Counts the look-ups that begin: those that find no other to join."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.results: list[Sequence[Address] | OSError] = []
        self.begun = 0

    def ask(self, origin: Origin) -> Any:
        self.begun += (origin.host, origin.port) not in self._lookups
        return self.look_up(origin, self.results.append)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", Address(V4, "127.0.0.1", 80)),
        ("::1", Address(V6, "::1", 80)),
        ("0:0:0:0:0:0:0:1", Address(V6, "::1", 80)),
        ("fe80::1%1", Address(V6, "fe80::1", 80, 1)),
        ("fe80::1%lo", Address(V6, "fe80::1", 80, socket.if_nametoindex("lo"))),
    ],
)
async def test_a_literal_address_is_not_looked_up(host: str, address: Address) -> None:
    assert Counted().known(Origin("http", host, 80)) == (address,)


async def test_the_path_of_a_unix_socket_passes_through() -> None:
    assert Counted().known(Origin("http+unix", "/tmp/a.sock", 0)) == (Address(socket.AF_UNIX, "/tmp/a.sock", 0),)


@pytest.mark.parametrize("host", ["localhost", "1.2.3", "engine-127.0.0.1", "a%lo"])
def test_a_name_is_no_literal_address(host: str) -> None:
    assert literal_address(host, 80) is None


async def test_a_zone_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match="no interface"):
        Counted().known(Origin("http", "fe80::1%nosuchif", 80))


async def test_a_name_is_looked_up_once_for_all_who_wait() -> None:
    resolver = Counted()
    assert resolver.known(LOCALHOST) is None
    for _ in range(100):
        resolver.ask(LOCALHOST)
    assert resolver.results == []
    await until(lambda: len(resolver.results) == 100)
    assert resolver.begun == 1
    (first, *_) = resolver.results
    assert not isinstance(first, OSError)
    assert {address.host for address in first} <= {"127.0.0.1", "::1"}
    assert resolver.known(LOCALHOST) == first


async def test_a_result_is_kept_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Counted()
    resolver.ask(LOCALHOST)
    await until(lambda: resolver.results)
    assert resolver.known(LOCALHOST) is not None
    (until_, _) = resolver._kept["localhost", 80]
    assert until_ <= asyncio.get_running_loop().time() + 1
    resolver._kept["localhost", 80] = (asyncio.get_running_loop().time(), ())
    assert resolver.known(LOCALHOST) is None


async def test_a_result_is_dropped_when_a_connection_failed() -> None:
    resolver = Counted()
    resolver.ask(LOCALHOST)
    await until(lambda: resolver.results)
    resolver.forget(LOCALHOST)
    assert resolver.known(LOCALHOST) is None


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a" * 70 + ".invalid"])
async def test_a_failed_look_up_says_why_and_is_not_kept(host: str) -> None:
    resolver, origin = Counted(), Origin("http", host, 80)
    resolver.ask(origin)
    await until(lambda: resolver.results)
    (error,) = resolver.results
    assert isinstance(error, OSError)
    assert str(error)
    assert resolver.known(origin) is None


async def test_who_has_cancelled_gets_nothing_and_the_last_one_ends_the_look_up() -> None:
    tasks = asyncio.all_tasks()
    resolver = Counted()
    cancels = [resolver.ask(NOWHERE) for _ in range(3)]
    cancels[0]()
    assert resolver._lookups
    for cancel in cancels:
        cancel()
        cancel()
    assert not resolver._lookups
    await until(lambda: asyncio.all_tasks() == tasks)
    assert resolver.results == []


async def test_after_a_cancelled_look_up_the_next_one_finds_its_result() -> None:
    resolver = Counted()
    resolver.ask(LOCALHOST)()
    resolver.ask(LOCALHOST)
    await until(lambda: resolver.results)
    assert not isinstance(resolver.results[0], OSError)
    assert resolver.begun == 2


def test_families_take_turns_beginning_with_the_preferred_one() -> None:
    a, b, c = (Address(V6, f"::{n}", 80) for n in (1, 2, 3))
    x = Address(V4, "127.0.0.1", 80)
    assert interleaved([a, b, c, x]) == [a, x, b, c]
    assert interleaved([x, a, b, c]) == [x, a, b, c]
    assert interleaved([x]) == [x]
