"""How responses of the loopback engine end: at stop strings, by several faults at once, and when their worker dies."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold.loopback import Faults, Loopback
from support.loopback_http import generate, post, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


def test_a_stop_string_is_seen_at_the_very_beginning_of_a_response() -> None:
    params: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1, "ignore_eos": True}
    begins_with_words = 0
    with Loopback() as engine:
        for seed in range(40):
            asked = {**params, "sampling_seed": seed}
            two = [engine.tokenizer.decode([token]) for token in engine.undisturbed([300], asked).token_ids[:2]]
            if all(word[0] == " " and word[1:].isalpha() for word in two):
                begins_with_words += 1
                stop = "".join(two).strip()
                reply = engine.undisturbed([300], {**asked, "stop": [stop]})
                assert (reply.finish, len(reply.token_ids)) == ({"type": "stop", "matched": stop}, 2)
    assert begins_with_words > 10


@pytest.mark.parametrize("other", [{"kind": "double_event", "after_events": 1}, {"kind": "split", "size": 9}])
def test_an_answer_that_one_fault_has_ended_is_not_gone_on_with_by_another(other: dict[str, Any]) -> None:
    rules = [other, {"kind": "done_without_finish", "after_events": 1}]
    with Loopback(faults=Faults(rules)) as engine:
        answer = generate(engine)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert set(engine.faults.done) == {rule["kind"] for rule in rules}


@pytest.mark.parametrize("kind", ["double_event", "drop_event", "error_event", "done_without_finish", "comments"])
def test_the_faults_of_streams_leave_a_status_alone(kind: str) -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "status", "body": {"a": 1}},
        {"kind": "drip"},
        {"kind": kind, "after_events": 0},
    ]
    with Loopback(faults=Faults(rules)) as engine:
        answer = generate(engine)
        assert (answer.status, answer.json) == (500, {"a": 1})
        assert set(engine.faults.done) == {"status"}


def test_slow_answers_end_without_a_word_when_their_worker_dies() -> None:
    rules = [
        {"kind": "drip", "size": 8, "pause": 0.0005},
        {"kind": "die", "requests": 9, "after_events": 1, "seconds": 0.02},
    ]
    with Loopback(incremental=True, stop_probability=0, faults=Faults(rules)) as engine, ThreadPoolExecutor(10) as pool:

        def ask(_: int) -> bool:
            try:
                return generate(engine, params={"max_new_tokens": 300}).status == 200
            except httpx.TransportError:
                return False

        assert not any(pool.map(ask, range(10)))
        until(lambda: _answers(engine) and engine.stats().open_connections == 0)


@pytest.mark.parametrize("kind", ["refuse", "die"])
def test_a_connection_that_comes_in_as_the_engine_stops_to_listen_is_not_forgotten(kind: str) -> None:
    """asyncio forgets one that was taken in and not handed over yet when its server closes: neither end ever learns."""
    with Loopback() as engine, socket.socket() as client:
        server, thread = engine._server, engine._thread
        assert server is not None
        assert thread is not None
        client.settimeout(10)

        def stop() -> None:
            loop = asyncio.get_running_loop()
            if kind == "refuse":
                loop.call_soon(server.stop_listening, 0.01)
            else:
                loop.call_soon(server.die, 0.01, "rst")

        def connect() -> None:
            url = httpx.URL(engine.url)
            client.connect((url.host, url.port))
            # In the next turn the server takes the connection in, in the one after that it is handed over.
            asyncio.get_running_loop().call_soon(stop)

        thread.call(connect)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        gc.collect()  # a leaked connection would be reported now, as an error
        until(lambda: _answers(engine))


def _answers(engine: Loopback) -> bool:
    try:
        return post(engine, "continue_generation").status_code == 200
    except httpx.TransportError:
        return False
