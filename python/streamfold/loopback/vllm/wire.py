"""vLLM's wire format: writes a reply as the events of ``/inference/v1/generate``, for each version and frontend.

::

    reply = Reply(rid="generate-tokens-7", token_ids=[21, 2], logprobs=[-0.25, -1.5], finish=stopped(2))
    body = b"".join(stream(reply, VllmFormat(), ResponseOptions(usage=True), splits=[1]))
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from streamfold.loopback.core.reply import DONE, Frame, shuffled, version_spans
from streamfold.loopback.core.versions import NEWEST
from streamfold.loopback.core.wire_format import WireFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Finish, Reply

__all__ = ["ResponseOptions", "VllmFormat", "VllmWriter", "aborted", "error_object", "stream"]

# Sent in place of -inf, and in later versions in place of NaN.
LOWEST_LOGPROB = -9999.0
_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


@dataclass(frozen=True, kw_only=True)
class VllmFormat(WireFormat):
    """How vLLM writes: version and frontend. Its streams are always incremental."""

    engine: ClassVar[Literal["sglang", "vllm"]] = "vllm"

    version: str = NEWEST["vllm"]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the format of an engine with this configuration."""
        return cls(frontend=config.frontend, version=config.version, shuffle_keys=config.shuffle_keys)

    def error_event(self, message: str, code: int = 400, param: str | None = None) -> bytes:
        """Return the stream event that reports an error instead of tokens."""
        error = _rust_error(message, code, param) if self.rust else error_object(message, code, param=param)
        # The Python frontend writes this event with the standard library's json: with spaces, and in ASCII.
        return b"data: " + (orjson.dumps(error) if self.rust else json.dumps(error).encode()) + b"\n\n"

    def http_error(self, message: str, status: int) -> Frame:
        """Return the body of a response with an HTTP error status."""
        return _rust_error(message, status) if self.rust else error_object(message, status)


def error_object(message: str, code: int, *, kind: str | None = None, param: str | None = None) -> Frame:
    """Return the object that reports an error; ``kind`` is its type, by default that of the code."""
    kind = _ERROR_TYPES.get(code, "InternalServerError") if kind is None else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _rust_error(message: str, code: int, param: str | None = None) -> Frame:
    """Return the object of the Rust frontend, which has one of two names in place of a number."""
    kind = "server_error" if code >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": kind}}


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """What a request wants in the response besides tokens."""

    usage: bool = False  # as the last event
    continuous_usage: bool = False  # in each event, too
    text: bool = False  # the text, and logprobs with the texts of tokens
    decode: Callable[[int], str] = "token_id:{}".format  # the text of a candidate token


def aborted() -> Finish:
    """Return the finish reason of an abort."""
    return {"type": "abort"}


def stream(
    reply: Reply,
    wire_format: VllmFormat,
    options: ResponseOptions = ResponseOptions(),  # frozen
    splits: Iterable[int] = (),
) -> Iterator[bytes]:
    """Write all events of a finished reply, ``[DONE]`` included; ``splits`` as in SGLang's writer."""
    writer = VllmWriter(reply, wire_format, options)
    for tokens in splits:
        yield writer.event(tokens)
    yield from writer.last_events()
    yield DONE


