"""How many instructions the parser takes for fixed streams: ``python -m benches.instructions [--update]``.

Callgrind counts them, so the figures hardly depend on the machine's load. They are compared with those kept in
``instructions.json``; ``--update`` keeps the new ones. Another compiler gives other counts, so its version is kept too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS: Final = 20_000
CUMULATIVE_TOKENS: Final = 2_000  # each event has all so far, and callgrind is slow to make them
STREAMS: Final = {
    "sglang-20": "SGLang, incremental, 20 tokens an event",
    "sglang-1": "SGLang, incremental, 1 token an event",
    "cumulative-20": "SGLang, cumulative, 20 tokens an event",
    "vllm-1": "vLLM, 1 token an event",
    "chunked-1": "SGLang, 1 token an event, a chunked reply",
}
LARGEST_INCREASE: Final = 0.02

_ROOT: Final = Path(__file__).parent.parent
_KEPT: Final = Path(__file__).with_suffix(".json")
_TARGET: Final = _ROOT / "target/bench-parsers"


def main() -> None:
    """Count, compare, and keep the counts if that is wanted."""
    parser = argparse.ArgumentParser(prog="python -m benches.instructions", description=__doc__)
    parser.add_argument("--update", action="store_true", help="keep the new counts")
    update = parser.parse_args().update
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed: no instructions are counted")
    built = ["cargo", "build", "--quiet", "--release", "--locked", "--bin", "fixed", "--target-dir", str(_TARGET)]
    subprocess.run([*built, "--manifest-path", str(_ROOT / "benches/parsers/Cargo.toml")], check=True)
    counts = {stream: count(stream) for stream in STREAMS}
    compiler = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    kept = json.loads(_KEPT.read_bytes()) if _KEPT.exists() else {"compiler": compiler, "instructions": {}}
    for line in compared(counts, kept, compiler):
        print(line)
    if update:
        _KEPT.write_text(json.dumps({"compiler": compiler, "instructions": counts}, indent=2) + "\n", encoding="utf-8")


def count(stream: str) -> int:
    """Count the instructions of one stream, which ``fixed`` makes and then reads once."""
    with tempfile.TemporaryDirectory() as folder:
        counted = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", "--toggle-collect=fixed::fold"]
        run = subprocess.run(
            [*counted, str(_TARGET / "release/fixed"), stream], check=True, capture_output=True, text=True
        )
    found = re.search(r"Collected : (\d+)", run.stderr)
    if found is None or int(found[1]) == 0:
        raise RuntimeError(f"callgrind counted nothing: {run.stderr}")
    return int(found[1])


def compared(counts: dict[str, int], kept: dict[str, Any], compiler: str) -> Iterator[str]:
    """Give the lines of the report."""
    yield f"Instructions for {TOKENS:,} tokens ({CUMULATIVE_TOKENS:,} cumulative), against those kept in {_KEPT.name}:"
    worse = []
    for stream, now in counts.items():
        before = kept["instructions"].get(stream)
        change = "new" if before is None else f"{now / before - 1:+.1%}"
        tokens = CUMULATIVE_TOKENS if stream.startswith("cumulative") else TOKENS
        yield f"  {STREAMS[stream]:42}{now:>14,}{now / tokens:>8,.0f} a token  {change}"
        if before is not None and now > before * (1 + LARGEST_INCREASE):
            worse.append(f"{STREAMS[stream]}: {change}")
    if compiler != kept["compiler"]:
        yield f"  The kept ones are of {kept['compiler']}, these of {compiler}."
    if worse:
        yield "!" * 100
        yield f"!!! THE PARSER TAKES MORE INSTRUCTIONS: {'; '.join(worse)}"
        yield "!!! Find out why, or keep the new counts: python -m benches.instructions --update"
        yield "!" * 100


if __name__ == "__main__":
    main()
