"""SGLang's wire format: writes a reply as the events of ``/generate``, for each emulated version and frontend.

A ``Reply`` is what was generated, a :class:`SglangFormat` how it is written, a :class:`SglangWriter` writes the events
of one reply. :func:`stream` writes a whole reply at once, without a server::

    reply = Reply(token_ids=[21, 2], logprobs=[-0.25, -1.5], pieces=[" Hi", ""], finish=stopped(2))
    body = b"".join(stream(reply, SglangFormat(incremental=True), splits=[1]))
"""

from __future__ import annotations

import base64
import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import orjson

from streamfold.loopback.core.reply import DONE, Finish, Frame, Reply, shuffled, version_spans
from streamfold.loopback.core.versions import NEWEST, check_version
from streamfold.loopback.core.wire_format import WireFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self

    from streamfold.loopback.core.config import Config

__all__ = [
    "SglangFormat",
    "SglangWriter",
    "aborted",
    "aborted_in_queue",
    "error_event",
    "error_frame",
    "queue_full",
    "refused",
    "stream",
    "whole",
]


@dataclass(frozen=True, kw_only=True)
class SglangFormat(WireFormat):
    """How SGLang writes: cumulative or ``incremental`` streams, version, frontend."""

    engine: ClassVar[Literal["sglang", "vllm"]] = "sglang"

    version: str = NEWEST["sglang"]
    incremental: bool = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the format of an engine with this configuration."""
        return cls(
            incremental=config.incremental,
            frontend=config.frontend,
            version=config.version,
            shuffle_keys=config.shuffle_keys,
        )

    def _check_version(self) -> None:
        check_version(self.engine, self.version, incremental=self.incremental)

    def error_event(self, message: str, code: int = 400) -> bytes:
        """Return the stream event that reports an error instead of tokens."""
        return error_event(self, message, code)

    def http_error(self, message: str, status: int) -> Frame:
        """Return the body of a response with an HTTP error status."""
        if self.rust:
            return error_frame(self, message, status)
        return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}


def aborted(message: str = "Aborted") -> Finish:
    """Return the finish reason of a running request that was aborted."""
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def aborted_in_queue(message: str = "Abort in waiting queue") -> Finish:
    """Return the finish reason of a request that was aborted in the queue, not started yet or retracted."""
    return {"type": "abort", "message": message}


def queue_full() -> Finish:
    """Return the finish reason of a request that found the queue full."""
    return {"type": "abort", "status_code": 503, "message": "The request queue is full."}


def refused(message: str, status_code: int = 400, err_type: str | None = "BadRequestError") -> Finish:
    """Return the finish reason of a request that the scheduler rejects."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}


def stream(reply: Reply, wire_format: SglangFormat, splits: Iterable[int] = ()) -> Iterator[bytes]:
    """Write all events of a finished reply, ``[DONE]`` included.

    ``splits`` are the token counts after which an event is sent, in ascending order; two equal ones make an event
    without new tokens. The remaining tokens are sent with the terminal event. If the reply was aborted in the queue,
    that event contains the unsent tokens, followed by all tokens once more, as the Python frontend does for a slow
    reader.
    """
    writer = SglangWriter(reply, wire_format)
    for tokens in splits:
        yield writer.event(tokens)
    yield writer.terminal()
    yield DONE


def whole(reply: Reply, wire_format: SglangFormat) -> Frame:
    """Return the body of an unstreamed reply, as an object."""
    return SglangWriter(reply, replace(wire_format, incremental=False)).terminal_frame()


def error_event(wire_format: SglangFormat, message: str, code: int = 400, index: int | None = None) -> bytes:
    """Return the stream event that reports an error; ``index`` is that of one generation among several."""
    return _event(error_frame(wire_format, message, code, index))


def error_frame(wire_format: SglangFormat, message: str, code: int = 400, index: int | None = None) -> Frame:
    """Return the object of an error event, as the emulated version writes it."""
    error: dict[str, Any] = {"message": message}
    if wire_format.rust:
        error["code"] = code
        return {"error": error} if index is None else {"error": error, "index": index}
    if wire_format.release >= (0, 5, 13):
        # Before 0.5.17 the code is always 400.
        code = code if wire_format.release >= (0, 5, 17) else 400
        error |= {"type": "invalid_request_error", "code": code, "retryable": False}
    return {"error": error}


