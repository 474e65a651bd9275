"""Prompts with images for vLLM: rendered by the server, moved to the trainer's own ids, and never dropped."""

from __future__ import annotations

import asyncio
import base64
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import EngineError, EngineTimeout, Retries, vime
from streamfold.integrations.multimodal import token_request
from support.completing import answers
from support.host import installed
from support.host.helpers import LIMIT
from support.host.slime.observability.trace_utils import spans
from support.host.slime.rollout import sglang_rollout
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils import processing_utils
from support.host.slime.utils.types import Sample
from support.host_calls import PARAMS, Server, Status, ask, broken_off, part, response_of, sent_request, streaming
from support.replay import DONE, HANG, RST, answer, answer_json, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.replay import Request, Route

BOTH_LOOPS = True

RENDER = "/v1/chat/completions/render"
IMAGE = 90  # the id of a placeholder
PROMPT = [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, 3]  # the trainer's
RENDERED = [7, 7, *PROMPT, 8]  # with another chat template around it
PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("streamfold.integrations.settings.Retries", lambda tries: Retries(tries=tries, first=0.001))
    with installed("vime"):
        yield


def rendered(ids: Sequence[int] = RENDERED, at: Sequence[Any] = (3, 7), **more: Any) -> dict[str, Any]:
    """What a server gives for two images of three ids."""
    places = [{"offset": place, "length": 3} if isinstance(place, int) else place for place in at]
    features = {"mm_hashes": {"image": ["a", "b"]}, "mm_placeholders": {"image": places}, "kwargs_data": None}
    return {"token_ids": list(ids), "features": features, "request_id": "its own", "cache_salt": None, **more}


def sample_of(**fields: Any) -> Sample:
    inputs = {"images": [b"png", b"png"], "videos": None}
    return Sample(**{"prompt": "x", "tokens": list(PROMPT), "multimodal_inputs": inputs, **fields})


def reply(request: Request) -> Any:
    return stream(part([5], prompt=len(sent_request(request).ids), finish="stop"), DONE)


def serving(render: Route, generate: Route = reply) -> Server:
    return Server(generate, routes={RENDER: render})


