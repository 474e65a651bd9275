"""Many streams open at once, through the whole adapter: CPU time of the client for each, ours against the host's way.

The engine holds each reply back for so long that all are open in between: measured is what a request costs among many.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest

from benches.bench_adapter import WAYS, Adapters
from benches.server import Pace, serving
from support.descriptors import room_for
from support.host import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

TOKENS: Final = 20  # in one event
HELD: Final = {64: 1.0, 512: 3.0, 2048: 10.0}  # streams, and seconds until they are answered
TURNS: Final = 2
CASES: Final = [(turn, way) for turn in range(TURNS) for way in WAYS]


@pytest.fixture(scope="module", params=HELD)
def adapters(request: pytest.FixtureRequest) -> Iterator[tuple[int, Adapters]]:
    streams: int = request.param
    with installed(), room_for(2 * streams), serving(Pace(per_event=TOKENS, hold=HELD[streams])) as url:
        made = Adapters("incremental", TOKENS, url, tokens=TOKENS)
        yield streams, made
        made.close()


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("turn", "way"), CASES)
def test_streams(benchmark: BenchmarkFixture, adapters: tuple[int, Adapters], turn: int, way: str) -> None:
    streams, asked = adapters
    benchmark.group = f"{streams} streams at once"
    benchmark.extra_info.update(streams=streams, way=way, turn=turn)
    samples = benchmark.pedantic(asked.ask_many, args=(way, streams))
    assert all(sample == asked.first["host"] for sample in samples)
