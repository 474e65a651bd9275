"""Engines that misbehave in every way there is, a client that is watched, and what must not be left of the two.

The loopback engine's mock model generates the same tokens whatever happens to the requests, so there is one right
result for each sample: that of one undisturbed call. At any moment the sample must be a prefix of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamfold import Call, Client, Experts, Limits, Retries, Timeouts
from streamfold.client.attempt import Attempt
from streamfold.client.attempt_state import Action
from streamfold.client.runner import CallRunner
from streamfold.loopback import Faults, Loopback, Router
from support.leftovers import open_files, settled
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import pytest

SHAPE = Experts(4, 2, 16, "uint8")  # of the engine's model
TOP_P: dict[str, Any] = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
ALL = 1 << 20  # of what has happened, an engine remembers the last so many

# What engines do to requests, and the rate of each.
RULES: tuple[dict[str, Any], ...] = (
    {"kind": "status", "rate": 0.02, "status": [500, 504]},
    {"kind": "status", "rate": 0.02, "status": 429, "headers": {"Retry-After": "0.02"}},
    {"kind": "queue_full", "rate": 0.03},
    {"kind": "drop", "rate": 0.02, "how": "rst"},
    {"kind": "drop", "rate": 0.02, "how": "fin"},
    {"kind": "no_answer", "rate": 0.02},
    {"kind": "park", "rate": 0.02},
    {"kind": "abort", "rate": 0.05, "after_tokens": [0, 40]},
    {"kind": "retract_abort", "rate": 0.05, "after_tokens": [1, 40]},
    {"kind": "version", "rate": 0.1, "after_tokens": [1, 20]},
    {"kind": "silence", "rate": 0.03, "after_events": [0, 12]},
    {"kind": "comments", "rate": 0.03, "after_events": [0, 12], "pause": 0.02},
    {"kind": "error_event", "rate": 0.04, "after_events": [0, 12]},
    {"kind": "done_without_finish", "rate": 0.02},
    {"kind": "done_without_finish", "rate": 0.02, "after_events": [0, 12]},
    {"kind": "double_event", "rate": 0.06, "after_events": [0, 12]},
    # A stream without its first event is an error for the caller: nothing had come that could be gone on with.
    {"kind": "drop_event", "rate": 0.06, "after_events": [1, 12]},
    {"kind": "split", "rate": 0.2, "size": [1, 60]},
    {"kind": "glue", "rate": 0.2, "size": [2, 5]},
    {"kind": "drip", "rate": 0.05, "size": [40, 400], "pause": 0.001},
    {"kind": "cut", "rate": 0.03, "how": "rst", "after_bytes": [0, 8000]},
    {"kind": "cut", "rate": 0.03, "how": "fin", "after_bytes": [0, 8000]},
    {"kind": "cut", "rate": 0.03, "how": "rst", "after_events": [0, 12]},
    {"kind": "cut", "rate": 0.02, "how": "fin"},
)
CUMULATIVE_RULES: tuple[dict[str, Any], ...] = (
    {"kind": "shrink", "rate": 0.06, "after_events": [1, 12], "tokens": [1, 3]},
    {"kind": "rewrite", "rate": 0.04, "after_events": [1, 12], "what": "id"},
    {"kind": "rewrite", "rate": 0.04, "after_events": [1, 12], "what": "logprob"},
)
# These take requests along that have left and were not read.
DYING_RULES: tuple[dict[str, Any], ...] = (
    {"kind": "refuse", "rate": 0.03, "seconds": 0.05},
    {"kind": "die", "rate": 0.03, "after_events": [0, 10], "seconds": 0.1},
)


@dataclass(frozen=True)
class Wire:
    """How engines write, whether there are two of them behind a router, and which rules they follow."""

    name: str
    engine: dict[str, Any]
    behind_router: bool = False
    dying: bool = False
    loop: str = "asyncio"

    @property
    def rules(self) -> tuple[dict[str, Any], ...]:
        more = () if self.engine.get("incremental") else CUMULATIVE_RULES
        return (*(DYING_RULES if self.dying else ()), *more, *RULES)

    @property
    def kinds(self) -> set[str]:
        return {rule["kind"] for rule in self.rules}

    @property
    def tells_side_data(self) -> bool:
        return self.engine.get("frontend") != "rust"


# leave_delay None: the engine never notices that a client has left.
WIRES = (
    Wire("python incremental", {"incremental": True, "leave_delay": None}),
    Wire("python cumulative", {"tokens_per_step": 3}, True),
    Wire("rust incremental", {"incremental": True, "frontend": "rust", "stream_interval": 2}, True, loop="uvloop"),
    Wire("rust cumulative", {"frontend": "rust", "shuffle_keys": 5}, False, True, "uvloop"),
    Wire("no text", {"incremental": True, "skip_tokenizer_init": True, "tokens_per_step": 2}, True, True),
)


@dataclass
class Site:
    """Engines at work, what is in front of them, and what they have done up to now."""

    wire: Wire
    engines: list[Loopback]
    url: str
    earlier: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> Counter[str]:
        """Faults that happened, by kind."""
        return sum((engine.faults.done for engine in self.engines), self.earlier)

    def follow(self, kinds: set[str]) -> None:
        """From now on follow only the rules of these kinds, and so more often."""
        self.earlier = self.done
        rules = [rule for rule in self.wire.rules if rule["kind"] in kinds]
        faults = Faults([{**rule, "rate": 0.6 / len(rules)} for rule in rules])
        for engine in self.engines:
            engine.faults = faults

    @property
    def one(self) -> Loopback:
        """Any engine: their model is the same."""
        return self.engines[0]

    def asked(self) -> list[str]:
        """The ids of all requests that engines were asked to generate for; behind a router one may come to several."""
        seen = [request for engine in self.engines for request in engine.seen() if request.path == "/generate"]
        return [request.json()["rid"] for request in seen if request.body]

    def told(self) -> set[str]:
        """The ids that somebody has asked an engine to abort."""
        return {rid for engine in self.engines for rid in engine.stats().aborts}

    async def comes_to_rest(self) -> None:
        """Wait until all engines listen, and none has a request or a connection."""
        await until(lambda: all(_is_idle(engine) for engine in self.engines))
        await until(lambda: all(_listens(engine) for engine in self.engines))


def _listens(engine: Loopback) -> bool:
    assert engine._server is not None
    return engine._server._listening


def _is_idle(engine: Loopback) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == stats.open_connections == 0


@contextlib.contextmanager
def at(wire: Wire, *, seed: int = 1, faults: bool = True, **options: Any) -> Iterator[Site]:
    """Run the engines of a wire, with a script of its rules each."""
    given = {"token_rate": 800, "stop_probability": 1 / 80, "keep_requests": ALL, **wire.engine, **options}
    rules = wire.rules if faults else ()
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Loopback(**given, faults=Faults(rules, seed=seed + i)))
            for i in range(2 if wire.behind_router else 1)
        ]
        url = engines[0].url
        if wire.behind_router:
            url = stack.enter_context(Router(engines, tries=2, down_seconds=0.05)).url
        yield Site(wire, engines, url)


class Watched(Client):
    """A client that remembers its calls, and which of them a task of ours is waiting for."""

    def __init__(self, url: str, **options: Any) -> None:
        patient = Timeouts(first_token=0.3, next_token=0.15, drain=0.3)
        soon = Retries(first=0.01, longest=0.1)
        super().__init__(url, **{"timeouts": patient, "retries": soon, "limits": Limits(calls=24), **options})
        self.calls: list[Call] = []
        self.latest: dict[asyncio.Task[Any] | None, Call] = {}  # by the task that waits for it

    def start(self, *args: Any, **more: Any) -> Call:
        call = super().start(*args, **more)
        self.calls.append(call)
        self.latest[asyncio.current_task()] = call
        return call

    @property
    def tries(self) -> int:
        return sum(call.tries for call in self.calls)

    @property
    def tokens(self) -> int:
        """Tokens of all calls."""
        return sum(call.token_count for call in self.calls)


class Departures(list[str]):
    """The ids of requests that have left.

    Attributes:
        again: how many may have left once more, as a kept connection was lost: without another try.
    """

    again = 0


def departures(monkeypatch: pytest.MonkeyPatch) -> Departures:
    """All requests that leave from now on."""
    left = Departures()
    begin = CallRunner._try

    def counted(runner: CallRunner, *, fresh: bool = False) -> None:
        left.again += fresh
        begin(runner, fresh=fresh)

    monkeypatch.setattr(CallRunner, "_try", counted)
    send = Attempt._actions[Action.SEND]

    def noted(attempt: Attempt) -> None:
        send(attempt)
        if attempt.sent_at < math.inf:
            left.append(attempt.rid)

    monkeypatch.setitem(Attempt._actions, Action.SEND, noted)
    return left


@contextlib.asynccontextmanager
async def nothing_is_left(site: Site, *clients: Client) -> AsyncIterator[None]:
    """Whatever is done inside: no task, descriptor, place, connection or work for an engine is left at its end."""
    for client in clients:
        await client.load()
    await site.comes_to_rest()
    tasks, files = await settled()
    yield
    await site.comes_to_rest()
    await until(lambda: asyncio.all_tasks() == tasks)
    await until(lambda: open_files() <= files)
    for client in clients:
        assert await client.load() == 0
        assert client.running == []
        session = client._session
        assert session is not None
        assert (session.slots.free, session.slots.waiting) == (client._limits.calls, 0)
