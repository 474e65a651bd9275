"""Writes replies in the SGLang dialect: pure functions from what was generated to the bytes of its events.

A :class:`Reply` is what there is to tell, a :class:`Dialect` how it is told, a :class:`Writer` the events of one reply
in their order. :func:`stream` writes a whole reply at once::

    reply = Reply(token_ids=[21, 2], logprobs=[-0.25, -1.5], pieces=[" Hi", ""], finish=stopped(2))
    body = b"".join(stream(reply, Dialect(incremental=True), cuts=[1]))
"""

from __future__ import annotations

import base64
import itertools
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson

from streamfold.loopback.core.reply import DONE, Finish, Frame, Reply, length, shuffled, stopped, version_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "DONE",
    "Dialect",
    "Reply",
    "Writer",
    "aborted",
    "aborted_in_queue",
    "error_event",
    "length",
    "queue_full",
    "refused",
    "stopped",
    "stream",
    "whole",
]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How an engine writes: its mode, which of its two frontends writes, and its release.

    ``shuffle`` is a seed: the keys of each object come in another order in each event.
    """

    incremental: bool = False
    frontend: Literal["python", "rust"] = "python"
    version: str = "0.5.23"
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.frontend not in {"python", "rust"}:
            msg = f"frontend must be 'python' or 'rust', got {self.frontend!r}"
            raise ValueError(msg)
        oldest = (0, 5, 11) if self.incremental else (0, 5, 10)
        if self.release < oldest:
            # Before, an incremental stream lost ids, or repeated all logprobs in each event.
            mode = "incremental" if self.incremental else "cumulative"
            msg = f"the {mode} stream is written as from {'.'.join(map(str, oldest))} on, not as in {self.version}"
            raise ValueError(msg)

    @cached_property
    def release(self) -> tuple[int, int, int]:
        """The release as numbers; suffixes such as ``.post1`` do not count."""
        try:
            major, minor, patch = (int(part) for part in self.version.split(".")[:3])
        except ValueError:
            msg = f"version must look like 0.5.23 or 0.5.15.post1, got {self.version!r}"
            raise ValueError(msg) from None
        return major, minor, patch

    @property
    def rust(self) -> bool:
        """Whether the Rust frontend writes."""
        return self.frontend == "rust"

    def error_event(self, message: str, code: int = 400) -> bytes:
        """Write the event that tells of an error instead of tokens."""
        return error_event(self, message, code)

    def http_error(self, message: str, status: int) -> Frame:
        """Give the body of an answer with a status that is none of success."""
        if self.rust:
            return error_frame(self, message, status)
        return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}


def aborted(message: str = "Aborted") -> Finish:
    """Finish by an abort of a running request."""
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def aborted_in_queue(message: str = "Abort in waiting queue") -> Finish:
    """Finish by an abort of a request that waited, never started or retracted."""
    return {"type": "abort", "message": message}


def queue_full() -> Finish:
    """Finish before the start: no room in the queue."""
    return {"type": "abort", "status_code": 503, "message": "The request queue is full."}


def refused(message: str, status_code: int = 400, err_type: str | None = "BadRequestError") -> Finish:
    """Finish by the scheduler's refusal."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}


def stream(reply: Reply, dialect: Dialect, cuts: Iterable[int] = ()) -> Iterator[bytes]:
    """Write all events of a finished reply, ``[DONE]`` included.

    ``cuts`` are the token counts after which an event is sent, never falling; two equal ones make an event without new
    tokens. What is left after the last cut goes with the terminal event. There a reply that was aborted in the queue
    has what was not sent yet glued before what it repeats, as the Python frontend does for a slow reader.
    """
    writer = Writer(reply, dialect)
    for cut in cuts:
        yield writer.event(cut)
    yield writer.terminal()
    yield DONE


def whole(reply: Reply, dialect: Dialect) -> Frame:
    """Give the body of a reply that is not streamed, as an object."""
    return Writer(reply, replace(dialect, incremental=False)).terminal_frame()


def error_event(dialect: Dialect, message: str, code: int = 400, index: int | None = None) -> bytes:
    """Write the event that tells of an error instead of tokens."""
    return _event(error_frame(dialect, message, code, index))


