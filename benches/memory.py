"""What replies in flight hold in memory: ``python -m benches.memory`` prints it as JSON."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from benches.baseline import Accumulator, events
from benches.streams import Stream, incremental
from streamfold import Parser

if TYPE_CHECKING:
    from collections.abc import Callable

REPLIES: Final = 128
TOKENS: Final = 16_384


def held_by_parser(stream: Stream, part: float) -> float:
    """Bytes that a parser holds per token, text and the incomplete event apart, when a part of a reply has come."""
    parser = Parser("sglang")
    for read in stream.reads[: max(1, round(len(stream.reads) * part))]:
        parser.feed(read)
    size, tokens = sys.getsizeof(parser), parser.token_count
    text = parser.take().text
    assert text is not None
    longest = max(map(len, b"".join(stream.reads).split(b"\n\n")))
    return (size - len(text.encode()) - longest) / tokens


def measure() -> dict[str, float]:
    """All figures, in bytes per token; resident memory on Linux only, each in a process of its own."""
    stream = incremental()
    figures = {"parser": max(held_by_parser(stream, part) for part in (0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1))}
    if sys.platform == "linux":
        for way in _HOLD:
            command = [sys.executable, "-m", "benches.memory", way]
            run = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent.parent)
            figures[f"resident {way}"] = float(run.stdout)
    return figures


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _hold_parser(stream: Stream) -> Parser:
    parser = Parser("sglang")
    for read in stream.reads:
        parser.feed(read)
    return parser


def _hold_lists(stream: Stream) -> Accumulator:
    accumulator = Accumulator(incremental=True)
    for event in events(stream.reads, orjson.loads):
        accumulator.add(event)
    return accumulator


_HOLD: Final[dict[str, Callable[[Stream], Any]]] = {"streamfold": _hold_parser, "lists": _hold_lists}


def _growth(way: str) -> float:
    stream = incremental(TOKENS)
    hold = _HOLD[way]
    hold(stream)  # imports, arenas and caches are not a reply's
    before = _resident()
    held = [hold(stream) for _ in range(REPLIES)]
    return (_resident() - before) / (len(held) * TOKENS)


if __name__ == "__main__":
    print(_growth(sys.argv[1]) if len(sys.argv) > 1 else json.dumps(measure(), indent=2))
