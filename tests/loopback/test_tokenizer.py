"""The mock tokenizer: text and ids, whole and token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.loopback.core.tokenizer import SPECIAL_TOKENS, WORDS, MockDetokenizer, MockTokenizer

tokenizer = MockTokenizer()
ids = st.lists(st.integers(0, tokenizer.vocab_size - 1))


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(ids, st.booleans())
def test_text_that_is_decoded_token_by_token_is_the_text_decoded_at_once(tokens: list[int], skip: bool) -> None:
    detokenizer = MockDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_a_character_comes_with_its_last_byte_and_a_cut_one_as_one_replacement_character() -> None:
    detokenizer = MockDetokenizer(tokenizer)
    emoji = tokenizer.encode("🙂")
    assert [detokenizer.push(token) for token in emoji] == ["", "", "", "🙂"]
    assert [detokenizer.push(token) for token in emoji[:3]] == ["", "", ""]
    assert detokenizer.pending
    assert detokenizer.flush() == "\ufffd"
    assert not detokenizer.pending


def test_words_are_single_tokens_and_special_tokens_are_read_from_text() -> None:
    assert len(tokenizer.encode(" the water")) == 2
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert tokenizer.encode("a", add_special_tokens=True) == [tokenizer.bos_token_id, ord("a")]
    assert tokenizer.decode([tokenizer.bos_token_id, ord("a")]) == "a"


def test_the_ids_of_the_vocabulary_never_move() -> None:
    """Recorded ids must mean the same for ever."""
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    assert pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert pieces[256:260] == [b"<|begin_of_text|>", b"<|end_of_text|>", b"<|im_start|>", b"<|im_end|>"]
    assert (pieces[272], pieces[511]) == (b" the", b" hard")
    assert len(set(pieces)) == len(pieces) == 512


def test_a_larger_vocabulary_only_adds_words_of_several_parts() -> None:
    large = MockTokenizer(200_000)
    assert [large.piece(token) for token in range(512)] == [tokenizer.piece(token) for token in range(512)]
    first_double, first_triple = 512, 512 + 240 * 240
    assert large.piece(first_double) == b" thethe"
    assert large.piece(first_triple - 1) == b" hardhard"
    assert large.piece(first_triple) == b" thethethe"
    assert large.decode(np.array([272, 199_999], np.int32)).startswith(" the ")


def test_an_id_outside_the_vocabulary_and_a_vocabulary_too_small_are_told() -> None:
    for token in (-1, 512):
        with pytest.raises(ValueError, match=f"token {token} is not in a vocabulary of 512"):
            tokenizer.decode([token])
    with pytest.raises(ValueError, match="at least 512, got 300"):
        MockTokenizer(300)


def test_no_word_and_no_special_token_is_there_twice() -> None:
    assert len({*WORDS, *SPECIAL_TOKENS}) == len(WORDS) + len(SPECIAL_TOKENS)
