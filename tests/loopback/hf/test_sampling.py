"""Sampling of one token: tokens come as often as they are probable, and never from outside of what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamfold.loopback.core.request_params import RequestParams, SamplingParams

pytestmark = pytest.mark.torch

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0]
DRAWS = 1500


def draw(seeds: range, output: list[int] | None = None, **sampling: Any) -> list[Any]:
    """The outcomes of one position with many seeds."""
    import torch  # noqa: PLC0415 - only where it is installed

    from streamfold.loopback.core.hf.sampling import Sampler  # noqa: PLC0415 - as above

    found = []
    for seed in seeds:
        params = RequestParams(rid="", prompt=[1, 2], seed=seed, sampling=SamplingParams(**sampling))
        sampler = Sampler(params, stop_ids={0}, counts_prompt=frozenset(), logprobs_of="scaled")
        found.append(sampler.sample(torch.tensor(LOGITS), output or []))
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_tokens_come_as_often_as_they_are_probable(sampling: dict[str, Any]) -> None:
    outcomes = draw(range(DRAWS), **sampling)
    kept = outcomes[0].kept
    scaled = np.array(LOGITS) / sampling.get("temperature", 1.0)
    probs = np.zeros(len(LOGITS))
    probs[kept] = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    counts = np.bincount([outcome.token for outcome in outcomes], minlength=len(LOGITS))
    deviation = np.sqrt(DRAWS * probs * (1 - probs))
    assert (np.abs(counts - DRAWS * probs) <= 4 * deviation).all(), (counts, DRAWS * probs)


def test_each_position_of_a_seed_has_its_own_randomness() -> None:
    tokens = [draw(range(1), [0] * place)[0].token for place in range(200)]
    assert len({*tokens}) > 3


def test_a_greedy_token_is_the_most_probable_and_alone_kept() -> None:
    greedy: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 1}]
    for sampling in greedy:
        (outcome,) = draw(range(1), **sampling)
        assert (outcome.token, outcome.kept, outcome.kept_logprob, outcome.rank) == (0, [0], 0.0, 1)
    assert outcome.logprob == pytest.approx(LOGITS[0] - np.logaddexp.reduce(LOGITS))


def test_stop_ids_cannot_be_drawn_before_the_fewest_tokens() -> None:
    early, late = (draw(range(50), output, min_new_tokens=2) for output in ([5], [5, 5]))
    assert all(outcome.token != 0 and 0 not in outcome.kept for outcome in early)
    assert any(outcome.token == 0 for outcome in late)


def test_a_negative_seed_is_a_seed() -> None:
    assert draw(range(-1, 0))[0].token == draw(range(-1, 0))[0].token
