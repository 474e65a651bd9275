"""Faults in place of a response and inside the engine: what a plain socket sees of each kind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback import Faults, Loopback
from support.loopback_http import PROMPT, generate, load, opened, post, undisturbed, until
from support.raw_http import ask, connected, listen, send

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG: dict[str, Any] = {"params": {"max_new_tokens": 20_000}}


@pytest.fixture
def engine() -> Iterator[Loopback]:
    with Loopback(incremental=True, token_rate=200) as running:
        yield running
        running.faults = None
        until(lambda: load(running) == (0, 0))


def told_of(engine: Loopback, kind: str, times: int = 1, **options: Any) -> None:
    """Have a kind of fault befall the next requests."""
    engine.faults = Faults([{"kind": kind, "times": times, **options}])


def refuses(engine: Loopback) -> bool:
    try:
        with connected(engine):
            return False
    except ConnectionError:  # reset, if the worker dies while the connection is made
        return True


# Instead of an answer


@pytest.mark.parametrize(
    ("options", "kind", "body"),
    [
        (
            {"status": 429, "headers": {"Retry-After": "3"}},
            "application/json",
            b'{"object":"error","message":"The engine was told to fail.","type":"429","param":null,"code":429}',
        ),
        ({"status": 404, "body": {"detail": "Not Found"}}, "application/json", b'{"detail":"Not Found"}'),
        ({"status": 502, "body": "bad gateway\n"}, "text/plain; charset=utf-8", b"bad gateway\n"),
        ({"body": "<p>", "headers": {"Content-Type": "text/html", "X-Of": "proxy"}}, "text/html", b"<p>"),
        ({"status": 503, "body": ""}, "text/plain; charset=utf-8", b""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_status_comes_with_its_headers_and_body(
    engine: Loopback, options: dict[str, Any], kind: str, body: bytes, stream: bool
) -> None:
    told_of(engine, "status", **options)
    answer = generate(engine, stream=stream)
    assert (answer.status, answer.headers["content-type"], answer.body) == (options.get("status", 500), kind, body)
    assert {name: answer.headers[name] for name in options.get("headers", {})} == options.get("headers", {})
    assert generate(engine).ids == undisturbed(engine).token_ids
    assert (engine.faults.done, engine.stats().requests) == ({"status": 1}, 1)


def test_a_status_has_the_shape_of_the_rust_frontend_where_that_answers() -> None:
    with Loopback(frontend="rust", faults=Faults([{"kind": "status", "status": 503}])) as engine:
        assert generate(engine).json == {"error": {"message": "The engine was told to fail.", "code": 503}}


def test_the_connection_stays_after_a_status(engine: Loopback) -> None:
    told_of(engine, "status")
    with connected(engine) as sock:
        send(sock)
        assert (listen(sock).status, engine.stats().connections) == (500, 1)
        send(sock)
        assert (listen(sock).end, engine.stats().connections) == ("whole", 1)


@pytest.mark.parametrize("options", [{"status": 204}, {"status": 304, "body": "nothing"}, {"status": [204, 204]}])
def test_a_status_that_has_no_body_comes_without_one_and_the_connection_stays(
    engine: Loopback, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    told_of(engine, "status", headers={"ETag": "x"}, **options)
    with connected(engine) as sock:
        send(sock)
        heard = sock.recv(1 << 16)
        assert heard.endswith(b"\r\n\r\n")
        assert b"etag: x" in heard
        assert b"content-length" not in heard
        send(sock)
        assert (listen(sock).end, engine.stats().connections) == ("whole", 1)
    assert not caplog.records


@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_ends_before_a_byte(engine: Loopback, how: str, stream: bool) -> None:
    told_of(engine, "drop", how=how)
    heard = ask(engine, stream=stream)
    assert (heard.raw, heard.end) == (b"", how)
    assert (engine.faults.done["drop"], engine.stats().requests) == (1, 0)
    assert ask(engine).end == "whole"


def test_while_connects_are_refused_what_runs_goes_on(engine: Loopback) -> None:
    with opened(engine, params={"max_new_tokens": 100}) as running:
        running.frame()
        told_of(engine, "refuse", seconds=0.6, how="fin")
        began = time.monotonic()
        heard = ask(engine)
        assert (heard.raw, heard.end) == (b"", "fin")
        assert refuses(engine)
        until(lambda: not refuses(engine))
        assert time.monotonic() - began >= 0.6
        assert running.to_end().ids == undisturbed(engine, params={"max_new_tokens": 100}).token_ids
    assert engine.faults.done == {"refuse": 1}
    assert ask(engine).end == "whole"


@pytest.mark.parametrize("how", ["rst", "fin"])
def test_a_worker_that_dies_takes_everything_with_it_and_returns_empty(how: str) -> None:
    script = Faults([{"kind": "die", "rid": "last", "after_events": 30, "seconds": 0.6, "how": how}])
    with Loopback(
        incremental=True, token_rate=100, max_running_requests=2, weight_version="7", leave_delay=None, faults=script
    ) as engine:
        post(engine, "update_weight_version", {"new_version": "8", "abort_all_requests": False})
        with ThreadPoolExecutor(3) as pool, connected(engine) as idle:
            running, last = (pool.submit(ask, engine, rid=rid, **LONG) for rid in ("other", "last"))
            until(lambda: load(engine) == (2, 0))
            queued = pool.submit(ask, engine, rid="queued", **LONG)
            until(lambda: load(engine) == (2, 1))
            heard = last.result()
            assert (heard.end, heard.counts) == (how, list(range(1, 31)))
            assert heard.frames[0]["meta_info"]["weight_version"] == "8"
            assert running.result().end == queued.result().end == listen(idle).end == how
        assert refuses(engine)
        assert (engine.stats().running, engine.stats().waiting, engine.faults.done) == (0, 0, {"die": 1})
        until(lambda: not refuses(engine))
        heard = ask(engine)
        assert (heard.end, heard.frames[0]["meta_info"]["weight_version"]) == ("whole", "7")


@pytest.mark.parametrize(("kind", "seconds"), [("die", None), ("refuse", 1000)])
def test_an_engine_whose_worker_is_gone_still_ends_well(kind: str, seconds: float | None) -> None:
    with Loopback(faults=Faults([{"kind": kind, "seconds": seconds}])) as engine:
        assert ask(engine).raw == b""
        assert refuses(engine)


def test_who_refuses_connects_last_says_for_how_long(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": "refuse", "rid": rid, "seconds": s} for rid, s in (("a", 0.1), ("b", 0.4))])
    with connected(engine) as one, connected(engine) as two:
        began = time.monotonic()
        for sock, rid in ((one, "a"), (two, "b")):
            send(sock, rid=rid)
            assert listen(sock).end == "rst"
    until(lambda: not refuses(engine))
    assert time.monotonic() - began >= 0.4
    assert engine.faults.done == {"refuse": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_is_silence_before_the_headers_until_it_is_over(engine: Loopback, stream: bool) -> None:
    told_of(engine, "no_answer")
    heard = ask(engine, stream=stream, seconds=0.1)
    assert (heard.raw, heard.end) == (b"", "silence")
    told_of(engine, "no_answer", seconds=0.6)
    with connected(engine, seconds=0.1) as sock:
        send(sock, stream=stream)
        assert listen(sock).end == "silence"
        sock.settimeout(5)
        assert listen(sock).end == "whole"
    assert engine.faults.done == {"no_answer": 1}


# Inside the engine


def test_a_full_queue_is_an_event_in_a_stream_and_a_status_elsewhere(engine: Loopback) -> None:
    told_of(engine, "queue_full", times=2)
    answer = generate(engine)
    assert answer.status == 200
    assert answer.finish == {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    assert answer.ids == []
    assert generate(engine, stream=False).status == 503
    assert generate(engine).ids == undisturbed(engine).token_ids
    with Loopback(frontend="rust", faults=Faults([{"kind": "queue_full"}])) as rust:
        assert generate(rust).last["error"]["code"] == 503


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_abort_that_nobody_asked_for_comes_at_its_token_and_what_is_kept_resumes(
    incremental: bool, tokens: int
) -> None:
    with Loopback(incremental=incremental, faults=Faults([{"kind": "abort", "after_tokens": tokens}])) as engine:
        answer = generate(engine)
        assert answer.finish["message"] == ("Aborted" if tokens else "Abort in waiting queue")
        assert len(answer.ids) == (tokens + 1 if tokens else 0)
        assert engine.stats().aborts == ()
        engine.faults = None
        rest = generate(engine, input_ids=PROMPT + answer.ids, params={"max_new_tokens": 20 - len(answer.ids)})
        assert answer.ids + rest.ids == undisturbed(engine).token_ids


def test_an_abort_beyond_the_end_never_happens(engine: Loopback) -> None:
    told_of(engine, "abort", after_tokens=20)
    assert generate(engine).finish["type"] == "length"
    assert engine.faults.done == {}


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.5.23"])
def test_an_abort_after_a_retraction_repeats_everything(version: str) -> None:
    script = Faults([{"kind": "retract_abort", "after_tokens": 4}])
    with Loopback(incremental=True, version=version, token_rate=200, faults=script) as engine:
        answer = generate(engine)
        wanted = undisturbed(engine, params={"max_new_tokens": 4})
        assert answer.finish == {"type": "abort", "message": "Abort in waiting queue"}
        assert [pair[1] for pair in answer.last["meta_info"]["output_token_logprobs"]] == wanted.token_ids
        assert answer.last["text"] == "".join(wanted.pieces or [])
        assert answer.read().token_ids == wanted.token_ids
        assert load(engine) == (0, 0)


def test_the_weight_version_changes_in_the_middle_for_all_that_run(engine: Loopback) -> None:
    told_of(engine, "version", rid="this", after_tokens=5)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, engine, rid="other", params={"max_new_tokens": 60})
        until(lambda: load(engine) == (1, 0))
        (old, new) = generate(engine, rid="this").read().version_spans
        assert (old, new) == (("default", 0, 5), ("1", 5, 20))
        assert [version for version, _, _ in other.result().read().version_spans] == ["default", "1"]
    assert engine.faults.done == {"version": 1}
    told_of(engine, "version", times=2, after_tokens=0)
    assert [generate(engine).read().version_spans for _ in range(2)] == [[("2", 0, 20)], [("3", 0, 20)]]
    told_of(engine, "version", after_tokens=19, version="v9")
    assert generate(engine).read().version_spans == [("3", 0, 19), ("v9", 19, 20)]


def test_a_late_request_is_parked_until_it_is_aborted_or_all_go_on(engine: Loopback) -> None:
    told_of(engine, "park", times=9, after_abort_all=1000)
    assert ask(engine, params={"max_new_tokens": 2}).end == "whole", "nothing was aborted yet"
    post(engine, "abort_request", {"abort_all": True})
    with opened(engine, rid="a") as one, opened(engine, rid="b") as two, opened(engine, rid="c") as three:
        until(lambda: load(engine) == (0, 3))
        post(engine, "abort_request", {"rid": "b"})
        assert two.to_end().finish == {"type": "abort", "message": "Abort in waiting queue"}
        post(engine, "continue_generation")
        for stream in (one, three):
            assert stream.to_end().ids == undisturbed(engine).token_ids
    with opened(engine) as late:
        until(lambda: load(engine) == (0, 1))
        post(engine, "abort_request", {"abort_all": True})
        assert late.to_end().ids == []
    assert engine.faults.done == {"park": 4}


def test_a_parked_request_goes_on_by_itself_after_its_time_and_holds_nobody_up(engine: Loopback) -> None:
    told_of(engine, "park", seconds=1)
    with opened(engine) as parked:
        until(lambda: load(engine) == (0, 1))
        assert ask(engine, params={"max_new_tokens": 2}).end == "whole", "who comes later is not held up"
        assert load(engine) == (0, 1)
        assert parked.to_end().ids == undisturbed(engine).token_ids
