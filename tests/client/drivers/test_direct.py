"""DirectDriver over asyncio's sockets: what it reports, and which connections it uses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver
from streamfold.errors import DecodeError, StreamTruncated
from support.driving import Driven, asked, told
from support.leftovers import open_files, settled
from support.peers import server_tls, trusting
from support.replay import (
    END,
    FIN,
    HANG,
    RST,
    RUNNING,
    WHOLE,
    Replay,
    Step,
    answer,
    answer_json,
    chunk,
    dripped,
    events,
    head,
    stream,
    until,
)
from support.ways import ALL

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

BOTH_LOOPS = True


@contextlib.asynccontextmanager
async def driving(**options: Any) -> AsyncIterator[DirectDriver]:
    """A driver that trusts the tests' certificate."""
    driver = DirectDriver(AsyncioSockets(trusting()), **options)
    try:
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> ssl.SSLContext | None:
    return server_tls() if request.param else None


# What is reported.


async def test_a_stream_is_reported_by_its_changes_alone(tls: ssl.SSLContext | None) -> None:
    async with Replay(WHOLE, tls=tls) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert driven.exchange.first_token_at == math.inf
        assert await driven.ended() == ALL
        assert driven.detail("head") == (200, True, {})
        assert driven.exchange.token_count == 3
        assert driven.exchange.first_token_at <= driven.exchange.last_token_at < math.inf
        assert driven.exchange.take().token_ids.tolist() == [1, 2, 3]
        (request,) = server.requests
        assert request.headers["host"] == f"127.0.0.1:{server.port}"
        assert request.body == b'{"input_ids": [5, 6, 7]}'


async def test_single_bytes_give_the_same(tls: ssl.SSLContext | None) -> None:
    async with Replay(lambda _: dripped(WHOLE), tls=tls) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ALL
        assert driven.exchange.take().token_ids.tolist() == [1, 2, 3]


async def test_a_reply_that_is_no_stream_is_kept() -> None:
    refusal = answer(b"busy", 503, retry_after="3", x_twice="a")
    async with Replay(refusal, routes={"/load": answer_json({"load": 1})}) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["connected", "head", "ended"]
        status, is_stream, headers = driven.detail("head")
        assert (status, is_stream, headers["retry-after"]) == (503, False, "3")
        assert driven.exchange.take_body() == b"busy"
        driven = Driven(driver, told(server.url, "/load"))
        assert await driven.ended() == ["connected", "head", "ended"]
        assert driven.exchange.take_body() == b'{"load": 1}'


async def test_a_stream_that_breaks_off_is_truncated_and_says_why(tls: ssl.SSLContext | None) -> None:
    broken: list[Step] = [*RUNNING[:-1], 0.05]
    async with Replay(tls=tls) as server, driving() as driver:
        for end, cause in ((RST, ConnectionResetError), (FIN, ConnectionError)):
            server.routes["/generate"] = [*broken, end]
            driven = Driven(driver, asked(server.url))
            assert await driven.ended() == ["connected", "head", "first_token", "error", "ended"]
            error = driven.detail("error")
            assert isinstance(error, StreamTruncated)
            assert isinstance(error.__cause__, OSError if tls else cause)
            assert driven.exchange.take().token_ids.tolist() == [1, 2]
            driven.exchange.end()


async def test_a_damaged_stream_is_an_error() -> None:
    async with Replay(stream(*events(1, finish=None), b"data: {]\n\n")) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["connected", "head", "first_token", "error", "ended"]
        assert isinstance(driven.detail("error"), DecodeError)
        driven.exchange.end()


async def test_a_connection_that_closes_without_a_reply_is_a_failure(tls: ssl.SSLContext | None) -> None:
    async with Replay([FIN], tls=tls) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["connected", "failed", "ended"]
        failure = driven.detail("failed")
        assert failure.retryable
        assert not failure.is_stale, "the connection was new"
        driven.exchange.end()


async def test_a_refused_connection_names_its_errno() -> None:
    async with Replay() as server:
        pass
    async with driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["failed", "ended"]
        assert driven.detail("failed").message == "no connection: Connection refused"
        assert driven.detail("failed").retryable


async def test_an_unknown_certificate_is_refused_for_good() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's own view of the handshake
    async with Replay(WHOLE, tls=server_tls()) as server:
        driver = DirectDriver(AsyncioSockets())
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["failed", "ended"]
        assert "certificate" in driven.detail("failed").message
        assert not driven.detail("failed").retryable
        await driver.aclose()
        assert server.requests == []


async def test_a_header_that_no_request_can_hold_is_refused_at_the_start() -> None:
    async with driving() as driver:
        with pytest.raises(ValueError, match="path"):
            driver.start(asked("http://127.0.0.1:9", "/a b"), lambda *_: None)


# Ending early.


async def test_an_end_at_any_moment_reports_the_end_once_and_leaves_nothing(tls: ssl.SSLContext | None) -> None:
    async with Replay(RUNNING, tls=tls) as server:
        _, files = await settled()
        for steps in range(0, 60, 2):
            async with driving() as driver:
                driven = Driven(driver, asked(server.url))
                for _ in range(steps):
                    await asyncio.sleep(0)
                driven.exchange.end()
                driven.exchange.end()
                assert await driven.ended() == driven.kinds
                assert driven.kinds.count("ended") == 1
        await until(lambda: server.open == 0)
        gc.collect()
        assert open_files() <= files + 1


