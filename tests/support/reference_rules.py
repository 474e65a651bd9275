"""What the obvious reader's dialects have in common: what was asked, what is known, and rules of single values."""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from support.reference_json import bad

if TYPE_CHECKING:
    import numpy.typing as npt

CLAMPED = (-3.4028234663852886e38, -9999.0)
LARGEST_TOKEN = 2**31 - 1


class ExpertsLike(Protocol):
    """What the reader needs to know about routed experts."""

    @property
    def num_layers(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_experts(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Asked:
    """What the caller asked for."""

    logprobs: bool
    experts: ExpertsLike | None
    prompt_len: int | None
    experts_start: int
    keep_clamped: bool


@dataclass
class State:
    """All that is known after some events."""

    mode: Literal["cumulative", "incremental"] | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_missing: bool = False
    versions: list[str | None] = field(default_factory=list)  # one for each token
    told_spans: list[tuple[str, int, int]] | None = None
    sets: list[list[int] | None] = field(default_factory=list)  # what each token was chosen from
    sets_told: bool = False
    experts: npt.NDArray[Any] | None = None
    experts_at: int = 0  # the number of tokens they were told for
    padded_rows: int = 0
    counted: bool = False  # whether ids, even none, or their number were ever told
    request_id: str | None = None
    finish: str | None = None
    matched: int | str | None = None
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    clamped: int = 0
    most_at_once: int = 0  # of the tokens
    meta: dict[str, Any] = field(default_factory=dict)
    levels: list[dict[str, Any]] = field(default_factory=list)  # where meta is gathered from, if from several places

    @property
    def text(self) -> str | None:
        if not self.texts:
            return None
        return self.texts[-1] if self.mode == "cumulative" else "".join(self.texts)


class Refused(Exception):
    """The engine said no; ``state`` is what its last event still brought."""

    def __init__(self, status: int | None, state: State | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.state = state


def refuse_if_error(event: Any, name: bytes, part: str) -> None:
    """An error in any of its shapes; ``part`` is the key that every event of a generation has."""
    top = event if isinstance(event, dict) else {}
    error = top.get("error")
    alone = part not in top and (top.get("detail") is not None or top.get("object") == "error")
    if name == b"error" or isinstance(error, dict | str) or alone:
        told = [place.get(key) for key in ("code", "type") for place in (error, top) if isinstance(place, dict)]
        statuses = [*map(status_of, told), *(500 for name in told if name == "server_error")]
        raise Refused(next((status for status in statuses if status is not None), None))


def status_of(code: Any) -> int | None:
    """A status told as a number or in digits."""
    if type(code) is str and code.isascii() and code.isdigit():
        code = int(code)
    return code if type(code) is int and 0 <= code < 2**16 else None


def told(fields: dict[str, Any], key: str, *types: type) -> Any:
    """The value of a key that may be absent or null, and has one of these types."""
    value = fields.get(key)
    if value is not None and type(value) not in types:
        bad("schema")
    return value


def count(meta_info: dict[str, Any], key: str) -> int | None:
    value: int | None = told(meta_info, key, int)
    if value is not None and not 0 <= value < 2**32:
        bad("schema")
    return value


def matched_value(matched: Any) -> int | str | None:
    """A token id or a string that a generation stopped at; anything else tells nothing."""
    return matched if type(matched) is str or (type(matched) is int and abs(matched) < 2**63) else None


def token_value(token: Any) -> Any:
    """A token id, or something that equals no token id: 12.0 and True are not 12 and 1."""
    return token if type(token) is int else ("no integer", json.dumps(token))


def double(number: float | None) -> float | None:
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf


def decoded(value: Any) -> bytes:
    """Base64 as it is written: no stray characters, no missing padding, no bits left over."""
    if type(value) is not str:
        bad("metadata")
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        bad("metadata")
    if base64.b64encode(raw).decode() != value:
        bad("metadata")
    return raw


def take_tokens(state: State, asked: Asked, ids: list[Any], logprobs: list[float | None]) -> None:
    """Append the new tokens of an event, and their logprobs if those were asked for."""
    state.most_at_once = max(state.most_at_once, len(ids))
    for token in ids:
        if type(token) is not int or not 0 <= token <= LARGEST_TOKEN:
            bad("token")
    state.ids += ids
    for logprob in logprobs if asked.logprobs else []:
        if logprob is None or math.isinf(logprob) or (logprob in CLAMPED and not asked.keep_clamped):
            bad("logprob")
        state.logprobs.append(logprob)
        state.clamped += logprob in CLAMPED


def check_prompt_length(state: State, asked: Asked, ids: list[Any] | None, prompt_tokens: int | None) -> None:
    """The ids of the prompt are as many as were sent, and as the engine counts, in this event or before it."""
    known = state.prompt_ids if ids is None else ids
    counted = state.prompt_tokens if prompt_tokens is None else prompt_tokens
    if known is not None and any(count not in (None, len(known)) for count in (asked.prompt_len, counted)):
        bad("length")


def take_prompt_ids(state: State, ids: list[Any] | None) -> None:
    """The ids of the prompt, which no later event may change."""
    if ids is None:
        return
    if state.prompt_ids not in (None, ids):
        bad("prefix")
    if not all(type(token) is int and 0 <= token <= LARGEST_TOKEN for token in ids):
        bad("token")
    state.prompt_ids = ids


def ids_of_set(value: Any) -> list[int]:
    """A list of numbers from 0 to 2**31 - 1."""
    if type(value) is not list or not all(type(item) is int and 0 <= item <= LARGEST_TOKEN for item in value):
        bad("metadata")
    return list(value)


def routed(array: npt.NDArray[Any], rows: int, state: State, asked: Asked) -> npt.NDArray[Any]:
    """Routed experts of ``rows`` rows, without those that come before the ones that were asked for."""
    assert asked.experts is not None
    experts = array.reshape(rows, asked.experts.num_layers, asked.experts.top_k)
    padded = [is_padded(row, asked.experts, array.dtype) for row in experts.tolist()]
    before = rows - rows_from(state, asked, asked.experts_start)
    state.padded_rows = sum(padded[before:])
    return experts[before:]


def is_padded(row: list[list[int]], asked: ExpertsLike, dtype: npt.DTypeLike) -> bool:
    """Whether a row, the ids of each layer, holds nothing but the mark of padding, or ids of experts."""
    ids = [expert for layer in row for expert in layer]
    number = 2**31 if asked.num_experts is None else asked.num_experts
    mark = {1: 255, 2: 65535, 4: -1}[np.dtype(dtype).itemsize]
    may_be_expert = 0 <= mark < number
    if set(ids) == {mark}:
        if may_be_expert and asked.top_k == 1:
            bad("metadata")
        return True
    # A token goes to an expert once.
    in_part = mark in ids and (not may_be_expert or any(layer.count(mark) > 1 for layer in row))
    if in_part or not all(0 <= expert < number for expert in ids):
        bad("metadata")
    return False


def rows_from(state: State, asked: Asked, start: int) -> int:
    """How many rows of experts there are from a position on: one for each token but the last."""
    prompt = state.prompt_tokens if asked.prompt_len is None else asked.prompt_len
    if prompt is None:
        bad("metadata")
    return max(0, max(0, prompt + len(state.ids) - 1) - start)


def take_versions(state: State, version: Any, told_spans: Any, new: int, *, final: bool) -> None:
    """The label of an event's new tokens, and the spans that a last event tells for all of them."""
    state.versions += [None if version is None else str(version)] * new
    if told_spans is None or not final:
        return
    if type(told_spans) is not list:
        bad("metadata")
    spans, end = [], 0
    for span in told_spans:
        if type(span) is not dict or type(span.get("version")) not in (str, int, float):
            bad("metadata")
        if type(span.get("start")) is not int or type(span.get("end")) is not int or span["start"] > span["end"]:
            bad("metadata")
        if span["start"] == span["end"]:
            continue
        if span["start"] != end:
            bad("metadata")
        end = span["end"]
        spans.append((str(span["version"]), span["start"], end))
    if end != len(state.ids):
        bad("metadata")
    state.told_spans = spans
