"""What the loopback engine rejects as vLLM, its faults, and its invalid settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.loopback import Config, Faults, Loopback
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
    payload,
    send,
    undisturbed,
    until_load,
    usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def engine() -> Iterator[Loopback]:
    with Loopback(engine="vllm", context_length=100) as running:
        yield running


# Before a byte of a stream


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"token_ids": ...}, "body.token_ids", "Field required"),
        ({"token_ids": None}, "body.token_ids", "valid list"),
        ({"token_ids": []}, "body.token_ids", "at least 1 item"),
        ({"token_ids": [5, -1]}, "body.token_ids", "negative"),
        ({"token_ids": [5, "x"]}, "body.token_ids.1", "valid integer"),
        ({"token_ids": [5, 1.5]}, "body.token_ids.1", "valid integer"),
        ({"sampling_params": ...}, "body.sampling_params", "Field required"),
        ({"sampling_params": {"max_tokens": "many"}}, "body.sampling_params.max_tokens", "valid integer"),
        ({"sampling_params": {"temperature": None}}, "body.sampling_params.temperature", "null"),
        ({"stream": "perhaps"}, "body.stream", "valid boolean"),
        ({"stream_options": 3}, "body.stream_options", "valid dictionary"),
        ({"request_id": 3}, "body.request_id", "valid string"),
        ({"output_mode": "song"}, "body.output_mode", "'tokens' or 'text'"),
    ],
)
def test_a_body_that_does_not_fit_the_schema_is_a_400_that_names_the_place(
    engine: Loopback, body: dict[str, Any], param: str, words: str
) -> None:
    given = {key: value for key, value in {**payload(), **body}.items() if value is not ...}
    answer = send(engine, TOKENS, given)
    error = error_of(answer)
    assert (answer.status, error["code"], error["type"], error["param"]) == (400, 400, "Bad Request", param)
    assert error["message"].startswith("1 validation error:\n")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": "a", "detokenize": False}, None),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_bad_sampling_parameter_is_a_400_even_of_a_stream(
    engine: Loopback, params: dict[str, Any], param: str | None, stream: bool
) -> None:
    before = engine.stats().requests
    answer = generate(engine, params=params, stream=stream)
    error = error_of(answer)
    assert (answer.status, error["type"], error["param"]) == (400, "BadRequestError", param)
    assert engine.stats().requests == before


def test_a_body_that_is_no_json_object_or_of_another_type_is_a_400(engine: Loopback) -> None:
    for content, kind, param in (
        (b'{"token_ids": [1', "application/json", "body.16"),
        (b"[]", "application/json; charset=utf-8", "body"),
        (b"{}", "text/plain", None),
    ):
        reply = httpx.post(f"{engine.url}/{TOKENS}", content=content, headers={"content-type": kind}, **PLAIN)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["param"]) == (400, "Bad Request", param)


def test_a_model_that_is_not_served_is_a_404(engine: Loopback) -> None:
    answer = generate(engine, model="nope")
    error = error_of(answer)
    assert (answer.status, error["code"], error["type"], error["param"]) == (404, 404, "NotFoundError", "model")
    assert error["message"] == "The model `nope` does not exist. Valid aliases: streamfold-loopback."
    for served in ("streamfold-loopback", "", None):
        assert generate(engine, model=served).status == 200


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    with Loopback(engine="vllm", skip_tokenizer_init=True) as engine:
        assert generate(engine, output_mode="text").status == 400
        assert generate(engine, params={"stop": "a"}).status == 400
        assert ids(generate(engine)) == undisturbed(engine).token_ids
        reported = choices(complete(engine))
        assert {choice["text"] for choice in reported} == {""}
        assert [token for choice in reported for token in choice["token_ids"]] == undisturbed(engine).token_ids
    with Loopback(engine="vllm", skip_tokenizer_init=True, version="0.30.0") as engine:
        assert len(ids(generate(engine, params={"stop": " "}))) == 20, "ignored, without an error"


def test_a_full_queue_is_a_503_before_a_byte() -> None:
    config = Config(engine="vllm", token_rate=100, max_running_requests=1, max_queued_requests=0)
    with Loopback(config) as engine, opened(engine, params={"max_tokens": 10_000}):
        until_load(engine, 1, 0)
        answer = generate(engine)
        assert (answer.status, error_of(answer)["type"]) == (503, "Service Unavailable")


def test_the_rust_frontend_refuses_stream_options_without_a_stream() -> None:
    with Loopback(engine="vllm", frontend="rust") as engine:
        options = {"include_usage": True}
        assert generate(engine, stream=False, stream_options=options).status == 400
        assert generate(engine, stream_options=options).status == 200


# In the stream


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"token_ids": [300, 5000]}, "Token id 5000 is out of vocabulary", None),
        (
            {"token_ids": [300] * 101},
            (
                "The decoder prompt (length 101) is longer than the maximum model length of 100. Make sure that "
                "`max_model_len` is no smaller than the number of text tokens."
            ),
            None,
        ),
        (
            {"token_ids": [300] * 100},
            (
                "The decoder prompt (length 100) plus the number of requested output tokens (at least 1) is longer "
                "than the maximum model length of 100."
            ),
            None,
        ),
        (
            {"params": {"logprobs": 21}},
            "Requested sample logprobs of 21, which is greater than max allowed: 20 (parameter=logprobs, value=21)",
            "logprobs",
        ),
        (
            {"params": {"logit_bias": {"600": 1, "3": 2}}},
            "token_id(s) [600] in logit_bias contain out-of-vocab token ids",
            "logit_bias",
        ),
    ],
)
def test_what_only_the_engine_checks_is_an_event_in_a_stream_and_a_400_elsewhere(
    engine: Loopback, body: dict[str, Any], message: str, param: str | None
) -> None:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    answer = generate(engine, stream_options={"include_usage": True}, **body)
    assert (answer.status, answer.frames) == (200, [{"error": error}])
    assert answer.body.startswith(b'data: {"error": {"message": ')
    whole = generate(engine, stream=False, **body)
    assert (whole.status, whole.json) == (400, {"error": error})


def test_a_completion_whose_prompt_is_too_long_is_a_400_and_one_of_unknown_ids_an_event(engine: Loopback) -> None:
    assert complete(engine, prompt=[300] * 100).status == 400
    assert error_of(complete(engine, prompt=[5000]))["message"] == "Token id 5000 is out of vocabulary"
    assert complete(engine, prompt=...).status == 400


# Faults


def faulty(*rules: dict[str, Any], **options: Any) -> Loopback:
    return Loopback(engine="vllm", token_rate=500, faults=Faults(rules), **options)


@pytest.mark.parametrize("kind", ["shrink", "rewrite", "retract_abort"])
def test_faults_that_make_no_sense_here_are_refused_at_the_start(kind: str) -> None:
    script = Faults([{"kind": "drop"}, {"kind": kind}])
    with pytest.raises(ValueError, match=rf"rule 1 \({kind}\): vLLM.* SGLang"):
        Config(engine="vllm", faults=script)
    with Loopback(engine="vllm") as engine:
        with pytest.raises(ValueError, match="SGLang"):
            engine.faults = script
        assert generate(engine).status == 200


def test_a_rule_is_for_where_this_engine_generates() -> None:
    with pytest.raises(ValueError, match="this engine generates at /inference/v1/generate and /v1/completions, not at"):
        Config(engine="vllm", faults=Faults([{"kind": "cut", "path": "/generate"}]))
    with pytest.raises(ValueError, match="this engine generates at /generate, not at"):
        Config(faults=Faults([{"kind": "cut", "path": "/v1/completions"}]))
    rules = {"kind": "abort", "path": "/v1/completions", "after_tokens": 3}, {"kind": "status", "rid": "r"}
    with faulty(*rules) as engine:
        assert choices(complete(engine))[-1]["finish_reason"] == "abort"
        assert generate(engine, request_id="x").status == 200
        assert generate(engine, request_id="r1").status == 500
        assert generate(engine, headers={"X-Request-Id": "r2"}).status == 500
        assert engine.faults.done == {"abort": 1, "status": 2}


def test_a_status_has_the_shape_of_this_engine() -> None:
    with faulty({"kind": "status", "status": 503}) as engine:
        error = {
            "message": "The engine was told to fail.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
        assert generate(engine).json == {"error": error}
        assert get(engine, "health").status_code == 200
        assert post(engine, "resume").status_code == 200


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
def test_an_abort_that_nobody_asked_for_comes_with_one_more_token(version: str) -> None:
    options = {"include_usage": True}
    with faulty({"kind": "abort", "after_tokens": 5, "times": 1}, version=version) as engine:
        answer = generate(engine, stream_options=options)
        assert (answer.read().finish_reason, len(ids(answer)), usage(answer)["completion_tokens"]) == ("abort", 6, 6)
        rest = generate(engine, token_ids=PROMPT + ids(answer), params={"max_tokens": 14})
        assert ids(answer) + ids(rest) == undisturbed(engine).token_ids


def test_what_is_turned_away_is_an_event_in_a_stream_and_a_503_elsewhere() -> None:
    with faulty({"kind": "queue_full"}) as engine:
        (frame,) = generate(engine).frames
        assert frame["error"]["code"] == 503
        assert frame["error"]["type"] == "ServiceUnavailableError"
        assert generate(engine, stream=False).status == 503


def test_an_error_amid_a_stream_leaves_its_tokens_and_is_the_last_event() -> None:
    with faulty({"kind": "error_event", "after_events": 3}) as engine:
        answer = generate(engine, stream_options={"include_usage": True})
        assert len(answer.frames) == 4
        assert error_of(answer)["type"] == "InternalServerError"
        assert b'data: {"error": {"message": ' in answer.body


def test_done_comes_in_place_of_the_terminal_event() -> None:
    with faulty({"kind": "done_without_finish"}) as engine:
        answer = generate(engine)
        assert {choice["finish_reason"] for choice in choices(answer)} == {None}
        assert engine.faults.done == {"done_without_finish": 1}


def test_weights_change_and_requests_park_as_told() -> None:
    with faulty({"kind": "version", "after_tokens": 4, "rid": "v"}, {"kind": "park", "rid": "p"}) as engine:
        last = choices(generate(engine, request_id="v"))[-1]
        assert last["weight_versions"] == [
            {"version": "default", "start": 0, "end": 4},
            {"version": "1", "start": 4, "end": 20},
        ]
        with opened(engine, request_id="p") as parked:
            until_load(engine, 0, 1)
            post(engine, "resume")
            assert ids(parked.to_end()) == undisturbed(engine).token_ids


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "cut", "after_bytes": 700},
        {"kind": "cut", "after_events": 3, "how": "fin"},
        {"kind": "drop"},
        {"kind": "die", "after_events": 4, "seconds": 0.05},
    ],
)
def test_a_connection_that_ends_takes_the_request_with_it(rule: dict[str, Any]) -> None:
    with faulty({**rule, "times": 1}) as engine:
        with pytest.raises(httpx.TransportError):
            generate(engine)
        until(lambda: engine.stats().running == 0)
        if rule["kind"] != "die":
            assert ids(generate(engine)) == undisturbed(engine).token_ids
            assert load(engine) == (0, 0)


# What can be set


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "trt"}, "engine must be one of sglang, vllm, got 'trt'"),
        ({"engine": "vllm", "version": "0.19"}, "vLLM streams tokens from 0.20 on"),
        ({"engine": "vllm", "max_logprobs": -1}, "max_logprobs must be at least 0"),
        ({"return_routed_experts": True}, "return_routed_experts must be left out: sglang has no such flag, got"),
        ({"dev_mode": False}, "dev_mode must be left out"),
    ],
)
def test_what_cannot_be_set_is_told(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Config(**options)


def test_the_newest_release_is_spoken_if_none_is_named() -> None:
    assert (Config().version, Config(engine="vllm").version) == ("0.5.23", "0.32.0")
    assert Config(engine="vllm", version="0.28").release == (0, 28)


@pytest.mark.parametrize(
    ("arguments", "spoken"),
    [
        ([], ("sglang", "0.5.23", "python")),
        (["--wire", "0.5.15"], ("sglang", "0.5.15", "python")),
        (["--engine", "vllm"], ("vllm", "0.32.0", "python")),
        (["--engine", "vllm", "--wire", "0.28"], ("vllm", "0.28", "python")),
        (["--engine", "vllm", "--wire", "rust"], ("vllm", "0.32.0", "rust")),
        (["--engine", "vllm", "--wire", "0.5.23"], None),
    ],
)
def test_the_command_line_serves_either_engine_in_each_of_its_ways(
    arguments: list[str], spoken: tuple[str, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, str, str]] = []

    def serve(*, host: str, port: int, on_ready: Callable[[str], None], **options: Any) -> None:
        config = Config(**options)
        served.append((config.engine, config.version, config.frontend))

    monkeypatch.setattr("streamfold.loopback.serve", serve)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert served == ([] if spoken is None else [spoken])
    assert result.exit_code == (2 if spoken is None else 0), result.output
    if spoken is None:
        assert "cannot serve: vLLM streams tokens from 0.20 on" in result.output
