"""The loopback engine's /generate over real HTTP: tokens, side data and the time of each event."""

from __future__ import annotations

import itertools
import socket
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from streamfold.loopback import Config, Loopback
from support.bodies import Shape
from support.loopback_http import PROMPT, chunks, generate, payload, undisturbed, unread, until

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = [(False, "python"), (True, "python"), (False, "rust"), (True, "rust")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Loopback]:
    with Loopback(incremental=True) as running:
        yield running


@pytest.fixture(scope="module")
def cumulative() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running


@pytest.mark.parametrize(("incremental", "frontend"), MODES)
def test_a_stream_tells_the_undisturbed_generation_in_every_mode(incremental: bool, frontend: Any) -> None:
    with Loopback(incremental=incremental, frontend=frontend, stop_probability=0.02) as engine:
        for seed in range(5):
            params = {"max_new_tokens": 200, "temperature": 1, "sampling_seed": seed, "ignore_eos": False}
            answer = generate(engine, params=params)
            reading, wanted = answer.read(), engine.undisturbed(PROMPT, params)
            assert reading.token_ids == wanted.token_ids
            assert reading.logprobs is not None
            assert len(reading.logprobs) == len(reading.token_ids)
            assert reading.text == "".join(wanted.pieces or [])
            assert answer.finish == wanted.finish
            assert reading.version_spans == [("default", 0, len(wanted.token_ids))]


