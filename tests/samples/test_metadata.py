"""What is kept in the metadata of a sample: readable by later versions, and never shared."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.samples import metadata
from streamfold.samples.metadata import TurnState, add_counts, enter, remove_keys, rename_old_keys
from streamfold.samples.reset import restart
from streamfold.samples.sample import Sample
from support.completing import SOON, completed
from support.replay import DONE, PROMPT, stream
from support.speaking import SGLANG

if TYPE_CHECKING:
    from collections.abc import Callable

STATES: list[tuple[TurnState, dict[str, Any]]] = [
    (TurnState(), {}),
    (TurnState(tokens=4, characters=5), {"streamfold_turn": [4, 5]}),
    (TurnState(exact_characters=0), {"streamfold_known_text": 0}),
    (
        TurnState(2, 0, exact_characters=7, text_joined=True),
        {"streamfold_turn": [2, 0], "streamfold_known_text": 7, "streamfold_text_joined": True},
    ),
]


@pytest.mark.parametrize(("state", "keys"), STATES)
def test_a_turns_state_is_saved_under_the_keys_that_saved_files_hold(state: TurnState, keys: dict[str, Any]) -> None:
    shared = {"mine": 1, "streamfold_turn": [9, 9], "streamfold_text_joined": True}
    sample = Sample(metadata=shared)
    state.save(sample)
    assert sample.metadata == {"mine": 1, **keys}
    assert shared == {"mine": 1, "streamfold_turn": [9, 9], "streamfold_text_joined": True}
    assert TurnState.of(sample) == state


def test_metadata_may_be_none_as_a_trainers_may() -> None:
    sample = Sample()
    sample.metadata = None  # type: ignore[assignment]
    assert TurnState.of(sample) == TurnState()
    add_counts(sample, resumed=1)
    assert sample.metadata == {"streamfold_resumed": 1}


def test_counts_are_added_and_keys_are_removed_without_touching_a_shared_dict() -> None:
    shared = {"mine": 1, "resumed": 9, "streamfold_resumed": 2, "streamfold_failures": "many"}
    before, sample = dict(shared), Sample(metadata=shared)
    add_counts(sample, resumed=3, restarted_tokens=4, failures=1)
    assert sample.metadata == {
        "mine": 1,
        "resumed": 9,
        "streamfold_resumed": 5,
        "streamfold_failures": 1,
        "streamfold_restarted_tokens": 4,
    }
    remove_keys(sample, "streamfold_resumed", "streamfold_failures", "missing")
    assert sample.metadata == {"mine": 1, "resumed": 9, "streamfold_restarted_tokens": 4}
    assert shared == before


def test_a_dict_is_copied_when_its_sample_enters_and_changed_in_place_from_then_on() -> None:
    shared = {"mine": 1}
    group = [Sample(metadata=shared) for _ in range(2)]
    for sample in group:
        enter(sample)
    held = [sample.metadata for sample in group]
    for sample in group:
        enter(sample)
        add_counts(sample, resumed=1)
        TurnState(exact_characters=3).save(sample)
        TurnState().save(sample)
        restart(sample)
    assert [sample.metadata is own for sample, own in zip(group, held, strict=True)] == [True, True]
    assert held[0] is not held[1]
    assert (held[0], shared) == ({"mine": 1, "streamfold_resumed": 1}, {"mine": 1})


@pytest.mark.parametrize("make", [copy.copy, replace], ids=["copied", "replaced"])
def test_a_sample_made_of_another_one_gets_a_dict_of_its_own(make: Callable[[Sample], Sample]) -> None:
    first = Sample(metadata={"mine": 1})
    enter(first)
    second = make(first)
    assert second.metadata is first.metadata
    enter(second)
    add_counts(second, failures=1)
    assert (first.metadata, second.metadata) == ({"mine": 1}, {"mine": 1, "streamfold_failures": 1})


def test_another_dict_that_is_set_after_the_sample_has_entered_may_be_shared_too() -> None:
    sample, shared = Sample(), {"mine": 1}
    enter(sample)
    sample.metadata = shared
    add_counts(sample, failures=1)
    assert (shared, sample.metadata) == ({"mine": 1}, {"mine": 1, "streamfold_failures": 1})


def test_nothing_is_remembered_of_a_sample_that_is_gone() -> None:
    gc.collect()
    before = len(metadata._own)
    samples = [Sample() for _ in range(100)]
    for sample in samples:
        enter(sample)
    assert len(metadata._own) == before + 100
    del sample, samples
    gc.collect()
    assert len(metadata._own) == before


def test_a_sample_without_weak_references_keeps_its_notes() -> None:
    sample: Any = SimpleNamespace(metadata={"mine": 1})
    add_counts(sample, resumed=1)
    add_counts(sample, resumed=1)
    assert sample.metadata == {"mine": 1, "streamfold_resumed": 2}


async def test_a_caller_that_holds_the_dict_of_a_sample_that_has_entered_keeps_its_writes() -> None:
    reply = stream(SGLANG.part([10, 11], finish="stop"), DONE)
    async with SGLANG.replay(reply) as server, SGLANG.client(server.url, retries=SOON) as client:
        sample = Sample(tokens=list(PROMPT), metadata={"sampling_params": {"max_new_tokens": 4}})
        enter(sample)
        held = sample.metadata
        held["before"] = 1
        await completed(client, sample)
        held["after"] = 2
    assert sample.metadata is held
    assert (held["before"], held["after"]) == (1, 2)


def test_old_names_are_read_only_where_their_values_are_ours() -> None:
    old = {"resumed": 2, "failures": "many", "text_joined": True, "restarted_tokens": True, "mine": 1}
    assert rename_old_keys(old, others={"resumed"}) == {
        "resumed": 2,
        "failures": "many",
        "streamfold_text_joined": True,
        "restarted_tokens": True,
        "mine": 1,
    }
    assert rename_old_keys({"resumed": 2}) == {"streamfold_resumed": 2}
    assert rename_old_keys(None) is None


async def test_a_partial_sample_that_was_saved_with_a_character_split_between_calls_is_finished_with_it() -> None:
    """As files of version 0.1 hold it: where the turn starts, and which characters are exact."""
    ids, params = [0, 1, ord("c"), *"🙂".encode()], {"max_new_tokens": 20}
    saved = {
        "tokens": [*PROMPT, *ids],
        "response": "abc\ufffd\ufffd",
        "response_length": 7,
        "loss_mask": [1, 0, 1, 1, 1, 1, 1],
        "rollout_log_probs": [-1.0] * 7,
        "status": "aborted",
        "metadata": {"sampling_params": params, "streamfold_turn": [2, 2], "streamfold_known_text": 3},
    }
    sample = Sample.from_dict(saved)
    end = stream(SGLANG.part([], prompt=10, finish="stop"), DONE)
    async with (
        SGLANG.replay(end) as server,
        SGLANG.client(server.url, tokenizer=MockTokenizer(), retries=SOON) as client,
    ):
        await completed(client, sample)
        assert [SGLANG.ids(request) for request in server.generates] == [[*PROMPT, *ids]]
    assert (sample.response, sample.status) == ("abc🙂", Sample.Status.COMPLETED)
    assert sample.metadata["streamfold_turn"] == [2, 2]
    assert "streamfold_known_text" not in sample.metadata
