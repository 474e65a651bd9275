"""The text of a response that came in parts is one text out of its ids, and ends where the engine's own ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.samples.detokenizer import has_stopped_at, whole_text
from streamfold.samples.sample import Sample

TOKENIZER = MockTokenizer()
PROMPT = TOKENIZER.encode("tell me a story")


def told(ids: list[int], *, last: str | None, matched: Any = None, stands: str = "", **params: Any) -> str | None:
    sample = Sample(tokens=[*PROMPT, *ids], response=stands + "and more", response_length=len(ids))
    return whole_text(sample, TOKENIZER, params, known=len(stands), last=last, matched=matched)


@pytest.mark.parametrize("last", ["", "\ufffd", "\ufffd\ufffd a tale", None])
def test_a_character_that_fell_apart_at_the_border_is_whole_again(last: str | None) -> None:
    ids = TOKENIZER.encode("once 🚀 a tale")
    assert told(ids, last=last) == "once 🚀 a tale"


def test_a_stop_token_is_shown_where_stops_are_shown_and_left_out_where_they_are_not() -> None:
    ids = [*TOKENIZER.encode("once"), ord("!")]
    assert told(ids, last="e", matched=ord("!")) == "once"
    assert told(ids, last="e!", matched=ord("!"), no_stop_trim=True) == "once!"
    assert told(ids, last="", matched=ord("!")) == "once"


@pytest.mark.parametrize(("last", "shown"), [("c", "abc"), ("cEND", "abcEND"), ("cENDx", "abcENDx"), ("", "abc")])
def test_a_stop_string_is_shown_as_far_as_the_engine_shows_it(last: str, shown: str) -> None:
    assert told(list(b"abcENDx"), last=last, matched="END") == shown


def test_a_stop_string_that_stood_before_the_last_part_is_not_the_end() -> None:
    ids = list(b"END and much more text than the last part has, cEND")
    found = told(ids, last="has, c", matched="END")
    assert found == "END and much more text than the last part has, c"


def test_a_stop_string_is_the_one_that_the_last_token_brought_however_long_the_token_is() -> None:
    ids = TOKENIZER.encode("a question and another question")
    assert told(ids, last="", matched=" qu") == "a question and another"
    assert told(ids, last=None, matched="e", no_stop_trim=True) == "a question and another que"


def test_a_text_that_ends_otherwise_than_the_engines_is_not_taken() -> None:
    assert told(list(b"abc"), last="the engine knows of something else") is None


def test_what_stands_of_the_text_is_not_changed() -> None:
    """Whoever wrote a part of it, a tool's answer in words of its own, had a reason."""
    assert told(list(b"abc"), last="c", stands="ab") == "abc"
    assert told(list(b"abc"), last="c", stands="ab\ufffd") == "abc"
    assert told(list(b"abc"), last="c", stands="[a tool's answer]") is None


def test_special_tokens_are_shown_if_they_are_asked_for() -> None:
    ids = [ord("a"), TOKENIZER.pad_token_id, ord("b")]
    assert told(ids, last=None) == "ab"
    assert told(ids, last=None, skip_special_tokens=False) == "a<|pad|>b"


class Sentencepiece:
    """A tokenizer that writes no space before the first word, as those with a metaspace do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return " ".join(f"w{token}" for token in ids)


def test_the_first_word_of_a_response_keeps_the_space_that_its_context_gives_it() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    assert whole_text(sample, Sentencepiece(), {}, known=0, last=None, matched=None) == " w2 w3"


def test_a_response_whose_first_part_was_decoded_alone_is_decoded_alone() -> None:
    sample = Sample(tokens=[1, 2, 3], response="w2 w3", response_length=2)
    assert whole_text(sample, Sentencepiece(), {}, known=2, last=None, matched=None) == "w2 w3"


@given(st.text(max_size=40), st.data())
def test_any_text_cut_anywhere_is_decoded_whole(text: str, data: st.DataObject) -> None:
    ids = list(text.encode(errors="replace"))
    border = data.draw(st.integers(0, len(ids)))
    last = bytes(ids[border:]).decode(errors="replace")
    assert told(ids, last=last) in (TOKENIZER.decode(ids), None)
    assert told(ids, last=None) == TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("text", "params", "found"),
    [
        ("abEND c", {"stop": "END"}, (2, False)),
        ("abEND c", {"stop": ["c", "END"], "no_stop_trim": True}, (5, False)),
        ("abEN", {"stop": ["END"]}, (None, True)),
        ("abEND", {"stop": None}, (None, False)),
        ("ab", {"stop": [""]}, (None, False)),
    ],
)
def test_a_stop_string_is_found_whole_or_begun(
    text: str, params: dict[str, Any], found: tuple[int | None, bool]
) -> None:
    assert has_stopped_at(text, params) == found


@pytest.mark.parametrize(
    ("text", "whole", "within"),
    [
        ("ab\ufffd", True, True),  # of the emoji, for all that is known
        ("a\ufffd", True, False),
        ("ab", False, True),
        ("a", False, True),  # the word is held back with its half of a character
        ("ab", True, True),
        ("", True, False),
    ],
)
def test_a_part_of_a_character_may_become_one_of_a_stop_string(text: str, *, whole: bool, within: bool) -> None:
    assert has_stopped_at(text, {"stop": ["b\U0001f642"]}, whole=whole) == (None, within)
    assert has_stopped_at(text, {"stop": ["\U0001f642"]}, whole=whole).within is (not whole or "\ufffd" in text)
    assert has_stopped_at(text.replace("b", ""), {"stop": ["bc"]}, whole=whole) == (None, False)


@pytest.mark.parametrize(("text", "within"), [("say x ", True), ("say x b", True), ("say b", False), ("say", False)])
def test_a_word_whose_last_character_is_half_there_may_be_missing_with_it(text: str, *, within: bool) -> None:
    """SGLang shows a text up to its last space as long as it ends in the half of a character."""
    assert has_stopped_at(text, {"stop": ["x b\U0001f642"]}, whole=False) == (None, within)
    assert has_stopped_at(text, {"stop": ["x b!"]}, whole=False).within is text.startswith("say x")
