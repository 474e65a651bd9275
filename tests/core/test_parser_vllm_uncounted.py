"""A vLLM stream that never says how many tokens there are: a router has dropped its ids and its usage."""

from __future__ import annotations

from typing import Any

import pytest

from support.bodies import DONE, LEFT_OUT
from support.bodies_vllm import WIRES, Wire, dialect_of, event, usage, usage_event
from support.folding import Folded, agreed


def folded(wire: Wire, *events: bytes, **asked: Any) -> Folded:
    return agreed(b"".join(events), dialect_of(wire), **asked)


def assert_refused(result: Folded) -> None:
    assert (result.decode_error.kind, result.decode_error.path) == ("schema", "choices[0].token_ids")
    assert (result.reading.token_ids, result.reading.finish_reason) == ([], None)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("reason", ["stop", "length", "abort", "repetition", "cancelled"])
@pytest.mark.parametrize("empty", [LEFT_OUT, None])
def test_a_stream_that_ends_without_ids_and_usage_is_no_answer_of_no_tokens(
    wire: Wire, reason: str, empty: Any
) -> None:
    told = {"wire": wire, "token_ids": empty, "logprobs": empty, "top": {"usage": empty}}
    for logprobs in (True, False):
        for before in (0, 2):
            running = [event(None, **told)] * before
            assert_refused(folded(wire, *running, event(None, reason, **told), DONE, logprobs=logprobs))


@pytest.mark.parametrize("wire", WIRES)
def test_a_text_of_no_characters_says_nothing_about_tokens(wire: Wire) -> None:
    assert_refused(folded(wire, event(None, wire=wire, text=""), event(None, "stop", wire=wire, text=""), DONE))


@pytest.mark.parametrize("wire", WIRES)
def test_a_usage_behind_the_end_comes_too_late(wire: Wire) -> None:
    """What is missing is known before it: the client asks for the usage in each event."""
    assert_refused(folded(wire, event(None, "stop", wire=wire), usage_event(0, wire=wire), DONE))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("place", ["before", "in the last event"])
@pytest.mark.parametrize("told", [{"token_ids": []}, {"top": {"usage": usage(0)}}])
def test_no_tokens_are_an_answer_if_ids_or_the_usage_say_so(wire: Wire, place: str, told: dict[str, Any]) -> None:
    first, last = (told, {}) if place == "before" else ({}, told)
    reading = folded(wire, event(None, wire=wire, **first), event(None, "abort", wire=wire, **last), DONE).reading
    assert (reading.error, reading.token_ids, reading.finish_reason) == (None, [], "abort")


@pytest.mark.parametrize("wire", WIRES)
def test_a_usage_without_its_count_says_nothing(wire: Wire) -> None:
    assert_refused(folded(wire, event(None, "stop", wire=wire, top={"usage": {"prompt_tokens": 3}})))


@pytest.mark.parametrize("wire", WIRES)
def test_ids_that_are_dropped_behind_a_usage_that_counts_them_are_a_length_error(wire: Wire) -> None:
    counted = event(None, wire=wire, top={"usage": usage(1)})
    assert folded(wire, counted, event(None, "stop", wire=wire)).decode_error.kind == "length"


@pytest.mark.parametrize("wire", WIRES)
def test_a_terminal_event_without_ids_ends_the_tokens_that_came_before_it(wire: Wire) -> None:
    reading = folded(wire, event([11], wire=wire), event(None, "stop", wire=wire), DONE).reading
    assert (reading.error, reading.token_ids, reading.finish_reason) == (None, [11], "stop")


@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_that_is_cut_before_its_end_is_truncated_and_an_aborted_one_is_empty(wire: Wire) -> None:
    running = event(None, wire=wire)
    assert folded(wire, running, DONE).reading.error == "StreamTruncated"
    assert folded(wire, running, DONE, aborted=True).reading.error is None
