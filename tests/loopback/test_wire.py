"""The loopback engine's SGLang writer: recorded events are reproduced byte for byte, random replies are read back."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import read
from streamfold.loopback.core.reply import DONE, Reply, length, stopped
from streamfold.loopback.sglang import wire
from streamfold.loopback.sglang.wire import SglangFormat, SglangWriter, stream
from support.bodies import Recording, Shape, recordings

TIMES = re.compile(rb'"(e2e_latency|response_sent_to_client_ts)":[0-9.e-]+')
TOLD = [recording for recording in recordings("streams") if "sglang" in recording.name]
GENERATED = [recording for recording in TOLD if b'"meta_info"' in recording.body]


def frames(body: bytes) -> list[dict[str, Any]]:
    """The objects of a body's events; ``[DONE]`` must be the last and is left out."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def format_of(recording: Recording) -> SglangFormat:
    release = recording.name.removeprefix("sglang-").partition("-")[0]
    return SglangFormat(incremental="incremental" in recording.name, version=release)


def reply_of(reported: list[dict[str, Any]], wire_format: SglangFormat) -> tuple[Reply, list[int]]:
    """The reply whose events these were, and the token counts at which they were sent."""
    last = reported[-1]["meta_info"]
    reply = Reply(
        rid=last["id"],
        prompt_tokens=reported[0]["meta_info"].get("prompt_tokens", 0),
        cached_tokens=reported[0]["meta_info"].get("cached_tokens", 0),
        cached_tokens_details=reported[0]["meta_info"].get("cached_tokens_details"),
        prompt_token_ids=reported[0].get("prompt_token_ids"),
        index=reported[0].get("index"),
        finish=last["finish_reason"],
        in_queue="prompt_tokens" not in last,
        pieces=[] if "text" in reported[0] else None,
    )
    if "output_token_logprobs" in last:
        reply.logprobs = []
    if "output_top_logprobs" in last:
        reply.top_logprobs = []
    if "routed_experts" in last:
        reply.routed_experts = base64.b64decode(last["routed_experts"], validate=True)
    splits, seen = [], ""
    for frame in reported:
        meta, known = frame["meta_info"], len(reply.token_ids)
        total = meta["completion_tokens"]
        first = known if len(frame["output_ids"]) == total else 0  # of the lists that this frame has whole
        reply.token_ids += frame["output_ids"][first:] if total > known else []
        reply.versions += [meta["weight_version"]] * (total - known)
        if reply.logprobs is not None and total > known:
            pairs = meta["output_token_logprobs"][first:]
            reply.logprobs += [pair[0] for pair in pairs]
            if reply.top_logprobs is not None:
                reply.top_logprobs += [[(p, t) for p, t, _ in row] for row in meta["output_top_logprobs"][first:]]
        if reply.pieces is not None and total > known:
            text = frame["text"] if wire_format.incremental else frame["text"].removeprefix(seen)
            seen += text
            reply.pieces += [text, *[""] * (total - known - 1)]
        splits.append(total)
        reply.label = meta["weight_version"]
    return reply, splits[:-1]


@pytest.mark.parametrize("recording", GENERATED, ids=str)
def test_a_recorded_stream_is_written_again_byte_for_byte(recording: Recording) -> None:
    """Key order, presence of keys, spelling of numbers, text and framing are the engine's; only its clocks are not."""
    wire_format = format_of(recording)
    events = [event for event in recording.body.split(b"\n\n") if b'"meta_info"' in event and event.endswith(b"}")]
    reported = [json.loads(event.removeprefix(b"data: ")) for event in events]
    written: dict[int | None, list[bytes]] = {}
    for index in sorted({frame.get("index") for frame in reported}, key=str):
        own = [frame for frame in reported if frame.get("index") == index]
        reply, splits = reply_of(own, wire_format)
        writer = SglangWriter(dataclasses.replace(reply, finish=None), wire_format)
        parts = []
        for tokens, frame in zip(splits, own, strict=False):
            # The label is the server's when the frame was made.
            writer.reply.label = frame["meta_info"]["weight_version"]
            parts.append(writer.event(tokens))
        if recording.told["complete"]:
            writer.reply.finish, writer.reply.label = reply.finish, reply.label
            parts.append(writer.terminal())
        else:
            parts.append(writer.event(own[-1]["meta_info"]["completion_tokens"]))
        written[index] = parts
    for event, frame in zip(events, reported, strict=True):
        mine = written[frame.get("index")].pop(0)
        assert TIMES.sub(rb'"\1":0', mine) == TIMES.sub(rb'"\1":0', event) + b"\n\n"
    assert not any(written.values())


