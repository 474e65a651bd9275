"""What is kept in the metadata of a sample: readable by later versions, and never shared."""

from __future__ import annotations

from typing import Any

import pytest

from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.samples.metadata import TurnState, add_counts, remove_keys
from streamfold.samples.sample import Sample
from support.completing import SOON, completed
from support.replay import DONE, PROMPT, stream
from support.speaking import SGLANG

STATES: list[tuple[TurnState, dict[str, Any]]] = [
    (TurnState(), {}),
    (TurnState(tokens=4, characters=5), {"streamfold_turn": [4, 5]}),
    (TurnState(exact_characters=0), {"streamfold_known_text": 0}),
    (
        TurnState(2, 0, exact_characters=7, text_joined=True),
        {"streamfold_turn": [2, 0], "streamfold_known_text": 7, "text_joined": True},
    ),
]


@pytest.mark.parametrize(("state", "keys"), STATES)
def test_a_turns_state_is_saved_under_the_keys_that_saved_files_hold(state: TurnState, keys: dict[str, Any]) -> None:
    shared = {"mine": 1, "streamfold_turn": [9, 9], "text_joined": True}
    sample = Sample(metadata=shared)
    state.save(sample)
    assert sample.metadata == {"mine": 1, **keys}
    assert shared == {"mine": 1, "streamfold_turn": [9, 9], "text_joined": True}
    assert TurnState.of(sample) == state


def test_metadata_may_be_none_as_a_trainers_may() -> None:
    sample = Sample()
    sample.metadata = None  # type: ignore[assignment]
    assert TurnState.of(sample) == TurnState()
    add_counts(sample, resumed=1)
    assert sample.metadata == {"resumed": 1}


def test_counts_are_added_and_keys_are_removed_without_touching_a_shared_dict() -> None:
    shared = {"mine": 1, "resumed": 2, "failures": "many"}
    sample = Sample(metadata=shared)
    add_counts(sample, resumed=3, restarted_tokens=4, failures=1)
    assert sample.metadata == {"mine": 1, "resumed": 5, "restarted_tokens": 4, "failures": 1}
    remove_keys(sample, "resumed", "failures", "missing")
    assert sample.metadata == {"mine": 1, "restarted_tokens": 4}
    assert shared == {"mine": 1, "resumed": 2, "failures": "many"}


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
    assert sample.metadata == {"sampling_params": params, "streamfold_turn": [2, 2]}
