"""The parser's invariants, each attacked with random streams: whole ones, and damaged ones.

``make soak`` runs them with many more examples, and with new ones each time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference import Reading, differences, exact, read
from streamfold import StreamfoldError
from streamfold.loopback.core.reply import Reply, length, stopped
from streamfold.loopback.sglang import wire
from support.bodies import DONE, event, finish, pieces
from support.folding import Folded, check_owned, fold, folded, parser_for
from support.written import Written
from support.written import written as written_by_sglang
from support.written_vllm import written as written_by_vllm

if TYPE_CHECKING:
    import numpy as np

# Decorators run before pytest's options are there to be asked.
SOAK = "--soak" in sys.argv or os.environ.get("STREAMFOLD_SOAK", "0") not in ("", "0")
examples = settings(
    max_examples=5_000 if SOAK else 40,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
pytestmark = pytest.mark.timeout(7_200 if SOAK else 120)

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
ODD = [b"0", b"-1", b"-0.0", b"12.5", b"1e3", b"2147483648", b"9" * 25, b"1e999", b"null", b'"x"', b"true", b"[]"]
TOKEN_LIMITS = st.none() | st.integers(0, 12)
CUT_IN = [*ODD, b"\n", b"\r", b"\xff", b'"', b",", b"data: "]


def written() -> st.SearchStrategy[Written]:
    """A stream of either engine that is as it should be."""
    return st.one_of(written_by_sglang(), written_by_vllm())


@st.composite
def cuts(draw: st.DrawFn, body: bytes) -> list[int]:
    return draw(st.lists(st.integers(0, len(body)), max_size=12))


@st.composite
def damaged(draw: st.DrawFn) -> Written:
    """A stream with one to three faults of the wire, the kinds that networks, proxies and engines make."""
    stream = draw(written())
    events = stream.events
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(events) - 1))
        raw = events[at]
        way = draw(st.sampled_from(["flip", "delete", "insert", "number", "twice", "drop", "swap", "cut"]))
        place = draw(st.integers(0, len(raw)))
        length = draw(st.integers(1, 20))
        if way == "flip" and place < len(raw):
            raw = raw[:place] + bytes([raw[place] ^ 1 << draw(st.integers(0, 7))]) + raw[place + 1 :]
        elif way == "delete":
            raw = raw[:place] + raw[place + length :]
        elif way == "insert":
            raw = raw[:place] + draw(st.sampled_from(CUT_IN)) + raw[place:]
        elif way == "number" and (numbers := list(NUMBER.finditer(raw))):
            number = draw(st.sampled_from(numbers))
            near = [b"%d" % (int(number[0]) + step) for step in (-1, 1)] if number[0].isdigit() else []
            raw = raw[: number.start()] + draw(st.sampled_from([*ODD, *near])) + raw[number.end() :]
        events = [*events[:at], raw, *events[at + 1 :]]
        if way == "twice":
            events = [*events[: at + 1], *events[at:]]
        elif way == "drop" and len(events) > 1:
            events = [*events[:at], *events[at + 1 :]]
        elif way == "swap":
            events = [*events[:at], *events[at : at + 2][::-1], *events[at + 2 :]]
        elif way == "cut":
            events = [*events[:at], raw[:place]]
    return Written(events, stream.dialect, stream.asked, stream.expected)


def same(one: Reading, other: Reading) -> None:
    found = differences(one, other)
    assert not found, found


def fed(stream: Written, events: int) -> Folded:
    """What is there after so many events, without an end told."""
    parser = parser_for(stream.dialect, **stream.asked)
    error = None
    try:
        parser.feed(b"".join(stream.events[:events]))
    except StreamfoldError as raised:
        error = raised
    return folded(parser, error)


# --- what was written is read ----------------------------------------------------------------------------------------


@examples
@given(written())
def test_the_obvious_reader_agrees_and_what_was_written_is_read_back(stream: Written) -> None:
    """Invariant: the obvious reader agrees, bit for bit; both give what was drawn, however it was laid out."""
    same(read(stream.body, stream.dialect, **stream.asked), stream.expected)
    same(fold(stream.body, stream.dialect, **stream.asked).reading, stream.expected)


@examples
@given(damaged(), st.booleans(), TOKEN_LIMITS)
def test_the_obvious_reader_agrees_on_damaged_streams(stream: Written, aborted: bool, limit: int | None) -> None:
    """Damage gives a typed error or exactly what the obvious reader says, never a third thing."""
    # fold() takes no error but our own.
    reading = fold(stream.body, stream.dialect, aborted=aborted, token_limit=limit, **stream.asked).reading
    same(reading, read(stream.body, stream.dialect, aborted=aborted, token_limit=limit, **stream.asked))


# --- the invariants --------------------------------------------------------------------------------------------------


@examples
@given(st.data(), written() | damaged())
def test_a_snapshot_is_what_the_bytes_so_far_give_and_changes_nothing(data: st.DataObject, stream: Written) -> None:
    """Invariant: folding goes on as if nobody had looked, and every look shows what has been folded."""
    parser, before = parser_for(stream.dialect, **stream.asked), b""
    for piece in pieces(stream.body, sorted(data.draw(cuts(stream.body)))):
        before += piece
        fresh = parser_for(stream.dialect, **stream.asked)
        with contextlib.suppress(StreamfoldError):
            fresh.feed(before)
        with contextlib.suppress(StreamfoldError):
            parser.feed(piece)
        assert parser.snapshot() == parser.snapshot() == fresh.take()
    error = None
    try:
        parser.close()
    except StreamfoldError as raised:
        error = raised
    assert folded(parser, error) == fold(stream.body, stream.dialect, **stream.asked)


@examples
@given(st.data(), written() | damaged(), TOKEN_LIMITS)
def test_any_cut_gives_the_same_result_and_the_same_error(
    data: st.DataObject, stream: Written, limit: int | None
) -> None:
    """Invariant: any cut."""
    whole = fold(stream.body, stream.dialect, token_limit=limit, **stream.asked)
    for found in ([], data.draw(cuts(stream.body)), range(1, len(stream.body))):
        assert fold(stream.body, stream.dialect, found, token_limit=limit, **stream.asked) == whole


@examples
@given(damaged())
def test_all_or_nothing_an_event_applies_whole_or_not_at_all(stream: Written) -> None:
    """Invariant: all or nothing. After an error the state is that of the last good event."""
    whole = fold(stream.body, stream.dialect, **stream.asked)
    if whole.reading.error != "DecodeError":
        return
    states = [fed(stream, i) for i in range(len(stream.events) + 1)]
    good = [state.reading for state in states if state.error is None]
    # Damage may join two events into one, so the last good state is that of some earlier border.
    state = {**vars(whole.reading), "error": None, "kind": None}
    assert any(exact(state) == exact(vars(reading)) for reading in good)


@examples
@given(written() | damaged())
def test_aligned_nothing_is_padded_or_invented(stream: Written) -> None:
    """Invariant: aligned. Also at every place where the stream may be taken in the middle."""
    for i in range(len(stream.events) + 1):
        reading = fed(stream, i).reading  # whose lengths, offsets and dtypes are checked there
        assert (reading.logprobs is not None) == stream.asked["logprobs"]
        assert sum(end - start for _, start, end in reading.version_spans) <= len(reading.token_ids)


@examples
@given(written() | damaged())
def test_only_forward_accepted_tokens_never_change(stream: Written) -> None:
    """Invariant: only forward."""
    states = [fed(stream, i).reading for i in range(len(stream.events) + 1)]
    for before, later in itertools.pairwise(states):
        n = len(before.token_ids)
        assert later.token_ids[:n] == before.token_ids
        assert exact((later.logprobs or [])[:n]) == exact(before.logprobs or [])


@examples
@given(written() | damaged(), st.integers(1, 4096))
def test_bounded_memory_stays_near_the_bytes_that_came(stream: Written, step: int) -> None:
    """Invariant: bounded, linear. What is told to come reserves nothing."""
    parser = parser_for(stream.dialect, **stream.asked)
    empty = parser.__sizeof__()
    body = stream.body
    try:
        for start in range(0, len(body), step):
            parser.feed(body[start : start + step])
            assert parser.__sizeof__() <= empty + 16 * (start + step) + 65_536
        parser.close()
    except StreamfoldError:
        assert parser.__sizeof__() <= empty + 16 * len(body) + 65_536


def test_linear_a_long_event_in_tiny_reads_and_many_events_in_one_read_end() -> None:
    """Invariant: bounded, linear. Work that grew with what is already there would take hours here."""
    long = event([1], 1, text="x" * 1_500_000)
    many = b"".join(event([5], number + 1, text="é") for number in range(60_000))
    last = event([], 60_000, text="", reason=finish()) + DONE
    assert fold(long, "sglang", range(1, len(long)), aborted=True).reading.token_ids == [1]
    assert len(fold(many + last, "sglang-incremental").reading.token_ids) == 60_000


@examples
@given(written(), st.integers(0, 2**30))
def test_owned_once_arrays_belong_to_the_caller_alone(stream: Written, filler: int) -> None:
    """Invariant: owned once. Writing into what one parser gave changes nothing that another gave."""

    def taken() -> dict[str, np.ndarray[Any, Any]]:
        parser = parser_for(stream.dialect, **stream.asked)
        parser.feed(stream.body)
        generation = parser.take()
        top_p = dict(zip(("top_p_ids", "offsets"), generation.top_p or (), strict=False))
        named = {"ids": generation.token_ids, "logprobs": generation.logprobs, "experts": generation.routed_experts}
        return {key: array for key, array in {**named, **top_p}.items() if array is not None}

    first, second = taken(), taken()
    before = {key: array.tobytes() for key, array in second.items()}
    for array in first.values():
        check_owned(array, array.dtype)
        array[...] = filler % 100
    assert {key: array.tobytes() for key, array in second.items()} == before


# --- the loopback's writer -------------------------------------------------------------------------------------------

VERSIONS = ["0.5.11", "0.5.15.post1", "0.5.19", "0.5.23"]


@st.composite
def replies(draw: st.DrawFn) -> tuple[Reply, wire.SglangFormat, list[int]]:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=30))
    n = len(ids)
    frontend: Any = draw(st.sampled_from(["python", "rust"]))
    dialect = wire.SglangFormat(
        incremental=draw(st.booleans()),
        frontend=frontend,
        version=draw(st.sampled_from(VERSIONS)),
        shuffle_keys=draw(st.none() | st.integers(0, 9)),
    )
    in_queue = frontend == "python" and draw(st.booleans())
    finishes = [stopped(5), stopped("END"), length(n), wire.aborted()]
    has_top_p = frontend == "python" and not in_queue and draw(st.booleans())
    reply = Reply(
        rid=draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        prompt_tokens=draw(st.integers(1, 9)),
        token_ids=ids,
        logprobs=[draw(st.floats(-50, 0)) for _ in ids] if draw(st.booleans()) else None,
        pieces=[draw(st.text(st.characters(codec="utf-8"), max_size=3)) for _ in ids],
        versions=draw(st.sampled_from([[], [draw(st.sampled_from("abc")) for _ in ids]])),
        finish=wire.aborted_in_queue() if in_queue else draw(st.sampled_from(finishes)),
        in_queue=in_queue,
        top_p=[draw(st.lists(st.integers(0, 9), max_size=3)) for _ in ids] if has_top_p else None,
        cached_tokens=draw(st.integers(0, 9)),
    )
    sent = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    # Without pairs the abort event of a queued request cannot bring what was not sent yet: up to 0.5.19 it is lost.
    return reply, dialect, [*sent, n] if in_queue and reply.logprobs is None else sent


@examples
@given(replies())
def test_what_the_loopback_engine_writes_is_read_back(told: tuple[Reply, wire.SglangFormat, list[int]]) -> None:
    reply, dialect, sent = told
    body = b"".join(wire.stream(reply, dialect, sent))
    named = "sglang-incremental" if dialect.incremental else "sglang-cumulative"
    for spoken in (named, "sglang"):
        reading = fold(body, spoken, logprobs=reply.logprobs is not None).reading
        same(reading, read(body, spoken, logprobs=reply.logprobs is not None))
        assert (reading.error, reading.token_ids) == (None, reply.token_ids)
        assert exact(reading.logprobs) == exact(reply.logprobs)
        assert reply.finish is not None
        assert (reading.finish_reason, reading.done) == (reply.finish["type"], True)
        # An abort without new tokens has no lists in the Rust frontend: it tells nothing but the finish reason.
        bare = dialect.rust and reading.finish_reason == "abort" and sent[-1:] == [len(reply.token_ids)]
        assert (reading.text if reply.token_ids else reading.text or "") == "".join(reply.pieces or [])
        if reply.top_p is not None:
            assert reading.top_p is not None
            ids, offsets = reading.top_p
            assert [ids[start:end] for start, end in itertools.pairwise(offsets)] == reply.top_p
        if dialect.release >= (0, 5, 19) and reply.versions and not bare:
            each = [version for version, start, end in reading.version_spans for _ in range(start, end)]
            assert each == reply.versions
