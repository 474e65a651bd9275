"""What an event says again is passed over: quickly, and never wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamfold import Experts, Generation, Parser, StreamTruncated
from support.bodies import DONE, event, finish, sse
from support.folding import agreed, fold

STOP = finish(matched=2)


def written(*members: str, n: int) -> bytes:
    """An event whose further members of meta_info are given as they are spelled."""
    told = [*members, f'"output_token_logprobs":[[-0.5,{n},null]]', f'"completion_tokens":{n}']
    return sse(('{"text":"x","meta_info":{' + ",".join(told) + "}}").encode())


@pytest.mark.parametrize(
    "events",
    [
        # A key that stands twice, once escaped: the last one counts, changed or not.
        [
            ['"finish_reaso\\u006e":null', '"finish_reason":null'],
            ['"finish_reaso\\u006e":{"type":"stop"}', '"finish_reason":null'],
            ['"finish_reason":{"type":"length"}'],
        ],
        [
            ['"\\u0069d":"y"', '"id":"x"'],
            ['"\\u0069d":"z"', '"id":"x"'],
            ['"id":"x"', '"finish_reason":{"type":"stop"}'],
        ],
        [['"cached_token\\u0073":1', '"cached_tokens":2'], ['"cached_token\\u0073":3', '"cached_tokens":2']],
        # Spelling and place change from event to event.
        [['"cached_tokens":1', '"a":1'], ['"a":1', '"cached_token\\u0073":2'], ['"cached_tokens":1', '"a":1']],
        # A value that goes and comes back.
        [['"weight_version":"a"'], ['"weight_version":null'], ['"weight_version":"a"']],
        [['"a":1'], ['"a":2'], ['"a":1']],
        [['"a":1', '"b":1'], ['"b":2'], ['"a":1', '"b":1'], ['"b":1', '"a":2']],
        [['"a":1'], ['"\\u0061":3'], ['"a":4']],
        # A key that stands twice, as a scalar and as a list.
        [['"a":1', '"a":[1]'], ['"a":[1]', '"a":1']],
        [['"a":1', '"a":2'], ['"a":3', '"a":2'], ['"a":3', '"a":2']],
    ],
)  # fmt: skip
def test_no_member_is_passed_over_that_says_something_new(events: list[list[str]]) -> None:
    body = b"".join(written(*members, n=number) for number, members in enumerate(events, start=1))
    agreed(body, aborted=True)


def test_a_second_meta_info_hides_what_the_first_said() -> None:
    first = '{"text":"x","meta_info":{"a":5,"output_token_logprobs":[[-0.5,1,null]],"completion_tokens":1},'
    second = '"meta_info":{"output_token_logprobs":[[-0.5,1,null]],"completion_tokens":1}}'
    agreed(sse((first + second).encode()) + written('"a":5', n=2), aborted=True)


def test_the_same_id_spelled_otherwise_is_the_same_request() -> None:
    body = written('"id":"ab"', n=1) + written('"id":"a\\u0062"', '"finish_reason":{"type":"stop"}', n=2)
    assert fold(body + DONE, "sglang-incremental").reading.token_ids == [1, 2]


def test_an_event_of_many_keys_is_read_in_linear_time() -> None:
    members = [f'"k{number}":{number}' for number in range(40_000)]
    body = written(*members, n=1) + written(*members, '"finish_reason":{"type":"stop"}', n=2)
    # Squared, this took the better part of a minute.
    folded = fold(body + DONE, "sglang-incremental")
    assert folded.reading.token_ids == [1, 2]
    assert folded.reading.meta["k39999"] == 39_999


def test_keys_that_come_and_go_by_the_thousand_are_read_in_linear_time() -> None:
    events = [written(f'"k{number}":1', n=number) for number in range(1, 8001)]
    assert len(fold(b"".join(events), "sglang-incremental", aborted=True).reading.meta) > 8000


@pytest.mark.parametrize("kind", ["stop", "length", "abort"])
@pytest.mark.parametrize("matched", ["NaN happened", b"NaN\\u0020happened"])
def test_nan_is_the_engines_error_whatever_the_type_says(kind: str, matched: Any) -> None:
    spelled = matched.decode() if isinstance(matched, bytes) else matched
    body = written(f'"finish_reason":{{"type":"{kind}","matched":"{spelled}"}}', n=1)
    assert agreed(body + DONE).engine_error.status is None


def test_a_status_beside_the_error_object_counts() -> None:
    error = agreed(sse({"error": {"message": "overloaded"}, "code": 503})).engine_error
    assert (error.status, error.retryable) == (503, True)


def test_closing_twice_reads_the_last_event_once_and_ends_the_stream() -> None:
    parser = Parser("sglang-incremental")
    parser.feed(event([11], 1, text="a") + event([12], 2, text="b").rstrip())
    parser.close(aborted=True)
    parser.close(aborted=True)
    assert parser.token_count == 2
    with pytest.raises(ValueError, match="closed"):
        parser.feed(event([13], 3, text="c"))
    with pytest.raises(StreamTruncated):
        parser.close()
    with pytest.raises(StreamTruncated):
        parser.feed(b"")
    assert parser.take().token_ids.tolist() == [11, 12]


@pytest.mark.parametrize("mask", [[[7], [1], [2]], [[2], [1], [2]]])
def test_masks_of_a_glued_abort_repeat_their_delta_as_the_pairs_do(mask: list[list[int]]) -> None:
    kept = event([1], 1, text="a", output_token_sampling_mask=[[1]])
    glued = event([2, 1, 2], 2, text="bab", reason=finish("abort"), output_token_sampling_mask=mask)
    folded = fold(kept + glued + DONE, "sglang-incremental")
    if mask[0] == mask[2]:
        assert folded.reading.top_p == ([1, 2], [0, 1, 2])
    else:
        assert folded.decode_error.kind == "metadata"


@pytest.mark.parametrize("experts", [(2**31, 2**31), (2**32 - 1, 2**32 - 1)])
def test_a_shape_beyond_all_bounds_is_an_error_that_keeps_the_tokens(experts: tuple[int, int]) -> None:
    body = event([11], 1, text="a", prompt_tokens=1) + event(
        [12], 2, text="b", prompt_tokens=1, reason=STOP, routed_experts=""
    )
    folded = fold(body, "sglang-incremental", experts=Experts(*experts), prompt_len=1)
    assert folded.decode_error.kind == "metadata"
    assert folded.reading.token_ids == [11]


def test_a_generation_owns_its_arrays_whatever_it_was_made_of() -> None:
    base = np.arange(8, dtype=np.int32)
    read_only = np.frombuffer(base.tobytes(), np.int32)
    misaligned = np.frombuffer(b"x" + base.tobytes(), np.int32, offset=1)
    for array in (base[:4], base[::2], read_only, misaligned):
        generation = Generation(array, np.zeros(len(array)), top_p=(array[:0], [0] * (len(array) + 1)))
        assert generation.token_ids.tolist() == array.tolist()
        flags = generation.token_ids.flags
        assert flags.writeable
        assert flags.aligned
        assert flags.c_contiguous
        assert not np.shares_memory(generation.token_ids, base)
    with pytest.raises(ValueError, match="token_ids"):
        Generation(np.array([-1], np.int32))


def test_data_lines_without_data_count_towards_the_limit() -> None:
    body = b"data\n" * 100_000
    assert fold(body, "sglang", max_event_bytes=200_000).decode_error.kind == "too_large"
    assert fold(body[:5_000], "sglang", max_event_bytes=200_000, aborted=True).error is None
