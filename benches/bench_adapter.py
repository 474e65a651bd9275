"""One sample through the whole adapter, over loopback HTTP: CPU time of the client, ours against the host's way.

The sample is the stand-in host's (tests/support/host), and so is the state around it; the engine is a process that
writes ready bytes. What is counted is the CPU time of this process, kernel included, as the pauses between events are
idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from benches.baseline import generate_by_lines
from benches.server import PAUSE, Pace, serving
from streamfold.slime import generate_streaming
from support.host import arguments, installed
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import SimpleNamespace

    from pytest_benchmark.fixture import BenchmarkFixture

TOKENS: Final = 4096
PROMPT: Final = list(range(512))  # as many as the replies say
# Enough that the best times settle; a cumulative reply of one-token events is 250 MB.
TURNS: Final = {("incremental", 20): 5, ("incremental", 1): 3, ("cumulative", 20): 3, ("cumulative", 1): 1}
WAYS: Final = ("streamfold", "host")
CASES: Final = [(stream, turn, way) for stream, turns in TURNS.items() for turn in range(turns) for way in WAYS]
# A connection for each sample, as this package makes it today.
_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def pace(mode: str, per_event: int) -> Pace:
    """One event after the other, with a pause before each."""
    return Pace(per_event=per_event, tick=PAUSE, cumulative=mode == "cumulative")


class Adapters:
    """Both ways to one engine, warm: the first sample of each is not measured."""

    def __init__(self, mode: str, per_event: int, url: str, *, tokens: int = TOKENS) -> None:
        self.mode, self.per_event, self.tokens = mode, per_event, tokens
        self._args: SimpleNamespace = arguments(url)
        self._params = {"max_new_tokens": tokens, "temperature": 1.0}
        self._client = httpx.AsyncClient(timeout=None, trust_env=False, limits=_LIMITS)
        self._loop = asyncio.new_event_loop()
        self._incremental = mode == "incremental"
        host = self.ask("host")
        self._let_tokenizer_decode(host)
        self.first = {"streamfold": self.ask("streamfold"), "host": host}

    def _let_tokenizer_decode(self, sample: Sample) -> None:
        """Let the host's tokenizer give the text of the replies, which ours is compared with: a join, not a model's."""
        text, response = sample.response, sample.tokens[-sample.response_length :]
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        tokenizer: Any = GenerateState(self._args).tokenizer
        tokenizer.decode = lambda ids, **_options: "".join(pieces) if list(ids[-len(response) :]) == response else ""

    def ask(self, way: str) -> Sample:
        """One sample."""
        return self._loop.run_until_complete(self._ask(way))

    def ask_many(self, way: str, count: int) -> list[Sample]:
        """So many samples at once."""

        async def ask_all() -> list[Sample]:
            return await asyncio.gather(*[self._ask(way) for _ in range(count)])

        return self._loop.run_until_complete(ask_all())

    async def _ask(self, way: str) -> Sample:
        sample = Sample(prompt="x", tokens=list(PROMPT))
        if way == "streamfold":
            await generate_streaming(self._args, sample, self._params)
        else:
            url = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}/generate"
            await generate_by_lines(self._client, url, sample, self._params, incremental=self._incremental)
        return sample

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture(scope="module")
def adapters_of() -> Iterator[Callable[[str, int], Adapters]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed())

        @functools.cache
        def made(mode: str, per_event: int) -> Adapters:
            adapters = Adapters(mode, per_event, stack.enter_context(serving(pace(mode, per_event))))
            stack.callback(adapters.close)
            return adapters

        yield made


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("stream", "turn", "way"), CASES)
def test_sample(
    benchmark: BenchmarkFixture,
    adapters_of: Callable[[str, int], Adapters],
    stream: tuple[str, int],
    turn: int,
    way: str,
) -> None:
    mode, per_event = stream
    adapters = adapters_of(mode, per_event)
    benchmark.group = f"adapter, {mode}, events of {per_event}"
    benchmark.extra_info.update(
        adapter=True, way=way, turn=turn, mode=mode, per_event=per_event, tokens=adapters.tokens
    )
    sample = benchmark.pedantic(adapters.ask, args=(way,))
    assert sample == adapters.first["host"]
