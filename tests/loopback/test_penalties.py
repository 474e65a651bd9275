"""Penalties: what an engine counts, and what becomes of that in a request that continues another one's response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.replay import PROMPT
from support.speaking import SGLANG, VLLM, Speech

if TYPE_CHECKING:
    from streamfold.loopback import Loopback

PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1}
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
PLAIN: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
COUNTED_ANEW = {SGLANG: set(PENALTIES), VLLM: {"frequency_penalty", "presence_penalty"}}


@pytest.fixture(params=[SGLANG, VLLM], ids=repr)
def speech(request: pytest.FixtureRequest) -> Speech:
    spoken: Speech = request.param
    return spoken


def generated(engine: Loopback, speech: Speech, prompt: list[int], **params: Any) -> list[int]:
    return speech.undisturbed(engine, prompt, {**PLAIN, **params}).token_ids


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("seed", [None, 1])
def test_each_penalty_changes_what_is_sampled_and_its_neutral_value_does_not(
    speech: Speech, name: str, seed: int | None
) -> None:
    sampling = {"temperature": 0} if seed is None else {"sampling_seed": seed}
    with speech.loopback() as engine:
        plain = generated(engine, speech, PROMPT, **sampling)
        assert generated(engine, speech, PROMPT, **sampling, **{name: NEUTRAL[name]}) == plain
        penalized = generated(engine, speech, PROMPT, **sampling, **{name: PENALTIES[name]})
        assert generated(engine, speech, PROMPT, **sampling, **{name: PENALTIES[name]}) == penalized
        assert generated(engine, speech, PROMPT, **sampling, **{name: PENALTIES[name] + 0.1}) != penalized != plain
        if name in COUNTED_ANEW[speech]:
            assert penalized[0] == plain[0], "there is nothing to count before the first token"


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("cut", [1, 20])
def test_a_resumed_request_samples_differently_only_where_its_engine_counts_anew(
    speech: Speech, name: str, cut: int
) -> None:
    """SGLang counts only what its own request has generated; vLLM's repetition penalty counts the prompt too."""
    with speech.loopback() as engine:
        asked = {name: PENALTIES[name]}
        whole = generated(engine, speech, PROMPT, **asked)
        rest = generated(engine, speech, [*PROMPT, *whole[:cut]], **asked, max_new_tokens=40 - cut)
        assert (rest == whole[cut:]) is (name not in COUNTED_ANEW[speech])