class SglangWriter:
    """Writes the events of one reply, in order; keeps how much of it was sent.

    The reply may grow between two events. To join events for a slow reader, skip them: the next one contains all new
    tokens.
    """

    def __init__(self, reply: Reply, wire_format: SglangFormat, *, clock: Callable[[], float] = time.time) -> None:
        self.reply = reply
        self.sent: int = 0  # tokens
        self._format = wire_format
        self._clock = clock
        self._events = 0
        self._sent_inputs = False

    def event(self, tokens: int) -> bytes:
        """Return the event that extends the reply to ``tokens`` tokens; not the last one."""
        return self._write(self.frame(tokens))

    def last_events(self) -> list[bytes]:
        """Return the last events."""
        return [self.terminal()]

    def terminal(self) -> bytes:
        """Return the event with the finish reason; the Rust frontend sends an error event for some of them."""
        return self._write(self.terminal_frame())

    def terminal_frame(self) -> Frame:
        """Return the object of the terminal event."""
        finish = self.reply.finish
        if finish is None:
            msg = "the reply has no finish reason yet"
            raise ValueError(msg)
        if self._format.rust:
            status = finish.get("status_code")
            if status is not None:
                return error_frame(self._format, finish["message"], status, self.reply.index)
        elif self.reply.in_queue:
            return self._queue_frame()
        return self.frame(len(self.reply.token_ids), last=True)

    def frame(self, tokens: int, *, last: bool = False) -> Frame:
        """Return the object of an event, and count its tokens as sent."""
        reply, wire_format = self.reply, self._format
        if not self.sent <= tokens <= len(reply.token_ids):
            msg = f"cannot go from {self.sent} tokens to {tokens}: the reply has {len(reply.token_ids)}"
            raise ValueError(msg)
        part = slice(self.sent if wire_format.incremental else 0, tokens)
        self.sent = tokens
        self._events += 1
        make_meta = self._rust_meta if wire_format.rust else self._python_meta
        meta = make_meta(part, last=last)
        ids = reply.token_ids[part]
        frame: Frame = {}
        if reply.pieces is not None:
            frame["text"] = "".join(reply.pieces[part])
        if wire_format.rust:
            frame |= {"text": frame.get("text", ""), "meta_info": meta}
            if ids:
                frame["output_ids"] = ids
            extras = ("index", "prompt_token_ids")
        else:
            frame |= {"output_ids": ids, "meta_info": meta}
            extras = ("prompt_token_ids", "index")
        for key in extras:
            if (value := getattr(reply, key)) is not None:
                frame[key] = value
        return frame

    def _write(self, frame: Frame) -> bytes:
        if self._format.shuffle_keys is not None:
            frame = shuffled(frame, b"%d/%d/" % (self._format.shuffle_keys, self._events))
        return _event(frame)

    def _python_meta(self, part: slice, *, last: bool) -> Frame:
        reply, release = self.reply, self._format.release
        meta: Frame = {
            "id": reply.rid,
            "finish_reason": reply.finish if last else None,
            "prompt_tokens": reply.prompt_tokens,
            "weight_version": self._label(part.stop, last=last),
            "num_retractions" if release >= (0, 5, 12) else "total_retractions": reply.retractions,
        }
        meta |= self._logprobs(part, last=last)
        if reply.sampling_mask is not None:
            meta["output_token_sampling_mask"] = reply.sampling_mask[part]
            if reply.sampling_logprobs is not None:
                meta["output_token_sampling_logprobs"] = reply.sampling_logprobs[part]
            meta["output_token_sampling_mask_length"] = part.stop
        meta |= {"reasoning_tokens": 0, "completion_tokens": part.stop, "cached_tokens": reply.cached_tokens}
        if last and release >= (0, 5, 19):
            meta["weight_versions"] = self._spans(part.stop)
        meta["cached_tokens_details"] = reply.cached_tokens_details
        meta |= {key: values[part] for key, values in reply.custom.items()}
        if last:
            meta |= self._side_data()
        meta["dp_rank"] = None
        if last:
            meta["e2e_latency"] = self._clock() - reply.arrived
        if self._events == 1:
            meta["response_sent_to_client_ts"] = self._clock()
        return meta

    def _rust_meta(self, part: slice, *, last: bool) -> Frame:
        reply = self.reply
        meta: Frame = {
            "id": reply.rid,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": part.stop,
            "finish_reason": reply.finish if last else None,
        }
        if last and reply.finish is not None and reply.finish["type"] == "abort":
            meta["finish_reason"] = aborted(reply.finish["message"])
        pairs = self._pairs(part)
        if pairs:
            repeated = self._format.incremental and self._sent_inputs
            self._sent_inputs = True
            meta["output_token_logprobs"] = pairs
            meta["input_token_logprobs"] = [] if repeated else self._inputs()
            if reply.top_logprobs is not None:
                meta["output_top_logprobs"] = [_triples(row) for row in reply.top_logprobs[part]]
        if last:
            meta["e2e_latency"] = self._clock() - reply.arrived
        meta |= {"cached_tokens": reply.cached_tokens, "reasoning_tokens": 0}
        meta["weight_version"] = self._label(part.stop, last=last)
        if last:
            meta["weight_versions"] = self._spans(part.stop)
        return meta

    def _queue_frame(self) -> Frame:
        """Return the abort frame of a queued or retracted request: not a delta, and with only some of the keys."""
        reply, wire_format = self.reply, self._format
        tokens = len(reply.token_ids)
        # An unsent delta is joined to the frame: its lists and its text are put in front.
        delta = slice(self.sent, tokens) if wire_format.incremental else slice(0)
        every = slice(0, tokens)
        self.sent = tokens
        self._events += 1
        frame: Frame = {"text": ""}
        if reply.pieces is not None:
            frame["text"] = "".join(reply.pieces[delta]) + "".join(reply.pieces[every])
        whole_ids = not wire_format.incremental and wire_format.release >= (0, 5, 20)
        frame["output_ids"] = reply.token_ids[delta] + reply.token_ids[0 if whole_ids else -1 :]
        meta: Frame = {
            "id": reply.rid,
            "finish_reason": reply.finish,
            "weight_version": self._label(tokens, last=True),
            "e2e_latency": self._clock() - reply.arrived,
        }
        if wire_format.release >= (0, 5, 19):
            meta["weight_versions"] = self._spans(tokens)
        if reply.logprobs is not None:
            meta["input_token_logprobs"] = self._inputs()
            meta["output_token_logprobs"] = self._pairs(delta) + self._pairs(every)
            meta["output_token_logprobs_length"] = tokens
        meta["completion_tokens"] = tokens
        if self._events == 1:
            meta["response_sent_to_client_ts"] = self._clock()
        frame["meta_info"] = meta
        if reply.index is not None:
            frame["index"] = reply.index
        return frame

    def _logprobs(self, part: slice, *, last: bool) -> Frame:
        reply = self.reply
        if reply.logprobs is None:
            return {}
        pairs, count = self._pairs(part), part.stop
        if last and reply.spare_pair is not None:
            pairs.append((*reply.spare_pair, None))
            count += 1
        found: Frame = {
            "input_token_logprobs": self._inputs(),
            "output_token_logprobs": pairs,
            "output_token_logprobs_length": count,
        }
        if reply.top_logprobs is not None:
            found["input_top_logprobs"] = []  # those of the prompt are not supported
            found["output_top_logprobs"] = [_triples(row) for row in reply.top_logprobs[part]]
        return found

    def _pairs(self, part: slice) -> list[tuple[float | None, int, str | None]]:
        reply = self.reply
        if reply.logprobs is None:
            return []
        texts: Iterable[str | None] = (
            itertools.repeat(None) if reply.logprob_texts is None else reply.logprob_texts[part]
        )
        return list(zip(reply.logprobs[part], reply.token_ids[part], texts))  # noqa: B905  # repeat() never ends

    def _inputs(self) -> list[tuple[float | None, int, None]]:
        return _triples(self.reply.input_logprobs or [])

    def _label(self, tokens: int, *, last: bool) -> str:
        reply = self.reply
        if last and self._format.release >= (0, 5, 19) and tokens and reply.versions:
            return reply.versions[tokens - 1]
        return reply.label

    def _spans(self, tokens: int) -> list[Frame]:
        return version_spans(self.reply, tokens) or [{"version": self.reply.label, "start": 0, "end": 0}]

    def _side_data(self) -> Frame:
        reply = self.reply
        found: Frame = {}
        if reply.routed_experts is not None:
            found["routed_experts"] = base64.b64encode(reply.routed_experts).decode()
        if reply.top_p is not None:
            offsets = itertools.accumulate(map(len, reply.top_p), initial=0)
            found["top_p_token_ids"] = _int32(itertools.chain.from_iterable(reply.top_p))
            found["top_p_token_offsets"] = _int32(offsets)
        return found


def _event(frame: Frame) -> bytes:
    return b"data: " + orjson.dumps(frame) + b"\n\n"


def _triples(pairs: Sequence[tuple[float | None, int]]) -> list[tuple[float | None, int, None]]:
    return [(logprob, token, None) for logprob, token in pairs]


def _int32(values: Iterable[int]) -> str:
    return base64.b64encode(np.fromiter(values, "<i4").tobytes()).decode()
