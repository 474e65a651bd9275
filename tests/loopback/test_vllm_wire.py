"""The loopback engine's vLLM writer: recorded events are reproduced byte for byte, random replies are read back."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import read
from streamfold.loopback.core.reply import DONE, Reply, length, stopped
from streamfold.loopback.vllm.completions import CompletionWriter
from streamfold.loopback.vllm.wire import ResponseOptions, VllmFormat, VllmWriter, aborted, stream
from support.bodies import Recording, Shape, recordings

TOLD = [recording for recording in recordings("streams") if recording.name.startswith("vllm-")]
GENERATED = [recording for recording in TOLD if b'"choices"' in recording.body]
Wire = Literal["0.20", "0.22", "0.24", "0.28", "0.31", "0.32", "0.33", "rust"]
WIRES: tuple[Wire, ...] = ("0.20", "0.22", "0.24", "0.28", "0.31", "0.32", "0.33", "rust")


def format_of(wire: str) -> VllmFormat:
    return VllmFormat(frontend="rust") if wire == "rust" else VllmFormat(version=wire)


def frames(body: bytes) -> list[dict[str, Any]]:
    """The objects of a body's events; ``[DONE]`` must be the last and is left out."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def token_of(entry: dict[str, Any]) -> int:
    return int(entry["token_id"] if "token_id" in entry else entry["token"].removeprefix("token_id:"))


def reply_of(reported: list[dict[str, Any]], usage: dict[str, Any]) -> tuple[Reply, list[int], dict[int, str]]:
    """The reply of which these were the events, the token counts of each, and the texts of other tokens."""
    choices = [frame["choices"][0] for frame in reported]
    last = choices[-1]
    reply = Reply(
        rid=reported[0]["request_id"],
        index=last["index"],
        prompt_tokens=usage.get("prompt_tokens", 3),
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        prompt_token_ids=reported[0].get("prompt_token_ids"),
    )
    if last["finish_reason"] is not None:
        reply.finish = {"type": last["finish_reason"], "matched": last.get("stop_reason")}
    if last["routed_experts"] is not None:
        reply.routed_experts = base64.b64decode(last["routed_experts"], validate=True)
    for span in last.get("weight_versions") or []:
        reply.versions += [span["version"]] * (span["end"] - span["start"])
    if last["logprobs"] is not None:
        reply.logprobs, reply.ranks, reply.top_logprobs, reply.logprob_texts = [], [], [], []
    splits: list[int] = []
    texts: dict[int, str] = {}
    for choice in choices:
        reply.token_ids += choice["token_ids"]
        splits.append(len(reply.token_ids))
        reply.pieces = [*(reply.pieces or []), choice.get("text", ""), *[""] * (len(choice["token_ids"]) - 1)]
        for token, entry in zip(choice["token_ids"], (choice["logprobs"] or {"content": []})["content"], strict=False):
            assert reply.logprobs is not None
            assert reply.ranks is not None
            assert reply.top_logprobs is not None
            assert reply.logprob_texts is not None
            reply.logprobs.append(entry["logprob"])
            reply.ranks.append(entry.get("rank", 1))
            reply.logprob_texts.append(entry.get("token", ""))
            if "text" in choice:
                # The candidates have texts only: they are given ids here, by which the writer asks for the texts.
                others = [(each["logprob"], 1000 + n) for n, each in enumerate(entry["top_logprobs"][1:], len(texts))]
                texts |= {token: each["token"] for (_, token), each in zip(others, entry["top_logprobs"][1:])}  # noqa: B905
                reply.top_logprobs.append([(entry["logprob"], token), *others])
            else:
                reply.top_logprobs.append([(each["logprob"], token_of(each)) for each in entry["top_logprobs"]])
    return reply, splits, texts


