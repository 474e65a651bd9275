"""The logprobs of a real model: whoever computes them anew, from tokens and routed experts, gets the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.hf_generating import MODES, PROMPTS, experts, generate, generate_all, kept_ids, logprobs, serve
from support.loopback_http import generate as ask
from support.loopback_vllm import generate as ask_vllm

if TYPE_CHECKING:
    from support.hf_reference import Reference

pytestmark = pytest.mark.torch

EXACT = 1e-5
PARAMS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5}
FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 7},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.02, "temperature": 0.7},
    {"temperature": 0},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recomputed_logprobs_equal_the_streamed_ones(moe: Reference, mode: dict[str, Any], temperature: float) -> None:
    with serve(moe, batch_invariant=True, **mode) as engine:
        generations = generate_all(engine, PROMPTS[:3], {**PARAMS, "temperature": temperature})
    for prompt, generation in zip(PROMPTS, generations, strict=False):
        anew = moe.logprobs(prompt, generation.token_ids, experts(generation), temperature=temperature)
        assert np.abs(logprobs(generation) - anew).max() < EXACT


@pytest.mark.parametrize(("place", "filters"), [*enumerate(FILTERS)], ids=str)
def test_with_top_p_replay_they_are_renormalised_over_the_kept_ids(
    moe: Reference, place: int, filters: dict[str, Any]
) -> None:
    with serve(moe, batch_invariant=True, incremental=place % 2 == 0) as engine:
        generations = generate_all(engine, PROMPTS[:3], {**PARAMS, **filters}, top_p=True)
        plain = generate(engine, PROMPTS[0], {**PARAMS, **filters})
    temperature = filters.get("temperature") or 1.0
    for prompt, generation in zip(PROMPTS, generations, strict=False):
        tokens, rows, kept = generation.token_ids, experts(generation), kept_ids(generation)
        assert_kept(moe.logits([*prompt, *tokens][:-1], rows)[len(prompt) - 1 :], kept, filters)
        anew = moe.logprobs(prompt, tokens, rows, temperature=temperature, kept=kept)
        assert np.abs(logprobs(generation) - anew).max() < EXACT
    assert plain.token_ids.tolist() == generations[0].token_ids.tolist(), "asking for the ids changes no token"
    anew = moe.logprobs(PROMPTS[0], plain.token_ids, experts(plain), temperature=temperature)
    assert np.abs(logprobs(plain) - anew).max() < EXACT, "without replay they are those before top-p"


def assert_kept(logits: np.ndarray, kept: list[list[int]], filters: dict[str, Any]) -> None:
    """Check the ids that the filters keep by their definitions; where a rounding error decides, either is right."""
    temperature = filters.get("temperature", 1.0)
    for row, ids in zip(logits, kept, strict=True):
        if not temperature:
            assert ids == [int(row.argmax())]
            continue
        probs = np.exp(row / temperature - np.logaddexp.reduce(row / temperature))
        least = max(np.sort(probs)[-filters.get("top_k", len(row))], filters.get("min_p", 0.0) * probs.max())
        before = np.array([probs[probs > each].sum() for each in probs])
        inner, outer = (
            np.flatnonzero((before <= filters.get("top_p", 1.0) - slack) & (probs >= least * (1 + slack)))
            for slack in (1e-4, -1e-4)
        )
        assert {*inner} - {int(probs.argmax())} <= {*ids} <= {*outer}
        assert len(ids) == len({*ids})


@pytest.mark.parametrize(
    "penalties", [{"frequency_penalty": -1.0}, {"presence_penalty": -2.0}, {"repetition_penalty": 0.5}], ids=str
)
@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_penalties_change_the_logits_as_a_slow_reference_does(
    moe: Reference, penalties: dict[str, float], mode: dict[str, Any]
) -> None:
    """All of them count the output; vLLM's repetition penalty counts the prompt too. These favour what has come."""
    prompt, temperature = PROMPTS[3], 0.3
    with serve(moe, batch_invariant=True, **mode) as engine:
        generation = generate(engine, prompt, {**PARAMS, "temperature": temperature, **penalties})
    tokens = generation.token_ids.tolist()
    logits = moe.logits([*prompt, *tokens][:-1], experts(generation))[len(prompt) - 1 :]
    for place, token in enumerate(tokens):
        row = logits[place].copy()
        counts_prompt = "engine" in mode and "repetition_penalty" in penalties
        counted = (prompt if counts_prompt else []) + tokens[:place]
        for other in {*counted}:
            if penalty := penalties.get("repetition_penalty"):
                row[other] = row[other] / penalty if row[other] > 0 else row[other] * penalty
            row[other] -= penalties.get("frequency_penalty", 0.0) * counted.count(other)
            row[other] -= penalties.get("presence_penalty", 0.0)
        row /= temperature
        assert logprobs(generation)[place] == pytest.approx(
            row[token] - np.logaddexp.reduce(row), abs=EXACT / temperature
        )
    assert len({*tokens}) < len(tokens), "no token came twice, so a count makes no difference"


