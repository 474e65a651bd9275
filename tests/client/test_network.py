"""The network between client and engine: addresses, proxy variables, TLS, custom transports, forks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold import Client, EngineError, EngineTimeout, Parser, Retries, StreamTruncated, Timeouts
from support.paths import DATA
from support.replay import DONE, HANG, PROMPT, RST, Replay, Step, chunk, events, head, stream, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOTH_LOOPS = True

WHOLE = stream(*events(3), DONE)
RUNNING: list[Step] = [head(), *map(chunk, events(2, finish=None)), HANG]
TLS = DATA / "tls"


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


# Addresses (encode/httpx#1311, #3574).


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback")
@pytest.mark.parametrize("spelling", ["http://[::1]:{port}", "[::1]:{port}", "http://::1:{port}/"])
async def test_an_ipv6_host_is_reached_however_it_is_written(spelling: str) -> None:
    async with Replay(WHOLE, host="::1") as server:
        if server.port < 10_000 and "::1:" in spelling:
            pytest.skip("a short port could belong to the address")
        async with Client(spelling.format(port=server.port)) as client:
            assert (await client.generate(PROMPT, {})).finish_reason == "stop"
            assert await client.start(PROMPT, {}).abort() is not None


async def test_an_ipv4_address_in_ipv6_clothes_is_reached() -> None:
    async with Replay(WHOLE) as server, Client(f"http://[::ffff:127.0.0.1]:{server.port}") as client:
        assert (await client.generate(PROMPT, {})).finish_reason == "stop"


# Proxies (THUDM/slime#1714, encode/httpx#3574).


@pytest.mark.parametrize("spared", ["", "10.0.0.0/8", "fe80::/10", "::1", "*"])
async def test_proxies_of_the_shell_are_not_used(spared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replay() as proxy, Replay(RUNNING) as server:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        monkeypatch.setenv("NO_PROXY", spared)
        monkeypatch.setenv("no_proxy", spared)
        async with Client(server.url) as client:
            call = client.start(PROMPT, {})
            await until(lambda: call.token_count)
            await call.abort()
        assert server.aborts == [call.rid]
        assert proxy.accepted == 0


async def test_cookies_are_not_kept() -> None:
    # A load balancer's sticky cookie would send every later call to one engine.
    steps = stream(*events(3), DONE)
    steps[0] = head(set_cookie="worker=1")
    async with Replay(steps) as server, Client(server.url) as client:
        for _ in range(2):
            await client.generate(PROMPT, {})
        assert all("cookie" not in request.headers for request in server.generates)


# TLS.


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=TLS / "cert.pem")


async def test_tls_works_as_plain_http_does() -> None:
    async with Replay(WHOLE, tls=server_tls()) as server, Client(server.url, ssl_context=trusting()) as client:
        assert (await client.generate(PROMPT, {})).token_ids.tolist() == [1, 2, 3]
        server.routes["/generate"] = RUNNING
        call = client.start(PROMPT, {})
        await until(lambda: call.token_count == 2)
        assert (await call.abort()).token_ids.tolist() == [1, 2]
        assert server.aborts == [call.rid]
        server.routes["/generate"] = [*RUNNING[:-1], RST]
        with pytest.raises(StreamTruncated) as truncated:
            await client.generate(PROMPT, {})
        assert truncated.value.partial is not None
        assert truncated.value.partial.token_ids.tolist() == [1, 2]
    await until(lambda: server.open == 0)


async def test_an_abort_in_any_step_of_a_tls_handshake_leaves_nothing() -> None:
    async with Replay(RUNNING, tls=server_tls()) as server:
        for steps in range(0, 120, 3):
            async with Client(server.url, ssl_context=trusting()) as client:
                call = client.start(PROMPT, {})
                for _ in range(steps):
                    await asyncio.sleep(0)
                assert await call.abort() is not None
            arrived = call.rid in [request.json["rid"] for request in server.generates]
            assert arrived <= (call.rid in server.aborts)
        await until(lambda: server.open == 0)
        assert server.generates


async def test_an_engine_with_an_unknown_certificate_is_not_spoken_to() -> None:
    async with Replay(WHOLE, tls=server_tls()) as server, Client(server.url) as client:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's own view of the handshake
        with pytest.raises(EngineError, match="certificate") as refused:
            await client.generate(PROMPT, {})
        assert refused.value.status is None
        assert not refused.value.retryable, "it will not be known later either"
        assert server.requests == []


# Transports of one's own.


class Trickle(httpx.AsyncByteStream):
    """A body that gives two events and then nothing, or all of them."""

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.closed = False
        self.cancels_left = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for payload in events(3 if self.ends else 2, finish="stop" if self.ends else None):
            yield payload
            await asyncio.sleep(0)
        if not self.ends:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed = True
        if sys.version_info >= (3, 11) and (task := asyncio.current_task()):
            self.cancels_left = task.cancelling()


class Blind(httpx.AsyncBaseTransport):
    """A transport that shows no network stream."""

    def __init__(self, body: Trickle, *, answers: bool = True) -> None:
        self.body = body
        self.answers = answers
        self.paths: list[str] = []
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path != "/generate":
            return httpx.Response(404 if request.method == "GET" else 200, content=b"")
        if not self.answers:
            await asyncio.Event().wait()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=self.body)

    async def aclose(self) -> None:
        self.closed = True


async def test_any_httpx_transport_carries_all_requests_and_is_closed_with_the_client() -> None:
    transport = Blind(Trickle(ends=True))
    async with Client("http://engine", transport=transport) as client:
        generation = await client.generate(PROMPT, {})
        assert generation.token_ids.tolist() == [1, 2, 3]
    assert transport.paths == ["/generate"]
    assert transport.body.closed
    assert transport.closed


@pytest.mark.parametrize("answers", [True, False], ids=["mid-stream", "before headers"])
@pytest.mark.parametrize("how", ["abort", "cancel", "timeout"])
async def test_a_call_on_a_transport_that_shows_no_stream_is_ended_all_the_same(how: str, *, answers: bool) -> None:
    before = asyncio.all_tasks()
    transport = Blind(Trickle(ends=False), answers=answers)
    timeouts = Timeouts(first_token=0.2, next_token=0.2) if how == "timeout" else Timeouts()
    once = Retries(tries=1)
    async with Client("http://engine", transport=transport, timeouts=timeouts, retries=once) as client:
        call = client.start(PROMPT, {})
        await until(lambda: transport.paths and call.token_count == 2 * answers)
        if how == "abort":
            await asyncio.wait_for(call.abort(), 20)
        elif how == "cancel":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.05)
        else:
            with pytest.raises(EngineTimeout):
                await asyncio.wait_for(call, 20)
        generation = await call.abort()
        assert generation.token_ids.tolist() == [1, 2][: 2 * answers]
        assert "/abort_request" in transport.paths
        if answers:
            assert transport.body.closed
            assert transport.body.cancels_left == 0, "it would spoil an asyncio.timeout() in the transport"
    assert asyncio.all_tasks() == before


async def test_a_connection_that_other_requests_share_is_not_closed_under_them() -> None:
    class Shared(httpx.AsyncBaseTransport):
        """Reports its steps as httpcore does with HTTP/2."""

        def __init__(self) -> None:
            self.network = Trickle(ends=False)
            self.body = Trickle(ends=False)

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            trace = request.extensions["trace"]
            await trace("connection.connect_tcp.complete", {"return_value": self.network})
            await trace("http2.send_request_headers.started", {"request": request})
            if request.url.path != "/generate":
                return httpx.Response(404)
            extensions = {"http_version": b"HTTP/2", "network_stream": self.network}
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=headers, stream=self.body, extensions=extensions)

    transport = Shared()
    async with Client("http://engine", transport=transport) as client:
        call = client.start(PROMPT, {})
        await until(lambda: call.token_count == 2)
        assert (await asyncio.wait_for(call.abort(), 20)).token_ids.tolist() == [1, 2]
        assert transport.body.closed
        assert not transport.network.closed


async def test_a_transport_that_keeps_connections_is_aborted_before_the_headers_too() -> None:
    async with Replay(WHOLE) as server:
        transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=5))
        async with Client(server.url, transport=transport) as client:
            await client.generate(PROMPT, {})
            server.routes["/generate"] = [HANG]
            call = client.start(PROMPT, {})
            await until(lambda: len(server.generates) == 2)
            assert server.accepted == 1, "the connection is not reused: this tests nothing"
            generation = await asyncio.wait_for(call.abort(), 20)
            assert len(generation.token_ids) == 0
            await asyncio.wait_for(server.generates[1].peer_closed.wait(), 20)


@pytest.mark.parametrize("error", [httpx.ReadError("cut"), ssl.SSLError("bad record"), OSError("cut")], ids=repr)
async def test_a_connection_that_breaks_is_a_truncated_stream_however_the_transport_says_it(error: Exception) -> None:
    class Breaks(Trickle):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield events(2, finish=None)[0]
            raise error

    transport = Blind(Breaks(ends=False))
    async with Client("http://engine", transport=transport) as client:
        with pytest.raises(StreamTruncated) as truncated:
            await client.generate(PROMPT, {})
    assert truncated.value.__cause__ is error
    assert truncated.value.partial is not None
    assert truncated.value.partial.token_ids.tolist() == [1]


class Faulty(Blind):
    """A transport with a fault of its own, before the headers or after two events."""

    def __init__(self, *, answers: bool) -> None:
        super().__init__(FaultyBody(ends=False), answers=answers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate" and not self.answers:
            self.paths.append(request.url.path)
            raise ZeroDivisionError("mine")
        return await super().handle_async_request(request)


class FaultyBody(Trickle):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        for payload in events(2, finish=None):
            yield payload
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize("answers", [True, False], ids=["mid-stream", "before headers"])
async def test_a_fault_of_a_transport_is_an_engine_error_that_names_it_and_is_not_tried_again(*, answers: bool) -> None:
    transport = Faulty(answers=answers)
    async with Client("http://engine", transport=transport) as client:
        call = client.start(PROMPT, {})
        for _ in range(2):
            with pytest.raises(EngineError, match=r"ZeroDivisionError\('mine'\)") as failed:
                await call
            assert isinstance(failed.value.__cause__, ZeroDivisionError)
            assert not failed.value.retryable
        assert (await call.abort()).token_ids.tolist() == [1, 2][: 2 * answers]
        assert client.running == []
    assert transport.paths.count("/generate") == 1


# Processes (delta-io/delta-rs#2744, huggingface/tokenizers#187).

CLIENT: list[Client] = []  # made before the fork, and used after it
PARSER: list[Parser] = []


def in_child(url: str) -> None:
    """What a child process does with the package: exits with 0 if all is right."""
    client = CLIENT[0] if CLIENT else Client(url)
    parser = PARSER[0] if PARSER else Parser("sglang")
    parser.feed(b"".join(events(3)))
    parser.close()
    assert parser.take().token_ids.tolist()[-3:] == [1, 2, 3]

    async def use() -> None:
        async with client:
            assert (await client.generate(PROMPT, {})).token_ids.tolist() == [1, 2, 3]

    asyncio.run(use())


def processes(method: str) -> Any:
    return multiprocessing.get_context(method)  # typeshed's base class of them has no Process


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # what this test is about
async def test_a_child_process_can_use_what_was_made_or_used_before_it_began(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    async with Replay(WHOLE) as server, Client(server.url) as used:  # in use while the child is made
        await used.generate(PROMPT, {})
        CLIENT[:], PARSER[:] = [Client(server.url)], [Parser("sglang")]
        try:
            child = processes(method).Process(target=in_child, args=(server.url,))
            child.start()
        finally:
            CLIENT.clear()
            PARSER.clear()
        try:
            await asyncio.to_thread(child.join, 20)
            assert child.exitcode == 0, "it hangs" if child.exitcode is None else "it failed"
        finally:
            child.kill()
            child.join()
            child.close()
        assert (await used.generate(PROMPT, {})).finish_reason == "stop"


async def test_a_client_that_was_used_before_a_fork_says_so_in_the_child() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    async with Replay(WHOLE) as server, Client(server.url) as client:
        await client.generate(PROMPT, {})
        CLIENT[:] = [client]
        try:
            child = processes("fork").Process(target=refused_in_child)
            child.start()
        finally:
            CLIENT.clear()
        await asyncio.to_thread(child.join, 20)
        assert child.exitcode == 0
        child.close()


def refused_in_child() -> None:
    async def use() -> None:
        with pytest.raises(RuntimeError, match="one client per loop"):
            await CLIENT[0].generate(PROMPT, {})

    asyncio.run(use())