async def test_an_abort_before_the_request_has_left_sends_nothing() -> None:
    async with Replay(WHOLE) as server, driving() as driver:
        driven = Driven(driver, asked(server.url), holds=True)
        await driven.comes("connected")
        driven.exchange.abort()
        assert driven.kinds == ["connected", "ended"]
        assert driven.exchange.take().token_ids.tolist() == []
        assert server.requests == []


async def test_an_aborted_stream_is_read_on_without_complaint(tls: ssl.SSLContext | None) -> None:
    steps = [*RUNNING[:-1], asyncio.Event(), FIN]
    async with Replay(steps, tls=tls) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        driven.exchange.abort()
        assert "ended" not in driven.kinds
        event = steps[-2]
        assert isinstance(event, asyncio.Event)
        event.set()
        assert await driven.ended() == ["connected", "head", "first_token", "ended"]
        driven.exchange.end()
        assert driven.exchange.take().token_ids.tolist() == [1, 2]


async def test_after_a_truncated_stream_the_socket_stays_open_until_the_caller_ends_it() -> None:
    # A shape that the client does not accept ends the exchange; the engine still runs, and is to be told first.
    async with Replay([head(), chunk(b"data: {]\n\n"), HANG]) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        await driven.ended()
        await Driven(driver, told(server.url)).ended()
        assert not server.generates[0].peer_closed.is_set()
        driven.exchange.end()
        await until(server.generates[0].peer_closed.is_set)


async def test_closing_the_driver_ends_what_runs_and_what_connects(tls: ssl.SSLContext | None) -> None:
    async with Replay(RUNNING, tls=tls) as server, driving(rate=1000) as driver:
        running = [Driven(driver, asked(server.url)) for _ in range(5)]
        await until(lambda: all(driven.exchange.token_count == 2 for driven in running))
        connecting = [Driven(driver, asked(server.url)) for _ in range(100)]
        looking_up = Driven(driver, asked("http://localhost:9"))
        await driver.aclose()
        await driver.aclose()
        assert all(driven.kinds.count("ended") == 1 for driven in [*running, *connecting, looking_up])
        with pytest.raises(RuntimeError, match="closed"):
            driver.start(asked(server.url), lambda *_: None)
        await until(lambda: server.open == 0)


# Which connections are used.


async def test_connections_are_used_again(tls: ssl.SSLContext | None) -> None:
    async with Replay(WHOLE, tls=tls) as server, driving() as driver:
        for _ in range(5):
            assert await Driven(driver, asked(server.url)).ended() == ALL
            assert await Driven(driver, told(server.url)).ended() == ["connected", "head", "ended"]
        assert server.accepted == 1
        assert await Driven(driver, asked(server.url, fresh=True)).ended() == ALL
        assert server.accepted == 2


async def test_a_connection_is_not_used_again_after_an_abort_or_a_close() -> None:
    gate = asyncio.Event()
    async with Replay([WHOLE[0], gate, *WHOLE[1:]]) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        await driven.comes("head")
        driven.exchange.abort()
        gate.set()
        await driven.ended()
        driven.exchange.end()
        server.routes["/generate"] = [head(connection="close"), *map(chunk, events(1)), b"0\r\n\r\n", END]
        for _ in range(2):
            driven = Driven(driver, asked(server.url))
            await driven.ended()
            driven.exchange.end()
        assert server.accepted == 3


async def test_a_kept_connection_that_the_server_has_closed_is_not_used(tls: ssl.SSLContext | None) -> None:
    async with Replay([*WHOLE[:-1], 0.0, FIN], tls=tls) as server, driving() as driver:
        assert await Driven(driver, asked(server.url)).ended() == ALL
        await until(lambda: server.open == 0)
        kinds = await Driven(driver, asked(server.url)).ended()
        assert kinds[kinds.count("connected") - 1 :] == ALL, "it may have been found closed at the sending only"
        assert server.accepted == 2


async def test_a_kept_connection_that_closes_at_the_next_request_is_stale() -> None:
    async with Replay(lambda _: WHOLE if len(server.requests) == 1 else [FIN]) as server, driving() as driver:
        await Driven(driver, asked(server.url)).ended()
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["connected", "failed", "ended"]
        assert driven.detail("failed").is_stale
        driven.exchange.end()


async def test_kept_connections_are_closed_after_a_while(tls: ssl.SSLContext | None) -> None:
    async with Replay(WHOLE, tls=tls) as server, driving(kept_seconds=0.05) as driver:
        await Driven(driver, asked(server.url)).ended()
        assert server.open == 1
        await until(lambda: server.open == 0)
        assert await Driven(driver, asked(server.url)).ended() == ALL


async def test_a_request_that_waits_for_its_turn_takes_a_connection_that_gets_free() -> None:
    async with Replay(WHOLE) as server, driving(rate=0.01) as driver:
        waves = [Driven(driver, asked(server.url)) for _ in range(200)]
        for driven in waves:
            assert await driven.ended() == ALL
        assert server.accepted <= 64
