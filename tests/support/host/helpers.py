"""Generate functions, rewards and shorthands for tests with the stand-in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.host.arguments import arguments

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from typing_extensions import Self

    from support.host.slime.utils.types import Sample

LIMIT = 60.0  # seconds after which something hangs


def nowhere(**settings: Any) -> SimpleNamespace:
    """Arguments for tests without an engine."""
    return arguments("http://127.0.0.1:9", **settings)


async def until(true: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not true():  # noqa: ASYNC110  # it has no event to wait for
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), LIMIT)


@dataclass
class Waiting:
    """A generator that writes two tokens when it is cancelled, and ends only then."""

    abort_mode: str = "request"
    running: int = 0
    cancels: int = 0

    def __deepcopy__(self, memo: object) -> Self:
        """Stay the same one in every copy of a prompt."""
        return self

    async def __call__(self, args: SimpleNamespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        self.running += 1
        sample.tokens = sample.tokens or [300]
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancels += 1
            append(sample, args, [301, 302], text=" of and")
            raise
        finally:
            self.running -= 1
        return sample


class Scripted:
    """A generator without an engine: for each sample, by its index, how many tokens it generates and how it
    ends, try by try.

    It ends with a status, an exception to raise, or ``"hang"``: it waits until it is cancelled. What has no script is
    COMPLETED with two tokens; the last try of a script is repeated.
    """

    def __init__(self, script: dict[int, list[tuple[int, Any]]] | None = None, abort_mode: str = "request") -> None:
        self.script = script or {}
        self.abort_mode = abort_mode
        self.calls: list[int] = []
        self.running = 0

    def __deepcopy__(self, memo: object) -> Self:
        """Stay the same one in every copy of a prompt."""
        return self

    async def __call__(self, args: SimpleNamespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        assert sample.index is not None
        tries = self.script.get(sample.index, [(2, sample.Status.COMPLETED)])
        tokens, end = tries[min(self.calls.count(sample.index), len(tries) - 1)]
        self.calls.append(sample.index)
        self.running += 1
        sample.tokens = sample.tokens or [300]
        sampling_params["max_new_tokens"] -= 1  # as some generate functions do: it is their copy
        try:
            await asyncio.sleep(0)
            append(sample, args, [301] * tokens, text="x" * tokens)
            if end == "hang":
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        if isinstance(end, Exception):
            raise end
        sample.status = end
        return sample


class Rewards:
    """A reward function that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Sample] = []

    async def __call__(self, args: SimpleNamespace, sample: Sample) -> float:
        self.calls.append(sample)
        return float(len(self.calls))


def append(sample: Sample, args: Any, tokens: list[int], **more: Any) -> None:
    sample.append_response_tokens(args, tokens=tokens, log_probs=[-0.5] * len(tokens), **more)
