"""The mock model: everything it generates is a function of the tokens before."""

from __future__ import annotations

import collections
import math
import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.loopback.core.model import PIECES, MockModel
from streamfold.loopback.core.tokenizer import MockTokenizer

tokenizer = MockTokenizer()
model = MockModel(tokenizer)
tokens = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


def generate(prompt: list[int], count: int, seed: int | None = None, of: MockModel = model) -> list[int]:
    """Draw tokens without stopping."""
    context, salt, drawn = of.read(prompt), of.salt(seed), []
    for _ in range(count):
        drawn.append(of.draw(context, salt))
        context.push(drawn[-1])
    return drawn


@given(tokens, st.integers(0, 60), st.none() | st.integers(-(2**70), 2**70))
def test_a_generation_goes_on_from_any_of_its_tokens_as_if_it_had_not_been_cut(
    prompt: list[int], count: int, seed: int | None
) -> None:
    whole = generate(prompt, 60, seed)
    assert generate(prompt + whole[:count], 60 - count, seed) == whole[count:]


@given(tokens, st.data())
def test_any_other_token_before_changes_what_follows(prompt: list[int], data: st.DataObject) -> None:
    other = [*prompt, 0]
    place = data.draw(st.integers(0, len(prompt)))
    other[place] = (other[place] + data.draw(st.integers(1, tokenizer.vocab_size - 1))) % tokenizer.vocab_size
    assert model.read([*prompt, 0]).hash != model.read(other).hash


def test_seeds_matter_when_sampling_and_weights_always() -> None:
    prompt = tokenizer.encode(" once there was")
    greedy, one, two = (generate(prompt, 30, seed) for seed in (None, 1, 2))
    assert len({tuple(greedy), tuple(one), tuple(two)}) == 3
    assert generate(prompt, 30, None, MockModel(tokenizer, seed=1)) != greedy


@given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=200))
def test_hashes_all_at_once_are_those_of_pushing_one_by_one(prompt: list[int]) -> None:
    context, pushed = model.read([]), []
    for token in prompt:
        context.push(token)
        pushed.append(context.hash)
    assert model.hashes(prompt).tolist() == pushed


def test_a_logprob_is_a_float32_widened_and_its_mean_is_about_minus_one() -> None:
    values = [model.logprob(int(hash_after)) for hash_after in model.hashes(list(range(512)) * 8)]
    assert all(value <= 0 and value == float(np.float32(value)) for value in values)
    assert max(len(repr(value)) for value in values) >= 18, "spelled with all the digits of a double"
    assert math.isclose(-sum(values) / len(values), 1, abs_tol=0.1)


@pytest.mark.parametrize(("layers", "top_k", "experts"), [(4, 2, 16), (3, 8, 8), (2, 6, 60), (48, 8, 128), (1, 1, 1)])
def test_experts_have_their_shape_and_differ_within_a_layer(layers: int, top_k: int, experts: int) -> None:
    routed = MockModel(tokenizer, num_layers=layers, top_k=top_k, num_experts=experts)
    rows = routed.experts(routed.hashes(list(range(100))))
    assert rows.shape == (100, layers, top_k)
    assert rows.dtype == np.int32
    assert 0 <= rows.min() <= rows.max() < experts
    assert all(len(set(layer)) == top_k for layer in rows.reshape(-1, top_k).tolist())


def test_the_experts_of_a_position_depend_on_no_later_token() -> None:
    prompt = list(range(50))
    rows = model.experts(model.hashes(prompt))
    assert (model.experts(model.hashes(prompt[:30])) == rows[:30]).all()
    assert (rows[1:] != rows[:-1]).any(axis=(1, 2)).all(), "and on more than nothing"


@given(st.integers(0, 2**64 - 1), st.integers(0, tokenizer.vocab_size - 1))
def test_the_kept_ids_hold_the_token_and_none_twice(hash_after: int, token: int) -> None:
    kept = model.kept(hash_after, token)
    assert kept[0] == token
    assert 1 <= len(kept) <= 8
    assert len(set(kept)) == len(kept)
    assert all(0 <= other < tokenizer.vocab_size for other in kept)


def test_the_text_has_words_and_every_piece_that_is_hard_on_text() -> None:
    text = tokenizer.decode(generate([], 60_000), skip_special_tokens=False)
    assert " the" in text
    assert [piece for piece in PIECES if piece not in text] == []
    categories = collections.Counter(map(unicodedata.category, text))
    assert {"Zl", "Zp", "Cc", "So", "Lo", "Mn"} <= set(categories)


def test_no_piece_begins_another_one() -> None:
    assert not [(a, b) for a in PIECES for b in PIECES if a != b and b.encode().startswith(a.encode())]


def test_the_end_of_the_sequence_comes_as_often_as_it_was_set() -> None:
    for probability, low, high in ((0.0, 0, 0), (0.1, 300, 1000), (1.0, 10_000, 10_000)):
        drawn = generate([], 10_000, of=MockModel(tokenizer, stop_probability=probability))
        assert low <= drawn.count(tokenizer.eos_token_id) <= high


def test_a_forbidden_token_is_never_drawn() -> None:
    rng = random.Random(7)
    context, salt = model.read([]), model.salt(None)
    forbidden = {*range(tokenizer.vocab_size)} - {300, 301}
    for _ in range(200):
        assert model.draw(context, salt, forbidden) in {300, 301}
        context.push(rng.randrange(tokenizer.vocab_size))