@pytest.mark.parametrize("recording", GENERATED, ids=str)
def test_a_recorded_stream_is_written_again_byte_for_byte(recording: Recording) -> None:
    """Key order, presence of keys, nulls, spelling of numbers, text and framing are the engine's."""
    wire_format = VllmFormat(version=recording.name.split("/")[0].removeprefix("vllm-"))
    events = [event for event in recording.body.split(b"\n\n") if b'"request_id"' in event]
    reported = [json.loads(event.removeprefix(b"data: ")) for event in events]
    usage: dict[str, Any] = next((frame["usage"] for frame in reported if not frame["choices"]), {})
    continuous = any(frame["choices"] and frame["usage"] for frame in reported)
    indices = sorted({frame["choices"][0]["index"] for frame in reported if frame["choices"]})
    written: dict[int, list[bytes]] = {}
    for index in indices:
        own = [frame for frame in reported if frame["choices"] and frame["choices"][0]["index"] == index]
        reply, splits, texts = reply_of(own, usage)
        asks = ResponseOptions(
            usage=bool(usage),
            continuous_usage=continuous,
            text=own[0].get("output_mode") == "text",
            decode=lambda token, texts=texts: texts[token],  # type: ignore[misc]
        )
        writer = VllmWriter(reply, wire_format, asks)
        written[index] = [writer.event(tokens) for tokens in (splits if reply.finish is None else splits[:-1])]
        if reply.finish is None and recording.told["complete"] and usage:
            reply.finish = aborted()  # of which the old release tells nothing but the usage
        if reply.finish is not None:
            written[index] += writer.last_events()
    mine = []
    for frame in reported:
        # The usage counts all answers of one request, and a reply is one answer.
        if not frame["choices"] and len(indices) > 1:
            events.remove(events[-1])
        else:
            mine.append(written[frame["choices"][0]["index"] if frame["choices"] else 0].pop(0))
    assert mine == [event + b"\n\n" for event in events]


def test_a_recorded_error_event_is_written_again_byte_for_byte() -> None:
    found = [recording for recording in TOLD if b'"error"' in recording.body]
    assert len(found) >= 4
    for recording in found:
        (frame,) = [frame for frame in frames(recording.body) if "error" in frame]
        error = frame["error"]
        written = VllmFormat(version="0.28").error_event(error["message"], error["code"], error["param"])
        assert recording.body.endswith(written + DONE)


def test_an_error_event_of_the_python_frontend_is_ascii_with_spaces_and_of_the_rust_one_compact() -> None:
    assert VllmFormat().error_event("für", 503).isascii()
    assert b'"type": "ServiceUnavailableError", "param": null' in VllmFormat().error_event("x", 503)
    rust = VllmFormat(frontend="rust")
    for status, name in ((500, b"server_error"), (503, b"server_error"), (400, b"invalid_request_error")):
        told = b'{"error":{"message":"f\xc3\xbcr","type":"%b","param":null,"code":"%b"}}' % (name, name)
        assert told in rust.error_event("für", status)


# Replies of any kind, with text that is hard on readers of lines.

texts = st.text(st.sampled_from('ab \n"\\\u0085\u2028\u2029你🙂\x00\x7f') | st.characters(codec="utf-8"), max_size=5)
float32 = st.floats(-20, 0, width=32)
finishes = st.one_of(
    st.builds(stopped, st.none() | st.integers(0, 10**6) | texts.filter(bool)),
    st.builds(length, st.integers(1, 10**6)),
)
SHAPE = Shape(3, 2, dtype="uint8")


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    n = draw(st.integers(1, 12))
    prompt = draw(st.integers(1, 5))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    file = io.BytesIO()
    np.save(file, np.arange((prompt + n - 1) * 6, dtype=np.uint8).reshape(-1, 3, 2))
    ids = each(st.integers(0, 2**31 - 1))
    logprobs = each(float32) if draw(st.booleans()) else None
    rows = [[(own, token), (own - 1, 7)] for own, token in zip(logprobs or [], ids, strict=False)]
    return Reply(
        prompt_tokens=prompt,
        token_ids=ids,
        logprobs=logprobs,
        logprob_texts=each(texts),
        ranks=None if logprobs is None else each(st.integers(1, 10)),
        top_logprobs=None if logprobs is None else rows,
        pieces=each(texts),
        versions=each(st.sampled_from("ab")),
        finish=draw(finishes),
        sampling_mask=each(st.lists(st.integers(0, 2**31 - 1), max_size=3)) if draw(st.booleans()) else None,
        routed_experts=file.getvalue() if draw(st.booleans()) else None,
    )


split_fractions = st.lists(st.floats(0, 1), max_size=8)