def test_a_recorded_error_event_is_written_again_byte_for_byte() -> None:
    refused = [recording for recording in TOLD if recording not in GENERATED]
    assert refused
    for recording in refused:
        (frame,) = frames(recording.body)
        assert wire.error_event(format_of(recording), frame["error"]["message"]) + DONE == recording.body


@pytest.mark.parametrize(
    ("wire_format", "error"),
    [
        (SglangFormat(version="0.5.12"), {"message": "no"}),
        (
            SglangFormat(version="0.5.13"),
            {"message": "no", "type": "invalid_request_error", "code": 400, "retryable": False},
        ),
        (
            SglangFormat(version="0.5.17"),
            {"message": "no", "type": "invalid_request_error", "code": 429, "retryable": False},
        ),
        (SglangFormat(frontend="rust"), {"message": "no", "code": 429}),
    ],
)
def test_an_error_event_has_the_shape_of_its_release(wire_format: SglangFormat, error: dict[str, Any]) -> None:
    assert json.loads(wire.error_event(wire_format, "no", 429).removeprefix(b"data: ")) == {"error": error}
    assert list(wire.error_frame(wire_format, "no")["error"]) == list(error)


# Replies of any kind, with text that is hard on readers of lines.

texts = st.text(st.sampled_from('ab \n"\\\u0085\u2028\u2029你🙂\x00\x7f') | st.characters(codec="utf-8"), max_size=5)
float32 = st.floats(-20, 0, width=32)
finishes = st.one_of(
    st.builds(stopped, st.integers(0, 10**6) | texts.filter(bool)),
    st.builds(length, st.integers(0, 10**6)),
    st.just(wire.aborted()),
)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    n = draw(st.integers(0, 12))
    prompt = draw(st.integers(1, 5))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    kept = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    versions = [
        version
        for version, run in draw(st.lists(st.tuples(st.sampled_from("ab7"), st.integers(1, 4))))
        for _ in range(run)
    ][:n]
    return Reply(
        prompt_tokens=prompt,
        token_ids=each(st.integers(0, 2**31 - 1)),
        logprobs=each(float32) if draw(st.booleans()) else None,
        pieces=each(texts) if draw(st.booleans()) else None,
        versions=versions + ["z"] * (n - len(versions)),
        label="z",
        finish=draw(finishes),
        top_p=each(kept) if draw(st.booleans()) else None,
        sampling_mask=each(kept) if draw(st.booleans()) else None,
        routed_experts=bytes(range(2 * 3 * max(prompt + n - 1, 0))) if draw(st.booleans()) else None,
        custom={"entropy": each(float32)} if draw(st.booleans()) else {},
    )


def spans(versions: list[str]) -> list[tuple[str, int, int]]:
    found, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + len(list(run))
        found.append((version, start, end))
        start = end
    return found


split_fractions = st.lists(st.floats(0, 1), max_size=8)
modes = st.builds(SglangFormat, incremental=st.booleans(), shuffle_keys=st.none() | st.integers(0, 99))


def splits_at(reply: Reply, fractions: list[float]) -> list[int]:
    return sorted(math.floor(fraction * len(reply.token_ids)) for fraction in fractions)


def named(wire_format: SglangFormat) -> str:
    return "sglang-incremental" if wire_format.incremental else "sglang-cumulative"


