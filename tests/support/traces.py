"""Trace files: read as the format allows, and checked for what viewers need."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {"ph", "name", "ts", "pid", "tid"}


def records(path: Path) -> list[dict[str, Any]]:
    """All records, also of a file whose process was killed: the closing bracket may be missing, nothing else."""
    text = path.read_text(encoding="utf-8").rstrip()
    found: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
    for record in found:
        assert record.keys() >= KEYS
        assert record["ph"] in set("BEXiCM")
        assert record["ts"] >= 0
        assert ("dur" in record) == (record["ph"] == "X")
    return found


def lines(found: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Of each line, by its label, the spans and marks in their order: ``+name`` begins, ``-name`` ends.

    Checks that times never go back in a line, and that ends are those of what was begun last.
    """
    labels: dict[tuple[int, int], str] = {}
    shown: dict[str, list[str]] = defaultdict(list)
    begun: dict[tuple[int, int], list[str]] = defaultdict(list)
    last: dict[tuple[int, int], float] = defaultdict(float)
    for record in found:
        place, name = (record["pid"], record["tid"]), record["name"]
        if record["ph"] == "M":
            if name == "thread_name":
                labels[place] = record["args"]["name"]
            continue
        if record["ph"] in "BEi":
            assert record["ts"] >= last[place]
            last[place] = record["ts"]
        if record["ph"] == "B":
            begun[place].append(name)
        if record["ph"] == "E":
            assert begun[place].pop() == name
        if record["ph"] != "C":
            shown[labels[place]].append({"B": "+", "E": "-", "X": "=", "i": "!"}[record["ph"]] + name)
    assert not any(begun.values()), begun
    return dict(shown)


def args_of(found: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    """What the records of that kind and name tell."""
    return [record["args"] for record in found if (record["ph"], record["name"]) == (kind, name)]


def phases(*names: str) -> list[str]:
    """The records of a call with these phases, as :func:`lines` gives them."""
    return ["+call", *(sign + name for name in names for sign in "+-"), "-call"]
