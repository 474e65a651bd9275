"""The waterfall of a trace: its file as rows of spans, and these as a picture."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["Row", "Waterfall", "draw", "read_trace"]

_COLORS: Final = {
    "queue": "#d9d9d9",
    "connect": "#969696",
    "prefill": "#fdae6b",
    "tokens": "#4292c6",
    "abort": "#cb181d",
    "drain": "#fc9272",
    "retry": "#ffe66d",
    "reward": "#41ab5d",
}
_SHADE: Final = "#08306b"
_MARKS: Final = {"resume": (">", _SHADE), "weight version": ("|", "#000000")}
_MAX_INCHES: Final = 12.0


@dataclass
class Row:
    """One line of a trace. Times are seconds from its beginning.

    Attributes:
        label: of the line.
        spans: name, beginning, end.
        marks: name, time.
    """

    label: str = ""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)
    _begun: list[tuple[str, float]] = field(default_factory=list, repr=False)

    def add(self, record: dict[str, Any]) -> None:
        """Add the next record of this line."""
        kind, name, at = record["ph"], record["name"], record["ts"] * 1e-6
        if kind == "M" and name == "thread_name":
            self.label = record["args"]["name"]
        elif kind == "B":
            self._begun.append((name, at))
        elif kind == "E" and self._begun:
            self.spans.append((*self._begun.pop(), at))
        elif kind == "X":
            self.spans.append((name, at, at + record["dur"] * 1e-6))
        elif kind == "i":
            self.marks.append((name, at))

    def end(self, at: float) -> None:
        """End the spans that were not ended."""
        self.spans += [(name, began, at) for name, began in self._begun]
        self._begun.clear()


@dataclass
class Waterfall:
    """The lines of a trace.

    Attributes:
        rows: of samples and calls, by their first span.
        overall: spans of whole rollouts, and their aborts.
    """

    rows: list[Row]
    overall: list[tuple[str, float, float]]

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Waterfall:
        """Pair the begins and ends of records. A span that was never ended reaches to the last record."""
        rows: defaultdict[tuple[int, int], Row] = defaultdict(Row)
        last = 0.0
        for record in records:
            rows[record["pid"], record["tid"]].add(record)
            last = max(last, record["ts"] + record.get("dur", 0.0))
        for row in rows.values():
            row.end(last * 1e-6)
        overall = [span for row in rows.values() if row.label == "rollouts" for span in row.spans]
        kept = [row for row in rows.values() if row.spans and row.label != "rollouts"]
        return cls(sorted(kept, key=lambda row: min(began for _, began, _ in row.spans)), overall)


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that a :class:`~streamfold.Trace` has written, or is writing.

    Raises:
        ValueError: it is no such file; the message names the line.
    """
    lines = path.read_bytes().split(b"\n")
    if not lines[0].startswith(b"["):
        raise ValueError(f"{path} is no trace of streamfold: it does not begin with a bracket")
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().removeprefix(b",")
        if text in (b"", b"]"):
            continue
        try:
            record = orjson.loads(text)
            if not {"ph", "name", "ts", "pid", "tid"} <= record.keys():
                raise TypeError  # the same message
        except (orjson.JSONDecodeError, TypeError, AttributeError):
            if number == len(lines):
                return  # the process was killed while it wrote
            raise ValueError(f"{path}, line {number}: not a record of a trace of streamfold") from None
        yield record


def draw(waterfall: Waterfall, path: Path) -> None:
    """Write the picture of a waterfall as a PNG: one row for a sample, time from left to right.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.collections import PolyCollection  # noqa: PLC0415  # an extra that only this function needs
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'streamfold[plot]'") from error

    rows = waterfall.rows
    figure = Figure(figsize=(10.0, min(_MAX_INCHES, 1.6 + 0.06 * len(rows))), layout="constrained")
    axes = figure.add_subplot()
    for name, color in _COLORS.items():
        if boxes := list(_boxes(rows, name)):
            axes.add_collection(PolyCollection(boxes, facecolors=color, edgecolors="none", label=name))
    for name, (marker, color) in _MARKS.items():
        if points := [(at, y) for y, row in enumerate(rows) for each, at in row.marks if each == name]:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=14, marker=marker, c=color, linewidths=0.8, label=name, zorder=3)
    _shade(axes, waterfall.overall)
    axes.set(xlabel="seconds", ylabel=f"{len(rows)} samples", ylim=(len(rows), -1))
    axes.set_yticks([])
    axes.autoscale(axis="x")
    axes.margins(x=0.01)
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(path, dpi=100, format="png", metadata={"Software": "streamfold"})


def _boxes(rows: Iterable[Row], name: str) -> Iterator[list[tuple[float, float]]]:
    """The corners of all spans of that name."""
    for y, row in enumerate(rows):
        for each, began, ended in row.spans:
            if each == name:
                yield [(began, y - 0.4), (ended, y - 0.4), (ended, y + 0.4), (began, y + 0.4)]


def _shade(axes: Axes, overall: Iterable[tuple[str, float, float]]) -> None:
    """Shade and name whole rollouts, and shade their aborts."""
    for name, began, ended in overall:
        if name == "abort":
            axes.axvspan(began, ended, color=_COLORS[name], alpha=0.12)
        else:
            axes.axvspan(began, ended, color=_SHADE, alpha=0.03)
            axes.text(began, 1.01, f" {name}", fontsize=8, transform=axes.get_xaxis_transform())
