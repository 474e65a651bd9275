"""What the loopback engine rejects, and what it reports about itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from streamfold.loopback import Loopback
from support.loopback_http import PLAIN, generate, get, load, opened, payload, post, undisturbed, until

LONG: dict[str, Any] = {"params": {"max_new_tokens": 20_000}}

# Refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
        ({"params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
        ({"params": {"temperature": -1}}, "temperature must be non-negative, got -1."),
        ({"params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"params": {"stream_interval": 0}}, "stream_interval must be at least 1, got 0."),
        ({"params": {"min_new_tokens": 30}}, "min_new_tokens must be in [0, max_new_tokens(20)], got 30."),
        ({"params": {"stop": [1]}}, "stop must be a string or a list of strings, got (1,)."),
        ({"params": {"regex": "a"}}, "the loopback engine does not offer regex: leave it out"),
        ({"input_ids": [7] * 100}, "The input (100 tokens) is longer than the model's context length (100 tokens)."),
        (
            {"input_ids": [7] * 90},
            "90 tokens of input and 20 of output exceed the model's context length (100 tokens): ask for fewer.",
        ),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [512]}, "input_ids must be integers from 0 to 511."),
        ({"input_ids": ...}, "Either text or input_ids should be provided."),
        ({"input_ids": [[1], []]}, "input_ids cannot be empty."),
        ({"input_ids": ..., "text": []}, "The batch is empty."),
        (
            {"params": {"custom_params": {"null_logprobs_at": 5}}},
            "custom_params.null_logprobs_at must be a list of positions in the output.",
        ),
        ({"routed_experts_dtype": "int8"}, "routed_experts_dtype must be one of int32, uint8, uint16, got 'int8'"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate request ID detected: a"),
    ],
)
def test_what_comes_to_light_late_is_an_event_in_a_stream_and_a_400_elsewhere(
    body: dict[str, Any], message: str
) -> None:
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    with Loopback(context_length=100) as engine:
        answer = generate(engine, **body)
        assert (answer.status, answer.frames) == (200, [{"error": error}])
        whole = generate(engine, stream=False, **body)
        assert (whole.status, whole.json) == (400, {"error": error})
        assert engine.stats().requests == 0


def test_a_live_rid_cannot_be_used_again() -> None:
    with Loopback(token_rate=50) as engine, opened(engine, rid="a", **LONG) as stream:
        stream.frame()
        assert generate(engine, rid="a").last["error"]["message"] == "Duplicate request ID detected: a"
        stream.frame()


@pytest.mark.parametrize(
    ("body", "where"),
    [({"logprob_start_len": 4}, "[3]"), ({"return_routed_experts": True, "routed_experts_start_len": 4}, "[0, 3]")],
)
def test_the_scheduler_refuses_with_an_abort_of_status_400(body: dict[str, Any], where: str) -> None:
    with Loopback() as engine, Loopback(version="0.5.22") as older:
        answer = generate(engine, **body)
        assert (answer.finish["status_code"], answer.finish["err_type"]) == (400, "BadRequestError")
        assert where.strip("[]") in answer.finish["message"]
        assert answer.last["meta_info"]["prompt_tokens"] == 1
        assert not any("logprob" in key for key in answer.last["meta_info"])
        assert generate(engine, stream=False, **body).status == 400
        assert generate(older, stream=False, **body).status == 200


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[1]", b'{"input_ids": [1], "x": NaN}'),
        *(b'{"input_ids": "1"}', b'{"input_ids": [1], "stream": 1}', b'{"input_ids": [1, [2]]}', b'{"text": [1]}'),
    ],
)
def test_a_body_that_is_no_request_is_a_400_of_the_http_layer(content: bytes) -> None:
    with Loopback() as python, Loopback(frontend="rust") as rust:
        refused = httpx.post(f"{python.url}/generate", content=content, **PLAIN)
        assert refused.status_code == 400
        assert {**refused.json(), "message": ""} == {
            "object": "error",
            "message": "",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        }
        refused = httpx.post(f"{rust.url}/generate", content=content, **PLAIN)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == 400


def test_an_unknown_sampling_parameter_is_refused_by_whoever_looks_first() -> None:
    with Loopback(version="0.5.21") as old, Loopback(version="0.5.22") as new:
        answer = generate(old, params={"max_tokens": 1})
        assert (answer.status, answer.last["error"]["code"]) == (200, 400)
        for params in ({"max_tokens": 1}, {"max_new_tokens": "1"}, {"temperature": True}, {"ignore_eos": 1}):
            refused = generate(new, params=params)
            assert refused.status == 400
            assert isinstance(refused.json["error"], str)


def test_0_5_15_breaks_off_at_an_unknown_sampling_parameter_without_a_byte() -> None:
    params = {"sampling_params": {"max_tokens": 1}, "input_ids": [1]}
    with Loopback(version="0.5.15.post1") as engine:
        with httpx.stream("POST", f"{engine.url}/generate", json={**params, "stream": True}) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                answer.read()
        assert httpx.post(f"{engine.url}/generate", json=params).status_code == 500
        assert len(generate(engine).ids) == 20


def test_parameters_without_effect_and_nulls_are_taken() -> None:
    with Loopback() as engine:
        params = {"logit_bias": {"3": 1.0}, "stop": None, "top_p": None}
        assert generate(engine, params=params).ids == undisturbed(engine).token_ids


def test_only_the_key_opens_the_door() -> None:
    with Loopback(api_key="secret") as engine:
        for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = generate(engine, headers=headers)
            assert (refused.status, refused.json) == (401, {"error": "Unauthorized"})
        assert len(generate(engine, headers={"authorization": "Bearer secret"}).read().token_ids) == 20
        assert get(engine, "health").status_code == 200
        assert get(engine, "v1/loads").status_code == 401


# Server info, load and workers


def test_the_load_is_told_while_it_is_there() -> None:
    with Loopback(max_running_requests=1, prefill_delay=1000, version="0.5.15.post1") as engine:
        with opened(engine), opened(engine):
            until(lambda: load(engine) == (1, 1))
            reported = get(engine, "v1/loads?include=core,queues").json()
            assert reported["version"] == "0.5.15.post1"
            assert reported["loads"][0]["dp_rank"] == 0
            assert reported["loads"][0]["num_used_tokens"] == 3
            assert reported["aggregate"] == {"total_running_reqs": 1, "total_waiting_reqs": 1, "total_reqs": 2}
            assert get(engine, "flush_cache").status_code == 400
        until(lambda: load(engine) == (0, 0))
        assert post(engine, "flush_cache").status_code == 200
        assert get(engine, "v1/loads?include=everything").status_code == 400


def test_server_info_tells_the_mode_and_the_release() -> None:
    with Loopback(incremental=True, version="0.5.20", stream_interval=3) as old, Loopback(frontend="rust") as new:
        reported = get(old, "get_server_info").json()
        wanted = {"incremental_streaming_output": True, "stream_interval": 3, "version": "0.5.20"}
        wanted["skip_tokenizer_init"] = False
        assert {key: reported[key] for key in wanted} == wanted
        assert "frontend" not in reported
        assert get(new, "server_info").json()["frontend"] == "rust"
        assert get(new, "server_info").json()["incremental_streaming_output"] is False


def test_workers_are_itself_or_those_that_were_named() -> None:
    with Loopback() as alone, Loopback(workers=("http://a:1", "http://b:2")) as router:
        (worker,) = get(alone, "workers").json()["workers"]
        assert worker["url"] == alone.url
        reported = get(router, "workers").json()
        assert [worker["url"] for worker in reported["workers"]] == ["http://a:1", "http://b:2"]
        assert reported["total"] == 2


def test_health_is_an_empty_200() -> None:
    with Loopback() as engine:
        for path in ("health", "health_generate"):
            assert (get(engine, path).status_code, get(engine, path).content) == (200, b"")
        assert get(engine, "nothing").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [("abort_request", b"{"), ("pause_generation", b'{"mode": "later"}'), ("pause_generation", b"[]")],
)
def test_a_bad_order_is_refused(path: str, body: bytes) -> None:
    with Loopback() as engine:
        refused = httpx.post(f"{engine.url}/{path}", content=body, **PLAIN)
        assert refused.status_code == 400
        assert refused.json()["object"] == "error"


def test_the_last_requests_are_remembered_as_they_came() -> None:
    with Loopback(keep_requests=2, api_key="k") as engine:
        get(engine, "workers?x=1")
        generate(engine, rid="a", headers={"X-SMG-Routing-Key": "s"})
        generate(engine, rid="b", headers={"Authorization": "Bearer k"})
        first, second = engine.seen()
        assert (first.method, first.path, first.query) == ("POST", "/generate", "")
        assert first.headers["x-smg-routing-key"] == "s"
        assert first.body == b"", "it was rejected without being read"
        assert second.json() == json.loads(json.dumps(payload(rid="b")))