@given(replies(), modes, split_fractions)
def test_a_reply_reads_back_as_it_was_in_every_mode_and_chunking(
    reply: Reply, wire_format: SglangFormat, fractions: list[float]
) -> None:
    body = b"".join(stream(reply, wire_format, splits_at(reply, fractions)))
    reading = read(
        body,
        named(wire_format),
        logprobs=reply.logprobs is not None,
        prompt_len=reply.prompt_tokens,
        experts=Shape(3, 2, dtype="uint8"),
    )
    assert reading.error is None
    assert reading.done
    assert reading.token_ids == reply.token_ids
    assert reading.logprobs == reply.logprobs
    assert reply.finish is not None
    assert reading.finish_reason == reply.finish["type"]
    assert reading.matched == reply.finish.get("matched")
    assert (reading.text or "") == "".join(reply.pieces or [])
    if reply.token_ids:
        assert (reading.text is None) == (reply.pieces is None)
    assert reading.version_spans == spans(reply.versions)
    if reply.routed_experts is not None:
        assert reading.routed_experts is not None
        assert reading.routed_experts.tobytes() == reply.routed_experts
    reported = reply.top_p if reply.top_p is not None else reply.sampling_mask
    if reported is not None and reply.token_ids:
        assert reading.top_p == ([*itertools.chain(*reported)], [0, *itertools.accumulate(map(len, reported))])


@given(replies(), split_fractions, st.booleans(), st.sampled_from(["0.5.19", "0.5.20"]))
def test_an_abort_in_the_queue_reads_back_once_however_much_was_sent_before(
    reply: Reply, fractions: list[float], incremental: bool, version: str
) -> None:
    """sgl-project/sglang#40901: what was not sent yet stands glued before all that is repeated."""
    wire_format = SglangFormat(incremental=incremental, version=version)
    n = len(reply.token_ids)
    reply = dataclasses.replace(reply, finish=wire.aborted_in_queue(), in_queue=True, logprobs=[-0.5] * n)
    splits = splits_at(reply, fractions)
    sent = splits[-1] if splits else 0
    body = b"".join(stream(reply, wire_format, splits))
    terminal = frames(body)[-1]
    assert "prompt_tokens" not in terminal["meta_info"]
    assert len(terminal["meta_info"]["output_token_logprobs"]) == n + (n - sent if incremental else 0)
    whole_ids = version == "0.5.20" and not incremental
    assert terminal["output_ids"] == (
        reply.token_ids if whole_ids else (reply.token_ids[sent:] if incremental else []) + reply.token_ids[-1:]
    )
    reading = read(body, named(wire_format))
    assert (reading.error, reading.finish_reason) == (None, "abort")
    assert reading.token_ids == reply.token_ids
    assert reading.logprobs == reply.logprobs
    assert reading.version_spans == spans(reply.versions)


@given(replies(), split_fractions, st.booleans(), st.booleans())
def test_the_rust_frontend_tells_the_same_tokens_in_its_own_order(
    reply: Reply, fractions: list[float], incremental: bool, in_queue: bool
) -> None:
    if in_queue:
        reply = dataclasses.replace(reply, finish=wire.aborted_in_queue(), in_queue=True)
    wire_format = SglangFormat(incremental=incremental, frontend="rust")
    body = b"".join(stream(reply, wire_format, splits_at(reply, fractions)))
    known = [
        "id",
        "prompt_tokens",
        "completion_tokens",
        "finish_reason",
        "output_token_logprobs",
        "input_token_logprobs",
    ]
    known += ["e2e_latency", "cached_tokens", "reasoning_tokens", "weight_version", "weight_versions"]
    for frame in frames(body):
        assert list(frame) == ["text", "meta_info", *(["output_ids"] if frame.get("output_ids") else [])]
        meta = frame["meta_info"]
        assert list(meta) == [key for key in known if key in meta]
        assert ("output_token_logprobs" in meta) == (reply.logprobs is not None and "output_ids" in frame)
    if in_queue:
        assert frames(body)[-1]["meta_info"]["finish_reason"] == wire.aborted("Abort in waiting queue")
    reading = read(body, named(wire_format), logprobs=reply.logprobs is not None)
    assert reading.error is None
    assert (reading.token_ids, reading.logprobs) == (reply.token_ids, reply.logprobs)
    assert (reading.text or "") == "".join(reply.pieces or [])


def test_input_logprobs_are_repeated_by_the_python_frontend_and_told_once_by_the_rust_one() -> None:
    reply = Reply(
        token_ids=[5, 6],
        logprobs=[-0.5, -0.25],
        pieces=["a", "b"],
        finish=length(2),
        input_logprobs=[(None, 1), (-2.0, 2)],
    )
    pairs = [[None, 1, None], [-2.0, 2, None]]
    for frontend, incremental, wanted in (
        ("python", True, [pairs, pairs]),
        ("python", False, [pairs, pairs]),
        ("rust", True, [pairs, []]),
        ("rust", False, [pairs, pairs]),
    ):
        wire_format = SglangFormat(incremental=incremental, frontend=frontend)  # type: ignore[arg-type]
        reported = frames(b"".join(stream(reply, wire_format, [1])))
        assert [frame["meta_info"]["input_token_logprobs"] for frame in reported] == wanted, wire_format