def error_frame(dialect: Dialect, message: str, code: int = 400, index: int | None = None) -> Frame:
    """Give the object of an error event, in the shape of the release."""
    error: dict[str, Any] = {"message": message}
    if dialect.rust:
        error["code"] = code
        return {"error": error} if index is None else {"error": error, "index": index}
    if dialect.release >= (0, 5, 13):
        # Only as from 0.5.17 may what was raised bring another code.
        code = code if dialect.release >= (0, 5, 17) else 400
        error |= {"type": "invalid_request_error", "code": code, "retryable": False}
    return {"error": error}


class Writer:
    """Writes the events of one reply, in order; remembers how much of it was sent.

    The reply may grow between two events. Events that a slow reader did not take are joined by not asking for them:
    the next one brings all that is new.
    """

    def __init__(self, reply: Reply, dialect: Dialect, *, clock: Callable[[], float] = time.time) -> None:
        self.reply = reply
        self.sent = 0  # tokens
        self._dialect = dialect
        self._clock = clock
        self._events = 0
        self._sent_inputs = False

    def event(self, tokens: int) -> bytes:
        """Write the event that brings the reply to so many tokens, and is not the last."""
        return self._write(self.frame(tokens))

    def ending(self) -> list[bytes]:
        """Write the last events."""
        return [self.terminal()]

    def terminal(self) -> bytes:
        """Write the event with the finish reason; an error event where the Rust frontend makes one of it."""
        return self._write(self.terminal_frame())

    def terminal_frame(self) -> Frame:
        """Give the object of the terminal event."""
        finish = self.reply.finish
        if finish is None:
            msg = "the reply has no finish reason yet"
            raise ValueError(msg)
        if self._dialect.rust:
            status = finish.get("status_code")
            if status is not None:
                return error_frame(self._dialect, finish["message"], status, self.reply.index)
        elif self.reply.in_queue:
            return self._queue_frame()
        return self.frame(len(self.reply.token_ids), last=True)

    def frame(self, tokens: int, *, last: bool = False) -> Frame:
        """Give the object of an event, and count its tokens as sent."""
        reply, dialect = self.reply, self._dialect
        if not self.sent <= tokens <= len(reply.token_ids):
            msg = f"cannot go from {self.sent} tokens to {tokens}: the reply has {len(reply.token_ids)}"
            raise ValueError(msg)
        part = slice(self.sent if dialect.incremental else 0, tokens)
        self.sent = tokens
        self._events += 1
        make_meta = self._rust_meta if dialect.rust else self._python_meta
        meta = make_meta(part, last=last)
        ids = reply.token_ids[part]
        frame: Frame = {}
        if reply.pieces is not None:
            frame["text"] = "".join(reply.pieces[part])
        if dialect.rust:
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
        if self._dialect.shuffle is not None:
            frame = shuffled(frame, b"%d/%d/" % (self._dialect.shuffle, self._events))
        return _event(frame)

    def _python_meta(self, part: slice, *, last: bool) -> Frame:
        reply, release = self.reply, self._dialect.release
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
            repeated = self._dialect.incremental and self._sent_inputs
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
        """Give the abort frame of a queued or retracted request: made apart, so no delta, and only some of the keys."""
        reply, dialect = self.reply, self._dialect
        tokens = len(reply.token_ids)
        # A delta that still waits to be sent is joined to the frame; all but the lists and the text is the frame's.
        delta = slice(self.sent, tokens) if dialect.incremental else slice(0)
        every = slice(0, tokens)
        self.sent = tokens
        self._events += 1
        frame: Frame = {"text": ""}
        if reply.pieces is not None:
            frame["text"] = "".join(reply.pieces[delta]) + "".join(reply.pieces[every])
        whole_ids = not dialect.incremental and dialect.release >= (0, 5, 20)
        frame["output_ids"] = reply.token_ids[delta] + reply.token_ids[0 if whole_ids else -1 :]
        meta: Frame = {
            "id": reply.rid,
            "finish_reason": reply.finish,
            "weight_version": self._label(tokens, last=True),
            "e2e_latency": self._clock() - reply.arrived,
        }
        if dialect.release >= (0, 5, 19):
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
            found["input_top_logprobs"] = []  # nobody asks for those of the prompt
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
        if last and self._dialect.release >= (0, 5, 19) and tokens and reply.versions:
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