async def test_the_rendered_prompt_is_sent_with_the_trainers_ids_and_placeholders_where_they_are_in_them() -> None:
    response = answer_json(
        rendered(kwargs_extra=1, token_offsets=[[0, 1]], sampling_params={"top_p": 0.5}, stream=False)
    )
    async with serving(response) as server:
        args = streaming(server, router_policy="consistent_hash")
        sample = await ask(args, sample_of(session_id="mine"), {"max_new_tokens": 8})
        (render,), (generate,) = server.at(RENDER), server.generates
    assert render.json == {
        "model": "loopback/512",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            }
        ],
    }
    body = generate.json
    assert body["token_ids"] == PROMPT
    assert body["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 3}]}
    assert body["features"]["mm_hashes"] == {"image": ["a", "b"]}
    assert (body["model"], body["kwargs_extra"], body["stream"]) == ("loopback/512", 1, True)
    assert body["sampling_params"]["max_tokens"] == 8
    assert "token_offsets" not in body
    assert body["request_id"] != "its own"
    assert render.headers["x-session-id"] == generate.headers["x-session-id"] == "mine"
    assert (response_of(sample), sample.status) == ([5], Status.COMPLETED)
    assert [span.name for span in spans] == ["vllm_generate", "vllm_mm_render"]


async def test_a_resumed_call_sends_the_images_with_the_whole_prefix() -> None:
    first, later = (
        broken_off(part([5, 6], prompt=len(PROMPT))),
        stream(part([9], prompt=len(PROMPT) + 2, finish="stop"), DONE),
    )
    async with serving(answer_json(rendered()), answers(first, later)) as server:
        sample = await ask(streaming(server, streamfold_tries=3), sample_of())
        bodies = [request.json for request in server.generates]
        assert len(server.at(RENDER)) == 1
    assert [body["token_ids"] for body in bodies] == [PROMPT, [*PROMPT, 5, 6]]
    assert bodies[0]["features"] == bodies[1]["features"]
    assert response_of(sample) == [5, 6, 9]


async def test_a_partial_sample_is_rendered_as_its_prompt() -> None:
    tokens = {"tokens": [*PROMPT, 5, IMAGE], "response_length": 2, "response": "..", "loss_mask": [1, 1]}
    sample = sample_of(**tokens, rollout_log_probs=[-0.1, -0.2], status=Status.ABORTED)
    async with serving(answer_json(rendered())) as server:
        await ask(streaming(server), sample)
        (generate,) = server.generates
    assert generate.json["token_ids"] == [*PROMPT, 5, IMAGE]
    assert generate.json["features"]["mm_placeholders"]["image"][1]["offset"] == 5


# Where placeholders are.


@pytest.mark.parametrize(
    ("ids", "at", "prompt", "wanted"),
    [
        (PROMPT, (1, 5), PROMPT, (1, 5)),
        ([7, 90, 90, 90, 90, 90, 90], (1, 4), [90, 90, 90, 90, 90, 90, 8], (0, 3)),
        ([90, 90, 90], (0,), [1, 90, 90, 90], (1,)),
        ([4, 90, 5, 6, 4, 90, 5], (0, 4), [9, 4, 90, 5, 4, 90, 5], (1, 4)),
    ],
    ids=["the same ids", "side by side", "alone", "with ids of their own around"],
)
def test_placeholders_are_found_one_behind_the_other(ids: Any, at: Any, prompt: Any, wanted: Any) -> None:
    response = rendered(ids, at)
    body = token_request(response, prompt, len(at))
    assert [place["offset"] for place in body["features"]["mm_placeholders"]["image"]] == list(wanted)
    assert [place["offset"] for place in response["features"]["mm_placeholders"]["image"]] == list(at), (
        "a copy was moved"
    )


def test_offsets_of_tokens_stay_only_where_the_ids_are_the_same() -> None:
    assert token_request(rendered(PROMPT, (1, 5), token_offsets=[1]), PROMPT, 2)["token_offsets"] == [1]


def test_placeholders_of_several_kinds_follow_each_other() -> None:
    kinds = {"image": [{"offset": 3, "length": 3}], "audio": [{"offset": 0, "length": 2}], "video": None}
    response = {"token_ids": [8, 8, 1, 90, 90, 90], "features": {"mm_placeholders": kinds}}
    body = token_request(response, [5, 8, 8, 90, 90, 90], 2)
    assert body["features"]["mm_placeholders"]["audio"] == [{"offset": 1, "length": 2}]
    assert body["features"]["mm_placeholders"]["image"] == [{"offset": 3, "length": 3}]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (rendered(at=(3,)), "1 placeholders for 2 images"),
        (rendered([1, IMAGE, IMAGE, IMAGE, 2, 91, 91, 91], (1, 5)), "is not in the prompt's ids"),
        (rendered([*PROMPT[:7], 3], at=(1, {"offset": 5, "length": 2})), "is not in the prompt's ids"),
        (rendered(at=(3, {"offset": 11, "length": 3})), "that shape is not known"),
        (rendered(at=(3, {"offset": True, "length": 3})), "that shape is not known"),
        (rendered(at=(3, {"offset": 7, "length": 0})), "that shape is not known"),
        (rendered(at=(3, [7, 3])), "that shape is not known"),
        (rendered([7, *PROMPT[:5], IMAGE, *PROMPT[5:]], at=(2, {"offset": 6, "length": 4})), "is not in the prompt's"),
        (rendered(features=None), "its images would be lost"),
        (rendered(features={}), "its images would be lost"),
        ([["conversation"], [{"prompt_token_ids": PROMPT}]], "returned no object with token_ids"),
        ({"token_ids": "x"}, "returned no object with token_ids"),
        ({"token_ids": []}, "returned no object with token_ids"),
    ],
)
async def test_a_rendered_prompt_that_does_not_fit_the_trainers_ids_is_refused(response: Any, message: str) -> None:
    sample = sample_of()
    async with serving(answer_json(response)) as server:
        with pytest.raises(NotImplementedError, match=message):
            await ask(streaming(server, streamfold_tries=3), sample)
        assert (len(server.at(RENDER)), server.generates) == (1, [])
    assert (sample.status, sample.tokens) == (Status.ABORTED, PROMPT)


