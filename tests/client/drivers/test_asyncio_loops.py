"""AsyncioSockets on loops of several kinds, and when a loop closes or a listener raises."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import TYPE_CHECKING, Any

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver
from support.driving import Driven, asked
from support.leftovers import open_files
from support.peers import driving, read_head, server_tls, serving
from support.replay import RUNNING, WHOLE, Replay, until
from support.ways import ALL

if TYPE_CHECKING:
    import socket

BOTH_LOOPS = True


class Unwatching(asyncio.SelectorEventLoop):
    """A loop that watches no descriptors for its users."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]  # generic
        raise NotImplementedError

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_a_loop_that_watches_no_descriptors_will_do() -> None:
    async def run() -> None:
        async with Replay(WHOLE, tls=server_tls()) as server, driving() as driver:
            assert await Driven(driver, asked(server.url)).ended() == ALL

    loop = Unwatching()
    loop.run_until_complete(run())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_a_loop_that_is_closed_without_aclose_leaves_no_descriptor_after_it() -> None:
    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"".join(step for step in RUNNING if isinstance(step, bytes)))
        peer.recv(1)

    async def begin(url: str) -> DirectDriver:
        driver = DirectDriver(AsyncioSockets())
        await Driven(driver, asked(url)).comes("first_token")
        return driver

    files = open_files()
    for _ in range(5):
        with warnings.catch_warnings(), serving(serve) as url:
            warnings.simplefilter("ignore", ResourceWarning)  # asyncio's own, of its transport
            loop = asyncio.new_event_loop()
            driver = loop.run_until_complete(begin(url))
            loop.close()
            asyncio.run(driver.aclose())
            del driver
            gc.collect()
    assert open_files() == files


async def test_what_a_listener_raises_does_not_keep_the_rest_from_being_reported() -> None:
    heard: list[str] = []
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with Replay(WHOLE) as server, driving() as driver:

        def listen(kind: str, _: object) -> None:
            heard.append(kind)
            if kind == "connected":
                exchange.send()
            if kind == "head":
                raise ZeroDivisionError

        exchange = driver.start(asked(server.url), listen)
        await until(lambda: "ended" in heard or "failed" in heard)
        exchange.end()
    assert heard[:2] == ["connected", "head"]
    assert heard[-1] == "ended"
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]