def test_what_is_not_streamed_is_what_the_last_cumulative_frame_says(cumulative: Loopback) -> None:
    moments = {"id", "e2e_latency", "response_sent_to_client_ts"}
    options: dict[str, Any] = {"return_routed_experts": True, "params": {"max_new_tokens": 70}}
    streamed = generate(cumulative, **options).last
    whole = generate(cumulative, stream=False, **options).json
    for frame in (streamed, whole):
        frame["meta_info"] = {key: value for key, value in frame["meta_info"].items() if key not in moments}
    assert whole == streamed


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_generation_resumed_from_its_own_tokens_equals_the_undisturbed_one(
    engine: Loopback, temperature: float
) -> None:
    """Ids, logprobs, routed experts and kept ids of a resumed generation equal those of an uninterrupted one."""
    shape = Shape(4, 2, 16)
    params = {"temperature": temperature, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    options: dict[str, Any] = {"return_routed_experts": True}
    whole = generate(engine, params={**params, "max_new_tokens": 60}, **options).read(experts=shape, prompt_len=3)
    assert whole.logprobs is not None
    assert whole.routed_experts is not None
    assert whole.top_p is not None
    for count in (1, 7, 30, 59):
        first = generate(engine, params={**params, "max_new_tokens": count}, **options)
        one = first.read(experts=shape, prompt_len=3)
        prompt = PROMPT + one.token_ids
        second = generate(engine, input_ids=prompt, params={**params, "max_new_tokens": 60 - count}, **options)
        two = second.read(experts=shape, prompt_len=len(prompt))
        assert one.token_ids + two.token_ids == whole.token_ids
        assert (one.logprobs or []) + (two.logprobs or []) == whole.logprobs
        assert two.routed_experts is not None
        assert (two.routed_experts == whole.routed_experts).all(), "rows of the prompt too"
        assert one.top_p is not None
        assert two.top_p is not None
        assert one.top_p[0] + two.top_p[0] == whole.top_p[0]


# When an event is sent


def counts(answer: Any) -> list[int]:
    return [frame["meta_info"]["completion_tokens"] for frame in answer.frames]


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23"])
def test_the_interval_counts_tokens_after_the_first_one(version: str) -> None:
    with Loopback(incremental=True, stream_interval=20, version=version) as engine:
        assert counts(generate(engine, params={"max_new_tokens": 50})) == [1, 21, 41, 50]
        assert counts(generate(engine, params={"max_new_tokens": 5, "stream_interval": 2})) == [1, 3, 5]
        assert counts(generate(engine, params={"max_new_tokens": 4, "stream_interval": 1})) == [1, 2, 3, 4]


@pytest.mark.parametrize(("version", "wanted"), [("0.5.21", [4, 16, 28, 30]), ("0.5.23", [*range(4, 30, 4), 30])])
def test_steps_of_several_tokens_jump_the_beat_of_the_old_interval(version: str, wanted: list[int]) -> None:
    with Loopback(incremental=True, tokens_per_step=4, stream_interval=3, version=version) as engine:
        answer = generate(engine, params={"max_new_tokens": 30})
        assert counts(answer) == wanted
        assert answer.ids == undisturbed(engine, params={"max_new_tokens": 30}).token_ids


def test_a_budget_that_ends_inside_a_character_flushes_it_as_a_replacement_character(engine: Loopback) -> None:
    ids, _ = first_words(engine, 400)
    start = ids.index("🙂".encode()[0])
    for count in (1, 2, 3):
        answer = generate(engine, input_ids=PROMPT + ids[:start], params={"max_new_tokens": count})
        assert [frame["text"] for frame in answer.frames] == [*[""] * (count - 1), "\ufffd"]


@pytest.mark.parametrize("interval", [1, 7])
def test_text_that_ends_in_half_a_character_waits_as_far_as_its_last_space(interval: int) -> None:
    """As the engine: the text lags behind the ids, and what is shown never changes."""
    with Loopback(incremental=True, stream_interval=interval) as engine:
        answer = generate(engine, params={"max_new_tokens": 800, "skip_special_tokens": False})
        ids, text, lagging = answer.ids, "", 0
        for frame, n in zip(answer.frames, counts(answer), strict=True):
            text += frame["text"]
            decoded = engine.tokenizer.decode(ids[:n], skip_special_tokens=False)
            assert decoded.startswith(text)
            if n < 800:
                assert (text == decoded) != decoded.endswith("\ufffd")
                lagging += text != decoded
        assert lagging, "no span ended in half a character"
        assert text == engine.tokenizer.decode(ids, skip_special_tokens=False)


# How it ends


def first_words(engine: Loopback, count: int = 40) -> tuple[list[int], str]:
    """The ids and the text of the undisturbed beginning."""
    ids = engine.undisturbed(PROMPT, {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}).token_ids
    return ids, engine.tokenizer.decode(ids)


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_stop_string_cuts_the_text_and_leaves_the_ids(engine: Loopback, no_stop_trim: bool) -> None:
    ids, text = first_words(engine)
    stop = text[20:27]
    assert text.index(stop) == 20
    answer = generate(engine, params={"stop": ["nowhere", stop], "max_new_tokens": 40, "no_stop_trim": no_stop_trim})
    reading = answer.read()
    assert answer.finish == {"type": "stop", "matched": stop}
    assert reading.text == (text[:27] if no_stop_trim else text[:20])
    assert reading.token_ids == ids[: len(reading.token_ids)]
    assert len(reading.token_ids) < 40
    assert stop in engine.tokenizer.decode(reading.token_ids)
    assert stop not in engine.tokenizer.decode(reading.token_ids[:-1])


def test_frames_wait_while_the_text_may_become_a_stop_string(engine: Loopback) -> None:
    """Ids, text and logprobs all wait, and come together if it was none."""
    ids, text = first_words(engine)
    near = text[20:27] + "\x01"
    answer = generate(engine, params={"stop": near, "max_new_tokens": 40})
    assert answer.read().token_ids == ids
    assert answer.read().text == text
    seen = ""
    for frame in answer.frames[:-1]:
        seen += frame["text"]
        assert not any(seen.endswith(near[:k]) for k in range(1, len(near)))
    assert len(answer.frames) < 40


def test_a_stop_token_ends_it_without_its_text(engine: Loopback) -> None:
    ids, _ = first_words(engine)
    stop = next(token for token in ids[5:] if token not in ids[:5])
    place = ids.index(stop)
    answer = generate(engine, params={"stop_token_ids": [stop], "ignore_eos": False, "max_new_tokens": 40})
    assert answer.finish == {"type": "stop", "matched": stop}
    assert answer.read().token_ids == ids[: place + 1]
    assert answer.read().text == engine.tokenizer.decode(ids[:place])
    kept = generate(
        engine, params={"stop_token_ids": [stop], "ignore_eos": False, "max_new_tokens": 40, "no_stop_trim": True}
    )
    assert kept.read().text == engine.tokenizer.decode(ids[: place + 1])


def test_the_end_of_the_sequence_shows_in_the_text_only_if_both_options_keep_it() -> None:
    with Loopback(stop_probability=1) as engine:
        eos = engine.tokenizer.eos_token_id
        for trim, skip in itertools.product([False, True], repeat=2):
            params = {"no_stop_trim": trim, "skip_special_tokens": skip, "ignore_eos": False}
            answer = generate(engine, params=params)
            assert answer.finish == {"type": "stop", "matched": eos}
            assert answer.read().token_ids == [eos]
            assert answer.read().text == ("<|im_end|>" if trim and not skip else "")


def test_ignore_eos_goes_on_over_the_end_of_the_sequence() -> None:
    with Loopback(stop_probability=0.2) as engine:
        answer = generate(engine, params={"max_new_tokens": 100})
        assert answer.finish == {"type": "length", "length": 100}
        assert engine.tokenizer.eos_token_id in answer.read().token_ids
        assert "<|im_end|>" not in (answer.read().text or "")


def test_no_stop_token_comes_before_min_new_tokens() -> None:
    with Loopback(stop_probability=0.5) as engine:
        answer = generate(engine, params={"min_new_tokens": 30, "max_new_tokens": 500, "ignore_eos": False})
        ids = answer.read().token_ids
        assert len(ids) > 30
        assert ids.index(engine.tokenizer.eos_token_id) == len(ids) - 1


def test_special_tokens_are_in_the_text_if_they_are_not_skipped(engine: Loopback) -> None:
    for skip in (True, False):
        answer = generate(engine, params={"max_new_tokens": 1000, "skip_special_tokens": skip})
        text = "".join(frame["text"] for frame in answer.frames)
        assert text == engine.tokenizer.decode(answer.ids, skip_special_tokens=skip)
        assert ("<|" in text) != skip


def test_without_a_budget_it_ends_with_the_context() -> None:
    with Loopback(context_length=50) as engine:
        answer = generate(engine, params={"max_new_tokens": None})
        assert answer.finish == {"type": "length", "length": 47}


def test_a_budget_of_none_brings_one_terminal_frame_with_a_pair_too_many(engine: Loopback) -> None:
    """The engine's own oddity: a client does not ask for it."""
    (frame,) = generate(engine, params={"max_new_tokens": 0}).frames
    meta = frame["meta_info"]
    assert (frame["output_ids"], frame["text"]) == ([], "")
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    first = engine.undisturbed(PROMPT, {"max_new_tokens": 1, "temperature": 0}).token_ids
    assert [pair[1] for pair in meta["output_token_logprobs"]] == first


# Side data


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint16", None])
def test_routed_experts_have_a_row_for_all_but_the_last_token(engine: Loopback, dtype: Any) -> None:
    options: dict[str, Any] = {"return_routed_experts": True}
    if dtype is not None:
        options["routed_experts_dtype"] = dtype
    shape = Shape(4, 2, 16, dtype or "int32")
    whole = generate(engine, **options).read(experts=shape, prompt_len=3).routed_experts
    assert whole is not None
    assert whole.shape == (3 + 20 - 1, 4, 2)
    assert whole.dtype == np.dtype(dtype or "int32")
    for start in (1, 3):
        answer = generate(engine, routed_experts_start_len=start, **options)
        later = answer.read(experts=shape, prompt_len=3, experts_start=start).routed_experts
        assert later is not None
        assert (later == whole[start:]).all()


def test_routed_experts_are_silently_absent_where_the_engine_has_none() -> None:
    with Loopback(num_layers=0) as dense, Loopback(frontend="rust") as rust:
        for engine in (dense, rust):
            assert "routed_experts" not in generate(engine, return_routed_experts=True).last["meta_info"]


def test_old_releases_ignore_where_routed_experts_start() -> None:
    with Loopback(version="0.5.11") as engine:
        answer = generate(engine, return_routed_experts=True, routed_experts_start_len=2)
        assert answer.read(experts=Shape(4, 2, 16), prompt_len=3).routed_experts is not None


def test_top_p_arrays_come_only_if_asked_for_with_logprobs_under_a_filter(engine: Loopback) -> None:
    asked = {"custom_params": {"return_top_p_token_ids": True}}
    reported = generate(engine, params={**asked, "temperature": 1, "top_p": 0.5}).read()
    assert reported.top_p is not None
    kept, offsets = reported.top_p
    assert len(offsets) == 21
    assert all(token in kept[a:b] for token, a, b in zip(reported.token_ids, offsets, offsets[1:], strict=False))
    assert len(kept) > 21
    greedy = generate(engine, params=asked).read()
    assert greedy.top_p == (greedy.token_ids, list(range(21))), "greedy rows hold the single token"
    for options in (
        {"params": {**asked, "temperature": 1}},
        {"params": {"temperature": 1, "top_p": 0.5}},
        {"params": asked, "return_logprob": False},
    ):
        assert "top_p_token_ids" not in generate(engine, **options).last["meta_info"]


def test_sampling_masks_come_with_each_frame(engine: Loopback, cumulative: Loopback) -> None:
    params = {"temperature": 1, "top_p": 0.5, "sampling_seed": 3}
    readings = [generate(e, return_sampling_mask=True, params=params) for e in (engine, cumulative)]
    assert readings[0].read().top_p == readings[1].read().top_p is not None
    deltas = [frame["meta_info"]["output_token_sampling_mask"] for frame in readings[0].frames]
    assert all(len(delta) == 1 for delta in deltas)
    with Loopback(version="0.5.15.post1") as old:
        assert "output_token_sampling_mask" not in generate(old, return_sampling_mask=True).last["meta_info"]


def test_logprobs_are_told_only_if_asked_for_and_are_null_where_wanted(engine: Loopback) -> None:
    quiet = generate(engine, return_logprob=False)
    assert not any("logprob" in key for frame in quiet.frames for key in frame["meta_info"])
    plain = generate(engine).read().logprobs
    broken = generate(engine, params={"custom_params": {"null_logprobs_at": [2, 5]}})
    reported = [frame["meta_info"]["output_token_logprobs"][0][0] for frame in broken.frames]
    assert [i for i, value in enumerate(reported) if value is None] == [2, 5]
    assert plain is not None
    assert [value for value in reported if value is not None] == [v for i, v in enumerate(plain) if i not in {2, 5}]


def test_logprobs_of_the_prompt_texts_and_alternatives_are_told_if_asked_for(engine: Loopback) -> None:
    answer = generate(engine, logprob_start_len=1, return_text_in_logprobs=True, top_logprobs_num=3)
    for frame in answer.frames:
        meta = frame["meta_info"]
        inputs = meta["input_token_logprobs"]
        assert [(pair[0] is None, pair[1]) for pair in inputs] == [(True, 301), (False, 302)]
        ((value, token, text),) = meta["output_token_logprobs"]
        assert text == engine.tokenizer.decode([token], skip_special_tokens=False)
        ((first, *others),) = meta["output_top_logprobs"]
        assert first == [value, token, None]
        assert len(others) == 2
    resumed = engine.undisturbed([300, 301], {"max_new_tokens": 1}, logprob_start_len=0, return_logprob=True)
    assert resumed.input_logprobs is not None
    assert len(resumed.input_logprobs) == 2


def test_prompt_ids_come_back_with_every_frame_as_from_their_release() -> None:
    with Loopback() as new, Loopback(version="0.5.12") as old:
        assert all(frame["prompt_token_ids"] == PROMPT for frame in generate(new, return_prompt_token_ids=True).frames)
        assert "prompt_token_ids" not in generate(old, return_prompt_token_ids=True).last


def test_an_engine_without_tokenizer_tells_no_text_and_takes_none() -> None:
    with Loopback(skip_tokenizer_init=True) as engine:
        answer = generate(engine)
        assert all("text" not in frame for frame in answer.frames)
        assert answer.read().text is None
        assert "input_ids" in generate(engine, input_ids=..., text=" the").last["error"]["message"]
        assert "tokenizer" in generate(engine, params={"stop": ["x"]}).last["error"]["message"]


def test_text_prompts_are_encoded_by_the_tokenizer(engine: Loopback) -> None:
    by_text = generate(engine, input_ids=..., text=" the 🙂 water").read()
    assert by_text.token_ids == generate(engine, input_ids=engine.tokenizer.encode(" the 🙂 water")).read().token_ids


def test_an_image_makes_the_prompt_longer_than_what_was_sent(engine: Loopback) -> None:
    answer = generate(engine, image_data=["data:,"] * 2, return_routed_experts=True)
    assert answer.last["meta_info"]["prompt_tokens"] == 35
    assert answer.read(experts=Shape(4, 2, 16)).routed_experts is not None


def test_ids_that_hold_the_images_already_are_left_alone(engine: Loopback) -> None:
    ids = [engine.tokenizer.image_token_id] * 32 + PROMPT
    assert generate(engine, input_ids=ids, image_data=["data:,"] * 2).last["meta_info"]["prompt_tokens"] == 35
    assert generate(engine, input_ids=ids, image_data=["data:,"] * 3).last["meta_info"]["prompt_tokens"] == 83


# Several generations in one body


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"input_ids": [[300], [301, 302]], "rid": "job"}, [[300], [301, 302]]),
        ({"params": {"n": 2, "temperature": 1}, "rid": "job"}, [PROMPT, PROMPT]),
    ],
)
def test_several_generations_come_interleaved_with_an_index_each(
    engine: Loopback, body: dict[str, Any], prompts: list[list[int]]
) -> None:
    answer = generate(engine, **body)
    order = [frame["index"] for frame in answer.frames]
    assert sorted(set(order)) == [0, 1]
    assert order != sorted(order)
    ids = {i: [t for frame in answer.frames if frame["index"] == i for t in frame["output_ids"]] for i in (0, 1)}
    assert ids[0] != ids[1]
    assert [len(tokens) for tokens in ids.values()] == [20, 20]
    rids = {frame["index"]: frame["meta_info"]["id"] for frame in answer.frames}
    assert (rids == {0: "job_0", 1: "job_1"}) == ("n" not in body.get("params", {})), "copies get ids of their own"
    whole = generate(engine, stream=False, **body).json
    assert [one["output_ids"] for one in whole] == list(ids.values())
    assert [one["meta_info"]["prompt_tokens"] for one in whole] == list(map(len, prompts))


