"""Writes RESULTS.md to standard output: ``python -m benches.report FILE [SECTION...]``.

``FILE`` is pytest-benchmark's JSON; each ``SECTION`` is Markdown that ``benches.transport``, ``benches.scale`` or
``benches.abort_storm`` wrote; and ``aims.md``, which is written by hand.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benches.memory import REPLIES, TOKENS, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

# How many times faster than each way the parser is meant to be, and how many bytes a token may take.
AIMS: Final = {
    ("incremental", "json"): 9,
    ("incremental", "orjson"): 4,
    ("single-token", "json"): 12,
    ("single-token", "orjson"): 5,
    ("cumulative", "json"): 30,
    ("vllm", "json"): 8,
    ("vllm", "orjson"): 3.5,
    ("vllm single-token", "json"): 8,
    ("vllm single-token", "orjson"): 3.5,
}
AIM_BYTES: Final = 14


def report(run: dict[str, Any], memory: dict[str, float]) -> Iterator[str]:
    """Give the lines of the report on one run."""
    yield "# Results\n"
    yield f"Written by `make bench` on {run['datetime'][:10]}.\n"
    yield from _machine(run["machine_info"])
    yield "\n## From raw bytes to arrays\n"
    entries = [(entry["extra_info"], entry["stats"]["data"]) for entry in run["benchmarks"]]
    yield from _speed([entry for entry in entries if "stream" in entry[0]])
    if adapters := [entry for entry in entries if "adapter" in entry[0]]:
        yield "\n## One sample through the adapter\n"
        yield from _adapters(adapters)
    if many := [entry for entry in entries if "streams" in entry[0]]:
        yield "\n## Many streams at once\n"
        yield from _many(many)
    yield "\n## Memory in flight\n"
    yield from _memory(memory)


def _speed(entries: list[tuple[dict[str, Any], list[float]]]) -> Iterator[str]:
    streams: dict[str, dict[str, Any]] = {}
    seconds: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for info, data in entries:
        streams[info["stream"]] = info
        seconds[info["stream"]][info["way"]] += data
    yield "Fed in reads of 64 KiB. The ways take turns and give equal arrays."
    yield "Ratios are of the best times, which a busy machine disturbs least."
    yield "json and orjson are httpx's text lines, that parser, and Python lists (`benches/baseline.py`).\n"
    for stream, info in streams.items():
        turns, size = len(seconds[stream]["streamfold"]), f"{info['bytes'] / 1e6:,.1f} MB"
        yield f"- {stream}: {info['tokens']:,} tokens in {info['events']:,} events, {size}; {turns} turns"
    yield ""
    yield _row("stream", "way", "best s", "median s", "MB/s", "ns/token", "streamfold is faster by", "aim")
    yield _row("---", "---", *["---:"] * 6)
    for stream, ways in seconds.items():
        size, tokens = streams[stream]["bytes"], streams[stream]["tokens"]
        for way, times in ways.items():
            best, aim = min(times), AIMS.get((stream, way))
            yield _row(
                stream,
                way,
                f"{best:.4f}",
                f"{median(times):.4f}",
                f"{size / best / 1e6:,.0f}",
                f"{best / tokens * 1e9:,.0f}",
                "" if way == "streamfold" else f"{best / min(ways['streamfold']):.1f}x",
                f"at least {aim}x" if aim else "",
            )


def _adapters(entries: list[tuple[dict[str, Any], list[float]]]) -> Iterator[str]:
    seconds: defaultdict[tuple[str, int], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for info, data in entries:
        seconds[info["mode"], info["per_event"]][info["way"]] += data
    yield f"{entries[0][0]['tokens']:,} tokens over loopback HTTP, from the request to the host's sample: CPU time of"
    yield "the client, kernel included. The engine is another process, and writes one event every half millisecond or"
    yield "more. The host's way is httpx's text lines, json, and the sample's lists made anew at each event. The ways"
    yield "take turns and give equal samples; ratios are of the best times. The aim with one token an event: 12x,"
    yield "cumulative 60x.\n"
    yield _row("stream", "tokens per event", "way", "turns", "best CPU ms", "median CPU ms", "streamfold needs less by")
    yield _row("---", "---:", "---", *["---:"] * 4)
    for (mode, per_event), ways in seconds.items():
        for way, times in ways.items():
            ratio = "" if way == "streamfold" else f"{min(times) / min(ways['streamfold']):.1f}x"
            best, middle = f"{min(times) * 1e3:,.1f}", f"{median(times) * 1e3:,.1f}"
            yield _row(mode, str(per_event), way, str(len(times)), best, middle, ratio)


def _many(entries: list[tuple[dict[str, Any], list[float]]]) -> Iterator[str]:
    seconds: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for info, data in entries:
        seconds[info["streams"]][info["way"]] += data
    yield "The same two ways, with so many requests at once that all are open before the first is answered, with one"
    yield "event. The host's way has one httpx.AsyncClient without a limit. CPU time of the client for each; no aim.\n"
    yield _row("streams", "way", "turns", "best CPU ms each", "median CPU ms each", "streamfold needs less by")
    yield _row("---:", "---", *["---:"] * 4)
    for streams, ways in seconds.items():
        for way, times in ways.items():
            ratio = "" if way == "streamfold" else f"{min(times) / min(ways['streamfold']):.1f}x"
            best, middle = (f"{value / streams * 1e3:,.2f}" for value in (min(times), median(times)))
            yield _row(str(streams), way, str(len(times)), best, middle, ratio)


def _memory(figures: dict[str, float]) -> Iterator[str]:
    replies = f"{REPLIES} replies of {TOKENS:,} tokens"
    yield _row("what is held", "bytes per token", "aim")
    yield _row("---", "---:", "---")
    own = "by the parser's own count, less text and the incomplete event, at the worst of seven moments"
    yield _row(own, f"{figures['parser']:.2f}", f"at most {AIM_BYTES}")
    for way in ("streamfold", "lists"):
        if f"resident {way}" in figures:
            yield _row(f"resident, text included, {replies}: {way}", f"{figures[f'resident {way}']:.1f}", "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _machine(info: dict[str, Any]) -> Iterator[str]:
    cpu = info["cpu"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("streamfold", "httpx", "orjson", "numpy"))
    yield f"- {cpu.get('brand_raw', platform.processor())}, {cpu['count']} cores, {info['system']} {info['machine']}"
    yield f"- {info['python_implementation']} {info['python_version']}, {packages}"


if __name__ == "__main__":
    lines = list(report(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), measure()))
    lines += ["\n" + Path(section).read_text(encoding="utf-8").rstrip("\n") for section in sys.argv[2:]]
    print("\n".join(lines))
