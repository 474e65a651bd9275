"""The kinds of faults that disturb a stream: its events, and the bytes that they travel in."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.reply import DONE
from streamfold.loopback.faults import options
from streamfold.loopback.faults.response import Fault

if TYPE_CHECKING:
    from streamfold.loopback.http.answer import Ending

__all__ = ["KINDS"]

_DATA = b"data: "


def _frame(event: bytes) -> dict[str, Any]:
    """Read an event; what holds no tokens is an empty object, and so is what is split or glued already."""
    if event == DONE or not event.startswith(_DATA):
        return {}
    try:
        frame: dict[str, Any] = orjson.loads(event.removeprefix(_DATA))
    except orjson.JSONDecodeError:
        return {}
    return frame


def _finishes(frame: dict[str, Any]) -> bool:
    """Say whether an event is a terminal one, of any wire."""
    told = [frame.get("meta_info", {}), *frame.get("choices", [])]
    return any(part.get("finish_reason") is not None for part in told)


def _event(frame: object) -> bytes:
    return _DATA + orjson.dumps(frame) + b"\n\n"


# When


@dataclass(kw_only=True)
class _Silence(Fault):
    """Send nothing for ``seconds`` after so many events; 0: after the headers."""

    kind = "silence"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events:
            self.happened()
            await self.answer.pause(self.seconds)
        await super().event(data)


@dataclass(kw_only=True)
class _Comments(Fault):
    """Send nothing but comments, one every ``pause`` seconds, for ``seconds`` after so many events."""

    kind = "comments"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=None, metadata=options.number(none=True))
    pause: float = field(default=0.05, metadata=options.number())

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events:
            self.happened()
            clock = asyncio.get_running_loop().time
            end = clock() + (math.inf if self.seconds is None else self.seconds)
            while clock() < end and not self.answer.gone.is_set():
                await self.then.event(b": keep-alive\n\n")
                await self.answer.pause(self.pause)
        await super().event(data)


@dataclass(kw_only=True)
class _Drip(Fault):
    """Send so many bytes in one write, chunk sizes included, with a pause after each."""

    kind = "drip"
    needs = "generate"
    size: int = field(default=16, metadata=options.count(least=1))
    pause: float = field(default=0.01, metadata=options.number())

    async def begin(self) -> bool:
        self.happened()
        self.answer.pace = (self.size, self.pause)
        return True


# Where the bytes are cut


@dataclass(kw_only=True)
class _Split(Fault):
    """Send each event in several chunks of ``size`` bytes; each of its own size, if that is a range."""

    kind = "split"
    size: int | tuple[int, int] = field(default=1, metadata=options.count(least=1, ranges="kept"))

    async def event(self, data: bytes) -> None:
        if self.events == 0:
            self.happened()
        self.events += 1
        least, most = (self.size, self.size) if isinstance(self.size, int) else self.size
        start = 0
        while start < len(data):
            end = start + least + math.floor(self.chance.random() * (most + 1 - least))
            await self.then.event(data[start:end])
            start = end


@dataclass(kw_only=True)
class _Glue(Fault):
    """Send so many events in one chunk, "[DONE]" too; the last chunk may hold fewer."""

    kind = "glue"
    size: int = field(default=2, metadata=options.count(least=2))
    held: list[bytes] = field(default_factory=list, init=False)

    async def event(self, data: bytes) -> None:
        self.held.append(data)
        if len(self.held) == self.size:
            await self._release()

    async def partial(self, data: bytes, size: int) -> None:
        await self._release()
        await super().partial(data, size)

    async def end(self) -> None:
        await self._release()
        await super().end()

    async def _release(self) -> None:
        if len(self.held) > 1:
            self.happened()
        if self.held:
            held, self.held = self.held, []
            await super().event(b"".join(held))


@dataclass(kw_only=True)
class _Cut(Fault):
    """End the connection after so many bytes of the body, or events, or else where the last chunk would be.

    ``how`` is "rst", a reset, or "fin". Bytes may end inside an event, which is then a chunk that breaks off.
    """

    kind = "cut"
    needs = "generate"
    how: Ending = field(default="rst", metadata=options.choice("rst", "fin"))
    after_bytes: int | None = field(default=None, metadata=options.count(none=True))
    after_events: int | None = field(default=None, metadata=options.count(none=True))
    size: int = field(default=0, init=False)  # of what was let through, in bytes

    async def event(self, data: bytes) -> None:
        left = len(data) if self.after_bytes is None else self.after_bytes - self.size
        if self.events == self.after_events:
            await self._cut()
        elif left < len(data):
            if left:
                await self.then.partial(data[:left], len(data))
            await self._cut()
        else:
            self.size += len(data)
            await super().event(data)

    async def end(self) -> None:
        # An answer that was shorter than that is left alone.
        if self.after_events is None and self.after_bytes in {None, self.size}:
            await self._cut()
        else:
            await super().end()

    async def _cut(self) -> None:
        self.happened()
        await self.answer.hang_up(self.how)


# What the events say


@dataclass(kw_only=True)
class _ErrorEvent(Fault):
    """After so many events send an error event, then "[DONE]" unless ``done`` is false, and end the stream well.

    It has the shape of the release, with ``message`` and ``code``, or is ``payload``, any JSON.
    """

    kind = "error_event"
    after_events: int = field(default=0, metadata=options.count())
    message: str = field(default="The engine was told to fail.", metadata=options.text())
    code: int = field(default=500, metadata=options.count())
    payload: Any = field(default=None, metadata=options.anything())
    done: bool = field(default=True, metadata=options.flag())

    async def event(self, data: bytes) -> None:
        if self.events != self.after_events or data == DONE:
            await super().event(data)
            return
        self.happened()
        dialect = self.answer.engine.config.dialect
        error = dialect.error_event(self.message, self.code) if self.payload is None else _event(self.payload)
        await self.then.event(error)
        if self.done:
            await self.then.event(DONE)
        await self.end()


@dataclass(kw_only=True)
class _DoneWithoutFinish(Fault):
    """Leave the terminal event out, or end with "[DONE]" after so many events."""

    kind = "done_without_finish"
    after_events: int | None = field(default=None, metadata=options.count(none=True))

    async def event(self, data: bytes) -> None:
        if _finishes(_frame(data)):
            self.happened()
        elif self.events == self.after_events and data != DONE:
            self.happened()
            await self.then.event(DONE)
            await self.end()
        else:
            await super().event(data)


@dataclass(kw_only=True)
class _DoubleEvent(Fault):
    """Send the event that comes after so many twice."""

    kind = "double_event"
    after_events: int = field(default=1, metadata=options.count())

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events and data != DONE:
            self.happened()
            await self.then.event(data)
        await super().event(data)


@dataclass(kw_only=True)
class _DropEvent(Fault):
    """Leave the event that comes after so many out."""

    kind = "drop_event"
    after_events: int = field(default=1, metadata=options.count())

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events and data != DONE:
            self.happened()
            self.events += 1
        else:
            await super().event(data)


@dataclass(kw_only=True)
class _Shrink(Fault):
    """Let the event that comes after so many hold ``tokens`` less than the one before it, in its counters too."""

    kind = "shrink"
    needs = "cumulative"
    after_events: int = field(default=1, metadata=options.count(least=1))
    tokens: int = field(default=1, metadata=options.count(least=1))
    before: int = field(default=0, init=False)  # tokens in the event before

    async def event(self, data: bytes) -> None:
        frame = _frame(data)
        if "meta_info" in frame:
            count = frame["meta_info"]["completion_tokens"]
            if self.events == self.after_events:
                self.happened()
                data = _event(_shrunk(frame, max(self.before - self.tokens, 0)))
            self.before = count
        await super().event(data)


@dataclass(kw_only=True)
class _Rewrite(Fault):
    """Let the event that comes after so many tell another ``what``, "id" or "logprob", at a position that was told."""

    kind = "rewrite"
    needs = "cumulative"
    after_events: int = field(default=1, metadata=options.count(least=1))
    position: int = field(default=0, metadata=options.count())
    what: str = field(default="id", metadata=options.choice("id", "logprob"))

    async def event(self, data: bytes) -> None:
        frame = _frame(data)
        if self.events == self.after_events and self._rewrite(frame):
            self.happened()
            data = _event(frame)
        await super().event(data)

    def _rewrite(self, frame: dict[str, Any]) -> bool:
        """Change the frame; whether it reaches that far."""
        ids = frame.get("output_ids", [])
        pairs = frame.get("meta_info", {}).get("output_token_logprobs", [])
        here, rewrites_id = self.position, self.what == "id"
        if here >= len(ids if rewrites_id else pairs):
            return False
        if not rewrites_id:
            pairs[here][0] = (pairs[here][0] or 0.0) - 1.0
            return True
        ids[here] ^= 1
        if here < len(pairs):
            pairs[here][1] = ids[here]
        return True


_PER_TOKEN = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
_COUNTERS = ("output_token_logprobs_length", "output_token_sampling_mask_length", "completion_tokens")


def _shrunk(frame: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Give an event as if there were only so many tokens; its text stays."""
    meta = dict(frame["meta_info"])
    meta |= {key: meta[key][:tokens] for key in _PER_TOKEN if key in meta}
    meta |= {key: tokens for key in _COUNTERS if key in meta}
    return {**frame, "output_ids": frame.get("output_ids", [])[:tokens], "meta_info": meta}


KINDS: tuple[type[Fault], ...] = (
    _Silence,
    _Comments,
    _Drip,
    _Split,
    _Glue,
    _Cut,
    _ErrorEvent,
    _DoneWithoutFinish,
    _DoubleEvent,
    _DropEvent,
    _Shrink,
    _Rewrite,
)
