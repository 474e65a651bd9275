"""The text of a response that took several calls is decoded as a whole, and ends where the engine's text ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.samples.detokenizer import Detokenizer
from streamfold.samples.metadata import TurnState

TOKENIZER = MockTokenizer()
PROMPT = TOKENIZER.encode("tell me a story")


def decoded(ids: list[int], *, last: str | None, matched: Any = None, exact: str = "", **params: Any) -> str | None:
    detokenizer, turn = Detokenizer(tokenizer=TOKENIZER, params=params), TurnState(exact_characters=len(exact))
    text, tokens = exact + "and more", [*PROMPT, *ids]
    found = detokenizer.text_of_response(tokens, len(ids), text, turn, last_text=last, matched=matched)
    assert found is None or not found.is_corrected
    return None if found is None else found.text


@pytest.mark.parametrize("last", ["", "\ufffd", "\ufffd\ufffd a tale", None])
def test_a_character_split_between_calls_is_whole(last: str | None) -> None:
    ids = TOKENIZER.encode("once 🚀 a tale")
    assert decoded(ids, last=last) == "once 🚀 a tale"


def test_a_stop_token_is_in_the_text_only_with_no_stop_trim() -> None:
    ids = [*TOKENIZER.encode("once"), ord("!")]
    assert decoded(ids, last="e", matched=ord("!")) == "once"
    assert decoded(ids, last="e!", matched=ord("!"), no_stop_trim=True) == "once!"
    assert decoded(ids, last="", matched=ord("!")) == "once"


@pytest.mark.parametrize(("last", "shown"), [("c", "abc"), ("cEND", "abcEND"), ("cENDx", "abcENDx"), ("", "abc")])
def test_a_stop_string_is_in_the_text_if_it_is_in_the_engines(last: str, shown: str) -> None:
    assert decoded(list(b"abcENDx"), last=last, matched="END") == shown


def test_a_stop_string_before_the_last_call_is_not_the_end() -> None:
    ids = list(b"END and much more text than the last part has, cEND")
    found = decoded(ids, last="has, c", matched="END")
    assert found == "END and much more text than the last part has, c"


def test_the_stop_string_is_the_one_in_the_last_token_even_if_more_text_follows_in_it() -> None:
    ids = TOKENIZER.encode("a question and another question")
    assert decoded(ids, last="", matched=" qu") == "a question and another"
    assert decoded(ids, last=None, matched="e", no_stop_trim=True) == "a question and another que"


def test_an_engines_text_that_no_tokens_end_in_is_replaced_which_is_told() -> None:
    detokenizer, turn = Detokenizer(tokenizer=TOKENIZER, params={}), TurnState(exact_characters=0)
    ids = list(b"abc")
    found = detokenizer.text_of_response(PROMPT + ids, 3, "abcd", turn, last_text="something else", matched=None)
    assert found == ("abc", True)


@pytest.mark.parametrize(
    ("exact", "is_corrected"),
    [
        ("今天天今天天气", True),
        ("今今天", True),
        ("今天天气很好、今天天气很好、今", True),
        ("今天天气\ufffd", False),
        ("", False),
    ],
)
def test_characters_that_the_engine_repeated_before_the_last_call_are_not_exact(exact: str, is_corrected: bool) -> None:
    ids = TOKENIZER.encode("今天天气很好、今天去")
    detokenizer, turn = Detokenizer(tokenizer=TOKENIZER, params={}), TurnState(exact_characters=len(exact))
    found = detokenizer.text_of_response([*PROMPT, *ids], len(ids), f"{exact}天去", turn, last_text="天去")
    assert found == ("今天天气很好、今天去", is_corrected)


def test_exact_characters_are_not_changed() -> None:
    """A tool's answer may be text that no token decodes to."""
    assert decoded(list(b"abc"), last="c", exact="ab") == "abc"
    assert decoded(list(b"abc"), last="c", exact="ab\ufffd") == "abc"
    assert decoded(list(b"abc"), last="c", exact="[a tool's answer]") is None


def test_special_tokens_are_in_the_text_if_they_are_not_skipped() -> None:
    ids = [ord("a"), TOKENIZER.pad_token_id, ord("b")]
    assert decoded(ids, last=None) == "ab"
    assert decoded(ids, last=None, skip_special_tokens=False) == "a<|pad|>b"


class Sentencepiece:
    """A tokenizer that decodes the first word without a space, as those with a metaspace do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return " ".join(f"w{token}" for token in ids)


def test_the_first_word_of_a_response_keeps_the_space_that_its_context_gives_it() -> None:
    detokenizer = Detokenizer(tokenizer=Sentencepiece(), params={})
    assert detokenizer.text_of_response([1, 2, 3], 2, "", TurnState()) == (" w2 w3", False)
    assert detokenizer.text_of_response([1, 2, 3], 2, "", TurnState(), uses_prompt=False) == ("w2 w3", False)


def test_a_response_whose_first_part_was_decoded_by_itself_is_decoded_by_itself() -> None:
    detokenizer = Detokenizer(tokenizer=Sentencepiece(), params={})
    assert detokenizer.text_of_response([1, 2, 3], 2, "w2 w3", TurnState()) == ("w2 w3", False)


def test_of_a_later_turn_only_its_own_tokens_are_decoded() -> None:
    tokens = [*PROMPT, *TOKENIZER.encode("answer 🚀")]
    turn = TurnState(tokens=6, characters=9, exact_characters=10)
    text = "[answer] \ufffd"
    assert Detokenizer(tokenizer=TOKENIZER, params={}).text_of_response(tokens, 10, text, turn) == (
        "[answer] 🚀",
        False,
    )


@given(st.text(max_size=40), st.data())
def test_any_text_split_anywhere_is_decoded_whole(text: str, data: st.DataObject) -> None:
    ids = list(text.encode(errors="replace"))
    border = data.draw(st.integers(0, len(ids)))
    last = bytes(ids[border:]).decode(errors="replace")
    turn = TurnState(exact_characters=0)
    for last_text in (last, None):
        found = Detokenizer(tokenizer=TOKENIZER, params={}).text_of_response(
            [*PROMPT, *ids], len(ids), "and more", turn, last_text=last_text
        )
        assert found is not None
        assert found.text == TOKENIZER.decode(ids)
