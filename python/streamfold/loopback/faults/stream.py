"""Faults in a stream: they change when events are sent, how they are chunked, or what they contain."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.reply import DONE
from streamfold.loopback.faults import options
from streamfold.loopback.faults.fault import Fault

if TYPE_CHECKING:
    from streamfold.loopback.http.response_writer import ConnectionEnd

__all__ = ["KINDS"]

_DATA = b"data: "


def _frame(event: bytes) -> dict[str, Any]:
    """Parse an event; "[DONE]", comments, and events that are split or joined already, give an empty object."""
    if event == DONE or not event.startswith(_DATA):
        return {}
    try:
        frame: dict[str, Any] = orjson.loads(event.removeprefix(_DATA))
    except orjson.JSONDecodeError:
        return {}
    return frame


def _finishes(frame: dict[str, Any]) -> bool:
    """Return whether an event is a terminal one, in any engine's wire format."""
    parts = [frame.get("meta_info", {}), *frame.get("choices", [])]
    return any(part.get("finish_reason") is not None for part in parts)


def _event(frame: object) -> bytes:
    return _DATA + orjson.dumps(frame) + b"\n\n"


# When events are sent


@dataclass(kw_only=True)
class _Silence(Fault):
    """Send nothing for ``seconds`` after ``after_events`` events; 0: after the headers."""

    kind = "silence"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=None, metadata=options.number(none=True))

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events:
            self.happened()
            await self.response.pause(self.seconds)
        await super().event(data)


@dataclass(kw_only=True)
class _Comments(Fault):
    """Send only comments, one every ``pause`` seconds, for ``seconds`` after ``after_events`` events."""

    kind = "comments"
    after_events: int = field(default=0, metadata=options.count())
    seconds: float | None = field(default=None, metadata=options.number(none=True))
    pause: float = field(default=0.05, metadata=options.number())

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events:
            self.happened()
            clock = asyncio.get_running_loop().time
            end = clock() + (math.inf if self.seconds is None else self.seconds)
            while clock() < end and not self.response.gone.is_set():
                await self.following.event(b": keep-alive\n\n")
                await self.response.pause(self.pause)
        await super().event(data)


@dataclass(kw_only=True)
class _Drip(Fault):
    """Write ``size`` bytes at a time, chunk sizes included, with a pause after each write."""

    kind = "drip"
    needs = "generate"
    size: int = field(default=16, metadata=options.count(least=1))
    pause: float = field(default=0.01, metadata=options.number())

    async def begin(self) -> bool:
        self.happened()
        self.response.pace = (self.size, self.pause)
        return True


# How the bytes are chunked


@dataclass(kw_only=True)
class _Split(Fault):
    """Send each event in several chunks of ``size`` bytes; a range is drawn from for each chunk."""

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
            await self.following.event(data[start:end])
            start = end


@dataclass(kw_only=True)
class _Glue(Fault):
    """Send ``size`` events in one chunk, "[DONE]" included; the last chunk may contain fewer."""

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
    """Close the connection after some bytes of the body or some events; by default in place of the last chunk.

    ``how`` is "rst", a reset, or "fin". ``after_bytes`` may lie inside an event, whose chunk is then incomplete.
    """

    kind = "cut"
    needs = "generate"
    how: ConnectionEnd = field(default="rst", metadata=options.choice("rst", "fin"))
    after_bytes: int | None = field(default=None, metadata=options.count(none=True))
    after_events: int | None = field(default=None, metadata=options.count(none=True))
    size: int = field(default=0, init=False)  # bytes let through

    async def event(self, data: bytes) -> None:
        left = len(data) if self.after_bytes is None else self.after_bytes - self.size
        if self.events == self.after_events:
            await self._disconnect()
        elif left < len(data):
            if left:
                await self.following.partial(data[:left], len(data))
            await self._disconnect()
        else:
            self.size += len(data)
            await super().event(data)

    async def end(self) -> None:
        # A response that was shorter is not disturbed.
        if self.after_events is None and self.after_bytes in {None, self.size}:
            await self._disconnect()
        else:
            await super().end()

    async def _disconnect(self) -> None:
        self.happened()
        await self.response.disconnect(self.how)


# What events contain


@dataclass(kw_only=True)
class _ErrorEvent(Fault):
    """Send an error event after ``after_events`` events, then "[DONE]" unless ``done`` is false, and end the stream.

    The event is the engine's own with ``message`` and ``code``, or ``payload``, any JSON.
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
        wire_format = self.target.wire_format
        error = wire_format.error_event(self.message, self.code) if self.payload is None else _event(self.payload)
        await self.following.event(error)
        if self.done:
            await self.following.event(DONE)
        await self.end()


@dataclass(kw_only=True)
class _DoneWithoutFinish(Fault):
    """Omit the terminal event, or send "[DONE]" after ``after_events`` events and end the stream."""

    kind = "done_without_finish"
    after_events: int | None = field(default=None, metadata=options.count(none=True))

    async def event(self, data: bytes) -> None:
        if _finishes(_frame(data)):
            self.happened()
        elif self.events == self.after_events and data != DONE:
            self.happened()
            await self.following.event(DONE)
            await self.end()
        else:
            await super().event(data)


@dataclass(kw_only=True)
class _DoubleEvent(Fault):
    """Send the event after ``after_events`` events twice."""

    kind = "double_event"
    after_events: int = field(default=1, metadata=options.count())

    async def event(self, data: bytes) -> None:
        if self.events == self.after_events and data != DONE:
            self.happened()
            await self.following.event(data)
        await super().event(data)


@dataclass(kw_only=True)
class _DropEvent(Fault):
    """Omit the event after ``after_events`` events."""

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
    """Remove tokens from the event after ``after_events``: it has ``tokens`` less than the event before it."""

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
    """Change ``what``, "id" or "logprob", at an already sent ``position`` of the event after ``after_events``."""

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
        """Change the frame; return False if it has no token at the position."""
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
    """Return an event reduced to its first ``tokens`` tokens; its text stays."""
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
