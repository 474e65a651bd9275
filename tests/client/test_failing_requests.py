"""Requests that an engine never answers: an id that is in use, and a parameter that it fails on."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, EngineError, Retries, StreamTruncated
from streamfold.engines.base import RequestOptions
from streamfold.engines.detect import ENGINES
from streamfold.loopback import Loopback
from support.replay import ASKED, DONE, END, FIN, LAST_CHUNK, PROMPT, RST, answer_json, head, stream, until
from support.speaking import SGLANG
from support.tries import SOON, in_turn, rids

if TYPE_CHECKING:
    from support.replay import Step
    from support.speaking import Speech

EACH_DRIVER = True

OTHER = [7, 8, 9]
OFTEN = Retries(tries=12, first=0.001, longest=0.001)


# An id that is in use.

IN_USE = [
    b'data: {"error":{"message":"Duplicate request ID detected: a"}}\n\n',
    b'data: {"error":{"message":"Duplicate request ID detected: a","code":400,"retryable":false}}\n\n',
    b'data: {"error": {"message": "Request id a already running.", "type": "BadRequestError", "code": 400}}\n\n',
]
REFUSED = [
    answer_json({"error": {"message": "Duplicate request ID detected: a", "code": 400}}, 400),
    answer_json(
        {"error": {"message": "failed to submit: request `a` is already in flight", "code": "server_error"}}, 500
    ),
]


@pytest.mark.parametrize("reply", [*[stream(event, DONE) for event in IN_USE], *REFUSED])
async def test_an_id_that_is_in_use_is_tried_again_under_another_one(speech: Speech, reply: list[Step]) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, reply, speech.whole)
        call = client.start(PROMPT, ASKED)
        assert (await call).token_ids.tolist() == [1, 2, 3]
        assert (call.tries, client.retried, len(set(rids(server)))) == (2, 1, 2)


@pytest.mark.parametrize("reply", [*[stream(event, DONE) for event in IN_USE], *REFUSED])
async def test_a_given_id_that_is_in_use_is_an_error_that_says_so(speech: Speech, reply: list[Step]) -> None:
    async with speech.replay(reply) as server, speech.client(server.url, retries=SOON) as client:
        with pytest.raises(EngineError, match="give each call its own, or none"):
            await client.generate(PROMPT, ASKED, rid="mine")
        await asyncio.sleep(0.05)
        assert rids(server) == ["mine"]
        assert server.aborts == [], "the request that has the id may be somebody else's"


async def test_ids_that_are_always_in_use_cost_the_tries_of_a_call(speech: Speech) -> None:
    async with speech.replay(stream(IN_USE[1], DONE)) as server, speech.client(server.url, retries=SOON) as client:
        with pytest.raises(EngineError, match="after 4 tries"):
            await client.generate(PROMPT, ASKED)
        assert len(set(rids(server))) == 4


async def test_what_runs_twice_under_an_id_of_the_client_is_aborted(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, stream(IN_USE[1], DONE), speech.whole)
        await client.generate(PROMPT, ASKED)
        assert set(server.aborts) == {rids(server)[0]}


async def test_a_real_collision_is_answered_like_that() -> None:
    with Loopback(token_rate=100, stop_probability=0) as box:
        async with Client(box.url) as client, Client(box.url, retries=SOON) as other:
            call = client.start(PROMPT, {"max_new_tokens": 4000}, rid="a" * 8)
            await until(lambda: call.token_count)
            with pytest.raises(EngineError, match="give each call its own"):
                await other.generate(PROMPT, ASKED, rid="a" * 8)
            await call.abort()


# Empty replies.

NOTHING: dict[str, list[Step]] = {
    "fin": [head(), FIN],
    "reset": [head(), 0.05, RST],
    "the end": [head(), LAST_CHUNK, END],
}


@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
async def test_the_third_empty_reply_ends_a_call_if_another_has_succeeded_since(
    speech: Speech, nothing: list[Step]
) -> None:
    def serve(request: Any) -> list[Step]:
        if speech.ids(request) != PROMPT:
            return speech.whole
        return nothing

    async with speech.replay(serve) as server, speech.client(server.url, retries=Retries(first=0.2)) as client:
        call = client.start(PROMPT, ASKED)
        await until(lambda: call.tries == 1 and server.generates)
        await client.generate(OTHER, ASKED)
        with pytest.raises(EngineError, match="are the sampling parameters right") as raised:
            await call
        assert (call.tries, raised.value.retryable, raised.value.status) == (3, False, 200)
        assert isinstance(raised.value.__cause__, StreamTruncated)
        assert raised.value.partial is not None


async def test_empty_replies_keep_their_retries_while_no_other_call_succeeds(speech: Speech) -> None:
    async with speech.replay(NOTHING["fin"]) as server, speech.client(server.url, retries=OFTEN) as client:
        server.routes[speech.path] = in_turn(server, speech.whole, NOTHING["fin"])
        await client.generate(OTHER, ASKED)  # before the first try
        with pytest.raises(StreamTruncated, match="after 12 tries"):
            await client.generate(PROMPT, ASKED)


@pytest.mark.parametrize("cut", [[head(), FIN], [head(), b"1\r\n:\r\n", FIN]], ids=["empty", "a comment"])
async def test_only_a_reply_without_any_byte_counts(cut: list[Step]) -> None:
    def serve(request: Any) -> list[Step]:
        return SGLANG.whole if SGLANG.ids(request) != PROMPT else cut

    async with SGLANG.replay(serve) as server, SGLANG.client(server.url, retries=OFTEN) as client:
        call = client.start(PROMPT, ASKED)
        while not call._runner.ended.done():
            await client.generate(OTHER, ASKED)
        assert call.tries == (3 if len(cut) == 2 else 12)


async def test_sglang_0_5_15_fails_on_an_unknown_parameter_and_the_call_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Loopback(version="0.5.15.post1") as box:
        async with Client(box.url, retries=Retries(first=0.2)) as client:
            call = client.start(PROMPT, {"max_new_tokens": 4, "max_token": 4})
            await until(lambda: call.tries == 1)
            await asyncio.sleep(0.05)
            await client.generate(PROMPT, {"max_new_tokens": 4})
            with pytest.raises(EngineError, match="the engine failed on this request; see its log"):
                await call
    assert "'max_token'" in caplog.text


# Names of parameters.


def unknown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "no sampling parameter" in record.getMessage()]


async def test_an_unknown_parameter_is_warned_of_once_for_each_client_and_name(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    async with speech.replay(speech.whole) as server:
        for _ in range(2):
            caplog.clear()
            async with speech.client(server.url) as client:
                for _ in range(3):
                    await client.generate(PROMPT, {**ASKED, "temprature": 1.0, "top_q": 1})
            assert [name for name in ("temprature", "top_q") if any(name in told for told in unknown(caplog))] == [
                "temprature",
                "top_q",
            ]
            assert len(unknown(caplog)) == 2
            assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("name", ENGINES)
def test_all_that_an_engine_is_sent_by_its_own_or_our_name_is_known(name: str) -> None:
    engine = ENGINES[name]()
    ours = {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 1, "no_stop_trim": True, "custom_params": {}}
    common = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["a"], "stop_token_ids": [1]}
    params = {**ours, **common, "ignore_eos": True, "skip_special_tokens": False, "repetition_penalty": 1.1}
    assert engine.unknown_params(params) == []
    sent = engine.payload(np.asarray(PROMPT, np.int32), params, RequestOptions(rid="r"))
    told = sent.get("sampling_params", sent)
    keys = {"request_id", "prompt", "return_token_ids", "stream", "stream_options"}
    told = {name: value for name, value in told.items() if name not in keys}
    assert engine.unknown_params(told) == []
    assert engine.unknown_params({"regexp": "a", "max_new_token": 4}) == ["regexp", "max_new_token"]


def test_each_engine_knows_its_own_names_alone() -> None:
    sglang, vllm, completions = (ENGINES[name]() for name in ("sglang", "vllm", "vllm-completions"))
    assert sglang.unknown_params({"max_tokens": 1, "structured_outputs": {}}) == ["max_tokens", "structured_outputs"]
    assert vllm.unknown_params({"stop_regex": None, "response_format": {}}) == ["response_format"]
    assert completions.unknown_params({"response_format": {}, "detokenize": False}) == ["detokenize"]
