"""Generations of the loopback engine as vLLM, over real HTTP."""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from streamfold.loopback import Config, Loopback
from streamfold.loopback import undisturbed as alone
from support.bodies import Shape
from support.loopback_http import PROMPT, chunks, until
from support.loopback_vllm import (
    choices,
    complete,
    generate,
    ids,
    opened,
    payload,
    send,
    undisturbed,
    usage,
    whole_characters,
)
from support.raw_http import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

Frontend = Literal["python", "rust"]


def a_word(engine: Loopback) -> tuple[int, str]:
    """The place and the text of a word that the model says for the first time, among its first tokens."""
    tokens = undisturbed(engine).token_ids
    place = next(i for i in range(3, 20) if tokens[i] >= engine.tokenizer.first_word_id and tokens[i] not in tokens[:i])
    return place, engine.tokenizer.decode([tokens[place]])


@pytest.fixture(scope="module")
def engine() -> Iterator[Loopback]:
    with Loopback(engine="vllm") as running:
        yield running


@pytest.fixture(scope="module")
def old() -> Iterator[Loopback]:
    with Loopback(engine="vllm", version="0.28.0") as running:
        yield running


@pytest.mark.parametrize(("version", "frontend"), [("0.32.0", "python"), ("0.28.0", "python"), ("0.32.0", "rust")])
def test_a_stream_tells_the_undisturbed_generation_in_every_dialect(version: str, frontend: Frontend) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with Loopback(engine="vllm", version=version, frontend=frontend) as engine:
        for params in ({"max_tokens": 40}, {"max_tokens": 400, "temperature": 1, "seed": 5, "ignore_eos": False}):
            answer = generate(engine, params=params, stream_options=options)
            wanted = undisturbed(engine, params=params)
            reading = answer.read(prompt_len=3)
            assert (reading.token_ids, reading.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert wanted.finish is not None
            assert reading.finish_reason == wanted.finish["type"]
            assert reading.done
            assert usage(answer)["completion_tokens"] == len(wanted.token_ids)


def test_the_model_says_what_it_says_in_the_other_engine() -> None:
    """One core, two tongues."""
    mine = alone(Config(engine="vllm"), PROMPT, {"max_tokens": 50, "seed": 3, "logprobs": 1, "stop_token_ids": [300]})
    params = {"max_new_tokens": 50, "sampling_seed": 3, "stop_token_ids": [300]}
    theirs = alone(Config(), PROMPT, params, return_logprob=True)
    assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.parametrize("seed", [None, 4])
def test_a_generation_resumed_from_its_own_tokens_equals_the_undisturbed_one(
    engine: Loopback, seed: int | None
) -> None:
    sampling: dict[str, Any] = {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}
    wanted = undisturbed(engine, params={"max_tokens": 50, **sampling}).token_ids
    kept: list[int] = []
    for count in (1, 7, 20, 22):
        answer = generate(engine, token_ids=PROMPT + kept, params={"max_tokens": count, **sampling})
        kept += ids(answer)
    assert kept == wanted


def test_the_head_comes_at_once_and_each_event_is_a_chunk_of_its_own() -> None:
    with Loopback(engine="vllm", token_rate=200, prefill_delay=0.3) as engine, connected(engine) as sock:
        sent = json.dumps(payload(params={"max_tokens": 3})).encode()
        head = f"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n"
        sock.sendall(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + sent)
        first = sock.recv(1 << 16)
        assert first.endswith(b"\r\n\r\n"), "no event before the prefill is over"
        assert b"HTTP/1.1 200 OK\r\n" in first
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in first
        assert b"content-length" not in first
        events = chunks(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
    assert len(events) == 4
    assert events[-1] == b"data: [DONE]\n\n"
    assert all(event.startswith(b"data: {") and event.endswith(b"\n\n") for event in events[:-1])


def test_the_rust_frontend_has_headers_of_its_own_and_no_prefix() -> None:
    with Loopback(engine="vllm", frontend="rust") as engine:
        answer = generate(engine, headers={"X-Request-Id": "abc"})
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert "server" not in answer.headers
        assert {frame["request_id"] for frame in answer.frames} == {"abc"}


def test_the_id_is_the_headers_or_the_bodys_or_16_hex_digits_behind_a_prefix(engine: Loopback) -> None:
    def reported(**asked: Any) -> str:
        (rid,) = {frame["request_id"] for frame in generate(engine, **asked).frames}
        return str(rid)

    assert reported(request_id="body") == "generate-tokens-body"
    assert reported(request_id="body", headers={"X-Request-Id": "head"}) == "generate-tokens-head"
    random = reported().removeprefix("generate-tokens-")
    assert len(random) == 16
    assert int(random, 16) >= 0


# Cutting


@pytest.mark.parametrize(("interval", "counts"), [(1, [1] * 12), (5, [1, 5, 5, 1]), (50, [1, 11])])
def test_an_event_comes_with_the_first_token_then_each_interval_and_with_the_last(
    interval: int, counts: list[int]
) -> None:
    with Loopback(engine="vllm", token_rate=500) as engine:
        answer = generate(engine, params={"max_tokens": 12, "stream_interval": interval})
        assert [len(choice["token_ids"]) for choice in choices(answer)] == counts
    with Loopback(engine="vllm", token_rate=500, stream_interval=interval, version="0.26.0") as engine:
        answer = generate(engine, params={"max_tokens": 12, "stream_interval": 3})
        assert [len(choice["token_ids"]) for choice in choices(answer)] == counts, "the request's is not known yet"


def test_steps_of_several_tokens_make_events_of_several_tokens() -> None:
    with Loopback(engine="vllm", tokens_per_step=4, token_rate=1000) as engine:
        answer = generate(engine, params={"max_tokens": 10})
        assert [len(choice["token_ids"]) for choice in choices(answer)] == [4, 4, 2]
        assert answer.read().token_ids == undisturbed(engine, params={"max_tokens": 10}).token_ids


# How it ends


def test_the_last_token_and_length_are_in_one_event(engine: Loopback) -> None:
    last = choices(generate(engine, params={"max_tokens": 3}))[-1]
    assert (last["finish_reason"], last["stop_reason"], len(last["token_ids"])) == ("length", None, 1)


def test_the_end_of_the_sequence_is_kept_and_is_no_stop_reason(engine: Loopback) -> None:
    params = {"max_tokens": 3000, "temperature": 1, "seed": 1}
    answer = generate(engine, params={**params, "ignore_eos": False})
    assert choices(answer)[-1]["finish_reason"] == "stop"
    assert choices(answer)[-1]["stop_reason"] is None
    assert ids(answer)[-1] == engine.tokenizer.eos_token_id
    beyond = undisturbed(engine, params={**params, "max_tokens": len(ids(answer)) + 5})
    assert beyond.token_ids[: len(ids(answer))] == ids(answer), "with ignore_eos it continues"
    assert len(beyond.token_ids) == len(ids(answer)) + 5


def test_a_stop_token_ends_it_is_kept_and_told_even_where_eos_is_ignored(engine: Loopback) -> None:
    tokens = undisturbed(engine).token_ids
    last = choices(generate(engine, params={"stop_token_ids": [tokens[4]], "ignore_eos": True}))[-1]
    assert (last["finish_reason"], last["stop_reason"], last["token_ids"]) == ("stop", tokens[4], [tokens[4]])
    assert generate(engine, params={"stop_token_ids": [tokens[4]], "min_tokens": 5}).read().token_ids[4] != tokens[4]


def test_a_stop_token_stops_before_the_budget_does(engine: Loopback) -> None:
    tokens = undisturbed(engine).token_ids
    last = choices(generate(engine, params={"stop_token_ids": [tokens[4]], "max_tokens": 5}))[-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", tokens[4])


def test_a_stop_string_ends_it_with_the_token_that_completes_it_which_is_kept(engine: Loopback, old: Loopback) -> None:
    place, word = a_word(engine)
    for stop in (word, ["never said", word[1:]]):
        answer = generate(engine, params={"stop": stop})
        last = choices(answer)[-1]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", word if stop == word else word[1:])
        assert ids(answer) == undisturbed(engine).token_ids[: place + 1]
    last = choices(generate(old, params={"stop": word}))[-1]
    assert (last["finish_reason"], "stop_reason" in last) == ("stop", False)


@pytest.mark.parametrize(
    ("version", "frontend", "wanted"),
    [("0.21.0", "python", 16), ("0.22.0", "python", 97), ("0.32.0", "python", 97), ("0.32.0", "rust", 97)],
)
def test_a_budget_that_is_not_told_is_16_in_the_oldest_releases_and_all_there_is_later(
    version: str, frontend: Frontend, wanted: int
) -> None:
    with Loopback(engine="vllm", version=version, frontend=frontend, context_length=100) as engine:
        answer = generate(engine, params={"max_tokens": ...})
        assert (len(ids(answer)), answer.read().finish_reason) == (wanted, "length")
        assert len(ids(generate(engine, params={"max_tokens": None}))) == 97
        assert len(ids(generate(engine, params={"max_tokens": 1000}))) == 97, "more than there is may be asked for"


# Logprobs, usage, routed experts


@pytest.mark.parametrize(("asked", "rows"), [(0, 1), (1, 1), (3, 3), (20, 20)])
def test_as_many_candidates_as_asked_for_and_at_least_the_sampled_one(
    engine: Loopback, old: Loopback, asked: int, rows: int
) -> None:
    for running in (engine, old):
        for choice in choices(generate(running, params={"logprobs": asked, "max_tokens": 4})):
            for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
                assert len(entry["top_logprobs"]) == rows
                assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
                name = {"token_id": token} if running is engine else {"token": f"token_id:{token}", "bytes": None}
                assert name.items() <= entry.items()
                if running is engine:
                    assert [each["rank"] for each in entry["top_logprobs"]] == [*range(1, rows + 1)]


def test_logprobs_that_are_not_asked_for_are_null(engine: Loopback) -> None:
    for absent in (..., None):
        reported = choices(generate(engine, params={"logprobs": absent, "max_tokens": 3}))
        assert {choice["logprobs"] for choice in reported} == {None}


def test_a_logprob_that_is_no_number_is_the_lowest_or_null_and_refused_in_one_piece(
    engine: Loopback, old: Loopback
) -> None:
    params = {"max_tokens": 3, "extra_args": {"null_logprobs_at": [1]}}
    for running, wanted in ((engine, -9999.0), (old, None)):
        reported = [e["logprob"] for c in choices(generate(running, params=params)) for e in c["logprobs"]["content"]]
        assert (reported[1], None in (reported[0], reported[2])) == (wanted, False)
    assert generate(engine, params=params, stream=False).status == 200
    refused = generate(old, params=params, stream=False)
    assert (refused.status, refused.json["error"]["code"]) == (400, 400)
    assert refused.json["error"]["message"] == "Out of range float values are not JSON compliant"


@pytest.mark.parametrize(("experts", "dtype"), [(16, "uint8"), (300, "uint16")])
@pytest.mark.parametrize("start", [0, 2])
def test_routed_experts_come_with_the_terminal_event_as_a_npy_file(experts: int, dtype: Any, start: int) -> None:
    with Loopback(engine="vllm", return_routed_experts=True, num_layers=3, num_experts=experts) as engine:
        answer = generate(engine, params={"max_tokens": 6, "routed_experts_prompt_start": start})
        reported = [choice["routed_experts"] for choice in choices(answer)]
        assert reported[:-1] == [None] * (len(reported) - 1)
        array = np.load(io.BytesIO(base64.b64decode(reported[-1], validate=True)))
        assert (array.dtype, array.shape) == (np.dtype(dtype), (3 + 6 - 1 - start, 3, 2))
        assert array.max() < experts
        reading = answer.read(prompt_len=3, experts=Shape(3, 2, dtype=dtype), experts_start=start)
        assert reading.routed_experts is not None
        whole = np.load(io.BytesIO(undisturbed(engine, params={"max_tokens": 6}).routed_experts or b""))
        np.testing.assert_array_equal(array, whole[start:])
    with Loopback(engine="vllm") as engine:
        assert choices(generate(engine))[-1]["routed_experts"] is None


def test_sampling_masks_come_token_by_token_as_from_0_32_if_the_flag_is_on(engine: Loopback) -> None:
    params = {"max_tokens": 9, "temperature": 1, "top_p": 0.9, "seed": 2}
    with Loopback(engine="vllm", return_sampling_mask=True) as masking:
        answer = generate(masking, params=params)
        masks = [mask for choice in choices(answer) for mask in choice["sampling_mask"]]
        assert [mask[0] for mask in masks] == ids(answer)
        assert masks == undisturbed(masking, params=params).sampling_mask
        assert max(map(len, masks)) > 1
    assert {choice["sampling_mask"] for choice in choices(generate(engine, params=params))} == {None}
    with Loopback(engine="vllm", return_sampling_mask=True, version="0.28.0") as masking:
        assert {choice["sampling_mask"] for choice in choices(generate(masking, params=params))} == {None}


def test_the_usage_comes_where_it_is_asked_for(engine: Loopback) -> None:
    def usages(**options: bool) -> list[Any]:
        return [frame["usage"] for frame in generate(engine, params={"max_tokens": 3}, stream_options=options).frames]

    assert {json.dumps(each) for each in usages()} == {"null"}
    assert {json.dumps(each) for each in usages(continuous_usage_stats=True)} == {"null"}, "not by itself"
    assert [each and each["completion_tokens"] for each in usages(include_usage=True)][-2:] == [None, 3]
    each = usages(include_usage=True, continuous_usage_stats=True)
    assert [reported["total_tokens"] - reported["prompt_tokens"] for reported in each][-2:] == [3, 3]
    assert "prompt_tokens_details" in each[-1]
    assert each[-2]["prompt_tokens_details"] is None


def test_the_ids_of_the_prompt_come_with_the_first_event_if_asked_for(engine: Loopback) -> None:
    with_ids = [frame.get("prompt_token_ids") for frame in generate(engine, return_token_ids=True).frames]
    assert with_ids == [PROMPT, *[None] * (len(with_ids) - 1)]
    assert all("prompt_token_ids" not in frame for frame in generate(engine).frames)


# Text


def test_text_mode_tells_whole_characters_with_the_token_that_completes_them(engine: Loopback) -> None:
    """The model says emoji of several tokens now and then, and special tokens."""
    answer = generate(engine, params={"max_tokens": 600}, output_mode="text")
    reported = choices(answer)
    assert {frame["output_mode"] for frame in answer.frames} == {"text"}
    entries = [entry for choice in reported for entry in choice["logprobs"]["content"]]
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in entries)
    joined = "".join(choice["text"] for choice in reported)
    assert (
        joined
        == engine.tokenizer.decode(ids(answer))
        == "".join(undisturbed(engine, params={"max_tokens": 600}, output_mode="text").pieces or [])
    )
    spelled = "".join(entry["token"] for entry in entries)
    assert spelled == engine.tokenizer.decode(ids(answer), skip_special_tokens=False)
    assert "<|" in spelled
    assert "<|" not in joined
    assert any(ord(character) > 0xFFFF for character in joined)
    assert answer.read().logprobs == undisturbed(engine, params={"max_tokens": 600}).logprobs


def test_a_character_that_the_prompt_leaves_open_is_told_whole_by_the_token_that_completes_it(engine: Loopback) -> None:
    emoji = list("🙂".encode())
    said = undisturbed(engine, params={"max_tokens": 3000}).token_ids
    start = next(i for i in range(len(said)) if said[i : i + 4] == emoji)
    prompt = PROMPT + said[: start + 2]
    sent = choices(generate(engine, token_ids=prompt, output_mode="text", params={"max_tokens": 2}))
    assert [(choice["text"], choice["logprobs"]["content"][0]["token"]) for choice in sent] == [
        ("", ""),
        ("🙂", "🙂"),
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_is_no_part_of_the_text_unless_asked_for_and_its_tokens_are_ids(
    engine: Loopback, keep: bool
) -> None:
    place, word = a_word(engine)
    params = {"stop": word[2:], "include_stop_str_in_output": keep}
    answer = generate(engine, params=params, output_mode="text")
    assert len(ids(answer)) == place + 1
    reported = "".join(choice["text"] for choice in choices(answer))
    assert reported == whole_characters(engine, ids(answer)[:-1]) + (word if keep else word[:2])


def test_text_that_may_become_a_stop_string_is_held_back_and_the_tokens_are_not() -> None:
    with Loopback(engine="vllm", token_rate=300) as engine:
        held = "x" * 8  # never said
        reported = choices(generate(engine, params={"stop": held}, output_mode="text"))
        texts = ["".join(choice["text"] for choice in reported[: i + 1]) for i in range(len(reported))]
        tokens = [token for choice in reported for token in choice["token_ids"]]
        for i, text in enumerate(texts[:-1]):
            whole = whole_characters(engine, tokens[: i + 1])
            assert text == whole[: max(len(whole) - 7, 0)]
        assert texts[-1] == whole_characters(engine, tokens)


def test_old_releases_and_the_rust_frontend_know_no_text_mode(old: Loopback) -> None:
    with Loopback(engine="vllm", frontend="rust") as rust:
        for running in (old, rust):
            answer = generate(running, output_mode="text")
            assert all("output_mode" not in frame for frame in answer.frames)
            assert all("text" not in choice for choice in choices(answer))


# Without a stream


@pytest.mark.parametrize(("version", "frontend"), [("0.32.0", "python"), ("0.28.0", "python"), ("0.32.0", "rust")])
def test_what_is_not_streamed_has_all_in_one_choice(version: str, frontend: Frontend) -> None:
    with Loopback(engine="vllm", version=version, frontend=frontend) as engine:
        answer = generate(engine, stream=False)
        wanted = undisturbed(engine)
        assert answer.headers["content-type"] == "application/json"
        (choice,) = answer.json["choices"]
        assert choice["token_ids"] == wanted.token_ids
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == wanted.logprobs
        assert choice["finish_reason"] == "length"
        assert answer.json["request_id"].startswith("generate-tokens-") == (frontend == "python")
        if frontend == "python":
            assert answer.json["usage"]["completion_tokens"] == 20


# Completions


def test_a_completion_tells_the_same_tokens_in_its_own_shape(engine: Loopback) -> None:
    answer = complete(engine, headers={"X-Request-Id": "c1"}, stream_options={"include_usage": True})
    wanted = undisturbed(engine)
    reading = answer.read(prompt_len=3)
    assert (reading.token_ids, reading.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert reading.text == engine.tokenizer.decode(wanted.token_ids)
    assert {frame["id"] for frame in answer.frames} == {"cmpl-c1"}
    assert [choice["prompt_token_ids"] for choice in choices(answer)][:2] == [PROMPT, None]
    assert "system_fingerprint" in answer.frames[-1]
    assert usage(answer)["completion_tokens"] == 20
    texts = [text for choice in choices(answer) for text in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices(answer) for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [len("".join(texts[:i])) for i in range(len(texts))]


def test_a_completion_leaves_ids_out_unless_asked_for_and_has_16_tokens_by_default(engine: Loopback) -> None:
    reported = choices(complete(engine, return_token_ids=..., max_tokens=...))
    assert {(choice["token_ids"], choice["prompt_token_ids"]) for choice in reported} == {(None, None)}
    assert sum(len(choice["logprobs"]["tokens"]) for choice in reported) == 16
    named = choices(complete(engine, return_tokens_as_token_ids=True, max_tokens=2))
    for choice in named:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert sum(len(choice["token_ids"]) for choice in choices(complete(engine, prompt=" the story"))) == 20
    (choice,) = complete(engine, stream=False).json["choices"]
    assert choice["token_ids"] == undisturbed(engine).token_ids


# Leaving


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_once(stream: bool) -> None:
    with Loopback(engine="vllm", token_rate=100) as engine:
        if stream:
            with opened(engine, params={"max_tokens": 20_000}, request_id="gone") as running:
                running.frame()
        else:
            with connected(engine) as sock:
                sent = json.dumps(payload(params={"max_tokens": 20_000}, stream=False, request_id="gone")).encode()
                head = "POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                sock.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
                until(lambda: engine.stats().running == 1)
        until(lambda: engine.stats().leavers == ("generate-tokens-gone",))
        assert engine.stats().running == 0


def test_a_body_is_read_as_leniently_as_the_engine_does(engine: Loopback) -> None:
    reported = generate(engine, token_ids=[300.0, "301", 302], stream="yes", temprature=3, params={"no_such": 1})
    assert ids(reported) == undisturbed(engine).token_ids
    assert send(engine, "inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}}).status == 200
