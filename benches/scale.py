"""How cost grows with streams, tokens per event and length: ``python -m benches.scale``, a table and a plot.

    python -m benches.scale [--quick] [--turns 2] [--loop asyncio] [--out target/scale.md] [--plot benches/scale.png]

For this package and both baselines, SGLang's incremental streams, evenly spread. Processes, CPUs and turns are those
of ``benches.transport``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benches.clients.base import Target
from benches.clients.registry import AIOHTTP, HTTPX, PRODUCT
from benches.environment import described
from benches.measure import Job, cpus, measure
from benches.server import ROOT, Pace, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OUT: Final = ROOT / "target" / "scale.md"
PLOT: Final = Path(__file__).parent / "scale.png"
CLIENTS: Final = (PRODUCT, HTTPX, AIOHTTP)
_EVENT_SECONDS: Final = 20e-6  # of the server, at least: so it keeps its pace with any number of streams


@dataclass(frozen=True, kw_only=True)
class Point:
    """One load: ``x`` is what varies along the curve."""

    x: int
    streams: int
    per_event: int
    events: int
    tick: float

    @property
    def tokens(self) -> int:
        """Of all streams."""
        return self.streams * self.events * self.per_event


def _of_streams(streams: int) -> Point:
    return Point(x=streams, streams=streams, per_event=1, events=200, tick=max(0.02, streams * _EVENT_SECONDS))


def _of_tokens(per_event: int) -> Point:
    return Point(x=per_event, streams=64, per_event=per_event, events=200, tick=0.02)


def _of_length(length: int) -> Point:
    return Point(x=length, streams=4, per_event=20, events=-(-length // 20), tick=0.001)


CURVES: Final[Mapping[str, Sequence[Point]]] = {
    "streams, 1 token per event": [_of_streams(4**power) for power in range(7)],
    "tokens per event, 64 streams": [_of_tokens(2**power) for power in range(7)],
    "tokens of a response, 4 streams, 20 per event": [_of_length(1024 * 2**power) for power in range(8)],
}
_QUICK: Final = 3  # points of each curve

Costs = dict[str, dict[int, dict[str, float]]]  # by curve, x and client: CPU µs per token


def run(curves: Mapping[str, Sequence[Point]], *, turns: int, loop: Literal["asyncio", "uvloop"]) -> Costs:
    """Measure all points; the best turns."""
    own, other = cpus()
    costs: Costs = {}
    for name, points in curves.items():
        costs[name] = {}
        for point in points:
            pace = Pace(streams=point.streams, per_event=point.per_event, tick=point.tick, pacing="spread", cpu=other)
            found: defaultdict[str, list[float]] = defaultdict(list)
            with serving(pace) as url:
                for turn in range(turns):
                    for client in CLIENTS:
                        print(f"{name}: {point.x:,}, {client}, {turn + 1}/{turns}", file=sys.stderr)
                        job = Job(
                            client=client,
                            loop=loop,
                            target=Target(url=url),
                            streams=point.streams,
                            tokens=point.events * point.per_event,
                            cpu=own,
                        )
                        found[client].append(measure(job)["cpu"] * 1e6 / point.tokens)
            costs[name][point.x] = {client: min(found[client]) for client in CLIENTS}
    return costs


def section(costs: Costs, heading: Sequence[str], plot: str) -> Iterator[str]:
    """Give the lines of the section in RESULTS.md."""
    yield "## Cost against scale\n"
    yield from heading
    yield "\nCPU time of the client's process in µs per token, kernel and connecting included; the best turn.\n"
    yield f"![CPU time per token against streams, tokens per event and length]({plot})\n"
    yield f"| varied | value | {' | '.join(CLIENTS)} |"
    yield f"| --- | ---: |{' ---: |' * len(CLIENTS)}"
    for name, points in costs.items():
        for x, found in points.items():
            yield f"| {name} | {x:,} | {' | '.join(f'{found[client]:,.2f}' for client in CLIENTS)} |"


def draw(costs: Costs, path: Path) -> None:
    """Write the plot, a panel for each curve."""
    import matplotlib as mpl  # noqa: PLC0415  # slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, len(costs), figsize=(5 * len(costs), 4), sharey=True, squeeze=False)
    for axes, (name, points) in zip(panels[0], costs.items(), strict=True):
        for client in CLIENTS:
            axes.plot(list(points), [found[client] for found in points.values()], marker="o", label=client)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(name)
        axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("CPU µs per token")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.scale")
    parser.add_argument("--quick", action="store_true", help="only the first points of each curve, once")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--out", type=Path, default=OUT, help="where the section is written")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot is written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the section, and write it with its plot."""
    options = _options(arguments)
    turns = 1 if options.quick else options.turns
    curves = {name: points[:_QUICK] if options.quick else points for name, points in CURVES.items()}
    costs = run(curves, turns=turns, loop=options.loop)
    draw(costs, options.plot)
    command = shlex.join(["python", "-m", "benches.scale", *arguments])
    heading = [*described(command), f"- {options.loop}; turns: {turns}; evenly spread"]
    text = "\n".join(section(costs, heading, options.plot.name)) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
