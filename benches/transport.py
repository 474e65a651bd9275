"""From the socket to the arrays: what clients cost against the compiled server. ``python -m benches.transport``.

    python -m benches.transport [--quick] [--seconds 6] [--turns 3] [--only TEXT] [--out target/transport.md]

Every measurement is a process of its own, pinned to one CPU, the server to another one. The clients take turns; ratios
are of the best turns of one run. ``--quick`` runs the small loads once and shortly: it shows that all works, its
figures are worth nothing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benches.clients.base import Target
from benches.clients.registry import AIOHTTP, AIOHTTP_JSON, BARE, CLIENTS, HTTPX, PRODUCT, PRODUCT_ON_ASYNCIO
from benches.environment import described
from benches.measure import Job, cpus, measure
from benches.server import ROOT, Pace, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benches.measure import Figures, Kind

OUT: Final = ROOT / "target" / "transport.md"
LOOPS: Final[tuple[Literal["asyncio", "uvloop"], ...]] = ("asyncio", "uvloop")
BOTH: Final[tuple[Literal["burst", "spread"], ...]] = ("burst", "spread")
ALL: Final = (PRODUCT, PRODUCT_ON_ASYNCIO, HTTPX, AIOHTTP, BARE)
_QUICK_STREAMS: Final = 64
_QUICK_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a measurement other than the CPU time of each event, token or call.

    Attributes:
        key: its name in the measurement.
        name: what it is called in the table.
        unit: of the table.
        scale: from the measurement's unit to the table's.
        aim: at most this, in the table's unit; None: there is no aim.
        against: the client that the aim is a ratio to; None: it is absolute.
    """

    key: str
    name: str
    unit: str
    scale: float = 1.0
    aim: float | None = None
    against: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One load, for several clients.

    Attributes:
        name: what it is called in the table.
        pace: the server's, but for the pacing and the CPU.
        streams: requests at once.
        tokens: of each response; None: as many as ``seconds`` take.
        pacings: each is measured.
        clients: each is measured.
        per: what the aims count CPU for; ``"call"`` where a response is one event.
        aims: at most this ratio of this package's CPU time to the client's.
        figures: the others that are shown.
    """

    name: str
    pace: Pace
    streams: int
    tokens: int | None = None
    engine: Literal["sglang", "vllm"] = "sglang"
    keep_alive: bool = False
    prompt_tokens: int = 512
    waves: int = 1
    kind: Kind = "stream"
    pacings: Sequence[Literal["burst", "spread"]] = BOTH
    clients: Sequence[str] = ALL
    per: Literal["event", "token", "call"] | None = "token"
    aims: Mapping[str, float] = field(default_factory=dict)
    figures: Sequence[Figure] = ()

    def tokens_in(self, seconds: float) -> int:
        """Tokens of each response."""
        return self.tokens or max(2, round(seconds / self.pace.tick)) * self.pace.per_event


@dataclass(frozen=True, kw_only=True)
class Result:
    """The turns of one client under one load."""

    row: Row
    pacing: str
    loop: Literal["asyncio", "uvloop"]
    client: str
    tokens: int
    turns: list[Figures]

    def best(self, key: str) -> float:
        """The least of all turns."""
        return min(float(turn[key]) for turn in self.turns)

    @property
    def events(self) -> int:
        """Events with tokens, of all streams."""
        return -(-self.tokens // self.row.pace.per_event) * self.row.streams * self.row.waves


def _streams(streams: int, tick: float, per: Literal["event", "token"], aims: Mapping[str, float]) -> Row:
    name = f"{streams:,} streams, 1 token every {tick * 1e3:g} ms"
    figures = [Figure(key="finish_p99", name="finish, p99", unit="ms", scale=1e3, aim=60)] if streams < 2048 else []
    return Row(
        name=name,
        pace=Pace(streams=streams, tick=tick),
        streams=streams,
        clients=tuple(client for client in ALL if client != HTTPX or client in aims),  # it takes minutes for many
        per=per,
        aims=aims,
        figures=figures,
    )


def _calls(at_once: int, waves: int) -> Row:
    return Row(
        name=f"one event, {at_once:,} calls at once",
        pace=Pace(per_event=20),
        streams=at_once,
        tokens=20,
        keep_alive=True,
        waves=waves,
        pacings=("burst",),
        clients=(PRODUCT, HTTPX, AIOHTTP),
        per="call",
        aims={AIOHTTP: 1 / 1.5, HTTPX: 1 / 6},
    )


def _aborts(streams: int, tick: float) -> Row:
    abort = Figure(key="abort_p99", name="abort, p99", unit="ms", scale=1e3, aim=5)
    middle = Figure(key="abort_p50", name="abort, median", unit="ms", scale=1e3)
    return Row(
        name=f"{streams} streams, 1 token every {tick * 1e3:g} ms, aborted one by one within a second",
        pace=Pace(streams=streams, tick=tick),
        streams=streams,
        tokens=3000,
        kind="abort",
        pacings=("spread",),
        clients=(PRODUCT,),
        per=None,
        figures=[middle, abort],
    )


_FEW: Final = {HTTPX: 1 / 10, AIOHTTP: 1 / 2.5, BARE: 1.1, PRODUCT_ON_ASYNCIO: 1.0}
ROWS: Final = [
    _streams(16, 0.02, "event", _FEW),
    _streams(64, 0.02, "event", _FEW),
    _streams(512, 0.02, "token", {BARE: 1 / 2, PRODUCT_ON_ASYNCIO: 1 / 2}),
    _streams(2048, 0.04, "token", {BARE: 1 / 2, PRODUCT_ON_ASYNCIO: 1 / 2}),
    Row(
        name="512 streams, 20 tokens every 100 ms",
        pace=Pace(streams=512, per_event=20, tick=0.1),
        streams=512,
        clients=(PRODUCT, AIOHTTP, BARE),
        aims={AIOHTTP: 1 / 5},
    ),
    Row(
        name="512 streams, 20 tokens every 100 ms, TLS",
        pace=Pace(streams=512, per_event=20, tick=0.1, tls=True),
        streams=512,
        clients=(PRODUCT, AIOHTTP, BARE),
        aims={AIOHTTP: 1 / 2},
    ),
    Row(
        name="vLLM, 256 streams of 100 tokens, 1 every 20 ms",
        pace=Pace(streams=256, tick=0.02),
        streams=256,
        tokens=100,
        engine="vllm",
        clients=(PRODUCT, HTTPX, AIOHTTP, AIOHTTP_JSON, BARE),
        aims={AIOHTTP_JSON: 1 / 3},
    ),
    Row(
        name="2,048 streams, 1 token every 20 ms",
        pace=Pace(streams=2048, tick=0.02),
        streams=2048,
        kind="sweeps",
        clients=(PRODUCT,),
        figures=[
            Figure(key="share", name="share of one core", unit="%", scale=100, aim=35),
            Figure(key="sweep_p99", name="sweep, p99", unit="ms", scale=1e3),
            Figure(key="longest_sweep", name="longest sweep", unit="ms", scale=1e3, aim=10),
            Figure(key="sweep_cpu", name="longest sweep, CPU", unit="ms", scale=1e3),
        ],
    ),
    _calls(64, 16),
    _calls(1024, 2),
    Row(
        name="one event, 64 calls at once, a transport that answers at once",
        pace=Pace(per_event=20),
        streams=64,
        tokens=20,
        waves=16,
        kind="start",
        pacings=("burst",),
        clients=(PRODUCT,),
        per="call",
        figures=[Figure(key="cpu_of_each", name="Python of a call", unit="µs", scale=1e6, aim=120)],
    ),
    _aborts(64, 0.02),
    _aborts(512, 0.2),
    Row(
        name="512 streams, 1 token every 20 ms, beside a busy Python thread",
        pace=Pace(streams=512, tick=0.02),
        streams=512,
        kind="lag",
        clients=(PRODUCT, AIOHTTP, BARE),
        per=None,
        figures=[
            Figure(key="lag_mean", name="loop lag, mean", unit="ms", scale=1e3, aim=2, against=BARE),
            Figure(key="lag_p99", name="loop lag, p99", unit="ms", scale=1e3, aim=2, against=BARE),
        ],
    ),
    Row(
        name="512 streams, the loop blocked for 5 s",
        pace=Pace(streams=512, tick=0.02),
        streams=512,
        tokens=150,
        kind="blocked",
        pacings=("spread",),
        clients=(PRODUCT, AIOHTTP, BARE),
        per=None,
        figures=[Figure(key="catch_up", name="all caught up after", unit="s", aim=1)],
    ),
    Row(
        name="4,096 streams waiting, second wave, prompts of 1,024 tokens",
        pace=Pace(streams=4097),
        streams=4096,
        tokens=2,
        prompt_tokens=1024,
        kind="memory",
        pacings=("burst",),
        clients=(PRODUCT, AIOHTTP),
        per=None,
        figures=[Figure(key="waiting_bytes", name="resident for each", unit="KiB", scale=1 / 1024, aim=24)],
    ),
]


def run(rows: Sequence[Row], *, seconds: float, turns: int) -> Iterator[Result]:
    """Measure all rows."""
    for row in rows:
        for pacing in row.pacings:
            yield from _measured(row, pacing, seconds, turns)


def _measured(row: Row, pacing: Literal["burst", "spread"], seconds: float, turns: int) -> Iterator[Result]:
    own, other = cpus()
    found: defaultdict[tuple[Literal["asyncio", "uvloop"], str], list[Figures]] = defaultdict(list)
    tokens = row.tokens_in(seconds)
    with serving(replace(row.pace, pacing=pacing, cpu=other)) as url:
        target = Target(url=url, engine=row.engine, keep_alive=row.keep_alive, prompt_tokens=row.prompt_tokens)
        for turn in range(turns):
            for loop in LOOPS:
                for client in row.clients:
                    print(f"{row.name}, {pacing}, {loop}, {client}, {turn + 1}/{turns}", file=sys.stderr)
                    job = Job(
                        kind=row.kind,
                        client=client,
                        loop=loop,
                        target=target,
                        streams=row.streams,
                        tokens=tokens,
                        waves=row.waves,
                        cpu=own,
                    )
                    found[loop, client].append(_with_shares(measure(job), row))
    digests = {turn["digest"] for figures in found.values() for turn in figures if turn.get("digest")}
    assert len(digests) <= 1, f"the clients have read different responses: {row.name}"
    for (loop, client), figures in found.items():
        yield Result(row=row, pacing=pacing, loop=loop, client=client, tokens=tokens, turns=figures)


def _with_shares(figures: Figures, row: Row) -> Figures:
    if "cpu" in figures:
        figures["share"] = figures["cpu"] / figures["wall"]
        figures["cpu_of_each"] = figures["cpu"] / (row.streams * row.waves)
    return figures


def section(results: Sequence[Result], heading: Sequence[str]) -> Iterator[str]:
    """Give the lines of the section in RESULTS.md."""
    groups: defaultdict[tuple[int, str, str], dict[str, Result]] = defaultdict(dict)
    for result in results:
        groups[id(result.row), result.pacing, result.loop][result.client] = result
    clients = [client for client in CLIENTS if any(client in group for group in groups.values())]
    yield "## From the socket to the arrays\n"
    yield from heading
    yield "\nCPU time of the client's process in µs, kernel and connecting included; the best turn. In brackets: this"
    yield "package's CPU time over that client's, and the aim. Every client opens a connection for each stream; calls"
    yield "of one event use one again. Late: events that the server sent more than 5 ms after their time, at the worst"
    yield "turn of all clients; many of them mean that the load was a different one.\n"
    yield _line("load", "pacing", "loop", "µs per", *clients, "late")
    yield _line("---", "---", "---", "---", *["---:"] * (len(clients) + 1))
    for group in groups.values():
        yield from _cpu_lines(group, clients)
    yield "\nOther figures; the best turn.\n"
    yield _line("load", "pacing", "loop", "figure", *clients, "aim")
    yield _line("---", "---", "---", "---", *["---:"] * (len(clients) + 1))
    for group in groups.values():
        yield from _figure_lines(group, clients)


def _cpu_lines(group: Mapping[str, Result], clients: Sequence[str]) -> Iterator[str]:
    """CPU time for each event, and for each token where that is not the same."""
    first = next(iter(group.values()))
    row = first.row
    if row.per is None:
        return
    tokens = first.tokens * row.streams * row.waves
    units = [(row.per, first.events)] if first.events in (tokens, row.streams * row.waves) else []
    for unit, count in units or [("event", first.events), ("token", tokens)]:
        cells = [_cpu_cell(group, client, unit, count) for client in clients]
        turns = [turn for result in group.values() for turn in result.turns if "server_late" in turn]
        late = max((turn["server_late"] / turn["server_events"] for turn in turns), default=None)
        yield _line(*_names(first), unit, *cells, "" if late is None else f"{late:.0%}")


def _cpu_cell(group: Mapping[str, Result], client: str, unit: str, count: int) -> str:
    result, own = group.get(client), group.get(PRODUCT)
    if result is None:
        return ""
    cell = f"{result.best('cpu') * 1e6 / count:,.2f}"
    if client == PRODUCT or own is None:
        return cell
    aim = result.row.aims.get(client) if unit == result.row.per else None
    ratio = f"{own.best('cpu') / result.best('cpu'):.2f}"
    return f"{cell} ({ratio})" if aim is None else f"{cell} ({ratio}, aim {aim:.2f})"


def _figure_lines(group: Mapping[str, Result], clients: Sequence[str]) -> Iterator[str]:
    first = next(iter(group.values()))
    for figure in first.row.figures:
        values = {client: result.best(figure.key) * figure.scale for client, result in group.items()}
        cells = [f"{values[client]:,.2f} {figure.unit}" if client in values else "" for client in clients]
        aim = "" if figure.aim is None else f"≤ {figure.aim:g} {figure.unit}"
        if figure.against is not None:
            aim = f"≤ {figure.aim:g} times {figure.against}"
        yield _line(*_names(first), figure.name, *cells, aim)


def _names(result: Result) -> tuple[str, str, str]:
    return result.row.name, result.pacing if len(result.row.pacings) > 1 else "", result.loop


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.transport")
    parser.add_argument("--quick", action="store_true", help="only the small loads, once and shortly")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=OUT, help="where the section is written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the section, and write it."""
    options = _options(arguments)
    rows = [row for row in ROWS if options.only in row.name]
    seconds, turns = options.seconds, options.turns
    if options.quick:
        rows = [row for row in rows if row.streams <= _QUICK_STREAMS]
        seconds, turns = min(seconds, _QUICK_SECONDS), 1
    command = shlex.join(["python", "-m", "benches.transport", *arguments])
    results = list(run(rows, seconds=seconds, turns=turns))
    heading = [*described(command), f"- turns: {turns}; streams of {seconds:g} s"]
    text = "\n".join(section(results, heading)) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
