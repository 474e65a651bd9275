"""Faults in a stream: what a plain socket sees of each kind."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold.loopback import Faults, Loopback
from support.loopback_http import LIMIT, PLAIN, PROMPT, generate, payload, undisturbed, until
from support.raw_http import LAST_CHUNK, Heard, ask, connected, send

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = b"data: [DONE]"
EIGHT: dict[str, Any] = {"params": {"max_new_tokens": 8}}


@pytest.fixture(params=[True, False], ids=["incremental", "cumulative"])
def engine(request: pytest.FixtureRequest) -> Iterator[Loopback]:
    """An engine that is slow enough for an event of each token. No request is left in it."""
    with Loopback(incremental=request.param, token_rate=200) as running:
        yield running
        until(lambda: running.stats().running + running.stats().waiting == 0)


def disturbed(engine: Loopback, kind: str, *, seconds: float = LIMIT, body: Any = EIGHT, **options: Any) -> Heard:
    """What comes of one request under one fault, which must happen."""
    engine.faults = Faults([{"kind": kind, **options}])
    heard = ask(engine, seconds=seconds, **body)
    assert engine.faults.done == {kind: 1}
    return heard


def whole(engine: Loopback) -> list[bytes]:
    """The body of an undisturbed stream, event by event, without what tells of time."""
    engine.faults = None
    return timeless(ask(engine, rid="r", **EIGHT))


def timeless(heard: Heard) -> list[bytes]:
    found = []
    for event in heard.events:
        if event.startswith(b"data: {"):
            frame = json.loads(event[6:])
            for key in ("e2e_latency", "response_sent_to_client_ts", "id"):
                frame.get("meta_info", {}).pop(key, None)
            found.append(json.dumps(frame).encode())
        else:
            found.append(event)
    return found


# How the connection ends


@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest.mark.parametrize("count", [0, 1, 700, 1000])
def test_a_cut_lets_so_many_bytes_of_the_body_through_and_breaks_the_chunk_off(
    engine: Loopback, how: str, count: int
) -> None:
    heard = disturbed(engine, "cut", how=how, after_bytes=count)
    assert (heard.status, heard.end, len(heard.body)) == (200, how, count)
    assert whole(engine)[: len(heard.events)] == timeless(heard)
    assert not heard.raw.endswith(b"\n\n\r\n") or count == 0


@pytest.mark.parametrize("how", ["rst", "fin"])
def test_a_cut_may_come_after_so_many_events_or_where_the_last_chunk_would_be(engine: Loopback, how: str) -> None:
    heard = disturbed(engine, "cut", how=how, after_events=3)
    assert (heard.end, heard.counts, heard.body[-2:]) == (how, [1, 2, 3], b"\n\n")
    heard = disturbed(engine, "cut", how=how)
    assert (heard.end, timeless(heard)) == (how, whole(engine))
    assert heard.events[-1] == DONE
    assert not heard.raw.endswith(LAST_CHUNK)


def test_a_stream_that_is_over_before_its_cut_is_left_alone(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": "cut", "after_bytes": 1_000_000}, {"kind": "cut", "after_events": 50}])
    assert ask(engine, **EIGHT).end == "whole"
    assert engine.faults.done == {}


def test_what_is_not_streamed_is_cut_too(engine: Loopback) -> None:
    heard = disturbed(engine, "cut", body={"stream": False}, after_bytes=100)
    head, _, body = heard.raw.partition(b"\r\n\r\n")
    assert (heard.end, len(body)) == ("rst", 100)
    assert b"content-length" in head


def test_a_cut_after_all_of_the_body_takes_the_place_of_the_last_chunk(engine: Loopback) -> None:
    with Loopback(skip_tokenizer_init=True, faults=Faults([{"kind": "error_event"}, {"kind": "cut"}])) as other:
        size = len(ask(other).body)
        other.faults = Faults([{"kind": "error_event"}, {"kind": "cut", "how": "fin", "after_bytes": size}])
        heard = ask(other)
        assert (heard.end, len(heard.body), heard.events[-1]) == ("fin", size, DONE)


# When the bytes come


def test_silence_begins_after_so_many_events_and_may_end(engine: Loopback) -> None:
    heard = disturbed(engine, "silence", seconds=0.4)
    assert (heard.status, heard.end, heard.body) == (200, "silence", b"")
    heard = disturbed(engine, "silence", seconds=0.4, after_events=3)
    assert (heard.end, heard.counts) == ("silence", [1, 2, 3])
    engine.faults = Faults([{"kind": "silence", "after_events": 2, "seconds": 0.3}])
    began = time.monotonic()
    heard = ask(engine, **EIGHT)
    assert time.monotonic() - began >= 0.3
    assert (heard.end, heard.counts[-1]) == ("whole", 8)
    assert heard.events[-1] == DONE


def test_comments_only_keep_the_bytes_coming_and_nothing_else(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": "comments", "after_events": 2, "pause": 0.01, "seconds": 0.2}])
    heard = ask(engine, **EIGHT)
    assert heard.end == "whole"
    kinds = [event.startswith(b":") for event in heard.events]
    first, last = kinds.index(True), len(kinds) - 1 - kinds[::-1].index(True)
    assert first == 2
    assert all(kinds[first : last + 1])
    engine.faults = Faults([{"kind": "comments", "pause": 0.01}])
    with connected(engine) as sock:
        send(sock)
        raw = b""
        while raw.count(b": keep-alive\n\n") < 20:
            raw += sock.recv(1 << 16)
        assert b"data:" not in raw


def test_a_drip_comes_a_few_bytes_at_a_time_and_cuts_chunk_sizes_too(engine: Loopback) -> None:
    heard = disturbed(engine, "drip", size=3, pause=0.0005, body={"params": {"max_new_tokens": 2}})
    assert heard.end == "whole"
    assert len(heard.reads) > len(heard.body) / 9, "some reads may find several writes"
    assert timeless(heard) == timeless(ask(engine, params={"max_new_tokens": 2}))
    heard = disturbed(engine, "drip", size=64, pause=0.0, body={"stream": False})
    assert (heard.end, heard.status) == ("whole", 200)


def test_the_connection_stays_after_a_drip_of_what_is_not_streamed(
    engine: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    engine.faults = Faults([{"kind": "drip", "size": 7, "pause": 0.0, "times": 1}])
    with httpx.Client(trust_env=False) as client:
        for _ in range(2):
            answer = client.post(f"{engine.url}/generate", json=payload(stream=False, **EIGHT))
            assert answer.json()["meta_info"]["completion_tokens"] == 8
    assert engine.faults.done == {"drip": 1}
    assert engine.stats().connections == 1
    assert [record for record in caplog.records if record.name == "streamfold.loopback"] == []


# How the bytes are chunked


@pytest.mark.parametrize("size", [1, [1, 40], 100_000])
def test_split_events_come_in_chunks_of_their_own_size(engine: Loopback, size: Any) -> None:
    heard = disturbed(engine, "split", size=size)
    sizes = [len(chunk) for chunk in heard.chunks]
    most = size[1] if isinstance(size, list) else size
    assert max(sizes) <= most
    assert (len(set(sizes)) > 10) == isinstance(size, list)
    assert timeless(heard) == whole(engine)
    assert len(disturbed(engine, "split", size=100_000).chunks) == 8 + 1


def test_split_pieces_are_the_same_in_every_run(engine: Loopback) -> None:
    def first_sizes() -> list[int]:
        heard = disturbed(engine, "split", size=[1, 40], body={"params": {"max_new_tokens": 1}, "rid": "r" * 32})
        return [len(chunk) for chunk in heard.chunks][:10]

    assert first_sizes() == first_sizes()


def test_glued_events_come_in_one_chunk(engine: Loopback) -> None:
    heard = disturbed(engine, "glue", size=4)
    assert [chunk.count(b"\n\n") for chunk in heard.chunks] == [4, 4, 1]
    assert timeless(heard) == whole(engine)
    heard = disturbed(engine, "glue", size=100)
    assert len(heard.chunks) == 1


@pytest.mark.parametrize("kind", ["status", "queue_full", "split"])
def test_a_client_that_leaves_before_its_answer_is_no_error_of_the_engine(
    engine: Loopback, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine.faults = Faults([{"kind": kind}])
    for i in range(200):
        with connected(engine) as sock:
            send(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", i % 2, 0))
    until(lambda: engine.stats().open_connections == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_a_client_that_leaves_between_two_pieces_is_not_written_to_any_more(
    engine: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    engine.faults = Faults([{"kind": "split"}])
    for _ in range(12):
        with connected(engine) as sock:
            send(sock)
            sock.recv(1 << 10)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
    until(lambda: engine.stats().open_connections == 0)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# What the events say


@pytest.mark.parametrize("events", [0, 3])
def test_an_error_event_has_the_shape_of_the_release_and_done_behind_it(engine: Loopback, events: int) -> None:
    heard = disturbed(engine, "error_event", after_events=events, message="out of order", code=507)
    assert heard.end == "whole"
    assert len(heard.events) == events + 2
    error = {"message": "out of order", "type": "invalid_request_error", "code": 507, "retryable": False}
    assert (heard.frames[-1], heard.events[-1]) == ({"error": error}, DONE)
    with Loopback(version="0.5.12", faults=Faults([{"kind": "error_event", "done": False}])) as old:
        heard = ask(old)
        assert (heard.end, heard.frames) == ("whole", [{"error": {"message": "The engine was told to fail."}}])
        assert len(heard.events) == 1
    heard = disturbed(engine, "error_event", payload={"object": "error", "message": "x", "code": 503})
    assert heard.frames == [{"object": "error", "message": "x", "code": 503}]


def test_done_may_come_without_a_finish(engine: Loopback) -> None:
    heard = disturbed(engine, "done_without_finish")
    assert timeless(heard) == [*whole(engine)[:7], DONE]
    heard = disturbed(engine, "done_without_finish", after_events=2)
    assert timeless(heard) == [*whole(engine)[:2], DONE]
    assert heard.end == "whole"


def test_an_event_comes_twice_or_not_at_all(engine: Loopback) -> None:
    wanted = whole(engine)
    assert timeless(disturbed(engine, "double_event")) == [*wanted[:2], *wanted[1:]]
    assert timeless(disturbed(engine, "double_event", after_events=7)) == [*wanted[:8], *wanted[7:]]
    assert timeless(disturbed(engine, "drop_event")) == [*wanted[:1], *wanted[2:]]
    assert timeless(disturbed(engine, "drop_event", after_events=7)) == [*wanted[:7], DONE]
    engine.faults = Faults([{"kind": "drop_event", "after_events": 8}, {"kind": "double_event", "after_events": 8}])
    assert timeless(ask(engine, **EIGHT)) == wanted, "[DONE] is no event of the model's"
    assert engine.faults.done == {}


def test_a_shrunk_event_goes_behind_what_was_told_and_says_so() -> None:
    with Loopback(token_rate=200) as engine:
        heard = disturbed(engine, "shrink", after_events=5, tokens=2, body=EIGHT | {"top_logprobs_num": 1})
        assert heard.counts == [1, 2, 3, 4, 5, 3, 7, 8]
        shrunk, meta = heard.frames[5], heard.frames[5]["meta_info"]
        assert len(shrunk["output_ids"]) == len(meta["output_token_logprobs"]) == 3
        assert len(meta["output_top_logprobs"]) == meta["output_token_logprobs_length"] == 3
        assert heard.frames[-1]["output_ids"] == undisturbed(engine, **EIGHT).token_ids
        assert disturbed(engine, "shrink", tokens=9).counts[:3] == [1, 0, 3]


@pytest.mark.parametrize("what", ["id", "logprob"])
def test_a_rewritten_event_changes_what_was_told_at_one_place(what: str) -> None:
    with Loopback(token_rate=200) as engine:
        frames = disturbed(engine, "rewrite", after_events=4, position=2, what=what).frames
        before, changed, after = ([list(pair) for pair in f["meta_info"]["output_token_logprobs"]] for f in frames[3:6])
        assert before == after[:4]
        assert [i for i, pair in enumerate(changed) if pair != after[i]] == [2]
        assert (changed[2][0] == after[2][0], changed[2][1] == after[2][1]) == (what == "id", what == "logprob")
        assert frames[4]["output_ids"][2] == changed[2][1]
        engine.faults = Faults([{"kind": "rewrite", "after_events": 1, "position": 5, "what": what}])
        assert ask(engine, **EIGHT).end == "whole"
        assert engine.faults.done == {}, "no token was sent at that position"
        frames = disturbed(engine, "rewrite", body=EIGHT | {"return_logprob": False}).frames
        assert frames[1]["output_ids"][0] ^ 1 == frames[2]["output_ids"][0]


def test_a_fault_in_a_stream_leaves_other_answers_alone(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": kind} for kind in ("silence", "glue", "error_event", "done_without_finish")])
    assert generate(engine, stream=False).status == 200
    assert engine.faults.done == {}


def test_batches_are_disturbed_like_others(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": "cut", "after_events": 5}])
    heard = ask(engine, input_ids=[PROMPT, PROMPT], rid=["a", "b"], **EIGHT)
    assert (heard.end, len(heard.frames), {frame["index"] for frame in heard.frames}) == ("rst", 5, {0, 1})


def test_an_ordinary_client_sees_the_faults_as_what_they_are(engine: Loopback) -> None:
    def post(**options: Any) -> httpx.Response:
        return httpx.post(f"{engine.url}/generate", json=payload(**EIGHT), **{**PLAIN, **options})

    for rule, error in (
        ({"kind": "drop"}, httpx.ReadError),
        ({"kind": "drop", "how": "fin"}, httpx.RemoteProtocolError),
        ({"kind": "cut", "after_events": 2}, httpx.ReadError),
        ({"kind": "cut", "how": "fin", "after_bytes": 10}, httpx.RemoteProtocolError),
        ({"kind": "die", "after_events": 1, "seconds": 0}, httpx.ReadError),
        ({"kind": "refuse", "seconds": None}, httpx.ReadError),
    ):
        engine.faults = Faults([rule])
        with pytest.raises(error):
            post()
    with pytest.raises(httpx.ConnectError):
        post()


def test_an_ordinary_client_waits_in_vain_for_what_is_silent(engine: Loopback) -> None:
    engine.faults = Faults([{"kind": "silence", "after_events": 1}])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{engine.url}/generate", json=payload(), **{**PLAIN, "timeout": 0.3})