# On the wire


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_the_head_is_that_of_the_frontend(method: str) -> None:
    with Loopback() as python, Loopback(frontend="rust") as rust:
        head = generate(python, method=method).headers
        assert head["content-type"] == "text/event-stream; charset=utf-8"
        assert head["server"] == "uvicorn"
        assert head["transfer-encoding"] == "chunked"
        assert "cache-control" not in head
        head = generate(rust, method=method).headers
        assert (head["content-type"], head["cache-control"]) == ("text/event-stream", "no-cache")
        assert "server" not in head


def test_one_event_is_one_chunk(engine: Loopback) -> None:
    url = httpx.URL(engine.url)
    request = httpx.Request("POST", url, json=payload())
    with socket.create_connection((url.host, url.port or 80), timeout=20) as sock:
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        sock.sendall(head % len(request.content) + request.content)
        raw = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    found = chunks(raw.partition(b"\r\n\r\n")[2])
    assert len(found) == 21
    assert all(chunk.startswith(b"data: {") and chunk.endswith(b"}\n\n") for chunk in found[:-1])
    assert found[-1] == b"data: [DONE]\n\n"


def test_shuffled_keys_change_nothing_but_the_order() -> None:
    with Loopback(shuffle_keys=5) as shuffled, Loopback() as plain:
        answers = [generate(one, rid="same") for one in (shuffled, plain)]
        assert answers[0].read().token_ids == answers[1].read().token_ids
        orders = {tuple(frame["meta_info"]) for frame in answers[0].frames}
        assert len(orders) > 5