class VllmWriter:
    """Writes the events of one reply, in order; keeps how much of it was sent.

    The reply may grow between two events. Its ``logprobs`` are those of the sampled tokens, its ``top_logprobs`` their
    candidates, the sampled token first, and its ``logprob_texts`` their texts if text is returned.
    """

    def __init__(
        self,
        reply: Reply,
        wire_format: VllmFormat,
        options: ResponseOptions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reply = reply
        self.sent: int = 0  # tokens
        self._format = wire_format
        self._options = options
        self._clock = clock
        self._events = 0
        self._sent_of_piece = 0  # characters of the last piece that was sent

    def event(self, tokens: int) -> bytes:
        """Return the event that extends the reply to ``tokens`` tokens; not the last one."""
        return self._write(self._frame(tokens, last=False))

    def last_events(self) -> list[bytes]:
        """Return the terminal event, if there is one, and the usage event."""
        if self.reply.finish is None:
            msg = "the reply has no finish reason yet"
            raise ValueError(msg)
        events = [] if self._is_dropped else [self._write(self._frame(len(self.reply.token_ids), last=True))]
        if self._options.usage:
            events.append(self._write(self._usage_frame()))
        return events

    @property
    def _is_dropped(self) -> bool:
        """Whether the terminal event is omitted: old versions send no event without tokens."""
        release = self._format.release
        if self._format.rust or release >= (0, 32) or self.sent < len(self.reply.token_ids):
            return False
        return not (release >= (0, 30) and self._events == 0 and self.reply.prompt_token_ids is not None)

    def whole(self, model: str) -> Frame:
        """Return the body of an unstreamed reply, as an object."""
        reply, wire_format = self.reply, self._format
        choice = self._choice(slice(0, len(reply.token_ids)), last=True)
        if wire_format.rust:
            return {"request_id": reply.rid, "choices": [choice]}
        usage = self._usage(len(reply.token_ids), details=True)
        if wire_format.release < (0, 32):
            frame: Frame = {"request_id": reply.rid, "choices": [choice], "usage": usage}
            return frame | {"prompt_logprobs": None, "kv_transfer_params": None}
        frame = {"request_id": reply.rid, "model": model, "created": int(self._clock()), "usage": usage}
        frame |= {"prompt_logprobs": None, "prompt_token_ids": reply.prompt_token_ids, "kv_transfer_params": None}
        return frame | {"output_mode": self._mode, "choices": [choice]}

    def _frame(self, tokens: int, *, last: bool) -> Frame:
        """Return the object of an event, and count its tokens as sent."""
        reply, wire_format = self.reply, self._format
        if not self.sent <= tokens <= len(reply.token_ids):
            msg = f"cannot go from {self.sent} tokens to {tokens}: the reply has {len(reply.token_ids)}"
            raise ValueError(msg)
        part = slice(self.sent, tokens)
        choices = [self._choice(part, last=last)]
        self.sent = tokens
        self._events += 1
        usage = self._usage(tokens, details=False) if self._options.continuous_usage and self._options.usage else None
        prompt: Frame = {}
        if reply.prompt_token_ids is not None and self._events == 1 and wire_format.release >= (0, 30):
            prompt["prompt_token_ids"] = reply.prompt_token_ids
        if wire_format.rust:
            return _without_nulls({"request_id": reply.rid, "choices": choices, "usage": usage})
        if wire_format.release < (0, 32):
            return {"request_id": reply.rid, "choices": choices, "usage": usage, **prompt}
        return {"request_id": reply.rid, "usage": usage, **prompt, "output_mode": self._mode, "choices": choices}

    def _usage_frame(self) -> Frame:
        reply = self.reply
        usage = self._usage(len(reply.token_ids), details=True)
        if self._format.rust or self._format.release < (0, 32):
            return {"request_id": reply.rid, "choices": [], "usage": usage}
        return {"request_id": reply.rid, "usage": usage, "output_mode": self._mode, "choices": []}

    def _usage(self, tokens: int, *, details: bool) -> Frame:
        reply, wire_format = self.reply, self._format
        usage: Frame = {"prompt_tokens": reply.prompt_tokens, "total_tokens": reply.prompt_tokens + tokens}
        usage["completion_tokens"] = tokens
        if details and (reply.cached_tokens or wire_format.release >= (0, 24)):
            usage["prompt_tokens_details"] = {"cached_tokens": reply.cached_tokens}
        elif not details and not wire_format.rust:
            usage["prompt_tokens_details"] = None
            if wire_format.release >= (0, 32):
                usage["completion_tokens_details"] = None
        return usage

    @property
    def _mode(self) -> str:
        return "text" if self._options.text else "tokens"

    def _choice(self, part: slice, *, last: bool) -> Frame:
        reply, release = self.reply, self._format.release
        finish = (reply.finish or {}) if last else {}
        index, ids, logprobs, reason = reply.index or 0, reply.token_ids[part], self._logprobs(part), finish.get("type")
        if self._format.rust:
            return _without_nulls({"index": index, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids})
        experts = base64.b64encode(reply.routed_experts).decode() if last and reply.routed_experts is not None else None
        choice: Frame
        if release < (0, 32):
            choice = {"index": index, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids}
            if release >= (0, 24):
                choice["routed_experts"] = experts
            if release >= (0, 28):
                choice["sampling_mask"] = None  # always null before 0.32
            return choice
        choice = {"index": index, "finish_reason": reason, "stop_reason": finish.get("matched"), "token_ids": ids}
        choice["routed_experts"] = experts
        choice["sampling_mask"] = None if reply.sampling_mask is None else reply.sampling_mask[part]
        choice["weight_versions"] = version_spans(reply, len(reply.token_ids)) if last else None
        if self._options.text:
            choice["text"] = self._text(part)
        choice["logprobs"] = logprobs
        return choice

    def _text(self, part: slice) -> str:
        """Return the text of some tokens, and the text added to the token before them after it was sent."""
        pieces = self.reply.pieces
        if pieces is None:
            return ""
        late = pieces[part.start - 1][self._sent_of_piece :] if part.start else ""
        if part.stop:
            self._sent_of_piece = len(pieces[part.stop - 1])
        return late + "".join(pieces[part])

    def _logprobs(self, part: slice) -> Frame | None:
        reply = self.reply
        if reply.logprobs is None:
            return None
        return {"content": [self._entry(i) for i in range(part.start, part.stop)]}

    def _entry(self, i: int) -> Frame:
        """Return the logprobs of one sampled token and of its candidates."""
        reply, wire_format = self.reply, self._format
        token = reply.token_ids[i]
        logprob = (reply.logprobs or [])[i]
        rank = 1 if reply.ranks is None else reply.ranks[i]
        row = [(logprob, token)] if reply.top_logprobs is None else reply.top_logprobs[i]
        if self._options.text:
            own = (reply.logprob_texts or [])[i]
            texts = [own, *(self._options.decode(other) for _, other in row[1:])]
            top = [self._named(text, each) for text, (each, _) in zip(texts, row, strict=True)]
            return {**self._named(own, logprob), "top_logprobs": top}
        if wire_format.rust or wire_format.release < (0, 32):
            # Before 0.22 every candidate has the label of the sampled token.
            labels = [token if wire_format.release < (0, 22) else other for _, other in row]
            top = [self._named(f"token_id:{label}", each) for label, (each, _) in zip(labels, row, strict=True)]
            return {**self._named(f"token_id:{token}", logprob), "top_logprobs": top}
        others = (n for n in itertools.count(1) if n != rank)
        ranks = [rank, *itertools.islice(others, len(row) - 1)]
        top = [
            {"token_id": other, "logprob": self._clamped(each), "rank": rank_of_other}
            for (each, other), rank_of_other in zip(row, ranks, strict=True)
        ]
        return {"token_id": token, "logprob": self._clamped(logprob), "rank": rank, "top_logprobs": top}

    def _named(self, text: str, logprob: float | None) -> Frame:
        """Return a candidate that is labelled by text instead of its id."""
        spelled = list(text.encode()) if self._options.text or self._format.rust else None
        return {"token": text, "logprob": self._clamped(logprob), "bytes": spelled}

    def _clamped(self, logprob: float | None) -> float | None:
        if logprob is None:
            return LOWEST_LOGPROB if self._format.release >= (0, 32) else None
        return max(logprob, LOWEST_LOGPROB)

    def _write(self, frame: Frame) -> bytes:
        if self._format.shuffle_keys is not None:
            frame = shuffled(frame, b"%d/%d/" % (self._format.shuffle_keys, self._events))
        return b"data: " + orjson.dumps(frame) + b"\n\n"


def _without_nulls(value: dict[str, Any]) -> Frame:
    return {key: each for key, each in value.items() if each is not None}
