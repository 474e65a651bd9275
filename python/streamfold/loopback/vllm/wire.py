"""Writes replies in the vLLM dialect: the events of ``/inference/v1/generate``, as releases and frontends differ.

::

    reply = Reply(rid="generate-tokens-7", token_ids=[21, 2], logprobs=[-0.25, -1.5], finish=stopped(2))
    body = b"".join(stream(reply, Dialect(), Told(usage=True), cuts=[1]))
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import orjson

from streamfold.loopback.core.reply import DONE, Frame, shuffled, version_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from streamfold.loopback.core.reply import Finish, Reply

__all__ = ["Dialect", "Told", "Writer", "aborted", "stream"]

# Stands for -inf, and in later releases for NaN too.
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
class Dialect:
    """How an engine writes: its release, and which of its two frontends writes.

    ``shuffle`` is a seed: the keys of each object come in another order in each event.
    """

    version: str = "0.32.0"
    frontend: Literal["python", "rust"] = "python"
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.frontend not in {"python", "rust"}:
            msg = f"frontend must be 'python' or 'rust', got {self.frontend!r}"
            raise ValueError(msg)
        if self.release < (0, 20):
            msg = f"vLLM streams tokens from 0.20 on, and not in {self.version}"
            raise ValueError(msg)

    @cached_property
    def release(self) -> tuple[int, int]:
        """The release as numbers, without what only mends it."""
        try:
            major, minor = (int(part) for part in self.version.split(".")[:2])
        except ValueError:
            msg = f"version must look like 0.32.0 or 0.28, got {self.version!r}"
            raise ValueError(msg) from None
        return major, minor

    @property
    def rust(self) -> bool:
        """Whether the Rust frontend writes."""
        return self.frontend == "rust"

    @property
    def prefix(self) -> str:
        """What the engine puts before a client's id."""
        return "" if self.rust else "generate-tokens-"

    def error(self, message: str, code: int, *, kind: str | None = None, param: str | None = None) -> Frame:
        """Give the object that tells of an error; ``kind`` is its type, if it is not that of the code."""
        kind = _ERROR_TYPES.get(code, "InternalServerError") if kind is None else kind
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def error_event(self, message: str, code: int = 400, param: str | None = None) -> bytes:
        """Write the event that tells of an error instead of tokens."""
        error = self.error(message, code, param=param)
        # The Python frontend writes this one with another library than all others: with spaces, and in ASCII.
        return b"data: " + (orjson.dumps(error) if self.rust else json.dumps(error).encode()) + b"\n\n"

    def http_error(self, message: str, status: int) -> Frame:
        """Give the body of an answer with a status that is none of success."""
        return self.error(message, status)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a request wants to be told, beside its tokens."""

    usage: bool = False  # in an event of its own, the last one
    continuous_usage: bool = False  # in each event, too
    text: bool = False  # the text, and logprobs with the texts of tokens
    decode: Callable[[int], str] = "token_id:{}".format  # the text of a token that was not sampled


def aborted() -> Finish:
    """Finish by an abort."""
    return {"type": "abort"}


def stream(reply: Reply, dialect: Dialect, told: Told = Told(), cuts: Iterable[int] = ()) -> Iterator[bytes]:  # frozen
    """Write all events of a finished reply, ``[DONE]`` included; ``cuts`` as in SGLang's writer."""
    writer = Writer(reply, dialect, told)
    for cut in cuts:
        yield writer.event(cut)
    yield from writer.ending()
    yield DONE


