"""The parser as an object: what feed, close and take promise, what it accepts, and who owns what it gives."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from reference import differences, read
from streamfold import DecodeError, EngineError, Experts, Generation, Parser, StreamfoldError, StreamTruncated
from streamfold._core import DIALECTS
from support.bodies import DONE, Shape, event, finish, logprobs, pieces, random_cuts, recordings, sse
from support.folding import check_owned, fold, folded, parser_for

FIRST = event([11], 1, text="a")
LAST = event([12, 13], 3, text="b", reason=finish(matched=13))
BAD = event([14], 9)


def raises(parser: Parser, call: str, *args: Any) -> StreamfoldError:
    with pytest.raises(StreamfoldError) as caught:
        getattr(parser, call)(*args)
    return caught.value


# --- feed, close, take -----------------------------------------------------------------------------------------------


def test_feed_tells_how_many_tokens_became_available() -> None:
    parser = Parser("sglang")
    assert [parser.feed(piece) for piece in (b"", FIRST[:50], FIRST[50:], b"", FIRST[:0], LAST + DONE, DONE)] == [
        0,
        0,
        1,
        0,
        0,
        2,
        0,
    ]
    assert parser.token_count == 3
    parser.close()
    parser.close()
    assert parser.take().token_ids.tolist() == [11, 12, 13]


def test_take_is_valid_at_any_time() -> None:
    for fed, tokens, reason in ((b"", [], None), (FIRST[:80], [], None), (FIRST + LAST[:80], [11], None)):
        parser = Parser("sglang")
        parser.feed(fed)
        generation = parser.take()
        assert (generation.token_ids.tolist(), generation.finish_reason) == (tokens, reason)
        assert generation.logprobs is not None
        assert generation.logprobs.tolist() == logprobs(*tokens)


def test_the_tokens_so_far_are_a_copy() -> None:
    parser = Parser("sglang", logprobs=False)
    assert parser.token_ids().dtype == np.int32
    assert len(parser.token_ids()) == 0
    parser.feed(b'data: {"output_ids":[3,1],"meta_info":{"id":"r","completion_tokens":2,"finish_reason":null}}\n\n')
    ids = parser.token_ids()
    ids[:] = 9
    assert parser.token_ids().tolist() == [3, 1]
    assert parser.take().token_ids.tolist() == [3, 1]
    with pytest.raises(ValueError, match="taken"):
        parser.token_ids()


def test_a_parser_is_spent_after_take() -> None:
    parser = Parser("sglang")
    parser.feed(FIRST)
    parser.take()
    for call, args in (("feed", (LAST,)), ("feed", (b"",)), ("take", ()), ("close", ()), ("close", (True,))):
        with pytest.raises(ValueError, match="take"):
            getattr(parser, call)(*args)


def test_an_error_is_raised_again_and_the_last_good_state_is_kept() -> None:
    for wrong, kind in ((BAD, DecodeError), (sse({"error": {"message": "x", "code": 503}}), EngineError)):
        parser = Parser("sglang")
        first = raises(parser, "feed", FIRST + wrong + LAST)
        assert isinstance(first, kind)
        for call, args in (("feed", (LAST,)), ("feed", (b"",)), ("close", ()), ("close", (True,)), ("feed", (DONE,))):
            again = raises(parser, call, *args)
            assert type(again) is type(first)
            assert again.args == first.args
            assert vars(again) == vars(first)
        assert (parser.token_count, parser.finished, parser.done) == (1, False, False)
        assert parser.take().token_ids.tolist() == [11]


def test_a_truncated_stream_is_told_by_close() -> None:
    parser = Parser("sglang")
    parser.feed(FIRST)
    assert isinstance(raises(parser, "close"), StreamTruncated)
    assert isinstance(raises(parser, "close"), StreamTruncated)
    assert parser.take().token_ids.tolist() == [11]
    cut = Parser("sglang")
    cut.feed(FIRST)
    cut.close(aborted=True)
    assert cut.take().finish_reason is None


def test_an_error_tells_where_it_is() -> None:
    """The offset counts the bytes of the whole body, however they came."""
    for wrong, kind, path, at in (
        (event([-5], 4), "token", "meta_info.output_token_logprobs[0][1]", b"-5,null"),
        (event([5], 4, text=7), "schema", "text", b"7,"),
        (event([5], 4).replace(b"[[", b"[[]["), "json", "", b"["),
        (sse(b'{"a": nope}'), "json", "", b"nope"),
        (sse(b'{"a": "\xfe"}'), "utf8", "", b"\xfe"),
    ):
        body = FIRST + event([12, 13], 3, text="b") + wrong
        start = len(body) - len(wrong)
        for cuts in ([], [start + 3], range(1, len(body))):
            error = fold(body, "sglang", cuts).decode_error
            assert error.kind == kind
            assert error.path == path or (kind == "json")
            assert start <= error.offset < len(body)
            if kind != "json" or at == b"nope":
                assert error.offset == body.index(at, start)
            assert str(error.offset) in str(error)


def test_errors_survive_pickling() -> None:
    for wrong in (BAD, sse({"error": {"message": "x", "code": 503}}), b""):
        error = fold(FIRST + wrong).error
        assert error is not None
        error.partial = Generation([1], [0.5])
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(twin) is type(error)
            assert twin.args == error.args
            assert vars(twin) == vars(error)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "asked"),
    [
        ("", {}),
        ("SGLang", {}),
        ("openai", {}),
        ("sglang", {"clamped": "drop"}),
        ("sglang", {"clamped": ""}),
        ("sglang", {"prompt_len": -1}),
        ("sglang", {"experts_start": -1}),
        ("sglang", {"max_new_tokens": -1}),
        ("sglang", {"token_limit": -1}),
        ("sglang", {"max_event_bytes": -1}),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(dialect: str, asked: dict[str, Any]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parser_for(dialect, **asked)


@pytest.mark.parametrize(
    "asked", [{"experts": (2, 2)}, {"prompt_len": "3"}, {"logprobs": None, "prompt_len": 1.5}, {"unknown": 1}]
)
def test_an_argument_of_a_wrong_type_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Parser("sglang", **asked)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (-1, 2), (2, 2, 0), (2, 2, 8, "int64"), (2, 2, 8, "")])
def test_experts_that_make_no_sense_are_refused(shape: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        Experts(*shape)


def test_experts_are_values() -> None:
    experts = Experts(48, 8, 128, "uint8")
    assert (experts.num_layers, experts.top_k, experts.num_experts, experts.dtype) == (48, 8, 128, "uint8")
    assert Experts(2, 2).dtype == "int32"
    assert Experts(2, 2).num_experts is None
    assert experts == Experts(48, 8, 128, "uint8")
    assert hash(experts) == hash(Experts(48, 8, 128, "uint8"))
    for other in (
        Experts(47, 8, 128, "uint8"),
        Experts(48, 8, None, "uint8"),
        Experts(48, 8, 128, "uint16"),
        "x",
        None,
    ):
        assert experts != other
    assert pickle.loads(pickle.dumps(experts)) == experts
    assert "48" in repr(experts)
    with pytest.raises(AttributeError):
        experts.top_k = 3  # type: ignore[misc]  # that is the test


def test_the_repr_of_a_parser_says_how_far_it_is() -> None:
    parser = Parser("sglang")
    assert repr(parser) == "<Parser dialect='sglang', token_count=0, finished=False, done=False>"
    parser.feed(event([1, 2], 2, reason=finish()) + DONE)
    assert repr(parser) == "<Parser dialect='sglang', token_count=2, finished=True, done=True>"


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_bytes_of_any_kind_are_read(form: Any) -> None:
    parser = Parser("sglang")
    for piece in pieces(FIRST + LAST, [7, 200]):
        given = form(piece)
        parser.feed(given)
        if isinstance(given, bytearray):
            given[:] = b"\xff" * len(given)  # what was fed is ours by now
            given.clear()  # and nothing holds the buffer
    parser.close()
    assert parser.take().token_ids.tolist() == [11, 12, 13]


@pytest.mark.parametrize("wrong", ["text", None, 5, [1], {}, np.zeros((2, 2), np.uint8)[:, 0]])
def test_what_is_no_run_of_bytes_is_refused(wrong: Any) -> None:
    parser = Parser("sglang")
    with pytest.raises((TypeError, BufferError, ValueError)):
        parser.feed(wrong)
    assert parser.feed(FIRST) == 1


# --- threads and mutated input, in children --------------------------------------------------------------------------


def in_a_child(call: str) -> None:
    """Call a function of this file in a child: a crash is then a failed test and not the end of all."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; from core import test_parser; test_parser.{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


