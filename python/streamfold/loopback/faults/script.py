"""Scripts of faults: the rules that say which requests are disturbed, and how. ``streamfold serve --faults``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamfold.loopback.faults import options
from streamfold.loopback.faults.response import KINDS as RESPONSE_KINDS
from streamfold.loopback.faults.stream import KINDS as STREAM_KINDS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from streamfold.loopback.core.config import EngineName
    from streamfold.loopback.faults.fault import Fault, FaultTarget
    from streamfold.loopback.http.response_writer import ResponseWriter

__all__ = ["KINDS", "PATHS", "Conditions", "Faults", "Rule"]

# The paths that generate; the first one is a rule's default.
PATHS: Mapping[str, tuple[str, ...]] = {"sglang": ("/generate",), "vllm": ("/inference/v1/generate", "/v1/completions")}

KINDS = {kind.kind: kind for kind in (*RESPONSE_KINDS, *STREAM_KINDS)}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a rule: the requests that it applies to."""

    path: str | None = field(default=None, metadata=options.path())
    requests: int | Sequence[int] | None = field(default=None, metadata=options.numbers())
    every: int | None = field(default=None, metadata=options.count(least=1, none=True, ranges="refused"))
    rate: float | None = field(default=None, metadata=options.number(most=1, none=True, ranges=False))
    rid: str | None = field(default=None, metadata=options.text(none=True))
    after_abort_all: float | None = field(default=None, metadata=options.number(none=True, ranges=False))
    times: int | None = field(default=None, metadata=options.count(least=1, none=True, ranges="refused"))

    def hold(self, number: int, rids: Sequence[str], chance: random.Random) -> bool:
        """Return whether the conditions on the request itself hold: its number, its ids, and the rate."""
        return (
            self._names(number)
            and (self.rid is None or any(rid.startswith(self.rid) for rid in rids))
            and (self.rate is None or chance.random() < self.rate)
        )

    def _names(self, number: int) -> bool:
        numbers = self.requests if isinstance(self.requests, Sequence) else [self.requests]
        return (self.requests is None or number in numbers) and (
            self.every is None or number % self.every == self.every - 1
        )


class Rule:
    """One checked rule of a script: a kind of fault, its options and its conditions."""

    def __init__(self, given: Mapping[str, Any], place: int = 0) -> None:
        """Check the rule at position ``place`` of a script. Raises ValueError, which names the wrong key."""
        if not isinstance(given, Mapping):
            msg = f"rule {place}: an object was expected, got {given!r}"
            raise ValueError(msg)
        name = given.get("kind")
        if not isinstance(name, str) or name not in KINDS:
            msg = f"rule {place}: unknown kind {name!r}; there are {', '.join(sorted(KINDS))}"
            raise ValueError(msg)
        self.kind: type[Fault] = KINDS[name]
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
        self.conditions: Conditions = Conditions(**{key: value for key, value in given.items() if key in conditions})
        self._given = {key: given[key] for key in self._options if key in given}
        if not any(self._fits(engine) for engine in PATHS):
            sglang, vllm = (" and ".join(PATHS[engine]) for engine in ("sglang", "vllm"))
            msg = f"rule {place} ({name}): it is for {sglang}, not for {self.conditions.path}; in vLLM for {vllm}"
            raise ValueError(msg)

    def _fits(self, engine: str) -> bool:
        """Return whether this kind of fault can disturb requests to its path."""
        path = self.conditions.path
        return self.kind.needs == "anything" or path is None or path in PATHS[engine]

    def check(self, engine: EngineName, *, incremental: bool) -> None:
        """Raise ValueError if it is impossible in this engine and stream mode."""
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
        """Return whether it applies to a request with this number and these ids, streamed or not."""
        fits = stream or self.kind.needs in {"anything", "generate"}
        return fits and self.conditions.hold(number, rids, chance)

    def make(
        self,
        target: FaultTarget,
        response: ResponseWriter,
        following: Fault | ResponseWriter,
        chance: random.Random,
        note: Callable[[str], None],
    ) -> Fault:
        """Make the fault of one response; the arguments are the fields of :class:`Fault`."""
        drawn = {key: self._options[key].draw(value, chance) for key, value in self._given.items()}
        return self.kind(target=target, response=response, following=following, chance=chance, note=note, **drawn)


class Faults:
    """A script of faults: its rules, each a mapping as in JSON, and the seed of all random choices.

    It has no state: engines that run it count their requests themselves. ``python -m pydoc streamfold.loopback.faults``
    lists the kinds and conditions.

    Raises:
        ValueError: a rule has an unknown key, or a value that does not fit.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), *, seed: int = 0) -> None:
        if not isinstance(seed, int):
            msg = f"seed must be a whole number, got {seed!r}"
            raise ValueError(msg)
        self.rules: tuple[Rule, ...] = tuple(Rule(rule, place) for place, rule in enumerate(rules))
        self.seed = seed

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Faults:
        """Read a script from a JSON file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a valid script.
        """
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
        """Return the random generator of a rule and the request with this number: the same in every run."""
        return random.Random(f"{self.seed}/{rule.place}/{number}")  # noqa: S311  # it has to be repeatable

    def check(self, engine: EngineName, *, incremental: bool) -> None:
        """Raise ValueError if a rule is impossible in this engine and stream mode."""
        for rule in self.rules:
            rule.check(engine, incremental=incremental)
