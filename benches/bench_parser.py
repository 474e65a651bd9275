"""From raw bytes to arrays: the parser against what people run today, on one machine in one run.

Each reply is fed in reads of 64 KiB. The ways take turns, so that a machine that slows down slows them all. The
garbage collector stays on, as it is in a trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pytest

from benches.baseline import Arrays, fold_json, fold_orjson
from benches.streams import STREAMS, Stream
from streamfold import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_benchmark.fixture import BenchmarkFixture

# Enough that the best times settle; a cumulative reply takes the baseline half a minute.
TURNS: Final = {"incremental": 7, "single-token": 7, "cumulative": 2, "vllm": 7, "vllm single-token": 7}


class Way(Protocol):
    """Reads a whole reply body."""

    def __call__(self, reads: Sequence[bytes], dialect: str) -> Arrays: ...


def fold_streamfold(reads: Sequence[bytes], dialect: str) -> Arrays:
    """What this package does; the parser finds out SGLang's mode by itself."""
    parser = Parser(dialect.partition("-")[0])
    for read in reads:
        parser.feed(read)
    parser.close()
    generation = parser.take()
    assert generation.logprobs is not None
    return generation.token_ids, generation.logprobs, generation.text or ""


WAYS: Final[dict[str, Way]] = {"streamfold": fold_streamfold, "orjson": fold_orjson, "json": fold_json}
CASES: Final = [(stream, turn, way) for stream in STREAMS for turn in range(TURNS[stream]) for way in WAYS]


@pytest.fixture(scope="module")
def stream(request: pytest.FixtureRequest) -> Stream:
    make = STREAMS[request.param]
    return make()


@pytest.mark.parametrize("stream", STREAMS, indirect=True)
def test_every_way_gives_the_same_arrays(stream: Stream) -> None:
    token_ids, logprobs, text = fold_streamfold(stream.reads, stream.dialect)
    assert len(token_ids) == len(logprobs) == stream.tokens
    for way in (fold_orjson, fold_json):
        other_ids, other_logprobs, other_text = way(stream.reads, stream.dialect)
        np.testing.assert_array_equal(token_ids, other_ids, strict=True)
        np.testing.assert_array_equal(logprobs.view(np.int64), other_logprobs.view(np.int64), strict=True)
        assert text == other_text


@pytest.mark.parametrize(("stream", "turn", "way"), CASES, indirect=["stream"])
def test_fold(benchmark: BenchmarkFixture, stream: Stream, turn: int, way: str) -> None:
    benchmark.group = stream.name
    benchmark.extra_info.update(
        way=way, turn=turn, stream=stream.name, tokens=stream.tokens, events=stream.events, bytes=stream.size
    )
    benchmark.pedantic(WAYS[way], args=(stream.reads, stream.dialect))
