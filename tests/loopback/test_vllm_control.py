"""The loopback engine's control endpoints as vLLM: aborts, pauses, load, weight versions."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold.loopback import Loopback
from support.loopback_http import PLAIN, PROMPT, get, post, until
from support.loopback_vllm import (
    TOKENS,
    choices,
    complete,
    error_of,
    generate,
    ids,
    load,
    opened,
    undisturbed,
    until_load,
    usage,
    whole_characters,
)

if TYPE_CHECKING:
    from support.loopback_http import Answer, OpenStream

LONG: dict[str, Any] = {"params": {"max_tokens": 20_000}, "stream_options": {"include_usage": True}}
LISTED, ALL = "inference/v1/abort_requests", "abort_requests"


def slow(**options: Any) -> Loopback:
    return Loopback(engine="vllm", token_rate=100, **options)


def started(stream: OpenStream) -> None:
    stream.frame()


def is_beginning_of(answer: Answer, engine: Loopback, **options: Any) -> bool:
    """Whether an answer that ended early holds what the undisturbed one begins with, and counts it right."""
    wanted = undisturbed(engine, params={"max_tokens": max(len(ids(answer)), 1)}, **options).token_ids
    return ids(answer) == wanted[: len(ids(answer))] and usage(answer)["completion_tokens"] == len(ids(answer))


# Several API servers


def test_of_several_api_servers_each_aborts_only_its_own_requests_and_a_pause_those_of_all() -> None:
    with slow(api_servers=3) as engine, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(opened(engine, request_id=f"r{n}", **LONG)) for n in range(6)]
        for stream in streams:
            started(stream)
        assert post(engine, ALL, {}).json() == {"status": "aborted", "aborted": 2}
        until_load(engine, 4, 0)
        post(engine, "pause?mode=abort&clear_cache=false", {})
        until_load(engine, 0, 0)
        assert get(engine, "is_paused").json() == {"is_paused": True}
        post(engine, "resume", {})
        assert ids(generate(engine, params={"max_tokens": 3}))


def test_an_abort_by_id_at_another_api_server_changes_nothing() -> None:
    with slow(api_servers=2) as engine, opened(engine, request_id="a", params={"max_tokens": 30}) as stream:
        started(stream)
        reply = post(engine, LISTED, {"request_ids": ["generate-tokens-a"]})
        assert reply.status_code == 200
        assert choices(stream.to_end())[-1]["finish_reason"] == "length"


# Aborts


@pytest.mark.parametrize(("version", "path"), [("0.32.0", LISTED), ("0.32.0", ALL), ("0.28.0", ALL)])
def test_an_abort_by_id_ends_that_request_at_once_and_is_told_as_from_0_32(version: str, path: str) -> None:
    """vllm-project/vllm#47933."""
    with slow(version=version) as engine, opened(engine, request_id="a", **LONG) as one:
        started(one)
        with opened(engine, request_id="a1", params={"max_tokens": 10}) as other:
            started(other)
            reply = post(engine, path, {"request_ids": ["generate-tokens-a"]})
            assert reply.status_code == 200
            assert reply.content == (b"" if path == LISTED else b'{"status":"aborted","aborted":1}')
            answer = one.to_end()
            assert other.to_end().read().finish_reason == "length", "ids are whole, not prefixes"
        assert is_beginning_of(answer, engine)
        last = choices(answer)[-1]
        if version == "0.32.0":
            assert (last["finish_reason"], last["stop_reason"], last["token_ids"]) == ("abort", None, [])
            assert last["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids(answer))}]
        else:
            assert {choice["finish_reason"] for choice in choices(answer)} == {None}
        assert engine.stats().aborts == ("generate-tokens-a",)
        assert engine.stats().leavers == ()


def test_an_id_without_its_prefix_or_that_nobody_has_means_nothing() -> None:
    with slow() as engine, opened(engine, request_id="a", **LONG) as stream:
        started(stream)
        for rid in ("a", "generate-tokens-", "generate-tokens-b", ""):
            assert post(engine, LISTED, {"request_ids": [rid]}).status_code == 200
        assert post(engine, ALL, {"request_ids": ["x", "y"]}).json() == {"status": "aborted", "aborted": 2}
        assert load(engine) == (1, 0)
        assert post(engine, LISTED, {"request_ids": ["generate-tokens-a"]}).status_code == 200
        assert stream.to_end().read().finish_reason == "abort"


def test_requests_that_share_an_id_are_aborted_together() -> None:
    with slow() as engine, opened(engine, request_id="a", **LONG) as one, opened(engine, request_id="a", **LONG) as two:
        until_load(engine, 2, 0)
        post(engine, LISTED, {"request_ids": ["generate-tokens-a"]})
        assert [stream.to_end().read().finish_reason for stream in (one, two)] == ["abort", "abort"]


@pytest.mark.parametrize("body", [{}, {"request_ids": []}])
def test_an_abort_of_all_ends_what_runs_and_what_waits(body: dict[str, Any]) -> None:
    with slow(max_running_requests=1) as engine, opened(engine, **LONG) as running:
        started(running)
        with opened(engine, request_id="q", return_token_ids=True, **LONG) as queued:
            until_load(engine, 1, 1)
            assert post(engine, ALL, body).json() == {"status": "aborted", "aborted": 2}
            waited = queued.to_end()
        answer = running.to_end()
        assert is_beginning_of(answer, engine)
        assert choices(answer)[-1]["token_ids"] == [], "at once, without another token"
        (choice,) = choices(waited)
        assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])
        assert waited.frames[0]["prompt_token_ids"] == PROMPT
        assert usage(waited)["completion_tokens"] == 0
        assert (engine.stats().aborts, load(engine)) == (("*",), (0, 0))


