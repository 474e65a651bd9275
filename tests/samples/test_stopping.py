"""Whether a response has stopped: stop strings, stop tokens and the token budget, from values alone."""

from __future__ import annotations

from typing import Any

import pytest

from streamfold import Generation
from streamfold.engines.sglang import Sglang
from streamfold.engines.vllm import Vllm, VllmCompletions
from streamfold.samples.stopping import NO_STOP, UNKNOWN_STOP, StopMatch, StopRules, find_stop_string, stop_position

SPECS = {"sglang": Sglang(), "vllm": Vllm(), "vllm-completions": VllmCompletions()}


def rules(engine: str = "sglang", eos: int = 9, **params: Any) -> StopRules:
    return StopRules(params=params, engine_spec=SPECS[engine], eos_ids={eos})


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
def test_a_stop_string_is_found_whole_or_in_part(
    text: str, params: dict[str, Any], found: tuple[int | None, bool]
) -> None:
    assert find_stop_string(text, params) == found


@pytest.mark.parametrize(
    ("text", "complete", "partial"),
    [
        ("ab\ufffd", True, True),  # which may be a part of the emoji
        ("a\ufffd", True, False),
        ("ab", False, True),
        ("a", False, True),  # the word is held back with its incomplete character
        ("ab", True, True),
        ("", True, False),
    ],
)
def test_an_incomplete_character_may_become_one_of_a_stop_string(text: str, *, complete: bool, partial: bool) -> None:
    assert find_stop_string(text, {"stop": ["b\U0001f642"]}, is_complete=complete) == (None, partial)
    assert find_stop_string(text, {"stop": ["\U0001f642"]}, is_complete=complete).is_partial is (
        not complete or "\ufffd" in text
    )
    assert find_stop_string(text.replace("b", ""), {"stop": ["bc"]}, is_complete=complete) == (None, False)


@pytest.mark.parametrize(("text", "partial"), [("say x ", True), ("say x b", True), ("say b", False), ("say", False)])
def test_a_word_with_an_incomplete_last_character_may_be_missing_from_the_text(text: str, *, partial: bool) -> None:
    """SGLang sends a text up to its last space as long as it ends in an incomplete character."""
    assert find_stop_string(text, {"stop": ["x b\U0001f642"]}, is_complete=False) == (None, partial)
    assert find_stop_string(text, {"stop": ["x b!"]}, is_complete=False).is_partial is text.startswith("say x")


@pytest.mark.parametrize(
    ("engine", "left", "last", "match", "status"),
    [
        ("sglang", 4, 5, NO_STOP, None),
        ("sglang", 4, 9, NO_STOP, "COMPLETED"),
        ("sglang", 4, 7, NO_STOP, "COMPLETED"),
        ("sglang", 4, 5, StopMatch(2, is_partial=False), "COMPLETED"),
        ("sglang", 0, 5, NO_STOP, "TRUNCATED"),
        ("sglang", 0, 9, NO_STOP, "TRUNCATED"),  # it compares the length first
        ("vllm", 0, 9, NO_STOP, "COMPLETED"),
        ("vllm", 0, 5, UNKNOWN_STOP, "TRUNCATED"),
        ("vllm", 0, None, NO_STOP, "TRUNCATED"),
        ("vllm", 4, None, NO_STOP, None),
    ],
)
def test_an_aborted_response_is_finished_by_a_stop_token_a_stop_string_or_its_length(
    engine: str, left: int, last: int | None, match: StopMatch, status: str | None
) -> None:
    assert rules(engine, max_new_tokens=8, stop_token_ids=[7]).finish_status(left, last, match) == status


@pytest.mark.parametrize(("engine", "given"), [("sglang", False), ("vllm", True)])
def test_ignore_eos_leaves_the_stop_tokens_that_its_engine_leaves(engine: str, *, given: bool) -> None:
    ignoring = rules(engine, ignore_eos=True, stop_token_ids=[7])
    assert (ignoring.is_stop_token(9), ignoring.is_stop_token(7)) == (False, given)


@pytest.mark.parametrize(("engine", "hidden"), [("sglang", 9), ("vllm", None), ("vllm-completions", 9)])
def test_a_stop_token_is_hidden_if_its_engine_names_it_or_leaves_it_out_of_the_text(
    engine: str, hidden: int | None
) -> None:
    assert rules(engine).hidden_stop_token(9) == hidden
    assert rules(engine, stop_token_ids=[7]).hidden_stop_token(7) == 7
    assert rules(engine).hidden_stop_token(5) is None


@pytest.mark.parametrize(
    ("engine", "params", "matched", "eos"),
    [
        ("sglang", {}, 3, 3),
        ("sglang", {}, None, None),
        ("sglang", {}, "x", None),
        ("sglang", {"stop_token_ids": [3]}, 3, None),
        ("sglang", {"regex": "a*"}, 3, None),
        ("vllm", {}, None, 2),
        ("vllm", {"stop": ["x"]}, None, None),
        ("vllm", {"ignore_eos": True}, None, None),
    ],
)
def test_a_generation_that_stopped_reveals_the_eos_of_its_model(
    engine: str, params: dict[str, Any], matched: int | str | None, eos: int | None
) -> None:
    generation = Generation([1, 2], finish_reason="stop", matched=matched)
    assert rules(engine, **params).revealed_eos(generation) == eos
    assert rules("vllm").revealed_eos(Generation([1, 2], finish_reason="length")) is None


def test_a_delayed_or_missing_text_does_not_show_whether_a_stop_string_was_generated() -> None:
    assert rules("sglang", stop=["b"]).find_in_engine_text("ac") == NO_STOP
    assert rules("sglang", stop=["b"]).find_in_engine_text("") == UNKNOWN_STOP
    assert rules("vllm-completions", stop=["b"]).find_in_engine_text("ac") == UNKNOWN_STOP
    assert rules("vllm-completions", stop=["b"], no_stop_trim=True).find_in_engine_text("ac") == NO_STOP


def test_the_stop_string_is_the_first_one_in_the_last_token() -> None:
    assert stop_position("END, cEND", "END, cEN", "END") == 6
    assert stop_position("abEND cd", "abEND c", "END") == 2  # several tokens at once
    assert stop_position("abc", "ab", "END") == -1
