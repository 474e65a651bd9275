"""vLLM's streams: what an event may hold, what ends a generation, and what is told after its end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamfold import Parser, StreamTruncated
from support.bodies import DONE, LEFT_OUT, logprobs, sse
from support.bodies_vllm import WIRES, Wire, dialect_of, entry, event, fields, logprobs_of, usage, usage_event
from support.folding import Folded, agreed

FIRST = event([11])
LAST = event([12, 13], "stop", stop_reason=13)


def folded(*events: bytes, aborted: bool = False, dialect: str = "vllm", **asked: Any) -> Folded:
    return agreed(b"".join(events), dialect, aborted=aborted, **asked)


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_every_release_and_frontend_gives_the_same(wire: Wire) -> None:
    body = [
        event([11], wire=wire),
        event([], wire=wire),
        event([12, 13, 14], wire=wire),
        event([15], "stop", wire=wire, stop_reason=15),
        usage_event(5, wire=wire, cached=2),
        DONE,
    ]
    reading = folded(*body, dialect=dialect_of(wire), prompt_len=3).reading
    assert reading.token_ids == [11, 12, 13, 14, 15]
    assert reading.logprobs == logprobs(11, 12, 13, 14, 15)
    assert (reading.finish_reason, reading.matched, reading.text) == ("stop", 15, None)
    assert (reading.prompt_tokens, reading.cached_tokens) == (3, 2)
    assert (reading.done, reading.error) == (True, None)


@pytest.mark.parametrize("choice", [{}, {"index": None}, {"finish_reason": None, "stop_reason": None, "text": None}])
def test_what_is_missing_and_what_is_null_mean_the_same(choice: dict[str, Any]) -> None:
    event = {"choices": [{"token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}, **choice}]}
    for outer in ({}, {"usage": None, "request_id": None, "output_mode": None}):
        reading = folded(sse({**event, **outer}), aborted=True).reading
        assert (reading.token_ids, reading.logprobs) == ([5], [-0.5])
    assert folded(sse({"choices": [choice]}), aborted=True).reading.token_ids == []


def test_an_event_without_a_choice_and_without_a_usage_tells_nothing() -> None:
    reading = folded(sse({"choices": []}), FIRST, sse({"choices": [], "usage": None}), LAST).reading
    assert reading.token_ids == [11, 12, 13]


@pytest.mark.parametrize("dialect", ["vllm", "vllm-completions"])
def test_tokens_without_logprobs_are_read_if_none_were_asked_for(dialect: str) -> None:
    # Whatever stands in their place then.
    for told in (None, LEFT_OUT, {"content": None}, {"content": [1]}, 5, logprobs_of([1, 2])):
        reading = folded(event([11], logprobs=told), LAST, logprobs=False, dialect=dialect).reading
        assert (reading.token_ids, reading.logprobs) == ([11, 12, 13], None)
        assert "logprobs" not in reading.meta


# --- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        {"token_id": 7, "token": "token_id:9"},  # the number comes first
        {"token_id": None, "token": "token_id:7"},
        {"token_id": None, "token": None},
        {"token": "token_id:007"},
        {"token": "token_\\u0069d:7"},
        {"token": "token_id:"},
        {"token": "token_id:x7"},
        {"token": "token_id:-7"},
        {"token": "a token"},
        {"token": ""},
        {"token": 9},
        {},
    ],
)
def test_the_id_beside_a_logprob_is_told_as_a_number_or_a_name_or_not_at_all(told: dict[str, Any]) -> None:
    event = {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5, **told}]}}]}
    body = json.dumps(event).replace("\\\\u", "\\u").encode()
    assert folded(sse(body), aborted=True).reading.token_ids == [7]


@pytest.mark.parametrize(
    "told",
    [{"token_id": 8}, {"token_id": 7.0}, {"token_id": "7"}, {"token_id": True}, {"token_id": -1}, {"token_id": 2**40}]
    + [{"token_id": LEFT_OUT, "token": f"token_id:{name}"} for name in ("8", "70", "2147483648", "9" * 30)],
)
def test_another_id_beside_a_logprob_is_a_mismatch(told: dict[str, Any]) -> None:
    content = [entry(6), entry(7, **told)]
    body = [event([5]), event([6, 7], logprobs={"content": content}), LAST]
    error = folded(*body)
    assert (error.decode_error.kind, error.decode_error.path) == ("mismatch", "choices[0].token_ids[1]")
    assert b"".join(body)[error.decode_error.offset :].startswith(b"7]")
    assert error.reading.token_ids == [5]


def test_another_name_in_completions_is_a_mismatch_and_a_text_is_none() -> None:
    def body(*names: Any) -> bytes:
        return event([7, 8], wire="completions", logprobs={"token_logprobs": [-0.5, -0.5], "tokens": list(names)})

    for good in (["token_id:7", "token_id:8"], ["seven", "token_id:8"], [None, 9]):
        assert folded(body(*good), aborted=True, dialect="vllm-completions").reading.token_ids == [7, 8]
    error = folded(body("token_id:7", "token_id:9"), dialect="vllm-completions").decode_error
    assert (error.kind, error.path) == ("mismatch", "choices[0].token_ids[1]")


def test_in_text_mode_a_text_that_looks_like_an_id_is_a_text() -> None:
    content = [{"token": "token_id:5", "logprob": -0.5, "bytes": [116], "top_logprobs": []}]
    for mode, is_good in (("text", True), ("tokens", False), (None, False)):
        reading = folded(event([7], text="x", logprobs={"content": content}, top={"output_mode": mode}), aborted=True)
        assert (reading.error is None) == is_good
    text = fields([7], text="x", logprobs={"content": content}, top={"output_mode": "text"})
    escaped = sse(text).replace(b'"output_mode":"text"', b'"output_mode":"te\\u0078t"')
    assert folded(escaped, aborted=True).reading.text == "x"
    late_key = {"choices": text["choices"], "output_mode": "text"}
    assert folded(sse(late_key), aborted=True).reading.text == "x"


@pytest.mark.parametrize("likely", [LEFT_OUT, None, [], [{}], [1, [2]], "x", [{"token_id": 9, "logprob": None}] * 3])
def test_what_else_was_likely_does_not_matter(likely: Any) -> None:
    content = [entry(5, top_logprobs=likely), entry(6)]
    reading = folded(event([5, 6], logprobs={"content": content}), aborted=True).reading
    assert reading.logprobs == logprobs(5, 6)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"rank":1}]', b'"rank":1}'),
        (b'"rank":1}]', b'"rank":1},]'),
        (b'"rank":1}]', b'"rank":01}]'),
        (b'"rank":1}]', b'"rank":NaN}]'),
        (b'"rank":1}]}', b'"rank":1}]]'),
        (b'"rank":1}]', b'"rank":1}' + b",[" * 130 + b"]" * 131),
        (b'"rank":1,', b'"rank":1 1,'),
        (b'"rank":1,', b'"rank":-,'),
        (b'"logprob":', b'"logprob":+'),
        (b'"logprob":-0.625', b'"logprob":-0.625.5'),
        (b'"top_logprobs":[{', b'"top_logprobs":[{{'),
    ],
)
def test_what_is_read_past_is_json_too(good: bytes, bad: bytes) -> None:
    body = event([5])
    assert good in body
    folded_ = folded(FIRST, body.replace(good, bad, 1), LAST)
    assert folded_.decode_error.kind == "json"
    assert folded_.reading.token_ids == [11]


def test_logprobs_keep_every_bit_however_they_are_spelled() -> None:
    for spelled in ("-0.0", "-0", "0", "-1e-320", "-2.334400177001953", "-1E2", "-123456789012345678901234567890", "7"):
        for space in ("", " "):
            body = event([5]).replace(b"-0.625", space.encode() + spelled.encode())
            assert repr(folded(body, aborted=True).reading.logprobs) == repr([float(json.loads(spelled))])


@pytest.mark.parametrize("wire", ["0.32", "0.28", "completions"])
@pytest.mark.parametrize("stand_in", [-9999.0, -3.4028234663852886e38])
def test_a_stand_in_for_minus_infinity_is_damage_unless_it_is_to_be_kept(wire: Wire, stand_in: float) -> None:
    name = b"token_logprobs" if wire == "completions" else b"logprob"
    body = event([8], "length", wire=wire).replace(b"-1.0", json.dumps(stand_in).encode())
    assert name in body
    error = folded(FIRST if wire != "completions" else b"", body, dialect=dialect_of(wire)).decode_error
    assert (error.kind, "keep" in str(error)) == ("logprob", True)
    kept = folded(body, dialect=dialect_of(wire), clamped="keep").reading
    assert (kept.logprobs, kept.clamped_logprobs) == ([stand_in], 1)


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "stop_reason", "finish_reason", "matched"),
    [
        ("stop", None, "stop", None),
        ("stop", 13, "stop", 13),
        ("stop", "END", "stop", "END"),
        ("stop", [1], "stop", None),
        ("length", None, "length", None),
        ("abort", None, "abort", None),
        ("cancelled", None, "abort", None),
        ("repetition", "repetition_detected", "stop", "repetition_detected"),
        ("repetition", LEFT_OUT, "stop", "repetition"),
    ],
)
def test_the_reason_of_the_end_is_told_in_three_words(
    word: str, stop_reason: Any, finish_reason: str, matched: Any
) -> None:
    reading = folded(FIRST, event([12, 13], word, stop_reason=stop_reason), DONE).reading
    assert (reading.finish_reason, reading.matched, reading.error) == (finish_reason, matched, None)
    assert reading.meta["finish_reason"] == word


@pytest.mark.parametrize("word", ["error", "Stop", "", "tool_calls", 5, True, {"type": "stop"}, ["stop"]])
def test_any_other_reason_is_refused(word: Any) -> None:
    body = FIRST + event([12], word)
    error = folded(body)
    assert (error.decode_error.kind, error.decode_error.path) == ("schema", "choices[0].finish_reason")
    assert body[error.decode_error.offset :].startswith(json.dumps(word, separators=(",", ":")).encode())
    assert error.reading.token_ids == [11]


@pytest.mark.parametrize("tokens", [[], [12], [12, 13]])
def test_an_abort_may_bring_last_tokens_or_none(tokens: list[int]) -> None:
    reading = folded(FIRST, event(tokens, "abort"), usage_event(1 + len(tokens)), DONE).reading
    assert (reading.token_ids, reading.finish_reason, reading.error) == ([11, *tokens], "abort", None)
    assert folded(event([], "abort"), DONE).reading.token_ids == []


def test_done_is_no_success() -> None:
    """Up to 0.31 an aborted stream ends with its usage and [DONE], and without a finish reason."""
    body = FIRST + usage_event(1, cached=0) + DONE
    cut = folded(body)
    assert (cut.reading.error, cut.reading.done, cut.reading.token_ids) == ("StreamTruncated", True, [11])
    parser = Parser("vllm")
    parser.feed(body)
    with pytest.raises(StreamTruncated):
        parser.close()
    aborted = folded(body, aborted=True).reading
    assert (aborted.error, aborted.finish_reason, aborted.cached_tokens) == (None, None, 0)


# --- usage -----------------------------------------------------------------------------------------------------------


def test_the_usage_is_told_last_or_with_every_event() -> None:
    every = [
        event([11], top={"usage": usage(1)}),
        event([12, 13], "length", top={"usage": usage(3)}),
        usage_event(3, cached=2),
        DONE,
    ]
    for body in (every, [FIRST, LAST, usage_event(3, cached=2), DONE], [FIRST, LAST, usage_event(3, cached=2)]):
        reading = folded(*body, prompt_len=3).reading
        assert (reading.prompt_tokens, reading.cached_tokens, reading.error) == (3, 2, None)
        assert (reading.meta["total_tokens"], reading.meta["completion_tokens"]) == (6, 3)
        assert reading.meta["prompt_tokens_details"] == {"cached_tokens": 2}


def test_what_is_cached_stays_told_when_details_are_null() -> None:
    body = [event([11], top={"usage": usage(1, cached=2)}), event([12], "stop", top={"usage": usage(2)})]
    assert folded(*body).reading.cached_tokens == 2


@pytest.mark.parametrize("place", ["with tokens", "between", "after the end"])
@pytest.mark.parametrize("told", [0, 2, 4, 2**32 - 1])
def test_a_usage_that_counts_other_tokens_is_a_length_error(place: str, told: int) -> None:
    body = {
        "with tokens": [FIRST, event([12, 13], "stop", top={"usage": usage(told)})],
        "between": [FIRST, event([12, 13]), usage_event(told), event([], "stop")],
        "after the end": [FIRST, LAST, usage_event(told), DONE],
    }[place]
    error = folded(*body)
    assert (error.decode_error.kind, error.decode_error.path) == ("length", "usage.completion_tokens")
    assert b"".join(body)[error.decode_error.offset :].startswith(b"%d," % told)
    assert f"the engine reports {told} tokens" in str(error.decode_error)
    # What was good stays: the last event alone is refused.
    assert error.reading.finish_reason == ("stop" if place == "after the end" else None)
    assert error.reading.token_ids == ([11] if place == "with tokens" else [11, 12, 13])


@pytest.mark.parametrize("place", ["with tokens", "after the end"])
def test_a_prompt_of_another_length_is_a_length_error(place: str) -> None:
    last = event([12], "stop", top={"usage": usage(2)}) if place == "with tokens" else event([12], "stop")
    error = folded(FIRST, last, usage_event(2), DONE, prompt_len=4).decode_error
    assert (error.kind, error.path) == ("length", "usage.prompt_tokens")
    assert folded(FIRST, last, usage_event(2), DONE, prompt_len=None).reading.prompt_tokens == 3


@pytest.mark.parametrize(
    "late",
    [
        event([14]),
        event([14], "length"),
        event([], top={"usage": usage(9)}),
        sse({"request_id": "generate-tokens-r8", "choices": [{"index": 1}]}),
        sse({"usage": usage(9)}),
        sse({"choices": None, "usage": usage(9)}),
        sse({"error": {"message": "late", "code": 500}}),
        sse({"error": "late", "choices": []}),
        b"event: error\n" + usage_event(9),
        sse(b"{not json}"),
        sse(b'{"choices":[],"usage":"\xff"}'),
        sse([]),
    ],
)
def test_after_the_end_only_the_usage_is_read(late: bytes) -> None:
    reading = folded(FIRST, LAST, late, usage_event(3, cached=1), DONE).reading
    assert (reading.token_ids, reading.finish_reason, reading.matched) == ([11, 12, 13], "stop", 13)
    assert (reading.cached_tokens, reading.error, reading.done) == (1, None, True)


def test_the_usage_of_another_request_is_refused_after_the_end_too() -> None:
    other = event(None, top={"request_id": "other", "choices": [], "usage": usage(3)})
    ignored = event([14], top={"request_id": "other"})
    for body in (other, ignored + other):
        error = folded(FIRST, LAST, body, DONE)
        assert (error.decode_error.kind, error.decode_error.path) == ("schema", "request_id")
        assert error.reading.prompt_tokens is None


def test_nothing_is_read_after_done() -> None:
    assert folded(FIRST, LAST, DONE, usage_event(9)).reading.prompt_tokens is None


def test_a_usage_that_is_cut_at_the_end_of_a_finished_stream_is_dropped() -> None:
    told = usage_event(3)
    for end in range(len(told) - 4):
        assert folded(FIRST, LAST, told[:end]).reading.error is None


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["0.32", "completions"])
def test_text_is_joined_and_none_where_none_came(wire: Wire) -> None:
    def text_of(*texts: Any) -> str | None:
        events = [event([7], wire=wire, text=text) for text in texts]
        return folded(*events, event([], "stop", wire=wire), dialect=dialect_of(wire)).reading.text

    assert text_of("na", "\u00efve\u2028", "", "\U0001f642") == "na\u00efve\u2028\U0001f642"
    assert text_of("a", None) is None
    assert text_of(LEFT_OUT, "a") is None
    assert text_of() is None
    assert folded(event([], "stop", text="a", wire=wire), dialect=dialect_of(wire)).reading.text == "a"
