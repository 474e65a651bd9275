"""The rules of a script of faults: which requests meet which fault, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from streamfold.loopback.faults import options
from streamfold.loopback.faults import response as kinds
from streamfold.loopback.faults import stream as stream_kinds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from streamfold.loopback.faults.response import Fault
    from streamfold.loopback.http.answer import Answer

__all__ = ["KINDS", "PATHS", "Conditions", "Faults", "Rule"]

# Where engines generate: first what a rule is for that names no path.
PATHS = {"sglang": ("/generate",), "vllm": ("/inference/v1/generate", "/v1/completions")}

KINDS = {kind.kind: kind for kind in (*kinds.KINDS, *stream_kinds.KINDS)}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Which requests a rule is for."""

    path: str | None = field(default=None, metadata=options.path())
    requests: int | Sequence[int] | None = field(default=None, metadata=options.numbers())
    every: int | None = field(default=None, metadata=options.count(least=1, none=True, ranges="refused"))
    rate: float | None = field(default=None, metadata=options.number(most=1, none=True, ranges=False))
    rid: str | None = field(default=None, metadata=options.text(none=True))
    after_abort_all: float | None = field(default=None, metadata=options.number(none=True, ranges=False))
    times: int | None = field(default=None, metadata=options.count(least=1, none=True, ranges="refused"))


class Rule:
    """One rule of a script, checked: a kind of fault, its options, and its conditions."""

    def __init__(self, given: Mapping[str, Any], place: int = 0) -> None:
        """Read what was ``given`` at this place of a script. Raises ValueError, which names what is wrong."""
        if not isinstance(given, Mapping):
            msg = f"rule {place}: an object was expected, got {given!r}"
            raise ValueError(msg)
        name = given.get("kind")
        if not isinstance(name, str) or name not in KINDS:
            msg = f"rule {place}: unknown kind {name!r}; there are {', '.join(sorted(KINDS))}"
            raise ValueError(msg)
        self.kind = KINDS[name]
        self.place = place
        self._options, conditions = options.options(self.kind), options.options(Conditions)
        for key, value in given.items():
            option = self._options.get(key) or conditions.get(key)
            if key == "kind":
                continue
            if option is None:
                keys = f"{', '.join(self._options) or 'no key'} of its own, and {', '.join(conditions)}"
                msg = f"rule {place} ({name}): unknown key {key!r}; it takes {keys}"
                raise ValueError(msg)
            if not option.fits(value):
                msg = f"rule {place} ({name}): {key} must be {option.wanted}, got {value!r}"
                raise ValueError(msg)
        self.conditions = Conditions(**{key: value for key, value in given.items() if key in conditions})
        self._given = {key: given[key] for key in self._options if key in given}
        if not any(self._fits(engine) for engine in PATHS):
            sglang, vllm = (" and ".join(PATHS[engine]) for engine in ("sglang", "vllm"))
            msg = f"rule {place} ({name}): it is for {sglang}, not for {self.conditions.path}; in vLLM for {vllm}"
            raise ValueError(msg)

    def _fits(self, engine: str) -> bool:
        """Say whether a fault of this kind can befall what is asked for at its path."""
        path = self.conditions.path
        return self.kind.needs == "anything" or path is None or path in PATHS[engine]

    def check(self, engine: Literal["sglang", "vllm"], *, incremental: bool) -> None:
        """Raise ValueError if it makes no sense in this engine, writing in this mode."""
        if not self._fits(engine):
            reason = f"this engine generates at {' and '.join(PATHS[engine])}, not at {self.conditions.path}"
        elif engine == "vllm" and self.kind.needs == "cumulative":
            reason = "vLLM's streams repeat nothing, use a cumulative one of SGLang's"
        elif engine == "vllm" and self.kind.retracts:
            reason = "vLLM retracts no request for an abort, use SGLang"
        elif incremental and self.kind.needs == "cumulative":
            reason = "an incremental stream repeats nothing, use a cumulative one"
        else:
            return
        raise ValueError(f"rule {self.place} ({self.kind.kind}): {reason}")

    def holds(self, number: int, rids: Sequence[str], chance: random.Random, *, stream: bool) -> bool:
        """Say whether the rule is for the request of this number, as far as the request itself tells."""
        asked, numbers = self.conditions, self.conditions.requests
        return (
            (stream or self.kind.needs in {"anything", "generate"})
            and (numbers is None or number in (numbers if isinstance(numbers, Sequence) else [numbers]))
            and (asked.every is None or number % asked.every == asked.every - 1)
            and (asked.rid is None or any(rid.startswith(asked.rid) for rid in rids))
            and (asked.rate is None or chance.random() < asked.rate)
        )

    def make(self, answer: Answer, then: Fault | Answer, chance: random.Random, note: Callable[[str], None]) -> Fault:
        """Make the fault for one answer."""
        drawn = {key: self._options[key].draw(value, chance) for key, value in self._given.items()}
        return self.kind(answer=answer, then=then, chance=chance, note=note, **drawn)


class Faults:
    """A script: its rules, each a mapping as in JSON, and the seed of what is left to chance.

    It holds no state: engines that run it count for themselves. Raises ValueError for a rule that makes no sense.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), *, seed: int = 0) -> None:
        if not isinstance(seed, int):
            msg = f"seed must be a whole number, got {seed!r}"
            raise ValueError(msg)
        self.rules = tuple(Rule(rule, place) for place, rule in enumerate(rules))
        self.seed = seed

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Faults:
        """Read a script from a file. Raises OSError, and ValueError for what is no script."""
        try:
            script = json.loads(Path(path).read_bytes())
            if not isinstance(script, dict) or not isinstance(script.get("rules"), list):
                msg = 'an object with "rules", a list, was expected'
                raise ValueError(msg)
            unknown = sorted(script.keys() - {"seed", "rules"})
            if unknown:
                msg = f"unknown key {unknown[0]!r}; a script has rules and seed"
                raise ValueError(msg)
            return cls(script["rules"], seed=script.get("seed", 0))
        except ValueError as error:
            msg = f"{path}: {error}"
            raise ValueError(msg) from error

    def chance(self, rule: Rule, number: int) -> random.Random:
        """Give what is left to chance about the request of this number: the same in every run."""
        return random.Random(f"{self.seed}/{rule.place}/{number}")  # noqa: S311  # it has to be repeatable

    def check(self, engine: Literal["sglang", "vllm"], *, incremental: bool) -> None:
        """Raise ValueError if a rule makes no sense in this engine, writing in this mode."""
        for rule in self.rules:
            rule.check(engine, incremental=incremental)