def test_the_prompts_logprobs_and_the_most_probable_ids_are_those_of_the_model(moe: Reference) -> None:
    prompt = PROMPTS[2]
    with serve(moe, batch_invariant=True) as engine:
        last = ask(engine, input_ids=prompt, logprob_start_len=2, top_logprobs_num=3).last
    meta, tokens = last["meta_info"], last["output_ids"]
    values = moe.logits([*prompt, *tokens])
    values -= np.logaddexp.reduce(values, axis=-1, keepdims=True)
    (first, *rest) = meta["input_token_logprobs"]
    assert first == [None, prompt[2], None]
    assert [token for _, token, _ in rest] == prompt[3:]
    for place, (logprob, token, _) in enumerate(rest, start=2):
        assert logprob == pytest.approx(values[place, token], abs=1e-4)
    for place, row in enumerate(meta["output_top_logprobs"], start=len(prompt) - 1):
        assert [token for _, token, _ in row] == np.argsort(-values[place])[:3].tolist()
        assert [logprob for logprob, _, _ in row] == pytest.approx(np.sort(values[place])[::-1][:3], abs=1e-4)


def test_vllm_reports_raw_logprobs_unless_its_mode_says_processed(moe: Reference) -> None:
    params = {**PARAMS, "temperature": 0.5, "top_k": 5}
    with serve(moe, engine="vllm", batch_invariant=True, logprobs_mode="raw_logprobs") as engine:
        raw = generate(engine, PROMPTS[0], params)
    with serve(moe, engine="vllm", batch_invariant=True, return_sampling_mask=True) as engine:
        processed = generate(engine, PROMPTS[0], params, top_p=True)
    tokens, rows = raw.token_ids, experts(raw)
    assert processed.token_ids.tolist() == tokens.tolist()
    assert np.abs(logprobs(raw) - moe.logprobs(PROMPTS[0], tokens, rows)).max() < EXACT
    anew = moe.logprobs(PROMPTS[0], tokens, rows, temperature=0.5, kept=kept_ids(processed))
    assert np.abs(logprobs(processed) - anew).max() < EXACT


def test_vllm_lists_the_sampled_token_and_then_the_most_probable_ones(moe: Reference) -> None:
    params = {"logprobs": 4, "temperature": 0.3, "seed": 3}
    with serve(moe, engine="vllm", logprobs_mode="raw_logprobs") as engine:
        frames = ask_vllm(engine, params=params).frames
    choices = [choice for frame in frames for choice in frame.get("choices", [])]
    entries = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content", [])]
    assert len(entries) == 20
    for entry in entries:
        sampled, *others = entry["top_logprobs"]
        values = [other["logprob"] for other in others]
        assert sampled["logprob"] == entry["logprob"]
        assert values == sorted(values, reverse=True)
        # Among the four most probable it is one of them, otherwise it comes on top of them.
        assert len(others) == (3 if sampled["logprob"] > values[-1] or len(others) == 3 else 4)
    assert {len(entry["top_logprobs"]) for entry in entries} == {4, 5}, "both happen"