def test_an_abort_of_what_is_not_streamed_gives_the_partial_answer() -> None:
    with slow() as engine, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(generate, engine, stream=False, request_id="a", params={"max_tokens": 20_000})
        until(lambda: engine.stats().tokens > 5)
        post(engine, ALL, {"request_ids": ["generate-tokens-a"]})
        answer = whole.result()
        (choice,) = answer.json["choices"]
        assert (answer.status, choice["finish_reason"]) == (200, "abort")
        count = len(choice["token_ids"])
        assert choice["token_ids"] == undisturbed(engine, params={"max_tokens": count}).token_ids
        assert len(choice["logprobs"]["content"]) == count > 5


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_the_abort_of_a_completion_is_told_in_every_release(version: str) -> None:
    with slow(version=version) as engine, ThreadPoolExecutor(1) as pool:
        done = pool.submit(complete, engine, max_tokens=20_000, headers={"X-Request-Id": "c"})
        until(lambda: engine.stats().tokens > 5)
        post(engine, ALL, {"request_ids": ["cmpl-c-0"]})
        last = choices(done.result())[-1]
        assert (last["finish_reason"], last["token_ids"]) == ("abort", [])
        assert last["logprobs"] == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def test_tokens_that_were_held_back_for_an_interval_come_with_the_abort() -> None:
    with slow(version="0.28.0", stream_interval=1000) as engine, opened(engine, **LONG) as stream:
        started(stream)
        until(lambda: engine.stats().tokens > 5)
        post(engine, ALL)
        answer = stream.to_end()
        assert choices(answer)[-1]["finish_reason"] == "abort", "sent in this version, because there are tokens left"
        assert len(ids(answer)) > 5
        assert is_beginning_of(answer, engine)


