"""One line with 64 MiB of routed experts: ``python -m benches.experts`` (Linux).

Against httpx's text lines, json, pybase64 and a copy, which a sample needs since base64 gives bytes that cannot be
written to; and against the same without httpx, from reads that are joined. Times are the best of turns, and memory is
the highest above that before the first byte, each way in a process of its own.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pybase64

from benches.baseline import events
from benches.streams import READ
from streamfold import Experts, Parser

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT: Final = 32_768
LAYERS: Final = 48
TOP_K: Final = 8
TURNS: Final = 9
MIB: Final = 1 << 20

Ids = npt.NDArray[Any]


def reads() -> list[bytes]:
    """Make the body: one token, and the experts of the prompt's tokens."""
    ids = np.random.default_rng(1).integers(0, 128, PROMPT * LAYERS * TOP_K, dtype=np.int32)
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": PROMPT, "completion_tokens": 1}
    meta |= {"output_token_logprobs": [[-0.5, 5, None]], "routed_experts": base64.b64encode(ids.tobytes()).decode()}
    body = b"data: " + json.dumps({"text": "a", "output_ids": [5], "meta_info": meta}).encode() + b"\n\n"
    return [body[start : start + READ] for start in range(0, len(body), READ)]


def by_streamfold(body: list[bytes]) -> Ids:
    """Give what this package gives, whose ids are checked too."""
    parser = Parser("sglang", experts=Experts(LAYERS, TOP_K, 128), prompt_len=PROMPT)
    for read in body:
        parser.feed(read)
    parser.close()
    experts = parser.take().routed_experts
    assert experts is not None
    return experts


def by_lines(body: list[bytes]) -> Ids:
    """Give what a trainer gets of httpx's lines."""
    return _decoded(list(events(body, json.loads))[-1])


def by_join(body: list[bytes]) -> Ids:
    """Give the same without httpx."""
    line, _, _ = b"".join(body).partition(b"\n")
    return _decoded(json.loads(line[len(b"data: ") :]))


def _decoded(event: dict[str, Any]) -> Ids:
    raw = pybase64.b64decode(event["meta_info"]["routed_experts"], validate=True)
    experts: Ids = np.frombuffer(raw, np.int32).copy().reshape(-1, LAYERS, TOP_K)
    return experts


WAYS: Final[dict[str, Callable[[list[bytes]], Ids]]] = {
    "streamfold": by_streamfold,
    "httpx, json, pybase64": by_lines,
    "join, json, pybase64": by_join,
}


def peak(way: str) -> float:
    """Measure the highest memory of a way, in MiB above that before it."""
    run = [sys.executable, "-m", "benches.experts", way]
    return float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def _measure_here(way: str) -> float:
    body = reads()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    WAYS[way](body)
    return (_status("VmHWM") - before) / MIB


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Print the figures of all ways."""
    if len(sys.argv) > 1:
        print(_measure_here(sys.argv[1]))
        return
    body = reads()
    expected = by_join(body)
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(TURNS):
        for name, way in WAYS.items():
            start = time.perf_counter()
            ids = way(body)
            best[name] = min(best[name], time.perf_counter() - start)
            np.testing.assert_array_equal(ids, expected)
    line, decoded = sum(map(len, body)) / MIB, expected.nbytes / MIB
    print(f"One line of {line:.0f} MiB, {decoded:.0f} MiB decoded; best of {TURNS} turns:")
    for name, seconds in best.items():
        ratio = seconds / best["streamfold"]
        print(f"  {name:24}{seconds * 1e3:8.1f} ms{ratio:6.1f}x{peak(name):8.1f} MiB at the most")


if __name__ == "__main__":
    main()
