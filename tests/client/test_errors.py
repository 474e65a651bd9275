"""The exception classes: their bases, and that they can be pickled with their attributes."""

from __future__ import annotations

import pickle

import pytest

from streamfold import DecodeError, EngineError, EngineTimeout, Generation, StreamfoldError, StreamTruncated

PARTIAL = Generation([1, 2], [-0.5, -0.25], text="ab")
ERRORS = [
    DecodeError("bad", kind="length", offset=7, path="meta_info.x", partial=PARTIAL),
    StreamTruncated("cut", received=12, done=True, partial=PARTIAL),
    EngineError("full", status=503, code="server_error", partial=PARTIAL),
    EngineError("slow down", status=429, retry_after=7.0, partial=PARTIAL),
    EngineError("unreachable", retryable=True, partial=PARTIAL),
    EngineTimeout("slow", phase="next_token", partial=PARTIAL),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_all_that_it_tells(error: StreamfoldError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
    assert copy.partial == PARTIAL


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_is_a_streamfold_error(error: StreamfoldError) -> None:
    assert isinstance(error, StreamfoldError)


def test_damaged_bytes_are_a_value_error() -> None:
    assert issubclass(DecodeError, ValueError)
    assert not any(issubclass(kind, ValueError) for kind in (StreamTruncated, EngineError, EngineTimeout))


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        (400, False),
        (401, False),
        (404, False),
        (408, True),
        (429, True),
        (500, True),
        (503, True),
        (599, True),
        (200, False),
        (600, False),
        (None, False),
    ],
)
def test_a_refusal_is_worth_another_try_if_the_engine_was_busy_or_broke(status: int | None, *, retryable: bool) -> None:
    error = EngineError("no", status=status)
    assert error.retryable is retryable
    assert error.message == "no"
    assert str(error) == ("no" if status is None else f"no (status {status})")


def test_an_engine_that_does_not_say_when_to_come_back_has_said_nothing() -> None:
    assert EngineError("no", status=503).retry_after is None
    assert EngineError("no", status=503, retry_after=0.0).retry_after == 0.0


def test_an_error_outside_a_call_has_no_partial() -> None:
    assert StreamTruncated("cut").partial is None
