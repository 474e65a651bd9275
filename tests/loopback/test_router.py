"""The loopback router: what it forwards, to which worker, and what it does when client or worker disconnects."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, EngineError, Experts, StreamTruncated
from streamfold.loopback import Loopback, Router
from support.loopback_http import LIMIT, PLAIN, payload, undisturbed
from support.replay import (
    DONE,
    FIN,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RST,
    WHOLE,
    Replay,
    Request,
    Step,
    answer_json,
    chunk,
    dripped,
    events,
    head,
    stream,
    until,
)
from support.router_http import ask, generate, plain, reported

if TYPE_CHECKING:
    from collections.abc import Iterator


# Streams.


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_a_stream_comes_through_byte_for_byte(size: int) -> None:
    body = [*events(3), b"data: \xff\x00 not even text\n\n", b"x" * 300_000, DONE]
    steps = stream(*body) if size > 7 else list(dripped(stream(*events(2), DONE), size))
    async with Replay(steps) as worker:
        with Router([worker.url]) as router:
            response = await ask(router)
    assert response.content == b"".join(body if size > 7 else [*events(2), DONE])


async def test_each_event_is_passed_on_before_the_next_one_is_there() -> None:
    seen = [asyncio.Event() for _ in range(3)]
    steps: list[Step] = [head()]
    for event, passed in zip(events(3), seen, strict=True):
        steps += [chunk(event), passed]
    async with Replay([*steps, LAST_CHUNK, "END"]) as worker, plain() as client:
        with Router([worker.url]) as router:
            async with client.stream("POST", f"{router.url}/generate", json=payload()) as response:
                taken = []
                async for piece in response.aiter_raw():
                    taken.append(piece)
                    seen[len(taken) - 1].set()
    assert taken == events(3)


async def test_the_headers_of_a_stream_come_before_its_first_event() -> None:
    headers_seen = asyncio.Event()
    async with Replay([head(), headers_seen, *WHOLE[1:]]) as worker, plain() as client:
        with Router([worker.url]) as router:
            async with client.stream("POST", f"{router.url}/generate", json=payload()) as response:
                headers_seen.set()
                assert await response.aread() == b"".join([*events(3), DONE])


async def test_a_stream_is_plain_event_stream_and_keeps_the_headers_that_are_not_of_the_connection() -> None:
    more: dict[str, Any] = {
        "x_worker": "7",
        "connection": "close",
        "keep_alive": "timeout=5",
        "date": "Thu, 01 Jan 1970 00:00:00 GMT",
    }
    async with Replay([head(**more), *WHOLE[1:]]) as worker:
        with Router([worker.url]) as router:
            headers = (await ask(router)).headers
    assert headers.get_list("content-type") == ["text/event-stream"]
    assert headers["x-worker"] == "7"
    assert not {"connection", "keep-alive"} & set(headers)
    (date,) = headers.get_list("date")
    assert "1970" not in date


async def test_a_refusal_of_a_stream_is_called_an_event_stream_too() -> None:
    async with Replay(answer_json({"error": {"message": "no"}}, status=400)) as worker:
        with Router([worker.url]) as router:
            response = await ask(router)
            async with Client(router.url) as client:
                with pytest.raises(EngineError, match="no") as caught:
                    await client.generate(PROMPT, {})
    assert (response.status_code, response.headers["content-type"]) == (400, "text/event-stream")
    assert response.json() == {"error": {"message": "no"}}
    assert caught.value.status == 400


async def test_who_reads_slowly_holds_up_the_worker_and_loses_nothing() -> None:
    piece = b"data: " + b"y" * 100_000 + b"\n\n"
    written = 0

    def steps(_request: Request) -> Iterator[Step]:
        nonlocal written
        yield head()
        for _ in range(600):
            yield chunk(piece)
            written += 1
        yield LAST_CHUNK

    async with Replay(steps) as worker, plain() as client:
        with Router([worker.url]) as router:
            async with client.stream("POST", f"{router.url}/generate", json=payload()) as response:
                raw = response.aiter_raw()
                taken = len(await anext(raw))
                before = -1
                while written != before:  # as much as all buffers on the way take
                    before = written
                    await asyncio.sleep(0.3)
                assert 0 < written < 500
                taken += sum([len(more) async for more in raw])
    assert taken == 600 * len(piece)


# Who leaves.


@pytest.mark.parametrize("steps", [[HANG], [head(), HANG], [head(), chunk(events(2)[0]), HANG]])
async def test_a_client_that_leaves_drops_the_connection_to_the_worker(steps: list[Step]) -> None:
    async with Replay(steps) as worker, plain() as client:
        with Router([worker.url]) as router:
            leaving = asyncio.create_task(client.post(f"{router.url}/generate", json=payload()))
            await until(lambda: worker.generates)
            await asyncio.sleep(0.02)
            assert reported(router, "load") == [1]
            leaving.cancel()
            await asyncio.wait_for(worker.generates[0].peer_closed.wait(), LIMIT)
            assert reported(router, "load") == [0]
            assert router.stats() == {worker.url: 1}, "no retry after the client disconnected"


async def test_a_client_that_leaves_an_answer_in_one_piece_drops_it_too() -> None:
    async with Replay([HANG]) as worker, plain() as client:
        with Router([worker.url]) as router:
            leaving = asyncio.create_task(client.post(f"{router.url}/generate", json=payload(stream=False)))
            await until(lambda: worker.generates)
            leaving.cancel()
            await asyncio.wait_for(worker.generates[0].peer_closed.wait(), LIMIT)


@pytest.mark.parametrize("end", [FIN, RST])
async def test_a_worker_that_breaks_off_breaks_off_the_stream_with_all_that_came(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken = asyncio.Event()
    steps: list[Step] = [head(), *map(chunk, events(2, finish=None)), taken, end]
    async with Replay(steps) as worker, plain() as client:
        with Router([worker.url]) as router:
            async with client.stream("POST", f"{router.url}/generate", json=payload()) as response:
                raw = response.aiter_raw()
                body = b""
                while body != b"".join(events(2, finish=None)):
                    body += await anext(raw)
                taken.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(raw)
            async with Client(router.url) as ours:
                with pytest.raises(StreamTruncated) as caught:
                    await ours.generate(PROMPT, {})
            assert reported(router, "load") == [0]
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids.tolist() == [1, 2]
    assert not caplog.records, "that is a worker's fault, not one of the router's"


async def test_a_worker_that_breaks_off_in_the_middle_of_a_chunk_breaks_off_the_stream() -> None:
    whole = chunk(events(1)[0])
    async with Replay([head(), whole, whole[:20], FIN]) as worker, plain() as client:
        with Router([worker.url]) as router, pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{router.url}/generate", json=payload())


@pytest.mark.parametrize(
    "steps", [[FIN], [RST], [b"HTTP/1.1 200 OK\r\ncont", FIN], [b"220 no web server\r\n\r\n", FIN]]
)
async def test_a_worker_that_breaks_off_before_its_headers_is_asked_again_and_then_given_up(steps: list[Step]) -> None:
    async with Replay(steps) as worker:
        with Router([worker.url], tries=3) as router:
            response = await ask(router)
            assert router.stats() == {worker.url: 3}
    assert len(worker.generates) == 3
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "call_upstream_request_error"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_status_that_may_pass_is_tried_again_before_the_client_sees_it(status: int) -> None:
    replies = [answer_json({"error": "busy"}, status=status), WHOLE]

    async with Replay(lambda _request: replies.pop(0)) as worker:
        with Router([worker.url]) as router:
            assert (await ask(router)).content == b"".join([*events(3), DONE])
    assert worker.generates[0].body == worker.generates[1].body


async def test_the_last_refusal_is_passed_on_when_the_tries_are_used_up() -> None:
    async with Replay(answer_json({"error": "busy"}, status=503)) as worker:
        with Router([worker.url], tries=2) as router:
            response = await ask(router)
            assert (response.status_code, response.json()) == (503, {"error": "busy"})
            assert router.stats() == {worker.url: 2}
            assert reported(router, "load") == [0]


# Requests.


def test_only_the_headers_that_routers_forward_reach_the_worker() -> None:
    passed = {"authorization": "Bearer k", "x-request-id": "1", "x-request-id-2": "2", "traceparent": "3"}
    lost = {"x-api-key": "k", "cookie": "c", "x-smg-target-worker": "0", "x-request-identity": "i"}
    with Loopback() as engine, Router([engine]) as router:
        httpx.post(
            f"{router.url}/generate", json=payload(), headers={**passed, **lost, "X-SMG-Routing-Key": "s"}, **PLAIN
        )
        (seen,) = engine.seen()
    sent = {"content-type": "application/json", "content-length": str(len(seen.body)), "connection": "close"}
    host = engine.url.removeprefix("http://")
    assert seen.headers == {**passed, **sent, "host": host, "x-smg-routing-key": "s"}


def test_a_request_is_written_anew_without_the_keys_that_are_dropped() -> None:
    with Loopback(num_layers=2, top_k=2, num_experts=8) as engine:
        body = payload(
            return_routed_experts=True, routed_experts_start_len=2, unknown={"routed_experts_start_len": [1]}
        )
        spaced = json.dumps(body, indent=4)
        headers = {"content-type": "application/json; charset=utf-8"}
        with Router([engine], drops=["routed_experts_start_len"]) as router:
            assert httpx.post(f"{router.url}/generate", content=spaced, headers=headers, **PLAIN).status_code == 200
        with Router([engine]) as router:
            assert httpx.post(f"{router.url}/generate", content=spaced, headers=headers, **PLAIN).status_code == 200
        without, whole = (seen.json() for seen in engine.seen())
        assert engine.seen()[0].body != spaced.encode()
    assert whole == body
    assert without == {key: value for key, value in body.items() if key != "routed_experts_start_len"}


@pytest.mark.parametrize("drops", [(), ("routed_experts_start_len",)])
async def test_behind_a_router_that_drops_the_start_of_the_experts_the_client_finds_the_same_rows(
    drops: tuple[str, ...],
) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    with Loopback(num_layers=2, top_k=2, num_experts=8) as engine, Router([engine], drops=drops) as router:
        async with Client(router.url, experts=Experts(2, 2)) as client:
            generation = await client.generate(PROMPT, params, experts_start=2)
            whole = await client.generate(PROMPT, params)
    assert generation.routed_experts is not None
    assert whole.routed_experts is not None
    assert generation.routed_experts.shape == (4, 2, 2)
    assert generation.routed_experts.tolist() == whole.routed_experts[2:].tolist()


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"stream": NaN}', "application/json", 400),
        (b"[]", "application/json", 422),
        (b"{}", "text/plain", 415),
    ],
)
def test_what_is_no_json_object_never_reaches_a_worker(body: bytes, kind: str, status: int) -> None:
    with Loopback() as engine, Router([engine]) as router:
        response = httpx.post(f"{router.url}/generate", content=body, headers={"content-type": kind}, **PLAIN)
        assert response.status_code == status
        assert (engine.seen(), router.stats()) == ([], {engine.url: 0})


def test_an_answer_in_one_piece_comes_as_the_worker_gave_it() -> None:
    with Loopback() as engine, Router([engine]) as router:
        response = generate(router, stream=False)
        assert response.headers["content-type"] == "application/json"
        assert response.json()["output_ids"] == undisturbed(engine).token_ids
        refused = generate(router, stream=False, params={"max_new_tokens": -1})
        direct = httpx.post(f"{engine.url}/generate", json=engine.seen()[-1].json(), **PLAIN)
        assert (refused.status_code, refused.content) == (400, direct.content)


async def test_an_answer_in_one_piece_that_breaks_off_is_an_error_of_the_router() -> None:
    async with Replay([head(length=100, kind="application/json"), b"{", FIN]) as worker:
        with Router([worker.url]) as router:
            response = await ask(router, json=payload(stream=False))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "read_response_body_failed")
