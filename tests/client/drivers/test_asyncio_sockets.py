"""AsyncioSockets: what is particular to transports of the event loop: TLS, rests, writing in parts, the loop's end."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import socket
import threading
from typing import TYPE_CHECKING, cast

import pytest

from streamfold.client.drivers import asyncio_sockets, tls
from streamfold.client.drivers.asyncio_sockets import AsyncioSockets
from streamfold.client.drivers.direct import DirectDriver
from streamfold.errors import StreamTruncated
from support.driving import Driven, asked, told
from support.paths import DATA
from support.peers import driving, read_head, server_tls, serving, trusting
from support.replay import DONE, END, LAST_CHUNK, RUNNING, WHOLE, Replay, Step, answer_json, chunk, events, head, until
from support.ways import ALL

if TYPE_CHECKING:
    from pathlib import Path

BOTH_LOOPS = True


def reader_of(sockets: AsyncioSockets) -> asyncio.ReadTransport:
    """What reads from the only socket: below TLS, if there is any."""
    (connection,) = sockets.connections
    held = {id(held): held for held in gc.get_referents(connection) if hasattr(held, "is_reading")}
    (reader,) = (transport for transport in held.values() if transport.get_extra_info("ssl_object") is None)
    return cast("asyncio.ReadTransport", reader)


both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


# Rests.


@both
async def test_several_events_are_read_at_once(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio_sockets, "_SHORTEST_REST", 1.0)
    monkeypatch.setattr(asyncio_sockets, "_LONGEST_REST", 1.0)
    second, others, sent = threading.Event(), threading.Event(), threading.Event()
    chunks = [chunk(payload) for payload in events(10)]

    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(head() + chunks[0])
        second.wait(30)
        peer.sendall(chunks[1])
        others.wait(30)
        for part in chunks[2:]:
            peer.sendall(part)
        peer.sendall(chunk(DONE) + LAST_CHUNK)
        sent.set()

    with serving(serve, tls=tls) as url:
        sockets = AsyncioSockets(trusting())
        driver = DirectDriver(sockets)
        driven = Driven(driver, asked(url))
        await until(lambda: driven.exchange.token_count == 1)
        second.set()
        await until(lambda: driven.exchange.token_count == 2)
        others.set()
        await asyncio.to_thread(sent.wait)
        assert driven.exchange.token_count == 2
        assert not reader_of(sockets).is_reading()
        assert await driven.ended() == ALL
        assert driven.exchange.take().token_ids.tolist() == list(range(1, 11))
        await driver.aclose()


@both
async def test_a_stream_whose_events_no_rest_would_gather_is_read_at_once(tls: bool) -> None:
    slow: list[Step] = [head()]
    for payload in events(4):
        slow += [chunk(payload), 0.15]
    async with Replay([*slow, LAST_CHUNK, END], tls=server_tls() if tls else None) as server:
        sockets = AsyncioSockets(trusting())
        driver = DirectDriver(sockets)
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        assert reader_of(sockets).is_reading()
        await until(lambda: driven.exchange.token_count == 3)
        assert reader_of(sockets).is_reading()
        assert await driven.ended() == ALL
        await driver.aclose()


@both
async def test_an_end_that_comes_during_a_rest_is_seen(tls: bool) -> None:
    gone = threading.Event()

    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"".join(step for step in RUNNING if isinstance(step, bytes)))
        gone.set()

    with serving(serve, tls=tls) as url:
        async with driving() as driver:
            driven = Driven(driver, asked(url))
            await driven.comes("first_token")
            gone.wait()
            assert await driven.ended() == ["connected", "head", "first_token", "error", "ended"]
            assert isinstance(driven.detail("error"), StreamTruncated)
            driven.exchange.end()


async def test_a_loop_that_was_blocked_has_lost_nothing() -> None:
    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"".join(step for step in WHOLE if isinstance(step, bytes)))

    with serving(serve) as url:
        async with driving() as driver:
            driven = Driven(driver, asked(url))
            await driven.comes("connected")
            threading.Event().wait(0.2)
            assert await driven.ended() == ALL


# Writing.


@both
async def test_a_large_body_goes_out_in_parts_while_others_are_served(tls: bool) -> None:
    body = bytes(range(256)) * (40 << 12)  # 40 MB
    reading, digest = threading.Event(), hashlib.sha256()

    def serve(peer: socket.socket) -> None:
        part = read_head(peer)
        digest.update(part)
        left = len(body) - len(part)
        reading.wait()
        while left:
            part = peer.recv(1 << 20)
            digest.update(part)
            left -= len(part)
        peer.sendall(b"".join(step for step in WHOLE if isinstance(step, bytes)))

    with serving(serve, tls=tls) as url:
        async with driving() as driver, Replay(routes={"/load": answer_json(1)}) as other:
            driven = Driven(driver, asked(url, body=body))
            await driven.comes("connected")
            assert await Driven(driver, told(other.url, "/load")).ended() == ["connected", "head", "ended"]
            reading.set()
            assert await driven.ended() == ALL
    assert digest.digest() == hashlib.sha256(body).digest()


@both
async def test_a_reply_that_comes_while_a_body_is_sent_is_read(tls: bool) -> None:
    done = threading.Event()

    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\n\r\nhuge")
        done.wait(30)  # without reading the rest

    with serving(serve, tls=tls) as url:
        async with driving() as driver:
            driven = Driven(driver, asked(url, body=bytes(20 << 20)))
            assert await driven.ended() == ["connected", "head", "ended"]
            assert driven.detail("head").status == 413
            assert driven.exchange.take_body() == b"huge"
            driven.exchange.end()
            done.set()


async def test_a_reply_is_read_although_the_server_closed_before_it_took_the_body() -> None:
    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\nconnection: close\r\n\r\nhuge")
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 20):
            pass

    with serving(serve) as url:
        async with driving() as driver:
            driven = Driven(driver, asked(url, body=bytes(4 << 20)))
            assert await driven.ended() == ["connected", "head", "ended"]
            assert driven.exchange.take_body() == b"huge"
            driven.exchange.end()


async def test_a_reply_is_read_although_the_server_reset_the_connection_behind_it() -> None:
    closed = threading.Event()

    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\nconnection: close\r\n\r\nhuge")
        peer.close()  # with unread bytes: a reset
        closed.set()

    with serving(serve) as url:
        async with driving() as driver:
            driven = Driven(driver, asked(url, body=bytes(4 << 20)))
            await driven.comes("connected")
            closed.wait()
            assert await driven.ended() == ["connected", "head", "ended"]
            assert driven.exchange.take_body() == b"huge"
            driven.exchange.end()


# Connections.


async def test_options_of_the_socket_are_set() -> None:
    async with Replay(RUNNING) as server:
        sockets = AsyncioSockets()
        driver = DirectDriver(sockets)
        await Driven(driver, asked(server.url)).comes("first_token")
        (connection,) = sockets.connections
        (sock,) = (held for held in gc.get_referents(connection) if isinstance(held, socket.socket))
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 30),
            (socket.TCP_KEEPINTVL, 10),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 30_000),
        ):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        await driver.aclose()


async def test_a_kept_connection_shows_its_end_before_the_loop_has_seen_it() -> None:
    closing, closed = threading.Event(), threading.Event()

    def serve(peer: socket.socket) -> None:
        read_head(peer)
        peer.sendall(b"".join(step for step in WHOLE if isinstance(step, bytes)))
        closing.wait(30)
        peer.close()
        closed.set()

    with serving(serve, times=2) as url:
        async with driving() as driver:
            assert await Driven(driver, asked(url)).ended() == ALL
            driven = Driven(driver, asked(url), holds=True)
            await driven.comes("connected")
            closing.set()
            closed.wait()
            driven.exchange.send()  # no turn of the loop in between
            await until(lambda: driven.kinds == ["connected", "connected"])
            driven.exchange.send()
            assert await driven.ended() == ["connected", *ALL], "it was sent on a new connection"


async def test_certificates_and_keys_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's own view of the handshake
    monkeypatch.setenv("SSL_CERT_FILE", str(DATA / "tls" / "cert.pem"))
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    tls.verifying.cache_clear()
    async with Replay(WHOLE, tls=server_tls()) as server:
        driver = DirectDriver(AsyncioSockets())
        driven = Driven(driver, asked(server.url))
        await driven.ended()
        assert "certificate" in driven.detail("failed").message
        await driver.aclose()
    assert not (tmp_path / "keys").exists()


async def test_a_name_other_than_the_certificates_is_refused() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with Replay(WHOLE, host="127.0.0.2", tls=server_tls()) as server, driving() as driver:
        driven = Driven(driver, asked(server.url))
        await driven.ended()
        assert "IP address mismatch" in driven.detail("failed").message
