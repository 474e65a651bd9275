"""For tests of the loop: groups, a source that keeps account, generators without an engine, and what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from typing import TYPE_CHECKING, Any

from streamfold.client._internal import Totals
from streamfold.rollout.rollout import Rollout, RolloutConfig
from streamfold.samples.sample import Sample
from support.replay import PROMPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from streamfold.rollout.buffer import Buffer

Status = Sample.Status
LIMIT = 60.0  # seconds after which something hangs


def groups_of(count: int, size: int = 2, first: int = 0) -> list[list[Sample]]:
    """So many groups of fresh samples, each with a prompt of its own."""
    return [
        [Sample(group_index=g, index=g * size + i, tokens=[*PROMPT, 100 + g]) for i in range(size)]
        for g in range(first, first + count)
    ]


def endless(size: int = 2) -> Iterable[list[Sample]]:
    """Groups without end."""
    first = 0
    while True:
        yield from groups_of(1, size, first)
        first += 1


def snapshot(sample: Any) -> dict[str, Any]:
    """All that a sample is at this moment."""
    return copy.deepcopy(vars(sample))


class HostSource:
    """A host's data source: it gives and takes, and keeps no account."""

    def __init__(self, groups: Iterable[list[Any]]) -> None:
        self._groups = iter(groups)
        self.back: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups, self.back = self.back[:num_samples], self.back[num_samples:]
        for group in self._groups:
            groups.append(group)
            if len(groups) >= num_samples:
                break
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        self.back += samples


class NoEngine:
    """A client of one engine that has nothing to do."""

    retried = 0

    def __client_totals__(self) -> Totals:
        return Totals()

    async def workers(self) -> list[str]:
        return ["http://127.0.0.1:9"]

    def __init__(self) -> None:
        self.sweeps = 0
        self.on_sweep: Callable[[], object] = lambda: None

    async def abort_engines(self, seconds: float = 30.0) -> bool:
        assert seconds > 0
        self.sweeps += 1
        self.on_sweep()
        return True


class Scripted:
    """Generates by script: for each sample, by its index, how many tokens come, and how it ends.

    ``end`` is a status, an exception to raise, or ``"hang"``: it waits until it is cut. ``wait`` seconds before that.
    What has no script is COMPLETED with two tokens at once. Each try is noted in ``asked``.
    """

    abort_mode: Any = "request"

    def __init__(self, script: dict[int, Any] | None = None, wait: float = 0.0) -> None:
        self.script = script or {}
        self.wait = wait
        self.asked: list[int] = []
        self.params: list[dict[str, Any]] = []
        self.running = 0
        self.most = 0

    async def __call__(self, sample: Any, params: dict[str, Any], *, aborted: Callable[[], bool]) -> Any:
        self.asked.append(sample.index)
        assert not aborted(), "nothing is begun once an abort has come"
        self.params.append(params)
        self.running += 1
        self.most = max(self.most, self.running)
        tokens, end = self.script.get(sample.index, (2, Status.COMPLETED))
        try:
            await asyncio.sleep(self.wait)
            if end == "hang":
                await asyncio.Event().wait()
            append(sample, tokens)
        except asyncio.CancelledError:
            append(sample, tokens)
            sample.status = Status.ABORTED
            raise
        finally:
            self.running -= 1
        if isinstance(end, Exception):
            sample.status = Status.ABORTED
            raise end
        sample.status = end
        return sample


def append(sample: Any, tokens: int) -> None:
    """Write so many tokens to a sample, which go on counting."""
    first = sample.response_length + 1
    ids = list(range(first, first + tokens))
    sample.append_response_tokens(None, tokens=ids, log_probs=[-0.5 * i for i in ids], text="x" * tokens)


class Counted:
    """A reward that notes what it was asked, and the text that it judged."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    async def __call__(self, sample: Any) -> float:
        self.asked.append((sample.index, sample.response))
        return float(len(sample.response))


def rollout(generate: Any = None, *, client: Any = None, **options: Any) -> Rollout:
    """A rollout over a scripted generator; what is no part of it is a field of its configuration."""
    parts = {key: options.pop(key) for key in ("reward", "filter", "sample_filter", "on_abort") if key in options}
    config = RolloutConfig(**{"sampling_params": {"max_new_tokens": 8}, "progress": False, **options})
    engines: Any = client if client is not None else NoEngine()
    return Rollout(engines, config, generate=generate, **parts)


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Whatever is done inside, no task, timer of ours or thread is left at its end."""
    loop = asyncio.get_running_loop()
    tasks, threads = asyncio.all_tasks(), threading.active_count()
    try:
        yield
    finally:
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - tasks
        assert not left, left
        assert threading.active_count() <= threads
        timers = [handle for handle in getattr(loop, "_scheduled", ()) if not handle.cancelled()]
        assert not [handle for handle in timers if "streamfold" in repr(handle)], timers


async def bounded(work: Any) -> Any:
    """Await what must not hang."""
    return await asyncio.wait_for(work, LIMIT)


def everywhere(buffer: Buffer, *given: list[list[Any]]) -> list[int]:
    """The indices of the groups that are given or wait, sorted: nothing may be missing, nothing doubled."""
    waiting = buffer.take(len(buffer))
    buffer.put(waiting)
    return sorted(group[0].group_index for groups in (*given, waiting) for group in groups)