def splits_at(reply: Reply, fractions: list[float]) -> list[int]:
    return sorted(math.floor(fraction * len(reply.token_ids)) for fraction in fractions)


def spans(versions: list[str] | list[None]) -> list[tuple[str | None, int, int]]:
    edges = list(itertools.accumulate((len(list(run)) for _, run in itertools.groupby(versions)), initial=0))
    names = [name for name, _ in itertools.groupby(versions)]
    return list(zip(names, edges[:-1], edges[1:], strict=True))


asks = st.builds(ResponseOptions, usage=st.booleans(), continuous_usage=st.booleans(), text=st.booleans())


@given(replies(), st.sampled_from(WIRES), split_fractions, asks, st.none() | st.integers(0, 9))
def test_a_reply_reads_back_as_it_was_in_every_release_and_chunking(
    reply: Reply, wire: Wire, fractions: list[float], options: ResponseOptions, shuffle: int | None
) -> None:
    new, rust = wire in {"0.32", "0.33"}, wire == "rust"
    text = options.text and new
    wire_format = dataclasses.replace(format_of(wire), shuffle_keys=shuffle)
    # No engine ends a response without its last token, and old releases tell nothing of an event without any.
    splits = [tokens for tokens in splits_at(reply, fractions) if new or rust or tokens < len(reply.token_ids)]
    reading = read(
        b"".join(stream(reply, wire_format, dataclasses.replace(options, text=text), splits)),
        "vllm",
        logprobs=reply.logprobs is not None,
        prompt_len=reply.prompt_tokens,
        experts=SHAPE,
    )
    assert reading.error is None
    assert reading.done
    assert (reading.token_ids, reading.logprobs) == (reply.token_ids, reply.logprobs)
    assert reading.prompt_tokens == (reply.prompt_tokens if options.usage else None)
    assert reading.text == ("".join(reply.pieces or []) if text else None)
    assert reply.finish is not None
    assert reading.finish_reason == reply.finish["type"]
    assert reading.matched == (reply.finish.get("matched") if new else None)
    untold = spans([None] * len(reply.token_ids))
    assert reading.version_spans == (spans(reply.versions) if new else untold)
    if reply.sampling_mask is not None and new:
        sets = reply.sampling_mask
        assert reading.top_p == ([*itertools.chain(*sets)], [0, *itertools.accumulate(map(len, sets))])
    else:
        assert reading.top_p is None
    if reply.routed_experts is not None and not rust and wire not in {"0.20", "0.22"}:
        assert reading.routed_experts is not None
        np.testing.assert_array_equal(reading.routed_experts, np.load(io.BytesIO(reply.routed_experts)))
    else:
        assert reading.routed_experts is None


@given(replies(), split_fractions, st.booleans())
def test_a_completion_reads_back_as_it_was(reply: Reply, fractions: list[float], ids_as_text: bool) -> None:
    reply = dataclasses.replace(reply, rid="cmpl-7-0", prompt_token_ids=[5], prompt_tokens=1)
    options = ResponseOptions(usage=True, continuous_usage=True, text=True)
    writer = CompletionWriter(reply, VllmFormat(), options, "m", ids_as_text=ids_as_text)
    body = b"".join([writer.event(tokens) for tokens in splits_at(reply, fractions)] + writer.last_events()) + DONE
    reading = read(body, "vllm-completions", logprobs=reply.logprobs is not None, prompt_len=1)
    assert reading.error is None
    assert (reading.token_ids, reading.logprobs) == (reply.token_ids, reply.logprobs)
    assert reading.text == "".join(reply.pieces or [])
    assert {frame["id"] for frame in frames(body)} == {"cmpl-7"}


# What releases tell, and what they leave out.


def choice_of(reply: Reply, wire: str, **options: Any) -> dict[str, Any]:
    (frame,) = frames(b"".join(stream(reply, format_of(wire), ResponseOptions(**options))))
    (choice,) = frame["choices"]
    assert isinstance(choice, dict)
    return choice


