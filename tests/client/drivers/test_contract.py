"""The contract of drivers (``drivers/base.py``), kept by each of them: over plain sockets and over TLS, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.errors import DecodeError, EngineError, StreamTruncated
from support.carriers import ASYNCIO, HTTPX, REACTOR
from support.driving import BODY, Driven, asked, told
from support.leftovers import open_files, settled
from support.paths import DATA
from support.replay import (
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    RST,
    RUNNING,
    WHOLE,
    Replay,
    Request,
    Step,
    Steps,
    answer,
    answer_json,
    chunk,
    dripped,
    event,
    events,
    head,
    stream,
    until,
)
from support.unreachable import closed_port, full_house

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamfold.client.drivers.base import Driver, Kind
    from support.carriers import Carrier

BOTH_LOOPS = True

REFUSED = ["connected", "head", "ended"]
BEGUN = ["connected", "head", "first_token"]
ALL = [*BEGUN, "finished", "ended"]
BODY_OF_THREE = b"".join([*events(3), DONE])
STREAM_FIELDS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@dataclass(frozen=True)
class Way:
    """A driver, and whether it is asked to speak TLS."""

    carrier: Carrier
    is_tls: bool

    def replay(self, *steps: Any, **options: Any) -> Replay:
        context = None
        if self.is_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(DATA / "tls" / "cert.pem", DATA / "tls" / "key.pem")
        return Replay(*steps, tls=context, **options)

    @contextlib.asynccontextmanager
    async def driving(self) -> AsyncIterator[Driver]:
        driver = self.carrier.make(ssl.create_default_context(cafile=DATA / "tls" / "cert.pem"))
        try:
            yield driver
        finally:
            await driver.aclose()

    def __repr__(self) -> str:
        return f"{self.carrier}{'-tls' if self.is_tls else ''}"


PLAIN = tuple(Way(carrier, False) for carrier in (REACTOR, ASYNCIO, HTTPX))
WAYS = (*PLAIN, Way(ASYNCIO, True), Way(HTTPX, True))


@pytest.fixture(params=WAYS, ids=repr)
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


def sized(body: bytes) -> list[Step]:
    return [STREAM_FIELDS + b"content-length: %d\r\n\r\n" % len(body) + body, END]


def until_close(body: bytes) -> list[Step]:
    return [STREAM_FIELDS + b"connection: close\r\n\r\n" + body, FIN]


FRAMINGS = {"chunked": WHOLE, "sized": sized(BODY_OF_THREE), "until close": until_close(BODY_OF_THREE)}


# Replies that come to their end.


@pytest.mark.parametrize("drips", [False, True], ids=["at once", "single bytes"])
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_stream_is_reported_by_its_changes_alone_however_it_is_framed_and_cut(
    way: Way, framing: str, drips: bool
) -> None:
    steps = FRAMINGS[framing]
    async with way.replay(lambda _: dripped(steps) if drips else steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ALL
        assert driven.detail("head") == (200, True, {})
        exchange = driven.exchange
        assert exchange.token_count == 3
        assert 0 < exchange.first_token_at <= exchange.last_token_at < float("inf")
        assert exchange.take().token_ids.tolist() == [1, 2, 3]
        exchange.end()
        (request,) = server.requests
        assert (request.method, request.target, request.body) == ("POST", "/generate", BODY)
        assert request.headers["host"] == f"127.0.0.1:{server.port}"
        assert "transfer-encoding" not in request.headers


async def test_the_same_events_come_however_a_stream_is_cut_in_two(way: Way, soak: bool) -> None:
    raw = b"".join(step for step in stream(*events(2), DONE) if isinstance(step, bytes))
    cuts = range(1, len(raw), 1 if soak else 7)
    replies = iter([[raw[:cut], 0.001, raw[cut:], END] for cut in cuts])
    async with way.replay(lambda _: next(replies)) as server, way.driving() as driver:
        for _ in cuts:
            driven = Driven(driver, asked(server.url))
            assert await driven.ended() == ALL
            assert driven.exchange.take().token_ids.tolist() == [1, 2]
            driven.exchange.end()


async def test_a_refusal_is_a_head_and_a_body_and_so_is_a_reply_that_no_stream_was_expected_of(way: Way) -> None:
    refusal = answer(b"busy", 503, retry_after="3")
    async with way.replay(refusal, routes={"/load": answer_json({"load": 1})}) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == REFUSED
        status, is_stream, headers = driven.detail("head")
        assert (status, is_stream, headers["retry-after"]) == (503, False, "3")
        assert driven.exchange.take_body() == b"busy"
        driven.exchange.end()
        asking = Driven(driver, replace(told(server.url, "/load"), method="GET", body=b""))
        assert await asking.ended() == REFUSED
        assert asking.exchange.take_body() == b'{"load": 1}'
        assert (server.requests[-1].method, server.requests[-1].body) == ("GET", b"")
        asking.exchange.end()


@pytest.mark.parametrize(
    "kind", ["application/json", "text/event-stream-of-mine", None], ids=["json", "another stream", "none"]
)
async def test_a_body_that_is_no_event_stream_is_kept_and_not_parsed(way: Way, kind: str | None) -> None:
    async with way.replay(answer(BODY_OF_THREE, kind=kind)) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == REFUSED
        assert driven.detail("head")[:2] == (200, False)
        assert driven.exchange.take_body() == BODY_OF_THREE
        assert driven.exchange.token_count == 0
        driven.exchange.end()


async def test_of_a_body_that_is_too_long_the_beginning_is_kept_and_its_end_is_not_awaited(way: Way) -> None:
    steps: list[Step] = [head(500), chunk(b"x" * 100_000), HANG]
    async with way.replay(steps, routes={"/load": steps}) as server, way.driving() as driver:
        for request, kept in ((asked(server.url), 1 << 16), (told(server.url, "/load"), 1000)):
            driven = Driven(driver, replace(request, max_body_bytes=kept))
            assert await driven.ended() == REFUSED
            assert driven.exchange.take_body() == b"x" * kept
            driven.exchange.end()


async def test_interim_replies_are_passed_over(way: Way) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    async with way.replay([interim, 0.01, interim, *WHOLE]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ALL
        assert driven.detail("head").status == 200
        driven.exchange.end()


# Replies that do not.


@pytest.mark.parametrize("steps", [[FIN], [RST], [b"HTTP/1.1 200", FIN], [b"no HTTP at all\r\n\r\n", HANG]], ids=repr)
async def test_without_a_reply_there_is_a_failure_and_then_the_end(way: Way, steps: Steps) -> None:
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ["connected", "failed", "ended"]
        failure = driven.detail("failed")
        assert (failure.retryable, failure.timed_out, failure.is_stale) == (True, False, False)
        assert failure.message
        assert isinstance(failure.cause, Exception)
        driven.exchange.end()


@pytest.mark.parametrize("way", PLAIN, ids=repr)
async def test_a_connection_that_is_reset_as_it_opens_is_a_failure_and_worth_another_try(way: Way) -> None:
    async with way.replay(WHOLE) as server, way.driving() as driver:
        server.resets = 1
        driven = Driven(driver, asked(server.url))
        kinds = await driven.ended()
        assert [kind for kind in kinds if kind != "connected"] == ["failed", "ended"]
        assert (driven.detail("failed").retryable, driven.detail("failed").is_stale) == (True, False)
        driven.exchange.end()


@pytest.mark.parametrize("way", PLAIN, ids=repr)
async def test_without_a_connection_there_is_a_failure_that_says_whether_it_took_too_long(way: Way) -> None:
    async with way.driving() as driver:
        with closed_port() as (_, url):
            refused = Driven(driver, asked(url))
            assert await refused.ended() == ["failed", "ended"]
            assert (refused.detail("failed").retryable, refused.detail("failed").timed_out) == (True, False)
        with full_house() as (_, url):
            late = Driven(driver, asked(url, connect_timeout=0.1))
            assert await late.ended() == ["failed", "ended"]
            assert (late.detail("failed").retryable, late.detail("failed").timed_out) == (True, True)


@pytest.mark.parametrize("end", [FIN, RST])
@pytest.mark.parametrize("framing", ["chunked", "sized"])
async def test_a_stream_that_breaks_off_is_truncated_and_no_failure(way: Way, framing: str, end: str) -> None:
    begun = RUNNING[:-1] if framing == "chunked" else [STREAM_FIELDS + b"content-length: 9999\r\n\r\n", *events(2, None)]
    async with way.replay([*begun, 0.05, end]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == [*BEGUN, "error", "ended"]
        error = driven.detail("error")
        assert isinstance(error, StreamTruncated)
        assert isinstance(error.__cause__, Exception)
        assert driven.exchange.take().token_ids.tolist() == [1, 2]
        driven.exchange.end()


@pytest.mark.parametrize("ends", [True, False], ids=["whole", "cut"])
async def test_after_an_error_event_the_end_of_the_body_says_whether_the_engine_is_done(way: Way, ends: bool) -> None:
    refusal = event([], 1, {"type": "abort", "message": "full", "status_code": 503})
    body = [head(), chunk(event([1], 1)), chunk(refusal)]
    steps: list[Step] = [*body, chunk(DONE), LAST_CHUNK, END] if ends else [*body, 0.05, RST]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == [*BEGUN, "error", *([] if ends else ["failed"]), "ended"]
        error = driven.detail("error")
        assert isinstance(error, EngineError)
        assert error.status == 503
        driven.exchange.end()


async def test_a_damaged_stream_stays_open_until_the_caller_ends_it(way: Way) -> None:
    """The engine runs on, and is to be told before it sees the connection close."""
    async with way.replay([head(), chunk(event([1], 1)), chunk(b"data: {]\n\n"), HANG]) as server:
        async with way.driving() as driver:
            driven = Driven(driver, asked(server.url))
            assert isinstance(await driven.comes("error"), DecodeError)
            telling = Driven(driver, told(server.url))
            await telling.ended()
            telling.exchange.end()
            assert not server.generates[0].peer_closed.is_set()
            driven.exchange.end()
            assert await driven.ended() == [*BEGUN, "error", "ended"]
            assert driven.exchange.take().token_ids.tolist() == [1]
            await until(server.generates[0].peer_closed.is_set)


async def test_a_stream_that_goes_on_past_its_limit_is_an_overrun(way: Way) -> None:
    options = {"dialect": "sglang", "max_new_tokens": 2, "token_limit": 4}
    async with way.replay([head(), *map(chunk, events(9, finish=None)), HANG]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url, stream=options))
        await driven.comes("overrun")
        driven.exchange.end()
        assert await driven.ended() == [*BEGUN, "overrun", "ended"]
        generation = driven.exchange.take()
        assert (generation.token_ids.tolist(), generation.finish_reason) == ([1, 2, 3, 4, 5], "length")


@pytest.mark.parametrize("rest", [[chunk(b": x\n\n" * 20_000), HANG], [0.05, RST], [0.05, FIN]], ids=["long", RST, FIN])
async def test_after_the_terminal_event_nothing_is_a_failure_and_64_kib_are_read(way: Way, rest: list[Step]) -> None:
    async with way.replay([head(), *map(chunk, events(2)), *rest]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert await driven.ended() == ALL
        driven.exchange.end()
        assert driven.exchange.take().finish_reason == "stop"
    await until(lambda: server.open == 0)


@pytest.mark.parametrize("way", PLAIN, ids=repr)
async def test_a_reply_that_comes_before_a_large_body_has_left_is_read(way: Way) -> None:
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 X\r\ncontent-length: 5\r\nconnection: close\r\n\r\nlarge")
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.transport.abort()
        is_over.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, way.driving() as driver:
        port = server.sockets[0].getsockname()[1]
        driven = Driven(driver, asked(f"http://127.0.0.1:{port}", body=b"x" * 40_000_000))
        assert await driven.ended() == REFUSED
        assert driven.detail("head").status == 413
        assert driven.exchange.take_body() == b"large"
        driven.exchange.end()
        await is_over.wait()


# Ending early.


async def test_an_end_after_any_step_is_reported_once_and_nothing_follows(way: Way) -> None:
    async with way.replay(RUNNING) as server, way.driving() as driver:
        for steps in range(0, 60, 2):
            driven = Driven(driver, asked(server.url))
            for _ in range(steps):
                await asyncio.sleep(0)
            before = list(driven.kinds)
            driven.exchange.end()
            driven.exchange.end()
            assert await driven.ended() == [*before, "ended"]
            driven.exchange.end()
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("last", ["connected", "head", "first_token", "finished", "error", "failed"])
async def test_an_end_within_any_report_is_the_last_but_for_its_own(way: Way, last: Kind) -> None:
    refusal = event([], 1, {"type": "abort", "message": "full", "status_code": 503})
    steps = {"error": [head(), chunk(refusal), HANG], "failed": [FIN]}.get(last, WHOLE)

    class Ending(Driven):
        def _on_event(self, kind: Kind, detail: Any) -> None:
            super()._on_event(kind, detail)
            if kind == last:
                self.exchange.end()

    async with way.replay(steps) as server, way.driving() as driver:
        driven = Ending(driver, asked(server.url), holds=last == "connected")
        kinds = await driven.ended()
        assert kinds[-2:] == [last, "ended"]
        if last == "connected":
            await asyncio.sleep(0.05)
            assert server.requests == []
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("end", [FIN, RST])
async def test_an_aborted_stream_is_read_on_without_complaint(way: Way, end: str) -> None:
    more, over = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [*RUNNING[:-1], more, chunk(event([3], 3)), over, end]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        driven.exchange.abort()
        driven.exchange.abort()
        more.set()
        await until(lambda: driven.exchange.token_count == 3)
        over.set()
        assert await driven.ended() == [*BEGUN, "ended"]
        assert driven.exchange.take().token_ids.tolist() == [1, 2, 3]
        driven.exchange.end()


async def test_nothing_is_parsed_after_the_taking(way: Way) -> None:
    more = asyncio.Event()
    async with way.replay([*RUNNING[:-1], more, chunk(event([3], 3)), HANG]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        assert driven.exchange.take().token_ids.tolist() == [1, 2]
        more.set()
        await asyncio.sleep(0.1)
        driven.exchange.end()
        assert await driven.ended() == [*BEGUN, "ended"]


async def test_closing_the_driver_ends_all_exchanges_and_leaves_no_descriptor(way: Way) -> None:
    async with way.replay(RUNNING, routes={"/whole": WHOLE}) as server:
        async with way.driving() as driver:  # what the loop keeps for good is opened
            await Driven(driver, asked(server.url, "/whole")).ended()
        await until(lambda: server.open == 0)
        _, files = await settled()
        for _ in range(3):
            async with way.driving() as driver:
                kept = Driven(driver, asked(server.url, "/whole"))
                await kept.ended()
                running = [Driven(driver, asked(server.url)) for _ in range(5)]
                await until(lambda: all(driven.exchange.token_count == 2 for driven in running))  # noqa: B023
                connecting = [Driven(driver, asked(server.url)) for _ in range(20)]
                looking_up = Driven(driver, asked("http://localhost:9"))
                await driver.aclose()
                await driver.aclose()
                for driven in [kept, *running, *connecting, looking_up]:
                    assert driven.kinds.count("ended") == 1
                    assert driven.kinds[-1] == "ended"
        await until(lambda: server.open == 0)
        gc.collect()
        await until(lambda: open_files() <= files)


# Connections that are kept.


@pytest.fixture(params=[way for way in WAYS if way.carrier.keeps], ids=repr)
def keeping(request: pytest.FixtureRequest) -> Way:
    keeping: Way = request.param
    return keeping


async def test_a_connection_carries_one_request_after_another_unless_a_fresh_one_is_asked_for(keeping: Way) -> None:
    async with keeping.replay(WHOLE) as server, keeping.driving() as driver:
        for _ in range(5):
            assert await Driven(driver, asked(server.url)).ended() == ALL
            assert await Driven(driver, told(server.url)).ended() == REFUSED
        assert server.accepted == 1
        assert await Driven(driver, asked(server.url, fresh=True)).ended() == ALL
        assert server.accepted == 2


UNKEPT: dict[str, Steps] = {
    "close": [head(connection="close"), *map(chunk, events(1)), LAST_CHUNK, END],
    "until close": until_close(BODY_OF_THREE),
    "a byte behind it": [b"".join(step for step in WHOLE if isinstance(step, bytes)) + b"x", END],
    "HTTP/1.0": [b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(DONE), DONE, END],
}


@pytest.mark.parametrize("reply", UNKEPT)
async def test_a_connection_is_not_kept_after_a_reply_that_may_not_be_its_last_word(keeping: Way, reply: str) -> None:
    async with keeping.replay(UNKEPT[reply]) as server, keeping.driving() as driver:
        for _ in range(2):
            driven = Driven(driver, asked(server.url))
            await driven.ended()
            driven.exchange.end()
        assert server.accepted == 2


async def test_a_kept_connection_that_fails_before_the_first_byte_of_a_reply_is_stale_and_later_it_is_not(
    keeping: Way,
) -> None:
    later: list[Steps] = [[FIN], [RST], [b"HTTP/1.1 2", 0.02, RST]]

    def reply(request: Request) -> Steps:
        return WHOLE if request.target == "/first" else later[0]

    async with keeping.replay(reply, routes={"/first": WHOLE}) as server, keeping.driving() as driver:
        for is_stale in (True, True, False):
            await Driven(driver, asked(server.url, "/first", fresh=True)).ended()
            driven = Driven(driver, asked(server.url))
            assert await driven.ended() == ["connected", "failed", "ended"]
            assert driven.detail("failed").is_stale is is_stale
            driven.exchange.end()
            later.pop(0)


async def test_a_kept_connection_that_the_server_has_closed_is_not_used(keeping: Way) -> None:
    async with keeping.replay([*WHOLE[:-1], 0.0, FIN]) as server, keeping.driving() as driver:
        for count in (1, 2):
            assert await Driven(driver, asked(server.url)).ended() == ALL
            assert server.accepted == count
            await until(lambda: server.open == 0)