def test_text_that_was_held_back_for_a_stop_string_comes_with_the_abort() -> None:
    stop = "never said at all"
    params = {"max_tokens": 20_000, "stop": stop}
    with slow() as engine, opened(engine, output_mode="text", params=params) as stream:
        until(lambda: engine.stats().tokens > 8)
        post(engine, ALL)
        answer = stream.to_end()
        reported = "".join(choice["text"] for choice in choices(answer))
        assert reported == whole_characters(engine, ids(answer))
        assert len(choices(answer)[-1]["text"]) == len(stop) - 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (LISTED, b"{}", "Missing 'request_ids' in request body"),
        (LISTED, b"", "Invalid JSON format"),
        (ALL, b"", "Invalid JSON format"),
        (ALL, b"[]", "the body must be a JSON object"),
        (ALL, b'{"request_ids": "a"}', "request_ids must be a list of strings"),
        ("update_weight_version", b"{}", "1 validation error:\n  Input should be a valid string"),
    ],
)
def test_a_control_body_that_makes_no_sense_is_a_400(path: str, body: bytes, message: str) -> None:
    with Loopback(engine="vllm") as engine:
        reply = httpx.post(f"{engine.url}/{path}", content=body, **PLAIN)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["message"]) == (400, 400, message)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {LISTED: 200, ALL: 200}),
        ({"version": "0.28.0"}, {LISTED: 404, ALL: 200}),
        ({"version": "0.25.0"}, {LISTED: 404, ALL: 404}),
        ({"dev_mode": False}, {LISTED: 200, ALL: 404, "pause": 404, "resume": 404, "update_weight_version": 404}),
        ({"dev_mode": False, "skip_tokenizer_init": True}, {LISTED: 200, ALL: 200}),
        ({"enable_scale_out": False}, {LISTED: 403, ALL: 200, TOKENS: 403}),
        ({"enable_scale_out": False, "version": "0.29.0"}, {LISTED: 404, TOKENS: 404}),
        ({"enable_scale_out": False, "skip_tokenizer_init": True}, {LISTED: 200}),
    ],
)
def test_releases_and_flags_decide_which_paths_there_are(options: dict[str, Any], wanted: dict[str, int]) -> None:
    with Loopback(engine="vllm", **options) as engine:
        reported = {path: post(engine, path, {"request_ids": ["x"]}) for path in wanted}
        assert {path: reply.status_code for path, reply in reported.items()} == wanted
        paths = get(engine, "openapi.json").json()["paths"]
        for path, status in wanted.items():
            assert (f"/{path}" in paths) == (status == 200)
            if status == 404:
                assert reported[path].content == b'{"detail":"Not Found"}'
            if status == 403:
                assert error_of_reply(reported[path])["message"] == (
                    "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
                )
                assert error_of_reply(reported[path])["type"] == "PermissionDeniedError"
        if options.get("skip_tokenizer_init") and not options.get("dev_mode", True):
            assert reported[ALL].content == b""


def error_of_reply(reply: httpx.Response) -> dict[str, Any]:
    error = reply.json()["error"]
    assert isinstance(error, dict)
    return error


# Pauses


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_a_pause_ends_what_runs_with_one_more_token_which_is_told_in_every_release(version: str) -> None:
    with slow(version=version) as engine, opened(engine, **LONG) as stream:
        started(stream)
        assert post(engine, "pause").json() == {"status": "paused"}
        answer = stream.to_end()
        assert choices(answer)[-1]["finish_reason"] == "abort"
        assert len(choices(answer)[-1]["token_ids"]) >= 1
        assert is_beginning_of(answer, engine)
        assert get(engine, "is_paused").json() == {"is_paused": True}

        with opened(engine, params={"max_tokens": 3}) as waits:
            assert waits.response.status_code == 200, "the head comes while the engine is paused"
            until_load(engine, 0, 1)
            assert post(engine, "resume").json() == {"status": "resumed"}
            assert ids(waits.to_end()) == undisturbed(engine, params={"max_tokens": 3}).token_ids
        assert get(engine, "is_paused").json() == {"is_paused": False}


def test_what_is_kept_in_a_pause_goes_on_as_if_nothing_had_been() -> None:
    with Loopback(engine="vllm", token_rate=300) as engine, opened(engine, params={"max_tokens": 60}) as stream:
        started(stream)
        post(engine, "pause?mode=keep")
        tokens = engine.stats().tokens
        assert load(engine) == (1, 0)
        assert get(engine, "weight_info").json() == {"weight_version": "default"}
        assert engine.stats().tokens == tokens
        assert tokens < 60
        post(engine, "resume")
        assert ids(stream.to_end()) == undisturbed(engine, params={"max_tokens": 60}).token_ids


def test_an_abort_ends_what_is_kept_in_a_pause() -> None:
    with slow() as engine, opened(engine, request_id="a", **LONG) as stream:
        started(stream)
        post(engine, "pause?mode=keep")
        post(engine, LISTED, {"request_ids": ["generate-tokens-a"]})
        assert choices(stream.to_end())[-1]["token_ids"] == []


