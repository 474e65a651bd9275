"""Side data that was requested and not received: a generation names it, and a client warns once of each name."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, Experts
from streamfold.loopback import Loopback
from support import bodies_vllm
from support.replay import DONE, HANG, PROMPT, Replay, chunk, event, head, stream, until

if TYPE_CHECKING:
    from streamfold import Generation
    from support.replay import Step

EXPERTS = Experts(2, 1)
NARROW = {"max_new_tokens": 8, "top_p": 0.9}
WIDE = {"max_new_tokens": 8}


def reply(finish: str | None = "stop", **meta: Any) -> Any:
    return stream(event([1, 2], 2, finish, **meta), DONE)


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # how the client is made, the sampling parameters, the further arguments, and what is missing
    "experts": ({"experts": EXPERTS}, WIDE, {}, "routed_experts"),
    "experts by a key": ({}, WIDE, {"extra": {"return_routed_experts": True}}, "routed_experts"),
    "top-p ids": ({}, NARROW, {"top_p": True}, "top_p"),
    "top-p ids by custom_params": ({}, {**NARROW, "custom_params": {"return_top_p_token_ids": True}}, {}, "top_p"),
    "top-p ids by a key": ({}, NARROW, {"extra": {"return_sampling_mask": True}}, "top_p"),
    "top-p ids with top_k": ({}, {**WIDE, "top_k": 4}, {"top_p": True}, "top_p"),
    "prompt ids": ({}, WIDE, {"prompt_token_ids": True}, "prompt_token_ids"),
    "indexer rows": ({}, WIDE, {"extra": {"return_indexer_topk": True}}, "indexer_topk"),
}
NEEDS = {
    "routed_experts": ("no routed experts", "--enable-return-routed-experts", "sglang-router 0.3.2"),
    "top_p": ("no top-p ids", "return_top_p_token_ids", "return_sampling_mask", "0.5.23", "sglang-router 0.3.2"),
    "prompt_token_ids": ("no prompt token ids", "0.5.13", "router"),
    "indexer_topk": ("no indexer rows", "--enable-return-indexer-topk", "router"),
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("asked", ASKED)
async def test_what_a_finished_response_lacks_is_named_and_warned_of_once_a_client(
    asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, params, more, name = ASKED[asked]
    async with Replay(reply()) as server:
        for clients in (1, 2):
            async with Client(server.url, **made) as client:
                found = [await client.generate(PROMPT, params, **more) for _ in range(3)]
            assert [generation.missing for generation in found] == [(name,)] * 3
            assert pickle.loads(pickle.dumps(found[0])).missing == (name,)
            assert found[0].token_ids.tolist() == [1, 2]
            assert len(warnings_in(caplog)) == clients
    assert all(part in warnings_in(caplog)[0] for part in (server.url, *NEEDS[name]))
    assert f"missing=('{name}',)" in repr(found[0])


async def test_each_name_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Replay(reply()) as server, Client(server.url, experts=EXPERTS) as client:
        both: Generation = await client.generate(PROMPT, NARROW, top_p=True)
        await client.generate(PROMPT, NARROW, top_p=True, prompt_token_ids=True)
    assert both.missing == ("routed_experts", "top_p")
    assert len(warnings_in(caplog)) == 3


@pytest.mark.parametrize(
    ("params", "more"),
    [
        (WIDE, {}),
        (NARROW, {}),
        (WIDE, {"top_p": True}),  # sampling is not restricted: the engine has none to send
        (WIDE, {"extra": {"return_routed_experts": False, "return_sampling_mask": True}}),
        ({"max_new_tokens": 0}, {"top_p": True, "prompt_token_ids": True}),
    ],
)
async def test_nothing_is_missing_that_was_not_requested_or_cannot_be(
    params: dict[str, Any], more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with Replay(reply()) as server, Client(server.url) as client:
        assert (await client.generate(PROMPT, params, **more)).missing == ()
    assert warnings_in(caplog) == []


async def test_what_was_received_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(stop_probability=0) as engine:
        shape = Experts(engine.config.num_layers, engine.config.top_k)
        async with Client(engine.url, experts=shape) as client:
            patched = await client.generate([300, 301], NARROW, top_p=True, prompt_token_ids=True)
            unpatched = await client.generate([300, 301], NARROW, extra={"return_sampling_mask": True})
    assert (patched.missing, unpatched.missing) == ((), ())
    assert (patched.top_p is not None, unpatched.top_p is not None) == (True, True)
    rows: dict[str, Any] = {"indexer_topk": "AAAA", "indexer_topk_num_layers": 1}
    async with Replay(reply(**rows)) as server, Client(server.url) as client:
        assert (await client.generate(PROMPT, WIDE, extra={"return_indexer_topk": True})).missing == ()
    assert warnings_in(caplog) == []


async def test_an_aborted_call_names_what_it_lacks_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parked: list[Step] = [head(), chunk(event([1, 2], 2)), HANG]
    async with Replay(parked) as server, Client(server.url, experts=EXPERTS) as client:
        call = client.start(PROMPT, WIDE)
        await until(lambda: call.token_count)
        assert (await call.abort(drain=0.0)).missing == ("routed_experts",)
    async with Replay(reply("abort")) as server, Client(server.url, experts=EXPERTS) as client:
        assert (await client.generate(PROMPT, WIDE)).missing == ("routed_experts",)
    assert warnings_in(caplog) == []


async def test_vllm_names_its_flags(caplog: pytest.LogCaptureFixture) -> None:
    body = bodies_vllm.event([1, 2], "stop", top={"usage": bodies_vllm.usage(2)})
    async with (
        Replay(stream(body, DONE), path="/inference/v1/generate") as server,
        Client(server.url, engine="vllm", experts=EXPERTS) as client,
    ):
        found = await client.generate(PROMPT, NARROW, top_p=True, prompt_token_ids=True)
    assert found.missing == ("routed_experts", "top_p", "prompt_token_ids")
    for flag in ("--enable-return-routed-experts", "--return-sampling-mask", "0.30"):
        assert flag in " ".join(warnings_in(caplog))
