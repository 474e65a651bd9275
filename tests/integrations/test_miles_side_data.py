"""Routed experts and indexer rows in miles: whole arrays of all tokens but the last, or an error that says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import EngineError
from support.miles import installed
from support.miles.calls import LAYERS, TOP_K, ask, indexer, partial, response_of, rows_of, sample_of, state_of, written
from support.miles.types import Sample
from support.replay import DONE, PROMPT, Replay, event, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH_LOOPS = True

Status = Sample.Status
INDEXER = {"use_rollout_indexer_replay": True}
EXPERTS = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K, "num_experts": None}


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed():
        yield


def reply(finish: str = "stop", ids: tuple[int, ...] = (1, 2, 3), prompt: int = len(PROMPT), **meta: Any) -> Any:
    return stream(event(ids, len(ids), finish, prompt_tokens=prompt, **meta), DONE)


async def test_indexer_rows_are_requested_only_if_miles_replays_them() -> None:
    async with Replay(reply(**indexer(5))) as server:
        await ask(state_of(server), sample_of())
        sample = await ask(state_of(server, **INDEXER), sample_of())
    assert [request.json.get("return_indexer_topk") for request in server.generates] == [None, True]
    assert sample.rollout_indexer_topk is not None
    assert sample.rollout_indexer_topk.dtype == np.int32
    assert sample.rollout_indexer_topk.tolist() == rows_of(5).tolist()
    assert sample.rollout_indexer_topk.flags.writeable
    sample.validate()


@pytest.mark.parametrize("has_rows", [True, False], ids=["with rows", "without rows"])
async def test_an_aborted_call_keeps_its_tokens_and_the_next_one_brings_the_rows_of_all(has_rows: bool) -> None:
    async with Replay(reply("abort", **(indexer(5) if has_rows else {}))) as server:
        sample = await ask(state_of(server, **INDEXER), sample_of())
        assert (response_of(sample), sample.status) == ([1, 2, 3], Status.ABORTED)
        assert (sample.rollout_indexer_topk is not None) is has_rows
        server.routes[server.path] = reply(ids=(4,), prompt=6, **indexer(6, first=100))
        await ask(state_of(server, **INDEXER), sample)
    assert sample.rollout_indexer_topk is not None
    assert sample.rollout_indexer_topk.tolist() == rows_of(6, first=100).tolist()
    sample.validate()


NEEDS: dict[str, tuple[dict[str, Any], str]] = {
    "routed experts": (EXPERTS, "--enable-return-routed-experts.*router.*return_routed_experts"),
    "indexer rows": (INDEXER, "--enable-return-indexer-topk.*router.*return_indexer_topk"),
}


@pytest.mark.parametrize("what", NEEDS)
async def test_a_finished_response_without_the_rows_that_training_needs_is_an_error_that_says_what_they_need(
    what: str,
) -> None:
    settings, message = NEEDS[what]
    sample = sample_of()
    async with Replay(reply()) as server:
        with pytest.raises(EngineError, match=f"no {what}, which were requested: .*{message}"):
            await ask(state_of(server, **settings), sample)
    assert (sample.tokens, sample.status) == (PROMPT, Status.ABORTED)
    assert sample.metadata["streamfold_lost_side_data"] == 3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few rows": (indexer(4), "24 values, which do not fit 5 rows of 2 layers"),
    "no number of layers": ({"indexer_topk": written(rows_of(5))}, "indexer_topk_num_layers None"),
    "no layers": ({**indexer(5), "indexer_topk_num_layers": 0}, "indexer_topk_num_layers 0"),
    "no base64": ({**indexer(5), "indexer_topk": "*"}, "no base64 of int32"),
    "half a number": ({**indexer(5), "indexer_topk": "AAAA"}, "no base64 of int32"),
    "an object": ({**indexer(5), "indexer_topk": {"a": 1}}, "no base64 of int32"),
    "other layers than the model's": (indexer(5), "2 layers, but the model has 3 with an indexer"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_rows_that_do_not_fit_are_an_error_and_the_sample_is_as_it_was(wrong: str) -> None:
    meta, message = WRONG[wrong]
    layers = {"rollout_indexer_topk_num_streams": 3} if "model" in wrong else {}
    sample = partial(7)
    meta = {**meta} if wrong != "too few rows" else indexer(4)
    async with Replay(reply(ids=(1, 2), prompt=4, **meta)) as server:
        with pytest.raises(ValueError, match=message):
            await ask(state_of(server, **INDEXER, **layers), sample)
    assert (response_of(sample), sample.rollout_indexer_topk, sample.status) == ([7], None, Status.ABORTED)


async def test_a_response_of_no_tokens_behind_a_prompt_of_one_has_no_rows() -> None:
    sample = Sample(prompt="x", tokens=[9])
    empty = {"indexer_topk": "", "indexer_topk_num_layers": LAYERS}
    async with Replay(reply("abort", ids=(), prompt=1, **empty)) as server:
        await ask(state_of(server, **INDEXER), sample)
    assert sample.rollout_indexer_topk is not None
    assert sample.rollout_indexer_topk.shape == (0, LAYERS, 0)
    sample.validate()


async def test_experts_are_int32_of_all_tokens_but_the_last_over_several_calls() -> None:
    async with Replay(reply("abort", routed_experts=written(rows_of(5)))) as server:
        sample = await ask(state_of(server, **EXPERTS), sample_of())
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.tolist() == rows_of(5).tolist()
    sample.validate()