def test_a_pause_that_waits_returns_when_what_runs_is_done_and_leaves_the_queue() -> None:
    with (
        Loopback(engine="vllm", token_rate=300, max_running_requests=1) as engine,
        opened(engine, params={"max_tokens": 30}) as first,
        opened(engine, params={"max_tokens": 3}) as second,
    ):
        until_load(engine, 1, 1)
        post(engine, "pause?mode=wait")
        assert load(engine) == (0, 1)
        assert first.to_end().read().finish_reason == "length"
        post(engine, "resume")
        assert second.to_end().read().finish_reason == "length"


def test_a_pause_in_no_known_mode_is_a_400() -> None:
    with Loopback(engine="vllm") as engine:
        reply = post(engine, "pause?mode=retract")
        assert (reply.status_code, error_of_reply(reply)["param"]) == (400, "query.mode")
        assert get(engine, "is_paused").json() == {"is_paused": False}


# Weights, and what it tells of itself


def test_the_spans_of_weight_versions_follow_the_tokens() -> None:
    with slow() as engine, opened(engine, params={"max_tokens": 30}) as stream:
        started(stream)
        reply = post(engine, "update_weight_version", {"new_version": "step-7"})
        assert reply.json() == {"success": True, "new_version": "step-7"}
        assert get(engine, "weight_info").json() == {"weight_version": "step-7"}
        answer = stream.to_end()
        assert [choice["weight_versions"] for choice in choices(answer)[:-1]] == [None] * (len(choices(answer)) - 1)
        first, second = choices(answer)[-1]["weight_versions"]
        assert (first["version"], first["start"]) == ("default", 0)
        assert (second["version"], second["end"]) == ("step-7", 30)
        assert 0 < first["end"] == second["start"] < 30


@pytest.mark.parametrize("tracked", [True, False])
def test_the_load_is_counted_only_if_the_flag_is_on(tracked: bool) -> None:
    with slow(track_load=tracked, max_running_requests=1) as engine, opened(engine, **LONG), opened(engine, **LONG):
        until_load(engine, 1, 1)
        assert get(engine, "load").json() == {"server_load": 2 if tracked else 0}


def test_without_its_statistics_an_engine_has_metrics_and_no_gauges_of_its_requests() -> None:
    with slow(log_stats=False) as engine, opened(engine, **LONG) as stream:
        started(stream)
        metrics = get(engine, "metrics")
        assert metrics.status_code == 200
        assert "process_open_fds" in metrics.text
        assert "vllm:" not in metrics.text


def test_it_tells_who_it_is_as_the_engine_does() -> None:
    with Loopback(engine="vllm", version="0.28.0", model_name="m", context_length=99) as engine:
        assert get(engine, "version").json() == {"version": "0.28.0"}
        assert get(engine, "health").content == b""
        (model,) = get(engine, "v1/models").json()["data"]
        assert (model["id"], model["max_model_len"], model["owned_by"]) == ("m", 99, "vllm")
        assert [worker["url"] for worker in get(engine, "workers").json()["workers"]] == [engine.url]
        lines = get(engine, "metrics").text.splitlines()
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in lines
        assert "# TYPE vllm:num_requests_waiting gauge" in lines
        reply = get(engine, TOKENS)
        assert (reply.status_code, reply.json()) == (405, {"detail": "Method Not Allowed"})


def test_the_key_guards_what_generates_and_not_what_controls() -> None:
    with Loopback(engine="vllm", api_key="k", base_path="/api") as engine:
        for path in (TOKENS, "v1/completions", LISTED):
            reply = post(engine, path, {})
            assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
        assert get(engine, "v1/models").status_code == 401
        for path in ("health", "metrics", "load", "is_paused", "version"):
            assert get(engine, path).status_code == 200
        assert post(engine, ALL, {}).status_code == 200
        answer = generate(engine, headers={"Authorization": "Bearer k"})
        assert ids(answer) == undisturbed(engine).token_ids
        assert json.loads(answer.body.split(b"\n")[0].removeprefix(b"data: "))["choices"]
        assert error_of(generate(engine, token_ids=[600], headers={"Authorization": "Bearer k"}))["code"] == 400
