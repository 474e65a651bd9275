"""The contract of drivers (``drivers/base.py``): replies, whole and broken, over plain sockets and over TLS."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from streamfold.errors import DecodeError, EngineError, StreamTruncated
from support.driving import BODY, Driven, asked, told
from support.replay import (
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    RST,
    RUNNING,
    WHOLE,
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
from support.ways import ALL, BEGUN, BODY_OF_THREE, PLAIN, REFUSED, STREAM_FIELDS, Way, sized, until_close

BOTH_LOOPS = True

FRAMINGS = {"chunked": WHOLE, "sized": sized(BODY_OF_THREE), "until close": until_close(BODY_OF_THREE)}


# Replies that come to their end.


async def test_the_times_between_tokens_are_those_of_the_reads(way: Way) -> None:
    go_on = asyncio.Event()
    first, *others = map(chunk, events(3))
    steps: Steps = [head(), first, go_on, *others, chunk(DONE), LAST_CHUNK, END]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        await driven.comes("first_token")
        go_on.set()
        await driven.ended()
        exchange = driven.exchange
        gaps, reads = exchange.gaps()
        assert gaps.count == 2, "one for each token behind those of the first read"
        assert gaps.sum == pytest.approx(exchange.last_token_at - exchange.first_token_at)
        assert reads in {2, 3}
        assert exchange.take().token_ids.tolist() == [1, 2, 3]
        assert exchange.gaps()[0].count == 2
        exchange.end()


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
        asking = Driven(driver, told(server.url, "/load")._replace(method="GET", body=b""))
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
        failed = [*REFUSED[:-1], "failed", REFUSED[-1]]  # where no stream is expected, half of a body is no reply
        for request, kept, kinds in ((asked(server.url), 1 << 16, REFUSED), (told(server.url, "/load"), 1000, failed)):
            driven = Driven(driver, request._replace(max_body_bytes=kept))
            assert await driven.ended() == kinds
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
    begun = (
        RUNNING[:-1] if framing == "chunked" else [STREAM_FIELDS + b"content-length: 9999\r\n\r\n", *events(2, None)]
    )
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
    steps: list[Step] = [head(), chunk(event([1], 1)), chunk(b"data: {]\n\n"), HANG]
    async with way.replay(steps) as server, way.driving() as driver:
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
