"""What is sent to a vLLM server, and what is understood of its small replies."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from streamfold import Client, EngineError, Experts
from streamfold.engines.base import RequestOptions
from streamfold.engines.vllm import Vllm, VllmCompletions
from support.replay import DONE, PROMPT, Replay, answer_json, stream

ENGINE, COMPLETIONS = Vllm(), VllmCompletions()
FORBIDDEN = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
}
GAUGES = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
"""


def payload(sampling_params: dict[str, Any] | None = None, engine: Vllm = ENGINE, **more: Any) -> dict[str, Any]:
    ids = np.array([1, 2, 3], np.int32)
    given = {"max_new_tokens": 5} if sampling_params is None else sampling_params
    return engine.payload(more.pop("input_ids", ids), given, RequestOptions(**{"rid": "r", **more}))


def test_a_plain_request_asks_for_one_answer_with_usage_in_every_event() -> None:
    asked = payload()
    assert asked.pop("token_ids").tolist() == [1, 2, 3]
    assert asked == {
        "request_id": "r",
        "sampling_params": {"max_tokens": 5, "logprobs": 1, "n": 1},
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert ENGINE.headers("r") == {"X-Request-Id": "r"}


def test_completions_are_asked_for_with_token_ids_in_them() -> None:
    asked = payload({"max_new_tokens": 5, "temperature": 0.5}, COMPLETIONS)
    assert asked.pop("prompt").tolist() == [1, 2, 3]
    assert asked == {
        "request_id": "r",
        "max_tokens": 5,
        "temperature": 0.5,
        "logprobs": 1,
        "n": 1,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert payload(engine=COMPLETIONS, input_ids=None, extra={"text": "Hi"})["prompt"] == "Hi"
    replay = {"max_new_tokens": 5, "custom_params": {"return_top_p_token_ids": True}}
    for wrong in ({"top_p": True}, {"experts": Experts(2, 1)}, {"sampling_params": replay}):
        with pytest.raises(ValueError, match="engine='vllm'"):
            payload(engine=COMPLETIONS, **wrong)
    with pytest.raises(ValueError, match="no prompt"):
        payload(engine=COMPLETIONS, input_ids=None)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"sampling_seed": 0, "temperature": 0.0}, {"seed": 0, "temperature": 0.0}),
        ({"stop": ["END"], "no_stop_trim": True}, {"stop": ["END"], "include_stop_str_in_output": True}),
        ({"max_tokens": 5, "seed": 3}, {"max_tokens": 5, "seed": 3}),
        ({"stop": None, "stop_token_ids": None, "temperature": None}, {}),
        ({"regex": None, "stop_regex": None, "beam_width": None}, {}),
        ({"top_k": 20}, {"top_k": 20}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": 0}, {}),
        ({"top_k": 1 << 30}, {}),
        ({"custom_params": {"return_top_p_token_ids": True}}, {}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"skip_special_tokens": False, "ignore_eos": True}, {"skip_special_tokens": False, "ignore_eos": True}),
    ],
)
def test_sampling_parameters_go_under_vllms_names(given: dict[str, Any], sent: dict[str, Any]) -> None:
    before = dict(given)
    assert payload(given)["sampling_params"] == {"logprobs": 1, **sent, "n": 1}
    assert given == before


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"max_tokens": 5, "max_new_tokens": 5}, "two names"),
        *[({name: 2}, f"parameter {name}") for name in ("json_schema", "regex", "ebnf", "structural_tag")],
        *[({name: 2}, f"parameter {name}") for name in ("stop_regex", "beam_width")],
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_what_the_server_would_pass_over_without_a_word_is_refused(params: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        payload(params)


@pytest.mark.parametrize("engine", [ENGINE, COMPLETIONS])
def test_a_budget_has_to_be_given_under_either_name(engine: Vllm) -> None:
    assert engine.budget({"max_tokens": 5}) == engine.budget({"max_new_tokens": 5}) == 5
    assert engine.budget({"max_tokens": 0}) == 0
    for params in ({}, {"max_new_tokens": None}):
        with pytest.raises(ValueError, match="16 in some releases"):
            engine.budget(params)
    with pytest.raises(ValueError, match="n must be 1"):
        engine.budget({"max_tokens": 5, "n": 2})


def test_where_rows_of_experts_begin_is_a_sampling_parameter() -> None:
    asked = payload(experts=Experts(2, 1), experts_start=2)
    assert asked["sampling_params"]["routed_experts_prompt_start"] == 2
    assert not ENGINE.asks_side_data(asked), "an abort brings none, so it does not wait for any"


def test_a_prompt_without_ids_is_refused_but_one_that_was_rendered_is_not() -> None:
    with pytest.raises(ValueError, match="takes token ids only"):
        payload(input_ids=None, extra={"text": "Hi"})
    assert payload(input_ids=None, extra={"token_ids": [1], "features": {}})["features"] == {}


def test_a_request_is_ended_under_the_ids_that_the_server_made_of_its_own() -> None:
    ids = ["generate-tokens-r", "r", "generate-tokens-s", "s"]
    assert ENGINE.aborts(["r", "s"]) == [
        ("/inference/v1/abort_requests", [{"request_ids": ids}]),
        ("/abort_requests", [{"request_ids": ids}]),
    ]
    assert COMPLETIONS.aborts(["r"])[0][1] == [{"request_ids": ["cmpl-r-0", "cmpl-r"]}]


@pytest.mark.parametrize(
    ("reply", "load"),
    [(GAUGES, 6), (b'{"server_load":4}', 4), (b"vllm:num_requests_running 1e+03\n", 1000)],
)
def test_the_load_is_what_runs_and_waits(reply: bytes, load: int) -> None:
    assert ENGINE.read_load(reply) == load


@pytest.mark.parametrize("reply", [b"", b"{}", b"[]", b'{"server_load":"4"}', b"python_info 1.0\n"])
def test_a_load_of_unknown_shape_is_an_error_and_not_idle(reply: bytes) -> None:
    with pytest.raises(EngineError):
        ENGINE.read_load(reply)


@pytest.mark.parametrize(("status", "word"), [(403, "--enable-scale-out"), (404, "needs vLLM 0.20")])
async def test_a_refusal_says_which_flag_of_the_server_is_missing(status: int, word: str) -> None:
    async with (
        Replay(routes={"/inference/v1/generate": answer_json(FORBIDDEN, status)}) as server,
        Client(server.url, engine="vllm") as client,
    ):
        with pytest.raises(EngineError, match=word) as raised:
            await client.generate(PROMPT, {"max_new_tokens": 4})
        assert raised.value.status == status


async def test_a_token_outside_the_vocabulary_is_refused_as_servers_die_of_it() -> None:
    async with Replay() as server, Client(server.url, engine="vllm", vocab_size=512) as client:
        with pytest.raises(ValueError, match="0 to 511; found 512"):
            client.start([1, 512], {"max_new_tokens": 4})
        assert server.requests == []


def serving(there: dict[str, Any]) -> Replay:
    """A server that has these paths and no other: what each answers, with a status before it if that is not 200."""
    told = {path: answer if isinstance(answer, tuple) else (200, answer) for path, answer in there.items()}
    routes = {path: answer_json(body, status) for path, (status, body) in told.items()}
    return Replay(answer_json({"detail": "Not Found"}, 404), routes=routes)


@pytest.mark.parametrize(
    ("there", "engine"),
    [
        ({"/get_model_info": {"model_path": "m"}}, "sglang"),
        ({"/model_info": {"model_path": "m"}}, "sglang"),
        ({"/version": {"version": "0.32.0"}, "/inference/v1/generate": (400, "token_ids: Field required")}, "vllm"),
        ({"/version": {"version": "0.32.0"}, "/inference/v1/generate": (403, "disabled")}, "vllm-completions"),
        ({"/v1/models": {"data": []}}, "vllm-completions"),
    ],
)
async def test_a_server_is_asked_what_it_is(there: dict[str, Any], engine: str) -> None:
    async with serving(there) as server:
        client = Client(server.url, engine="auto")
        assert client.engine == "auto"
        with pytest.raises(RuntimeError, match="async with client"):
            client.start(PROMPT, {"max_new_tokens": 1})
        async with client:
            assert client.engine == engine


BUSY = (503, {"error": "The model is currently scaling. Please try again later."})
OF_VLLM = {"/version": {"version": "0.32.0"}}


@pytest.mark.parametrize(
    "there",
    [
        {**OF_VLLM, "/inference/v1/generate": BUSY},
        {**OF_VLLM, "/inference/v1/generate": (429, "later")},
        {**OF_VLLM, "/inference/v1/generate": (500, "EngineCore encountered an issue.")},
        # SGLang has this one too.
        {"/model_info": BUSY, "/get_model_info": BUSY, "/v1/models": {"data": []}},
        {"/model_info": BUSY, "/get_model_info": BUSY},
    ],
)
async def test_a_server_that_is_busy_when_it_is_asked_what_it_is_is_not_guessed_at(there: dict[str, Any]) -> None:
    """Nothing else is known of it then, and a wrong guess would last as long as the client."""
    async with serving(there) as server:
        client = Client(server.url, engine="auto")
        with pytest.raises(EngineError) as busy:
            await client.discover()
        assert busy.value.retryable
        assert client.engine == "auto"
        server.routes |= {"/model_info": answer_json({"model_path": "m"})}
        assert await client.discover() == "sglang"
        await client.aclose()


async def test_a_server_that_is_neither_is_an_error_and_not_a_guess() -> None:
    async with Replay(answer_json({"detail": "Not Found"}, 404)) as server:
        client = Client(server.url, engine="auto")
        with pytest.raises(EngineError, match="answers like neither SGLang nor vLLM"):
            await client.discover()
        await client.aclose()


async def test_a_request_is_named_in_its_header_and_its_body_by_the_same_id() -> None:
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}}
    event = {"request_id": "generate-tokens-x", "choices": [{**choice, "finish_reason": "length"}]}
    reply = stream(b"data: " + orjson.dumps(event) + b"\n\n", DONE)
    async with (
        Replay(routes={"/inference/v1/generate": reply}) as server,
        Client(server.url, engine="vllm") as client,
    ):
        generation = await client.generate(PROMPT, {"max_new_tokens": 1}, rid="f" * 32)
        (request,) = server.at("/inference/v1/generate")
    assert generation.token_ids.tolist() == [7]
    assert request.json["request_id"] == "f" * 32
    assert dict(request.headers)["x-request-id"] == "f" * 32
