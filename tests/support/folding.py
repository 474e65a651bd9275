"""The parser driven as a client drives it, and what it gives in the form of the reference reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reference import Reading, differences, read
from streamfold import DecodeError, EngineError, Experts, Generation, Parser, StreamfoldError
from support.bodies import Shape, pieces

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Folded:
    """What the parser gave."""

    reading: Reading
    error: StreamfoldError | None = None

    @property
    def decode_error(self) -> DecodeError:
        assert isinstance(self.error, DecodeError), f"no DecodeError: {self.error!r}, {self.reading}"
        return self.error

    @property
    def engine_error(self) -> EngineError:
        assert isinstance(self.error, EngineError), f"no EngineError: {self.error!r}, {self.reading}"
        return self.error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folded) and self.reading == other.reading and self._told() == other._told()

    __hash__ = None  # type: ignore[assignment]  # two of them are compared, never looked up

    def _told(self) -> Any:
        return None if self.error is None else (type(self.error), self.error.args, vars(self.error))


def parser_for(dialect: str, **asked: Any) -> Parser:
    """A parser; routed experts may be told by a :class:`Shape`."""
    experts = asked.get("experts")
    if isinstance(experts, Shape):
        asked["experts"] = Experts(experts.num_layers, experts.top_k, experts.num_experts, experts.dtype)
    return Parser(dialect, **asked)


def fold(
    body: bytes, dialect: str = "sglang", cuts: Sequence[int] = (), *, aborted: bool = False, **asked: Any
) -> Folded:
    """Feed a body, cut at these offsets, end it, and take what is there."""
    parser = parser_for(dialect, **asked)
    grown = 0
    error = None
    try:
        for piece in pieces(body, cuts):
            grown += parser.feed(piece)
            assert grown == parser.token_count
        parser.close(aborted)
    except StreamfoldError as raised:
        error = raised
    return folded(parser, error)


def byte_by_byte(body: bytes, dialect: str = "sglang", **asked: Any) -> Folded:
    return fold(body, dialect, range(1, len(body)), **asked)


def agreed(body: bytes, dialect: str = "sglang-incremental", *, aborted: bool = False, **asked: Any) -> Folded:
    """What the parser gives, whole and byte by byte, after the reference reader has said the same."""
    whole = fold(body, dialect, aborted=aborted, **asked)
    found = differences(whole.reading, read(body, dialect, aborted=aborted, **asked))
    assert not found, f"parser and reader differ: {found} in {dialect}, {body[-2000:]!r}"
    assert fold(body, dialect, range(1, len(body)), aborted=aborted, **asked) == whole
    return whole


def folded(parser: Parser, error: StreamfoldError | None) -> Folded:
    """Take what a parser holds after its last feed or close."""
    count, finished, done, overrun = parser.token_count, parser.finished, parser.done, parser.overrun
    generation = parser.take()
    reading = as_reading(generation)
    assert count == len(reading.token_ids)
    assert finished == (reading.finish_reason is not None)
    reading.done = done
    reading.overrun = overrun
    if error is not None:
        reading.error = type(error).__name__
    if isinstance(error, DecodeError):
        reading.kind = error.kind
    if isinstance(error, EngineError):
        reading.status = error.status
    return Folded(reading, error)


def as_reading(generation: Generation) -> Reading:
    """The same as lists, each array checked for its dtype, its place in memory, and its length."""
    check_owned(generation.token_ids, np.int32)
    if generation.logprobs is not None:
        check_owned(generation.logprobs, np.float64)
        assert len(generation.logprobs) == len(generation.token_ids)
    top_p = None
    if generation.top_p is not None:
        ids, offsets = generation.top_p
        check_owned(ids, np.int32)
        check_owned(offsets, np.int32)
        assert len(offsets) == len(generation.token_ids) + 1
        assert offsets[0] == 0
        assert offsets[-1] == len(ids)
        assert (np.diff(offsets) >= 0).all()
        top_p = ids.tolist(), offsets.tolist()
    prompt = generation.prompt_token_ids
    if prompt is not None:
        check_owned(prompt, np.int32)
    experts = generation.routed_experts
    if experts is not None:
        check_owned(experts, experts.dtype)
    ends = [0, *(end for _, _, end in generation.version_spans)]
    assert [start for _, start, _ in generation.version_spans] == ends[:-1]
    assert ends[-1] == len(generation.token_ids)
    return Reading(
        token_ids=generation.token_ids.tolist(),
        logprobs=None if generation.logprobs is None else generation.logprobs.tolist(),
        text=generation.text,
        finish_reason=generation.finish_reason,
        matched=generation.matched,
        routed_experts=experts,
        padded_rows=generation.padded_rows,
        top_p=top_p,
        version_spans=generation.version_spans,
        prompt_token_ids=None if prompt is None else prompt.tolist(),
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        clamped_logprobs=generation.clamped_logprobs,
        missing=generation.missing,
        max_tokens_per_event=generation.max_tokens_per_event,
        meta=generation.meta,
    )


def check_owned(array: np.ndarray[Any, Any], dtype: Any) -> None:
    """An array that belongs to Python alone: writable, aligned, C order, native."""
    assert isinstance(array, np.ndarray)
    assert array.dtype == dtype
    assert array.dtype.isnative
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
