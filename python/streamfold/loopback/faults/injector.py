"""Decides by the rules of a fault script which requests get which fault, and counts the injected faults."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.faults.script import PATHS, Faults

if TYPE_CHECKING:
    import random

    from streamfold.loopback.core.config import EngineName
    from streamfold.loopback.faults.script import Rule

__all__ = ["Injector"]


class Injector:
    """A script of faults at work in one engine: which requests it chose, and how often each kind happened."""

    def __init__(self, faults: Faults | None, engine: EngineName = "sglang") -> None:
        self.faults: Faults = faults or Faults()
        self._default_path = PATHS[engine][0]
        self._requests: Counter[str] = Counter()  # by path
        self._chosen: Counter[int] = Counter()  # by position of the rule
        self._done: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def done(self) -> Counter[str]:
        """Number of responses that each kind of fault has disturbed; may be read from any thread."""
        with self._lock:
            return self._done.copy()

    def note(self, kind: str) -> None:
        """Count a fault that happened."""
        with self._lock:
            self._done[kind] += 1

    def choose(
        self, path: str, body: bytes, since_abort_all: float, header_rid: str = ""
    ) -> list[tuple[Rule, random.Random]]:
        """Count the next request to a path; return the rules that apply to it, each with its random generator."""
        number = self._requests[path]
        self._requests[path] += 1
        rids, stream = _ids_and_stream(body, header_rid)
        found: list[tuple[Rule, random.Random]] = []
        for rule in self.faults.rules:
            chance = self.faults.chance(rule, number)
            if self._is_open(rule, path, since_abort_all) and rule.holds(number, rids, chance, stream=stream):
                self._chosen[rule.place] += 1
                found.append((rule, chance))
        return found

    def _is_open(self, rule: Rule, path: str, since_abort_all: float) -> bool:
        """Return whether the conditions hold that depend on the path and on what the engine did before."""
        conditions = rule.conditions
        return (
            path == (conditions.path or self._default_path)
            and (conditions.after_abort_all is None or since_abort_all <= conditions.after_abort_all)
            and (conditions.times is None or self._chosen[rule.place] < conditions.times)
        )


def _ids_and_stream(body: bytes, header_rid: str) -> tuple[list[str], bool]:
    """Read the ids of a request and whether it is streamed, in any engine's wire format."""
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        return [], False
    rid = header_rid or parsed.get("request_id") or parsed.get("rid")
    rids = rid if isinstance(rid, list) else [rid]
    return [rid for rid in rids if isinstance(rid, str)], bool(parsed.get("stream"))