# Servers.


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_server_that_cannot_render_is_an_error_that_names_the_flag(status: int) -> None:
    async with serving(answer_json({"detail": "Not Found"}, status)) as server:
        with pytest.raises(NotImplementedError, match="--enable-scale-out"):
            await ask(streaming(server, streamfold_tries=3), sample_of())
        assert len(server.at(RENDER)) == 1


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """THUDM/slime#1714, encode/httpx#3574."""
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "fe80::/10")
    async with serving(answer_json(rendered())) as server:
        assert (await ask(streaming(server), sample_of())).status is Status.COMPLETED


async def test_a_response_that_is_not_json_is_refused() -> None:
    async with serving(answer(b"<html>")) as server:
        with pytest.raises(NotImplementedError, match="<html>"):
            await ask(streaming(server), sample_of())


async def test_retryable_failures_are_retried() -> None:
    busy, reset = answer_json({"error": "busy"}, 503), [RST]
    async with serving(answers(busy, reset, answer_json(rendered()))) as server:
        sample = await ask(streaming(server, streamfold_tries=3), sample_of())
        assert len(server.at(RENDER)) == 3
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (503, 2)])
async def test_a_refusal_is_an_error_with_the_servers_message(status: int, tries: int) -> None:
    sample = sample_of()
    async with serving(answer_json({"error": {"message": "too many images"}}, status)) as server:
        with pytest.raises(EngineError, match="too many images"):
            await ask(streaming(server, streamfold_tries=2), sample)
        assert (len(server.at(RENDER)), server.generates) == (tries, [])
    assert sample.status is Status.ABORTED


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with serving([]) as server:
        args = streaming(server)
    with pytest.raises(EngineError, match="no reply from"):
        await ask(args, sample_of())


async def test_a_silent_server_times_out() -> None:
    async with serving([HANG]) as server:
        with pytest.raises(EngineTimeout, match=r"did not answer within 0\.1 s"):
            await ask(streaming(server, streamfold_timeout_first_token=0.1), sample_of())
        await until(lambda: server.open == 0)


async def test_a_response_that_cannot_be_decoded_is_an_engine_error() -> None:
    async with serving(answer(b"no gzip", content_encoding="gzip")) as server:
        with pytest.raises(EngineError, match="no reply from"):
            await ask(streaming(server), sample_of())


# Aborts.


async def test_a_failure_during_an_abort_is_not_reported_by_the_event_loop() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    ending = asyncio.Event()
    async with serving([ending, *answer_json(None, 400)]) as server:
        args = streaming(server)
        asking = asyncio.ensure_future(ask(args, sample_of()))
        await until(lambda: server.at(RENDER))
        ending.set()
        GenerateState(args).aborted = True
        assert (await asking).status is Status.ABORTED
    gc.collect()
    assert complaints == []


async def test_a_cancel_ends_the_request_and_leaves_an_aborted_sample() -> None:
    async with serving([HANG]) as server:
        sample = sample_of()
        task = asyncio.ensure_future(vime.generate_streaming(streaming(server), sample, PARAMS))
        await until(lambda: server.at(RENDER))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
        await until(lambda: server.open == 0)
        assert server.generates == []
    assert (sample.status, sample.tokens) == (Status.ABORTED, PROMPT)


