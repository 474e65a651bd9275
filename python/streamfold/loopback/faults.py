"""Faults in a box: the engine misbehaves as told, so that you can test your own client against it.

A script is a JSON object with ``rules``, and a ``seed`` for what is left to chance. A rule says which requests it is
for, and what happens to them::

    {
      "seed": 7,
      "rules": [
        {"kind": "status", "requests": 0, "status": 429, "headers": {"Retry-After": "0.2"}},
        {"kind": "silence", "every": 50, "after_events": [0, 5], "seconds": 2},
        {"kind": "die", "requests": 40, "after_events": 3, "seconds": 0.5},
        {"kind": "cut", "rate": 0.1, "how": "rst", "after_bytes": [0, 20000]}
      ]
    }

From the command line: ``streamfold serve --faults script.json``. In a test::

    with Loopback(faults=Faults.read("script.json")) as engine:
        ...
        assert engine.faults.done["cut"]  # how often it happened
        engine.faults = Faults([{"kind": "drop", "rate": 0.05}], seed=7)  # from now on; all counts begin again
        engine.faults = None

**Which requests.** All conditions of a rule must hold; a rule without any is for every request.

- ``path``: what is asked for, without the base path; by default where this engine generates, "/generate" or vLLM's
  "/inference/v1/generate". Each path counts its own requests.
- ``requests``: their numbers, one or a list. The first request is number 0.
- ``every``: every nth. 3 is for the requests 2, 5, 8 and so on.
- ``rate``: a share of the requests, from 0 to 1. Whether number i is among them depends on the script's seed, the
  rule's place in the script and i alone.
- ``rid``: what the request's id begins with, as the client has sent it.
- ``after_abort_all``: only so many seconds after all requests were aborted at most.
- ``times``: for so many requests at most.

**What happens.** In place of a number a pair ``[least, most]`` draws one for each request, by chance as ``rate`` does.
Times are in seconds, and null is for ever: until the client leaves. ``after_events`` counts the events of a stream,
the closing "[DONE]" too. A stream that is over before its fault is left alone, and is not counted in ``done``. Rules
that meet in one request act in their order, each on what the one before it left: put "cut" last.

Instead of an answer, on any path:

- ``status``: an HTTP ``status`` (500), with ``headers`` and a ``body``, a string or any JSON (else the engine's own);
  204 and 304 have none.
- ``drop``: the connection ends before a byte, by ``how``: "rst", which is a reset, or "fin".
- ``refuse``: the connection ends so, by ``how``, and for ``seconds`` (1) nobody listens: the system refuses connects.
  What runs goes on. (No server can refuse the connect that brought it the request, only those that follow.)
- ``die``: after ``after_events`` (0) of this answer the worker dies. All connections end, by ``how``, all requests are
  lost, connects are refused. It returns after ``seconds`` (1), empty, on the same port.
- ``no_answer``: nothing comes for ``seconds`` (null), not even headers.

Inside the engine, on the paths that generate, told in the engine's own words:

- ``queue_full``: turned away; in a stream that is an event with status 503 under HTTP 200.
- ``abort``: an abort that nobody asked for, at ``after_tokens`` (1). As ever one more token comes; 0: in the queue.
- ``retract_abort``: an abort of what was retracted, at ``after_tokens`` (1). Its event repeats everything, in
  incremental streams too.
- ``version``: at ``after_tokens`` (1) the engine's weight version becomes ``version`` (null: it counts up).
- ``park``: taken in, and left in the queue for ``seconds`` (null), or until it is aborted or all are continued.

In streams, "cut" and "drip" also in what is not streamed:

- ``silence``: after ``after_events`` (0) nothing comes for ``seconds`` (null).
- ``comments``: after ``after_events`` (0) only comments come for ``seconds`` (null), with a ``pause`` (0.05) between.
- ``drip``: ``size`` (16) bytes come in one write, chunk sizes included, and then a ``pause`` (0.01).
- ``split``: each event comes in chunks of ``size`` (1) bytes; of a pair each chunk draws its own.
- ``glue``: ``size`` (2) events come in one chunk.
- ``cut``: the connection ends, by ``how``: "rst" or "fin", after ``after_bytes`` of the body or ``after_events``; with
  neither, where the last chunk would be.
- ``error_event``: after ``after_events`` (0) an error comes, with ``message`` and ``code`` (500) in the shape of the
  release, or this ``payload``, any JSON; then "[DONE]", unless ``done`` is false.
- ``done_without_finish``: "[DONE]" comes in place of the terminal event, or after ``after_events``.
- ``double_event``: the event after ``after_events`` (1) comes twice.
- ``drop_event``: the event after ``after_events`` (1) is missing.
- ``shrink``: the event after ``after_events`` (1) holds ``tokens`` (1) less than the one before it.
- ``rewrite``: the event after ``after_events`` (1) tells another ``what``, "id" or "logprob", at ``position`` (0).

"shrink" and "rewrite" need a cumulative stream, "retract_abort" an engine that retracts; vLLM has neither.

What the model says is never disturbed: what was kept of a request can be gone on with, and the whole is what one
undisturbed request gives.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from streamfold.loopback import kinds, options, stream_kinds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from streamfold.loopback.answer import Answer
    from streamfold.loopback.kinds import Fault

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
