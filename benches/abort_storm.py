"""Many calls behind a router, aborted at once: ``python -m benches.abort_storm``, a table.

    python -m benches.abort_storm [--calls 1024] [--workers 4 16] [--engine sglang vllm] [--transport direct]
                                  [--turns 3] [--out target/aborts.md]

Engines and router are loopback ones, in processes of their own. Each call asks for side data that only the terminal
event carries. Told are the CPU time of the client from the abort of all to the end of the last call, how many calls got
their abort event with its side data, and to how many engines a call was posted on average: a router does not tell which
engine has a request, and once its stream has ended no other engine is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import shlex
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benches.environment import described
from benches.server import ROOT
from streamfold import Client, Experts
from streamfold.loopback import Loopback, Router

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from typing_extensions import Self

    from streamfold import Call, Generation

OUT: Final = ROOT / "target" / "aborts.md"
PROCESSES: Final = 2  # that share the engines
PARAMS: Final = {"max_new_tokens": 30_000, "temperature": 1}
# Seldom a token: what the client spends is for the aborts. A disconnect is never noticed, as in some releases.
OPTIONS: Final[dict[str, Any]] = {
    "token_rate": 0.2,
    "stop_probability": 0,
    "leave_delay": None,
    "keep_requests": 1 << 20,
}
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "sglang": {"incremental": True},
    "vllm": {"engine": "vllm", "return_routed_experts": True},
}


@dataclass(frozen=True)
class Storm:
    """What one storm gave.

    Attributes:
        cpu_ms: of the client, for each call, from the abort to the end of the last call.
        seconds: the same, by the clock.
        events: calls that got their abort event with its side data.
        posts: the engines to which a call was posted by the time ``aclose`` returned, on average.
    """

    cpu_ms: float
    seconds: float
    events: int
    posts: float


def _engines(count: int, options: dict[str, Any], pipe: Connection) -> None:
    """Run engines until the other side of the pipe says stop; then tell the ids that each was posted."""
    with ExitStack() as stack:
        engines = [stack.enter_context(Loopback(**options)) for _ in range(count)]
        pipe.send([engine.url for engine in engines])
        pipe.recv()
        pipe.send([set(engine.stats().aborts) for engine in engines])


def _router(urls: Sequence[str], pipe: Connection) -> None:
    with Router(urls) as router:
        pipe.send(router.url)
        pipe.recv()


class _Site:
    """Engines and a router, while the block runs."""

    def __init__(self, engine: str, workers: int) -> None:
        self._options = {**OPTIONS, **ENGINES[engine]}
        self._workers = workers
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self.url: str = ""

    def __enter__(self) -> Self:
        shares = [len(range(place, self._workers, PROCESSES)) for place in range(PROCESSES)]
        pipes = [self._start(_engines, share, self._options) for share in shares]
        urls = [url for pipe in pipes for url in pipe.recv()]
        self.url = self._start(_router, urls).recv()
        return self

    def _start(self, target: Any, *arguments: object) -> Connection:  # noqa: ANN401  # a function of this module
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        self._pipes.append(ours)
        self._processes.append(process)
        return ours

    def posted(self) -> list[set[str]]:
        """Stop the engines; the ids that each was posted."""
        *engines, _ = self._pipes
        for pipe in engines:
            pipe.send(None)
        return [posted for pipe in engines for posted in pipe.recv()]

    def __exit__(self, *_exception: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


async def storm(engine: Literal["sglang", "vllm"], workers: int, calls: int, transport: Any) -> Storm:  # noqa: ANN401
    """Start the calls, wait for their first tokens, abort all, close the client."""
    experts = Experts(num_layers=4, top_k=2, num_experts=16, dtype="int32" if engine == "sglang" else "uint8")
    with _Site(engine, workers) as site:
        client = Client(site.url, engine=engine, experts=experts, transport=transport)
        running = [client.start([300, place % 500], PARAMS) for place in range(calls)]
        while not all(call.token_count for call in running):  # noqa: ASYNC110  # nothing tells that all have begun
            await asyncio.sleep(0.1)
        with _counting() as count:
            await client.abort_all()
        generations = await asyncio.gather(*running)
        await client.aclose()
        wanted = {_name(engine, call) for call in running}
        posts = sum(len(wanted & posted) for posted in site.posted())
    events = sum(_is_whole(engine, generation) for generation in generations)
    return Storm(1e3 * count.cpu / calls, count.seconds, events, posts / calls)


def _name(engine: str, call: Call) -> str:
    """What an engine of this kind calls it."""
    return call.rid if engine == "sglang" else f"generate-tokens-{call.rid}"


def _is_whole(engine: str, generation: Generation) -> bool:
    """Whether it has what only the terminal event tells; vLLM's of an abort tells no experts."""
    has_side_data = engine == "vllm" or generation.routed_experts is not None
    has_versions = any(version is not None for version, _, _ in generation.version_spans)
    return generation.finish_reason == "abort" and has_versions and has_side_data


@dataclass
class _Count:
    cpu: float = 0.0
    seconds: float = 0.0


@contextmanager
def _counting() -> Iterator[_Count]:
    count = _Count(-_cpu(), -time.perf_counter())
    yield count
    count.cpu += _cpu()
    count.seconds += time.perf_counter()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def section(found: Mapping[tuple[str, int], Sequence[Storm]], calls: int, heading: Sequence[str]) -> Iterator[str]:
    """Give the lines of the section in RESULTS.md; of the turn that took the least CPU time."""
    yield "## Aborts behind a router\n"
    yield from heading
    yield f"\n{calls:,} calls behind a router of loopback engines, aborted at once. CPU time of the client from the"
    yield "abort to the end of the last call, the calls' own ends included; the best turn. The engines share the other"
    yield "core. Aim: every abort event, and at most 0.3 ms a call. A router does not tell which engine has a request:"
    yield "a call is posted to one engine after the other until its stream ends; vLLM takes a list of ids.\n"
    yield "| engine | workers | abort events | posts a call | CPU ms a call | seconds |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for (engine, workers), storms in found.items():
        best, events = min(storms, key=lambda storm: storm.cpu_ms), min(storm.events for storm in storms)
        cells = (f"{events} of {calls}", f"{best.posts:.1f}", f"{best.cpu_ms:.2f}", f"{best.seconds:.1f}")
        yield f"| {engine} | {workers} | {' | '.join(cells)} |"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.abort_storm")
    parser.add_argument("--calls", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--transport", choices=("direct", "httpx"), default="direct")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT, help="where the section is written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the section, and write it."""
    options = _options(arguments)
    found: defaultdict[tuple[str, int], list[Storm]] = defaultdict(list)
    for turn in range(options.turns):
        for engine in options.engine:
            for workers in options.workers:
                print(f"{engine}, {workers} workers, {turn + 1}/{options.turns}", file=sys.stderr)
                one = asyncio.run(storm(engine, workers, options.calls, options.transport))
                found[engine, workers].append(one)
    command = shlex.join(["python", "-m", "benches.abort_storm", *arguments])
    heading = [*described(command), f"- {options.turns} turns"]
    text = "\n".join(section(found, options.calls, heading)) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
