"""``token_limit``: a stream that floods ends, with the event that goes too far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from streamfold import Parser
from support.bodies import DONE, event, finish, logprobs, sse
from support.bodies_vllm import event as vllm_event
from support.bodies_vllm import usage_event
from support.folding import agreed, folded

if TYPE_CHECKING:
    from reference import Reading

FLOOD = b"".join(event([2 * n, 2 * n + 1], 2 * n + 2, text="ab") for n in range(9))


def limited(body: bytes, limit: int | None, dialect: str = "sglang-incremental") -> Reading:
    """What the parser gives; neither the reference reader nor a cut may give another result."""
    return agreed(body, dialect, token_limit=limit).reading


@pytest.mark.parametrize(("limit", "tokens"), [(0, 2), (1, 2), (2, 4), (5, 6), (16, 18), (17, 18)])
def test_the_event_that_goes_past_the_limit_is_the_last_one_and_is_kept_whole(limit: int, tokens: int) -> None:
    for body in (FLOOD, FLOOD + DONE, FLOOD + event([5], 19, reason=finish()), FLOOD + b"data: nonsense\n\n"):
        reading = limited(body, limit)
        assert reading.token_ids == list(range(tokens))
        assert reading.logprobs == logprobs(*range(tokens))
        assert reading.text == "ab" * (tokens // 2)
        assert (reading.finish_reason, reading.matched, reading.error) == ("length", None, None)
        assert (reading.overrun, reading.done) == (True, body.endswith(DONE))


def test_a_stream_within_its_limit_is_read_as_without_one() -> None:
    for body in (FLOOD, FLOOD + event([], 18, text="", reason=finish()) + DONE, FLOOD + sse(b"nonsense")):
        assert limited(body, 18) == limited(body, None)
        assert not limited(body, 18).overrun


def test_the_terminal_event_is_never_too_much() -> None:
    reading = limited(FLOOD + event([18], 19, text="c", reason=finish("stop", matched=18)), 18)
    assert (len(reading.token_ids), reading.finish_reason, reading.matched) == (19, "stop", 18)
    assert not reading.overrun


def test_an_error_in_the_event_that_goes_too_far_is_told() -> None:
    reading = limited(event([1], 1) + event([2, -1], 3), 1)
    assert (reading.token_ids, reading.kind, reading.finish_reason, reading.overrun) == ([1], "token", None, False)
    # The engine's failure ends the request, so nothing has to be aborted.
    failure = event([2], 2, reason=finish("abort", status_code=500, message="x"))
    reading = limited(event([1], 1) + failure, 1)
    assert (reading.token_ids, reading.status, reading.finish_reason, reading.overrun) == ([1, 2], 500, None, False)


def test_a_cumulative_stream_is_limited_by_its_tokens_too() -> None:
    body = b"".join(event(range(n), n, text="a" * n) for n in range(1, 9))
    for dialect in ("sglang", "sglang-cumulative"):
        reading = limited(body, 4, dialect)
        assert (reading.token_ids, reading.text, reading.overrun) == ([0, 1, 2, 3, 4], "aaaaa", True)


def test_vllm_s_usage_after_an_overrun_is_skipped() -> None:
    body = vllm_event([1, 2]) + vllm_event([3]) + usage_event(9, cached=7) + DONE
    reading = limited(body, 1, "vllm")
    assert (reading.token_ids, reading.finish_reason, reading.overrun) == ([1, 2], "length", True)
    assert (reading.prompt_tokens, reading.cached_tokens, reading.done) == (None, None, True)


def test_an_overrun_stays_visible_after_take() -> None:
    parser = Parser("sglang", token_limit=0)
    assert not parser.overrun
    assert parser.feed(FLOOD) == 2
    assert parser.overrun
    assert parser.finished
    parser.close()
    assert folded(parser, None).reading.finish_reason == "length"
    assert (parser.token_count, parser.finished, parser.overrun) == (2, True, True)