def share_one_parser(rounds: int) -> None:
    body = b"".join(event([token], token + 1, text="abc" * 50) for token in range(200))
    for _ in range(rounds):
        parser, buffer = Parser("sglang"), bytearray(body)
        wrong: list[BaseException] = []

        def work(seed: int, parser: Parser = parser, buffer: bytearray = buffer, wrong: Any = wrong) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(60):
                    with contextlib.suppress(StreamfoldError, ValueError, RuntimeError):
                        if seed == 2:
                            buffer[rng.randrange(len(buffer))] = rng.randrange(256)
                        start = rng.randrange(len(body))
                        parser.feed(memoryview(buffer)[start : start + rng.randrange(4_000)])
                        assert 0 <= parser.token_count <= 200
                        assert parser.__sizeof__() > 0
            except BaseException as error:  # noqa: BLE001 - a panic is one, and so is a failed assert
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        parser.take()


def test_one_parser_in_two_threads_is_an_error_or_a_lock_and_never_a_crash() -> None:
    """PyO3/pyo3#4736: input that changes, or a parser that is shared, while Rust reads."""
    in_a_child("share_one_parser(20)")


def damage(body: bytes, rng: random.Random) -> bytes:
    """Flip a bit, delete, insert, repeat a run, or cut."""
    odd = [
        b"2147483648",
        b"-1",
        b"1e999",
        b"null",
        b"[[",
        b"}}}}",
        b'"',
        b"\\u",
        b"\xff",
        b"\n\n",
        b"data: ",
        b"9" * 40,
    ]
    at = rng.randrange(len(body) + 1)
    other = rng.randrange(len(body) + 1)
    return rng.choice(
        [
            body[:at] + bytes([byte ^ 1 << rng.randrange(8) for byte in body[at : at + 1]]) + body[at + 1 :],
            body[:at] + body[at + rng.randrange(30) :],
            body[:at] + rng.choice(odd) + body[at:],
            body[:at] + body[other : other + rng.randrange(300)] + body[at:],
            body[:at],
        ]
    )