def test_a_status_is_an_error_event_under_the_rust_frontend_and_a_finish_reason_under_the_python_one() -> None:
    reply = Reply(finish=wire.queue_full(), in_queue=True)
    (rust,) = frames(b"".join(stream(reply, SglangFormat(frontend="rust"))))
    assert rust == {"error": {"message": "The request queue is full.", "code": 503}}
    (python,) = frames(b"".join(stream(reply, SglangFormat())))
    assert list(python["meta_info"]["finish_reason"].items()) == [
        ("type", "abort"),
        ("status_code", 503),
        ("message", "The request queue is full."),
    ]
    assert python["output_ids"] == []


def test_null_logprobs_texts_of_tokens_and_the_pair_of_no_token_are_written_as_told() -> None:
    reply = Reply(
        token_ids=[5, 6], logprobs=[None, -0.25], logprob_texts=["a", "\ufffd"], pieces=["a", ""], finish=length(2)
    )
    (frame,) = frames(b"".join(stream(reply, SglangFormat())))
    assert frame["meta_info"]["output_token_logprobs"] == [[None, 5, "a"], [-0.25, 6, "\ufffd"]]
    reply = Reply(logprobs=[], spare_pair=(-0.5, 9), finish=length(0))
    (frame,) = frames(b"".join(stream(reply, SglangFormat())))
    assert frame["output_ids"] == []
    assert frame["meta_info"]["completion_tokens"] == 0
    assert frame["meta_info"]["output_token_logprobs"] == [[-0.5, 9, None]]
    assert frame["meta_info"]["output_token_logprobs_length"] == 1


def test_releases_differ_in_the_keys_they_tell() -> None:
    def keys(version: str) -> set[str]:
        (frame,) = frames(b"".join(stream(Reply(finish=length(0)), SglangFormat(version=version))))
        return set(frame["meta_info"])

    assert "total_retractions" in keys("0.5.11")
    assert "num_retractions" in keys("0.5.12")
    assert "weight_versions" not in keys("0.5.18.post1")
    assert "weight_versions" in keys("0.5.19")


def test_shuffled_keys_differ_between_events_and_are_the_same_for_a_seed() -> None:
    reply = Reply(token_ids=list(range(9)), pieces=["x"] * 9, finish=length(9))

    def orders(seed: int | None) -> list[tuple[str, ...]]:
        reported = frames(b"".join(stream(reply, SglangFormat(shuffle_keys=seed), range(9))))
        return [(*frame, *frame["meta_info"]) for frame in reported[1:-1]]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len(set(orders(1))) > 4
    assert len(set(orders(None))) == 1


def test_what_is_not_streamed_is_the_cumulative_terminal_frame() -> None:
    reply = Reply(token_ids=[5, 6], pieces=["a", "b"], finish=length(2))
    whole = wire.whole(reply, SglangFormat(incremental=True))
    assert (whole["text"], whole["output_ids"]) == ("ab", [5, 6])


def test_what_cannot_be_written_is_told() -> None:
    reply = Reply(token_ids=[5, 6], pieces=["a", "b"])
    writer = SglangWriter(reply, SglangFormat())
    writer.event(1)
    for tokens in (0, 3):
        with pytest.raises(ValueError, match=f"from 1 tokens to {tokens}: the reply has 2"):
            writer.event(tokens)
    with pytest.raises(ValueError, match="no finish reason"):
        writer.terminal()
    for wrong, reason in (
        ({"version": "0.5.9"}, "as from 0.5.10"),
        ({"version": "0.5.10", "incremental": True}, "as from 0.5.11"),
        ({"version": "new"}, "like 0.5.23"),
        ({"frontend": "go"}, "'python' or 'rust'"),
    ):
        with pytest.raises(ValueError, match=reason):
            SglangFormat(**wrong)
