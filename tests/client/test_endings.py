"""How a failed call ends: its error, what it keeps, and whether the request is aborted at the engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import DecodeError, EngineError, Retries, StreamfoldError, StreamTruncated
from streamfold.client.drivers.httpx_driver import HttpxExchange
from support.replay import (
    ASKED,
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RST,
    Replay,
    Step,
    answer,
    chunk,
    head,
    stream,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.speaking import Speech, Spoken

BOTH_LOOPS = True
EACH_DRIVER = True

ONCE = Retries(tries=1)


async def failure(speech: Speech, server: Replay) -> StreamfoldError:
    """The error of a call that is tried once, with what every error of a call must be."""
    async with speech.client(server.url, retries=ONCE) as client:
        call = client.start(PROMPT, ASKED)
        with pytest.raises(StreamfoldError) as raised:
            await asyncio.wait_for(call, 20)
        error = raised.value
        assert error.partial is not None
        assert await call.abort() is error.partial
        assert call.token_count == len(error.partial.token_ids)
        assert pickle.loads(pickle.dumps(error)).partial == error.partial
        assert client.running == []
    await until(lambda: server.open == 0)
    return error


def kept(error: StreamfoldError) -> list[int]:
    assert error.partial is not None
    ids: list[int] = error.partial.token_ids.tolist()
    return ids


# Streams that stop (vllm-project/vime#410, macanderson/stella#362, SamSaffron/term-llm#955).


@pytest.mark.parametrize(
    "rest",
    [
        [FIN],
        [RST],
        [LAST_CHUNK, END],
        [chunk(DONE), LAST_CHUNK, END],
        lambda speech: [chunk(speech.event([3], 3)[:-30]), LAST_CHUNK, END],
        lambda speech: [chunk(speech.event([3], 3)[:-30]), FIN],
        [b"40\r\ndata: {", RST],
        [b"zz\r\n", FIN],
    ],
    ids=["fin", "reset", "last chunk", "[DONE]", "half an event", "half an event and fin", "half a chunk", "no chunk"],
)
async def test_a_stream_without_a_finish_reason_is_truncated_and_keeps_its_prefix(speech: Speech, rest: Spoken) -> None:
    async with speech.replay([*speech.two, *speech.told(rest)]) as server:
        error = await failure(speech, server)
        assert isinstance(error, StreamTruncated)
        assert kept(error) == [1, 2]
        assert len(server.generates) == 1, "what has tokens is not tried again"
        assert len(server.aborts) == 1, "the engine may be running on"


@pytest.mark.parametrize("end", [FIN, RST])
async def test_a_body_shorter_than_its_content_length_is_truncated(speech: Speech, end: str) -> None:
    two = b"".join(speech.events(2, finish=None))
    async with speech.replay([head(length=len(two) + 1) + two, end]) as server:
        error = await failure(speech, server)
        assert isinstance(error, StreamTruncated)
        assert kept(error) == [1, 2]


@pytest.mark.parametrize("rest", [[], [chunk(DONE)]], ids=["no [DONE]", "[DONE]"])
@pytest.mark.parametrize("end", [FIN, RST])
async def test_once_the_finish_reason_has_come_a_broken_end_is_a_success(
    speech: Speech, rest: list[Step], end: str
) -> None:
    async with (
        speech.replay([head(), *map(chunk, speech.events(3)), *rest, 0.02, end]) as server,
        speech.client(server.url) as client,
    ):
        generation = await client.generate(PROMPT, ASKED)
        assert generation.finish_reason == "stop"
        assert generation.token_ids.tolist() == [1, 2, 3]
        assert server.aborts == []


# Engines that cannot be reached.


async def test_a_refused_connection_is_an_engine_error_worth_another_try(speech: Speech) -> None:
    async with speech.replay() as server:
        pass
    error = await failure(speech, server)
    assert isinstance(error, EngineError)
    assert (error.status, error.retryable) == (None, True)
    assert server.url in str(error)
    assert kept(error) == []


@pytest.mark.parametrize(
    "steps",
    [[FIN], [RST], [b"HTTP/1.1 200 OK\r\ncontent-", RST], [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", FIN]],
    ids=["fin", "reset", "half a head", "no http"],
)
async def test_a_connection_lost_before_the_headers_is_an_engine_error_worth_another_try(
    speech: Speech, steps: list[Step]
) -> None:
    async with speech.replay(steps) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert (error.status, error.retryable) == (None, True)
        assert kept(error) == []
        assert len(server.generates) == 1


# Refusals.


@pytest.mark.parametrize(
    ("status", "body", "message", "retryable"),
    [
        (
            400,
            b'{"object":"error","message":"too long","type":"Bad Request","param":null,"code":400}',
            "too long",
            False,
        ),
        (400, b'{"error":"unknown field `x`"}', "unknown field `x`", False),
        (400, b'{"error":{"message":"validation failed","code":400}}', "validation failed", False),
        (401, b'{"error":"Unauthorized"}', "Unauthorized", False),
        (404, b'{"detail":"Not Found"}', "Not Found", False),
        (422, b'{"detail":[{"loc":["body"],"msg":"Field required"}]}', "Field required (['body'])", False),
        (429, b"slow down", "slow down", True),
        (500, b"", "an empty reply", True),
        (502, b"<html>\r\n<body>Bad Gateway</body>" + b" " * 9000, "<html> <body>Bad Gateway</body>", True),
        (
            503,
            b'{"object":"error","message":"The request queue is full.","code":503}',
            "The request queue is full.",
            True,
        ),
    ],
)
async def test_an_http_error_is_an_engine_error_with_the_servers_words(
    speech: Speech, status: int, body: bytes, message: str, *, retryable: bool
) -> None:
    async with speech.replay(answer(body, status)) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        hint = speech.hint(status)
        assert error.message == (f"{message} ({hint})" if hint else message)
        assert (error.status, error.retryable) == (status, retryable)
        assert kept(error) == []
        assert server.aborts == [], "nothing runs there"


@pytest.mark.parametrize(
    "steps",
    [
        [head(503, length=100) + b'{"error":"half', RST],
        [head(503, length=100) + b'{"error":"half', HANG],
        [head(503), *[chunk(b'{"error":"half' + b" " * 100_000)] * 20, HANG],
    ],
    ids=["interrupted", "silent", "endless"],
)
async def test_an_error_page_that_does_not_end_is_quoted_as_far_as_it_came(speech: Speech, steps: list[Step]) -> None:
    async with speech.replay(steps) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert (error.status, error.message) == (503, '{"error":"half')


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(speech: Speech, status: int) -> None:
    async with speech.replay(answer(b"", status, location="/elsewhere")) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert (error.status, error.retryable) == (status, False)
        assert "/elsewhere" in error.message
        assert server.at("/elsewhere") == []


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (answer(b"<html>proxy login</html>", kind="text/html"), "text/html"),
        (answer(b'{"text":"whole","meta_info":{}}'), "application/json"),
        (answer(b"data: 1\n\n", kind=None), "no content type"),
        (answer(gzip.compress(b"data: {}\n\n"), kind="text/event-stream", content_encoding="gzip"), "gzip"),
        (answer(b"", 204, kind=None), "empty reply"),
    ],
    ids=["html", "json", "no content type", "gzip", "no content"],
)
async def test_a_reply_that_is_no_plain_event_stream_is_an_engine_error_that_says_what_it_is(
    speech: Speech, steps: list[Step], named: str
) -> None:
    async with speech.replay(steps) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert named in error.message
        assert bool(server.aborts) is (error.status == 200), "a request may run behind it"
        assert error.retryable is False
        assert kept(error) == []


async def test_no_more_than_the_first_200_bytes_of_a_wrong_reply_are_quoted(speech: Speech) -> None:
    async with speech.replay(answer(b"a" * 200 + b"b" * 10_000, kind="text/plain")) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert error.message.endswith(": " + "a" * 200)


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream;charset=UTF-8", "text/event-stream ; x=1"])
async def test_an_event_stream_is_known_by_its_type_alone(speech: Speech, kind: str) -> None:
    body = b"".join([*speech.events(2), DONE])
    steps = answer(body, kind=kind, content_encoding="identity")
    async with speech.replay(steps) as server, speech.client(server.url) as client:
        assert (await client.generate(PROMPT, ASKED)).token_ids.tolist() == [1, 2]


# Errors inside the stream (vllm-project/guidellm#743, sgl-project/sglang#21900, #28175).


def sse(value: Any, name: str | None = None) -> bytes:
    payload = value if isinstance(value, str) else json.dumps(value)
    return (f"event: {name}\n" if name else "").encode() + f"data: {payload}\n\n".encode()


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize(
    ("error_event", "status", "retryable"),
    [
        (sse({"error": {"message": "broke", "code": 500}}), 500, True),
        (sse({"error": {"message": "broke", "type": "invalid_request_error", "code": 400}}), 400, False),
        (sse({"error": {"message": "broke"}}), None, False),
        (sse({"error": "broke"}), None, False),
        (sse({"object": "error", "message": "broke", "code": 429}), 429, True),
        (sse({"detail": "broke"}), None, False),
        (sse({"message": "broke", "code": 503}, "error"), 503, True),
    ],
    ids=["object", "object with type", "bare object", "text", "object=error", "detail", "event: error"],
)
async def test_an_error_event_is_an_engine_error_and_the_tokens_before_it_are_kept(
    speech: Speech, tokens: int, error_event: bytes, status: int | None, *, retryable: bool
) -> None:
    async with speech.replay(stream(*speech.events(tokens, finish=None), error_event, DONE)) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert "broke" in error.message
        assert (error.status, error.retryable) == (status, retryable)
        assert kept(error) == list(range(1, tokens + 1))
        assert len(server.generates) == 1
        assert server.aborts == [], "the engine has ended it"


@pytest.mark.parametrize(
    "rest",
    [
        [HANG],
        lambda speech: [chunk(speech.event([3], 3)), HANG],
        [RST],
        [*[chunk(b": on and on\n\n" * 1000)] * 1000, HANG],
    ],
    ids=["silence", "more tokens", "reset", "endless"],
)
async def test_a_body_that_does_not_end_after_an_error_event_is_closed_and_the_request_aborted(
    speech: Speech, rest: Spoken
) -> None:
    async with speech.replay([*speech.two, chunk(sse({"error": "broke"})), *speech.told(rest)]) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert "broke" in error.message
        assert kept(error) == [1, 2]
        assert len(server.aborts) == 1


async def test_an_error_that_came_before_an_abort_stays_an_error(speech: Speech) -> None:
    async with (
        speech.replay([*speech.two, chunk(sse({"error": "broke"})), HANG]) as server,
        speech.client(server.url) as client,
    ):
        call = client.start(PROMPT, ASKED)
        await until(lambda: call.token_count == 2)
        await asyncio.sleep(0.05)
        assert (await call.abort()).token_ids.tolist() == [1, 2]
        with pytest.raises(EngineError, match="broke"):
            await call


async def test_a_refusal_that_comes_in_the_stream_is_an_engine_error(speech: Speech) -> None:
    async with speech.replay(stream(speech.refusal(503), DONE)) as server:
        error = await failure(speech, server)
        assert isinstance(error, EngineError)
        assert (error.status, error.message, error.retryable) == (503, "The request queue is full.", True)


# Damage.


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda _: b"data: {this is not json}\n\n", "json"),
        (lambda _: b"data: \xff\n\n", "utf8"),
        (lambda speech: speech.event([3], 7), "length"),
        (lambda speech: speech.event([-1], 3), "token"),
        (lambda _: b"data: 5\n\n", "schema"),
    ],
    ids=["json", "utf8", "length", "token", "schema"],
)
async def test_damage_is_a_decode_error_that_keeps_the_good_prefix_and_ends_the_request(
    speech: Speech, damage: Callable[[Speech], bytes], kind: str
) -> None:
    # The engine sends without end; only an abort ends it.
    steps: list[Step] = [*speech.two, chunk(damage(speech)), *[chunk(speech.event([4], 4))] * 3, HANG]
    async with speech.replay(steps) as server:
        error = await failure(speech, server)
        assert isinstance(error, DecodeError)
        assert error.kind == kind
        assert error.offset >= len(b"".join(speech.events(2, finish=None)))
        assert kept(error) == [1, 2]
        assert len(server.aborts) == 1


async def test_a_panic_or_any_other_fault_below_reaches_who_awaits_the_call(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fault(BaseException):
        pass

    async with speech.replay(speech.two) as server, speech.client(server.url, transport="httpx") as client:
        call = client.start(PROMPT, ASKED)
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        def burst(exchange: HttpxExchange, chunk: bytes) -> None:
            raise Fault("burst")

        monkeypatch.setattr(HttpxExchange, "_feed", burst)
        with pytest.raises(StreamfoldError, match="burst"):
            await call
        assert client.running == []