def feed_damaged(count: int, seed: int) -> None:
    rng = random.Random(seed)
    found = [*recordings("streams"), *recordings("cases")]
    small = [recording for recording in found if len(recording.body) < 20_000]
    for _ in range(count):
        recording = rng.choice(small)
        body = recording.body
        for _ in range(rng.randint(1, 4)):
            body = damage(body, rng)
        asked: dict[str, Any] = {**recording.asked, "clamped": rng.choice(["raise", "keep"])}
        if rng.random() < 0.3:
            dtypes: list[Any] = ["int32", "uint8", "uint16"]
            asked["experts"] = Shape(rng.choice([1, 3]), 2, rng.choice([None, 8]), rng.choice(dtypes))
            asked["experts_start"] = rng.choice([0, 1, 2**31, 2**40])
        parser = parser_for(rng.choice([recording.dialect, *DIALECTS]), **asked)
        with contextlib.suppress(StreamfoldError):
            for piece in pieces(body, random_cuts(body, rng)):
                parser.feed(piece)
            parser.close(rng.random() < 0.5)
        generation = parser.take()
        assert generation.logprobs is None or len(generation.logprobs) == len(generation.token_ids)


@pytest.mark.timeout(3_600)
def test_no_damaged_input_makes_it_panic(soak: bool) -> None:
    """PyO3/pyo3#2783: a panic passes `except Exception`. Only our own errors may come out."""
    for seed in range(100 if soak else 1):
        in_a_child(f"feed_damaged(10_000, {seed})")


def test_parsers_in_many_threads_do_not_disturb_each_other() -> None:
    found: list[list[int]] = []

    def work(seed: int) -> None:
        body = b"".join(event([seed + number], number + 1) for number in range(200))
        found.append(fold(body, "sglang", range(997, len(body), 997), aborted=True).reading.token_ids)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [list(range(seed, seed + 200)) for seed in range(8)]


def test_random_bytes_are_read_as_the_reader_reads_them() -> None:
    rng = random.Random(1)
    words = [
        b"data: ",
        b"data:",
        b"\n",
        b"\r",
        b"\n\n",
        b": x",
        b"[DONE]",
        b"{",
        b"}",
        b'"text":"a"',
        FIRST,
        LAST,
        b"5",
        b"\xff",
    ]
    for _ in range(2_000):
        body = b"".join(rng.choice(words) for _ in range(rng.randrange(12)))
        assert not differences(fold(body, "sglang", random_cuts(body, rng)).reading, read(body, "sglang")), body


# --- arrays ----------------------------------------------------------------------------------------------------------

ROUTED = event(
    [12],
    2,
    reason=finish(),
    routed_experts="AAECAwQFBgc=",
    top_p_token_ids=[1, 2, 3],
    top_p_token_offsets=[0, 1, 3],
    c={"d": 1},
)


def routed_parser() -> Parser:
    return parser_for("sglang", experts=Shape(1, 2, 8, "uint8"), prompt_len=3)