@pytest.mark.parametrize("when", ["before", "meanwhile", "in a pause"])
async def test_a_trainer_that_aborts_gets_its_sample_back_and_no_request_leaves(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "streamfold.integrations.settings.Retries", lambda tries: Retries(tries=tries, first=30.0, longest=30.0)
    )
    async with serving([HANG] if when == "meanwhile" else answer_json(None, 503)) as server:
        args = streaming(server, streamfold_tries=5)
        GenerateState(args).aborted = when == "before"
        asking = asyncio.ensure_future(ask(args, sample_of()))
        if when != "before":
            await until(lambda: server.at(RENDER))
            await asyncio.sleep(0.02)
            GenerateState(args).aborted = True
        sample = await asking
        assert len(server.requests) == (0 if when == "before" else 1)
        await until(lambda: server.open == 0)
    assert (sample.status, sample.tokens) == (Status.ABORTED, PROMPT)


@pytest.mark.parametrize("budget", [0, -1])
async def test_without_a_budget_nothing_is_rendered(budget: int) -> None:
    async with serving(answer_json(rendered())) as server:
        if budget:
            with pytest.raises(ValueError, match="max_new_tokens is -1"):
                await ask(streaming(server), sample_of(), {"max_new_tokens": budget})
        else:
            sample = await ask(streaming(server), sample_of(), {"max_new_tokens": budget})
            assert sample.status is Status.TRUNCATED
        assert server.requests == []


# Releases of the host.


@pytest.mark.parametrize("images", [[b"png", b"png"], np.zeros((2, 4, 4, 3), np.uint8)], ids=["a list", "an array"])
async def test_inputs_may_be_arrays(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_utils, "encode_image_for_rollout_engine", lambda _: PNG)
    inputs = {"images": images, "videos": None, "image_grid_thw": np.array([[1, 4, 4]] * 2)}
    async with serving(answer_json(rendered())) as server:
        assert (await ask(streaming(server), sample_of(multimodal_inputs=inputs))).status is Status.COMPLETED
        (render,) = server.at(RENDER)
    assert [part["type"] for part in render.json["messages"][0]["content"]] == ["text", "image_url", "image_url"]


async def test_a_newer_trainer_makes_the_messages_itself_and_readies_its_encoders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(prompt: str, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [{"type": "audio_url", "audio_url": {"url": url}} for url in inputs["audio"]]
        system = {"role": "system", "content": "be terse"}
        return [system, {"role": "user", "content": [{"type": "text", "text": prompt}, *parts]}]

    async def prime(args: Any, messages: list[dict[str, Any]]) -> None:
        primed.append(messages)

    primed: list[Any] = []
    monkeypatch.setattr(processing_utils, "build_multimodal_messages", build, raising=False)
    monkeypatch.setattr(sglang_rollout, "prime_encoder", prime, raising=False)
    async with serving(answer_json(rendered())) as server:
        sample = sample_of(multimodal_inputs={"audio": ["a", "b"], "images": []})
        await ask(streaming(server), sample)
        (render,) = server.at(RENDER)
    assert primed == [render.json["messages"]]
    assert [part["type"] for part in render.json["messages"][1]["content"]] == ["text", "audio_url", "audio_url"]
    assert sample.status is Status.COMPLETED


async def test_an_older_trainer_cannot_send_videos_and_drops_none() -> None:
    async with serving(answer_json(rendered())) as server:
        with pytest.raises(NotImplementedError, match="cannot send images, videos"):
            await ask(streaming(server), sample_of(multimodal_inputs={"images": [b"png"], "videos": ["v"]}))
        assert server.requests == []


async def test_images_need_a_text_prompt() -> None:
    async with serving(answer_json(rendered())) as server:
        with pytest.raises(ValueError, match="with images the prompt must be a str"):
            await ask(streaming(server), sample_of(prompt=[{"role": "user"}]))
        assert server.requests == []


async def test_a_prompt_without_images_is_not_rendered() -> None:
    async with serving(answer_json(rendered())) as server:
        await ask(streaming(server), sample_of(multimodal_inputs={"images": [], "videos": None}))
        assert server.at(RENDER) == []