@pytest.mark.parametrize("incremental", [False, True])
def test_a_slow_reader_gets_fewer_frames_and_loses_nothing(incremental: bool) -> None:
    with Loopback(incremental=incremental, send_buffer=8192) as engine:
        params = {"max_new_tokens": 2000}
        with unread(engine, params=params) as read_all:
            assert len(generate(engine).read().token_ids) == 20, "no other request waits for it"
            until(lambda: engine.stats().tokens == 2020)
            answer = read_all()
        assert len(answer.frames) < 1000
        wanted, reading = undisturbed(engine, params=params), answer.read()
        assert reading.token_ids == wanted.token_ids
        assert reading.text == "".join(wanted.pieces or [])


def test_the_rust_frontend_gives_up_on_a_reader_that_is_too_slow() -> None:
    with Loopback(incremental=True, frontend="rust", send_buffer=8192) as engine:
        with unread(engine, params={"max_new_tokens": 30_000}) as read_all:
            until(lambda: engine.stats().requests == 1 and engine.stats().running == 0)
            answer = read_all()
        assert answer.last == {"error": {"message": "response truncated before completion", "code": 500}}
        assert all(len(frame["output_ids"]) == 1 for frame in answer.frames[:-1]), "it joins no events"
        assert engine.stats().tokens < 5000


def test_the_configuration_says_what_is_wrong_with_it() -> None:
    for name, value, reason in (
        ("vocab_size", 100, "at least 512"),
        ("token_rate", -1, "at least 0"),
        ("stop_probability", 2, "between 0 and 1"),
        ("piece_probability", -0.5, "between 0 and 1"),
        ("top_k", 17, "at most num_experts, 16"),
        ("base_path", "api/", "like /api"),
        ("tokens_per_step", 0, "at least 1"),
        ("version", "0.4.0", "as from 0.5.10"),
    ):
        with pytest.raises(ValueError, match=reason):
            Config(**{name: value})  # type: ignore[arg-type]