@pytest.mark.parametrize(
    ("wire", "keys"),
    [
        ("0.20", ["index", "logprobs", "finish_reason", "token_ids"]),
        ("0.24", ["index", "logprobs", "finish_reason", "token_ids", "routed_experts"]),
        ("0.28", ["index", "logprobs", "finish_reason", "token_ids", "routed_experts", "sampling_mask"]),
        (
            "0.32",
            [
                *("index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask"),
                *("weight_versions", "logprobs"),
            ],
        ),
        ("rust", ["index", "finish_reason", "token_ids"]),
    ],
)
def test_releases_differ_in_the_keys_that_they_tell(wire: str, keys: list[str]) -> None:
    assert list(choice_of(Reply(token_ids=[5], finish=length(1)), wire)) == keys


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_no_number_is_null_or_the_lowest_logprob_as_the_release_has_it(wire: Wire) -> None:
    reply = Reply(token_ids=[5, 6], logprobs=[None, -math.inf], finish=length(2))
    reported = [entry["logprob"] for entry in choice_of(reply, wire)["logprobs"]["content"]]
    assert reported == [-9999.0 if wire in {"0.32", "0.33", "rust"} else None, -9999.0]


def test_the_oldest_releases_name_every_candidate_after_the_sampled_token() -> None:
    reply = Reply(token_ids=[5], logprobs=[-1.0], top_logprobs=[[(-1.0, 5), (-2.0, 6)]], finish=length(1))

    def names(wire: str) -> list[str]:
        (entry,) = choice_of(reply, wire)["logprobs"]["content"]
        return [each["token"] for each in entry["top_logprobs"]]

    assert (names("0.21"), names("0.22")) == (["token_id:5"] * 2, ["token_id:5", "token_id:6"])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("prompt_ids", [None, [1, 2]])
def test_an_abort_without_a_token_is_told_by_a_terminal_event_or_not_at_all(
    wire: Wire, prompt_ids: list[int] | None
) -> None:
    """vllm-project/vllm#47933: old releases send no event without tokens, but for the ids of the prompt."""
    reply = Reply(logprobs=[], finish=aborted(), prompt_token_ids=prompt_ids)
    reported = frames(b"".join(stream(reply, format_of(wire), ResponseOptions(usage=True))))
    assert (reported[-1]["choices"], reported[-1]["usage"]["completion_tokens"]) == ([], 0)
    is_reported = wire in {"0.32", "0.33", "rust"} or (wire == "0.31" and prompt_ids is not None)
    assert [frame["choices"][0]["finish_reason"] for frame in reported[:-1]] == (["abort"] if is_reported else [])
    if wire in {"0.32", "0.33"}:
        assert reported[0]["choices"][0]["weight_versions"] == []
        assert reported[0]["choices"][0]["logprobs"] == {"content": []}


def test_the_ids_of_the_prompt_come_with_the_first_event_as_from_0_30() -> None:
    reply = Reply(token_ids=[5, 6], finish=length(2), prompt_token_ids=[1, 2])
    for wire, wanted in (("0.28", [None, None]), ("0.30", [[1, 2], None]), ("0.32", [[1, 2], None])):
        reported = frames(b"".join(stream(reply, format_of(wire), ResponseOptions(), [1])))
        assert [frame.get("prompt_token_ids") for frame in reported] == wanted, wire


def test_text_that_was_held_back_until_an_abort_comes_with_the_terminal_event() -> None:
    reply = Reply(token_ids=[5], pieces=["a"])
    writer = VllmWriter(reply, VllmFormat(), ResponseOptions(text=True))
    writer.event(1)
    reply.pieces, reply.finish = ["ab"], aborted()
    (event,) = writer.last_events()
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == "b"


def test_what_cannot_be_written_is_told() -> None:
    writer = VllmWriter(Reply(token_ids=[5, 6]), VllmFormat(), ResponseOptions())
    writer.event(1)
    for tokens in (0, 3):
        with pytest.raises(ValueError, match=f"from 1 tokens to {tokens}: the reply has 2"):
            writer.event(tokens)
    with pytest.raises(ValueError, match="no finish reason"):
        writer.last_events()
    for wrong, reason in (
        ({"version": "0.19.1"}, "from 0.20 on"),
        ({"version": "new"}, "like 0.32.0 or 0.28"),
        ({"frontend": "go"}, "'python' or 'rust'"),
    ):
        with pytest.raises(ValueError, match=reason):
            VllmFormat(**wrong)  # type: ignore[arg-type]