def arrays_of(generation: Generation) -> list[np.ndarray[Any, Any]]:
    assert generation.logprobs is not None
    assert generation.top_p is not None
    assert generation.routed_experts is not None
    return [generation.token_ids, generation.logprobs, *generation.top_p, generation.routed_experts]


def test_owned_once_arrays_outlive_the_parser_and_belong_to_the_caller() -> None:
    """Invariant: owned once. PyO3/rust-numpy#302: an array pointed into memory that was used again or freed."""
    kept = []
    for number in range(10_000):
        parser = routed_parser()
        parser.feed(event([number], 1))
        parser.feed(ROUTED)
        kept.append(arrays_of(parser.take()))
        del parser
    gc.collect()
    for number, (ids, probs, top_ids, offsets, routed) in enumerate(kept):
        assert ids.tolist() == [number, 12]
        assert probs.tolist() == [-number / 8, -1.5]
        assert (top_ids.tolist(), offsets.tolist()) == ([1, 2, 3], [0, 1, 3])
        assert routed.ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    for array in kept[0]:
        check_owned(array, array.dtype)
        array[...] = 3
    assert kept[1][0].tolist() == [1, 12]


def test_writing_into_one_array_changes_no_other() -> None:
    parser = routed_parser()
    parser.feed(event([11], 1) + ROUTED)
    generation = parser.take()
    twin = pickle.loads(pickle.dumps(generation))
    arrays = arrays_of(generation)
    for one in arrays:
        for other in arrays:
            assert (one is other) == np.shares_memory(one, other)
        one[...] = 7
    # The generation gives the same memory each time, and the twin's is its own.
    assert generation.token_ids.tolist() == [7, 7]
    assert np.shares_memory(generation.token_ids, arrays[0])
    assert twin.token_ids.tolist() == [11, 12]


def test_an_array_lives_without_its_generation() -> None:
    parser = routed_parser()
    parser.feed(event([11], 1) + ROUTED)
    arrays = arrays_of(parser.take())
    del parser
    gc.collect()
    junk = [np.full(50_000, 9, np.int32) for _ in range(50)]
    assert arrays[0].tolist() == [11, 12]
    assert arrays[4].shape == (4, 1, 2)
    assert len(junk) == 50


# --- size ------------------------------------------------------------------------------------------------------------


def test_bounded_a_parser_s_size_is_told_and_stays_near_what_it_holds() -> None:
    """Invariant: bounded. 14 bytes a token, the text, and the event that is not whole yet."""
    parser = Parser("sglang")
    empty = parser.__sizeof__()
    assert 0 < empty < 200_000
    for number in range(100_000):
        parser.feed(event([5], number + 1, text="ab"))
    assert parser.__sizeof__() < 100_000 * (2 * 14 + 2 * 2) + empty + 100_000
    started = parser.__sizeof__()
    parser.feed(b"data: " + b"x" * 1_000_000)
    assert started + 1_000_000 <= parser.__sizeof__() < started + 3_000_000
    assert sys.getsizeof(parser) >= parser.__sizeof__()


def test_bounded_reserving_for_many_tokens_takes_little() -> None:
    small, large = Parser("sglang", max_new_tokens=10), Parser("sglang", max_new_tokens=10**15)
    for parser in (small, large):
        parser.feed(event([], 0, text=""))
    assert large.__sizeof__() == small.__sizeof__(), "no token has arrived"
    for parser in (small, large):
        parser.feed(FIRST)
    assert 4_096 * 12 - 1_000 < large.__sizeof__() - small.__sizeof__() < 4_096 * 20


def test_no_object_is_made_for_a_token_or_an_event() -> None:
    pieces_ = [event([5], number + 1, text="ab") for number in range(20_000)]
    parser = Parser("sglang")
    parser.feed(pieces_[0])
    tracemalloc.start()
    try:
        for piece in pieces_[1:]:
            parser.feed(piece)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000
    assert parser.token_count == 20_000


def test_the_parser_of_a_body_that_ends_anywhere_gives_a_prefix() -> None:
    """A taken prefix is never longer or other than what the whole gives."""
    for recording in recordings("cases"):
        whole = read(recording.body, recording.dialect, **recording.asked)
        for end in range(0, len(recording.body), max(1, len(recording.body) // 50)):
            parser = parser_for(recording.dialect, **recording.asked)
            try:
                parser.feed(recording.body[:end])
            except StreamfoldError as error:
                reading = folded(parser, error).reading
            else:
                reading = folded(parser, None).reading
            assert reading.token_ids == whole.token_ids[: len(reading.token_ids)]