class Writer:
    """Writes the events of one reply, in order; remembers how much of it was sent.

    The reply may grow between two events. What it holds as ``logprobs`` is the sampled token's, as ``top_logprobs``
    its row, the sampled token first, and as ``logprob_texts`` its text where text is told.
    """

    def __init__(self, reply: Reply, dialect: Dialect, told: Told, *, clock: Callable[[], float] = time.time) -> None:
        self.reply = reply
        self.sent = 0  # tokens
        self._dialect = dialect
        self._told = told
        self._clock = clock
        self._events = 0
        self._sent_of_piece = 0  # characters of the last piece that was sent

    def event(self, tokens: int) -> bytes:
        """Write the event that brings the reply to so many tokens, and is not the last."""
        return self._write(self._frame(tokens, last=False))

    def ending(self) -> list[bytes]:
        """Write the terminal event, where there is one, and the event of the usage."""
        if self.reply.finish is None:
            msg = "the reply has no finish reason yet"
            raise ValueError(msg)
        events = [] if self._is_dropped else [self._write(self._frame(len(self.reply.token_ids), last=True))]
        if self._told.usage:
            events.append(self._write(self._usage_frame()))
        return events

    @property
    def _is_dropped(self) -> bool:
        """Whether the terminal event is left out: old releases send no event without tokens."""
        release = self._dialect.release
        if self._dialect.rust or release >= (0, 32) or self.sent < len(self.reply.token_ids):
            return False
        return not (release >= (0, 30) and self._events == 0 and self.reply.prompt_token_ids is not None)

    def whole(self, model: str) -> Frame:
        """Give the body of a reply that is not streamed, as an object."""
        reply, dialect = self.reply, self._dialect
        choice = self._choice(slice(0, len(reply.token_ids)), last=True)
        if dialect.rust:
            return {"request_id": reply.rid, "choices": [choice]}
        usage = self._usage(len(reply.token_ids), details=True)
        if dialect.release < (0, 32):
            frame: Frame = {"request_id": reply.rid, "choices": [choice], "usage": usage}
            return frame | {"prompt_logprobs": None, "kv_transfer_params": None}
        frame = {"request_id": reply.rid, "model": model, "created": int(self._clock()), "usage": usage}
        frame |= {"prompt_logprobs": None, "prompt_token_ids": reply.prompt_token_ids, "kv_transfer_params": None}
        return frame | {"output_mode": self._mode, "choices": [choice]}

    def _frame(self, tokens: int, *, last: bool) -> Frame:
        """Give the object of an event, and count its tokens as sent."""
        reply, dialect = self.reply, self._dialect
        if not self.sent <= tokens <= len(reply.token_ids):
            msg = f"cannot go from {self.sent} tokens to {tokens}: the reply has {len(reply.token_ids)}"
            raise ValueError(msg)
        part = slice(self.sent, tokens)
        choices = [self._choice(part, last=last)]
        self.sent = tokens
        self._events += 1
        usage = self._usage(tokens, details=False) if self._told.continuous_usage and self._told.usage else None
        prompt: Frame = {}
        if reply.prompt_token_ids is not None and self._events == 1 and dialect.release >= (0, 30):
            prompt["prompt_token_ids"] = reply.prompt_token_ids
        if dialect.rust:
            return _without_nulls({"request_id": reply.rid, "choices": choices, "usage": usage})
        if dialect.release < (0, 32):
            return {"request_id": reply.rid, "choices": choices, "usage": usage, **prompt}
        return {"request_id": reply.rid, "usage": usage, **prompt, "output_mode": self._mode, "choices": choices}

    def _usage_frame(self) -> Frame:
        reply = self.reply
        usage = self._usage(len(reply.token_ids), details=True)
        if self._dialect.rust or self._dialect.release < (0, 32):
            return {"request_id": reply.rid, "choices": [], "usage": usage}
        return {"request_id": reply.rid, "usage": usage, "output_mode": self._mode, "choices": []}

    def _usage(self, tokens: int, *, details: bool) -> Frame:
        reply, dialect = self.reply, self._dialect
        usage: Frame = {"prompt_tokens": reply.prompt_tokens, "total_tokens": reply.prompt_tokens + tokens}
        usage["completion_tokens"] = tokens
        if details and (reply.cached_tokens or dialect.release >= (0, 24)):
            usage["prompt_tokens_details"] = {"cached_tokens": reply.cached_tokens}
        elif not details and not dialect.rust:
            usage["prompt_tokens_details"] = None
            if dialect.release >= (0, 32):
                usage["completion_tokens_details"] = None
        return usage

    @property
    def _mode(self) -> str:
        return "text" if self._told.text else "tokens"

    def _choice(self, part: slice, *, last: bool) -> Frame:
        reply, release = self.reply, self._dialect.release
        finish = (reply.finish or {}) if last else {}
        index, ids, logprobs, reason = reply.index or 0, reply.token_ids[part], self._logprobs(part), finish.get("type")
        if self._dialect.rust:
            return _without_nulls({"index": index, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids})
        experts = base64.b64encode(reply.routed_experts).decode() if last and reply.routed_experts is not None else None
        choice: Frame
        if release < (0, 32):
            choice = {"index": index, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids}
            if release >= (0, 24):
                choice["routed_experts"] = experts
            if release >= (0, 28):
                choice["sampling_mask"] = None  # known, and not yet filled
            return choice
        choice = {"index": index, "finish_reason": reason, "stop_reason": finish.get("matched"), "token_ids": ids}
        choice["routed_experts"] = experts
        choice["sampling_mask"] = None if reply.sampling_mask is None else reply.sampling_mask[part]
        choice["weight_versions"] = version_spans(reply, len(reply.token_ids)) if last else None
        if self._told.text:
            choice["text"] = self._text(part)
        choice["logprobs"] = logprobs
        return choice

    def _text(self, part: slice) -> str:
        """Give the text of some tokens, with what came to the one before them after that was sent."""
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
        """Give what is told of one sampled token, and of the candidates beside it."""
        reply, dialect = self.reply, self._dialect
        token = reply.token_ids[i]
        logprob = (reply.logprobs or [])[i]
        rank = 1 if reply.ranks is None else reply.ranks[i]
        row = [(logprob, token)] if reply.top_logprobs is None else reply.top_logprobs[i]
        if self._told.text:
            own = (reply.logprob_texts or [])[i]
            texts = [own, *(self._told.decode(other) for _, other in row[1:])]
            top = [self._named(text, each) for text, (each, _) in zip(texts, row, strict=True)]
            return {**self._named(own, logprob), "top_logprobs": top}
        if dialect.rust or dialect.release < (0, 32):
            # The oldest releases call every candidate by the name of the sampled token.
            labels = [token if dialect.release < (0, 22) else other for _, other in row]
            top = [self._named(f"token_id:{label}", each) for label, (each, _) in zip(labels, row, strict=True)]
            return {**self._named(f"token_id:{token}", logprob), "top_logprobs": top}
        others = (n for n in itertools.count(1) if n != rank)
        ranks = [rank, *itertools.islice(others, len(row) - 1)]
        top = [
            {"token_id": other, "logprob": self._clamped(each), "rank": its}
            for (each, other), its in zip(row, ranks, strict=True)
        ]
        return {"token_id": token, "logprob": self._clamped(logprob), "rank": rank, "top_logprobs": top}

    def _named(self, text: str, logprob: float | None) -> Frame:
        """Give a candidate that is told by a text instead of its id."""
        spelled = list(text.encode()) if self._told.text or self._dialect.rust else None
        return {"token": text, "logprob": self._clamped(logprob), "bytes": spelled}

    def _clamped(self, logprob: float | None) -> float | None:
        if logprob is None:
            return LOWEST_LOGPROB if self._dialect.release >= (0, 32) else None
        return max(logprob, LOWEST_LOGPROB)

    def _write(self, frame: Frame) -> bytes:
        if self._dialect.shuffle is not None:
            frame = shuffled(frame, b"%d/%d/" % (self._dialect.shuffle, self._events))
        return b"data: " + orjson.dumps(frame) + b"\n\n"


def _without_nulls(value: dict[str, Any]) -> Frame:
    return {key: each for key, each in value.items() if each is not None}
