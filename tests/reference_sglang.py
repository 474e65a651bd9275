"""The obvious reader's rules for one event of SGLang's stream."""

from __future__ import annotations

import base64
import binascii
import copy
import itertools
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from reference_json import Undecodable, bad, parse

CLAMPED = (-3.4028234663852886e38, -9999.0)
LARGEST_TOKEN = 2**31 - 1
EXPERT_DTYPES = {"int32": "<i4", "uint8": "|u1", "uint16": "<u2"}
OWN_ATTRIBUTE = (
    "text",
    "output_ids",
    "prompt_tokens",
    "cached_tokens",
    "routed_experts",
    "top_p_token_ids",
    "top_p_token_offsets",
    "top_p_kept_token_ids",
    "top_p_kept_token_offsets",
)


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
    request_id: str | None = None
    finish: str | None = None
    matched: int | str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    clamped: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

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


def after(before: State, asked: Asked, name: bytes, data: bytes) -> State:
    """The state after one more event."""
    event = parse(data)
    refuse_if_error(event, name)
    meta_info = event.get("meta_info") if isinstance(event, dict) else bad("schema")
    if not isinstance(meta_info, dict):
        bad("schema")
    finish, matched, status = finish_of(meta_info)
    state = copy.deepcopy(before)
    if status is None:
        apply(state, asked, event, meta_info, finish)
        state.finish, state.matched = finish, matched
        return state
    if status < 500:
        raise Refused(status)
    try:
        apply(state, asked, event, meta_info, finish)
    except Undecodable:
        raise Refused(status) from None
    raise Refused(status, state)


def refuse_if_error(event: Any, name: bytes) -> None:
    top = event if isinstance(event, dict) else {}
    error = top.get("error")
    alone = "meta_info" not in top and (top.get("detail") is not None or top.get("object") == "error")
    if name == b"error" or isinstance(error, dict | str) or alone:
        codes = [status_of(place.get("code")) for place in (error, top) if isinstance(place, dict)]
        raise Refused(next((code for code in codes if code is not None), None))


def status_of(code: Any) -> int | None:
    """A status told as a number or in digits."""
    if type(code) is str and code.isascii() and code.isdigit():
        code = int(code)
    return code if type(code) is int and 0 <= code < 2**16 else None


def finish_of(meta_info: dict[str, Any]) -> tuple[str | None, int | str | None, int | None]:
    """The finish type, what matched, and the HTTP status that an abort carries."""
    reason = meta_info.get("finish_reason")
    if reason is None:
        return None, None, None
    if not isinstance(reason, dict):
        bad("schema")
    if reason.get("type") not in ("stop", "length", "abort"):
        bad("schema")
    matched = reason.get("matched")
    if matched == "NaN happened":
        raise Refused(None)
    status = reason.get("status_code") if reason["type"] == "abort" else None
    if status is not None and type(status) is not int:
        bad("schema")
    return (
        reason["type"],
        matched if type(matched) is str or (type(matched) is int and abs(matched) < 2**63) else None,
        status if status is not None and 400 <= status <= 599 else None,
    )


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


def apply(state: State, asked: Asked, event: dict[str, Any], meta_info: dict[str, Any], finish: str | None) -> None:
    """All checks in their order; the state is the caller's copy, so what is half done on an error is thrown away."""
    # index, id, types
    if told(event, "index", int) not in (None, 0):
        bad("schema")
    request_id = told(meta_info, "id", str)
    if state.request_id is not None and request_id not in (None, state.request_id):
        bad("schema")
    text = told(event, "text", str)
    output_ids = told(event, "output_ids", list)
    ids = None if output_ids is None else [token_value(token) for token in output_ids]
    pairs = pairs_of(meta_info) if asked.logprobs else None
    length = count(meta_info, "output_token_logprobs_length")
    completion = count(meta_info, "completion_tokens")
    prompt_tokens = count(meta_info, "prompt_tokens")
    cached_tokens = count(meta_info, "cached_tokens")
    version = told(meta_info, "weight_version", str, int, float)
    told(meta_info, "routed_experts", str)

    # counts
    source: list[Any] | None = pairs if asked.logprobs else ids
    k = len(state.ids)
    n = completion if length is None else length
    if n is None:
        bad("schema")
    if source is None and (n > k if finish == "abort" else asked.logprobs and n != k):
        bad("schema")
    if completion is not None and completion != n:
        bad("length")
    if None not in (prompt_tokens, asked.prompt_len) and prompt_tokens != asked.prompt_len:
        bad("length")

    kept: list[Any] = list(zip(state.logprobs, state.ids, strict=True)) if asked.logprobs else state.ids
    if finish == "abort":
        shape, new = abort_of(source, kept, n, pairs=asked.logprobs, mode=state.mode)
    elif source is None and asked.logprobs:
        shape, new = "", []
    else:
        shape, new = "", ordinary(state, source or [], kept, n)
        if pairs is not None and ids is not None and [pair[1] for pair in pairs] != ids:
            bad("mismatch")
        if state.mode == "cumulative":
            new = beyond(kept, new)

    own = {"meta_info", *OWN_ATTRIBUTE, *(["output_token_logprobs"] if asked.logprobs else [])}
    for key, value in [*event.items(), *meta_info.items()]:
        if type(value) is not list and key not in own:
            state.meta[key] = value
    if request_id is not None:
        state.request_id = request_id
    if prompt_tokens is not None:
        state.prompt_tokens = prompt_tokens
    if cached_tokens is not None:
        state.cached_tokens = cached_tokens
    if shape == "marker":
        return

    # ids, then logprobs
    new_ids = [pair[1] for pair in new] if asked.logprobs else new
    for token in new_ids:
        if type(token) is not int or not 0 <= token <= LARGEST_TOKEN:
            bad("token")
    state.ids += new_ids
    if asked.logprobs:
        for logprob, _ in new:
            if logprob is None or math.isinf(logprob) or (logprob in CLAMPED and not asked.keep_clamped):
                bad("logprob")
            state.logprobs.append(logprob)
            state.clamped += logprob in CLAMPED
    take_text(state, text, shape, brought=len(new), queued=prompt_tokens is None)
    take_sets(state, meta_info, len(new))
    take_experts(state, asked, meta_info)
    take_versions(state, meta_info, None if version is None else str(version), len(new), final=finish is not None)


def token_value(token: Any) -> Any:
    """A token id, or something that equals no token id: 12.0 and True are not 12 and 1."""
    return token if type(token) is int else ("no integer", json.dumps(token))


def pairs_of(meta_info: dict[str, Any]) -> list[tuple[float | None, Any]] | None:
    pairs = told(meta_info, "output_token_logprobs", list)
    if pairs is None:
        return None
    for pair in pairs:
        if type(pair) is not list or len(pair) < 2 or type(pair[0]) not in (int, float, type(None)):
            bad("schema")
    return [(double(pair[0]), token_value(pair[1])) for pair in pairs]


def double(number: float | None) -> float | None:
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf


def ordinary(state: State, items: list[Any], kept: list[Any], n: int) -> list[Any]:
    """The items of an event that is no abort; an event that fits one mode alone settles the mode."""
    k, p = len(kept), len(items)
    fits = {"incremental": k + p == n, "cumulative": p == n >= k}
    if not any(fits.values()) or (state.mode and not fits[state.mode]):
        bad("length")
    if state.mode is None and k > 0 and p > 0:
        state.mode = "incremental" if fits["incremental"] else "cumulative"
    return items


def abort_of(
    source: list[Any] | None, kept: list[Any], n: int, *, pairs: bool, mode: str | None
) -> tuple[str, list[Any]]:
    """What shape an abort event has, and its new items."""
    k = len(kept)
    items = source or []
    p = len(items)
    if (p == 0 and n < k) or source is None:
        return "marker", []
    if not pairs:
        if p == n and (mode == "cumulative" or items[:k] == kept):
            return "whole", beyond(kept, items)
        if p < n - k:
            bad("length")
        return "delta", items[: max(0, n - k)]
    if k + p == n:
        return "delta", items
    if p == n:
        return "whole", beyond(kept, items)
    if n <= k or p != 2 * n - k or items[: n - k] != items[k - n :]:
        bad("length")
    return "glued", beyond(kept, items[n - k :])


def beyond(kept: list[Any], whole: list[Any]) -> list[Any]:
    if whole[: len(kept)] != kept:
        bad("prefix")
    return whole[len(kept) :]


# --- what comes beside the tokens ------------------------------------------------------------------------------------


def take_text(state: State, text: str | None, shape: str, *, brought: int, queued: bool) -> None:
    if text is None:
        state.text_missing |= brought > 0
        return
    kept = state.text or ""
    twice = text[max(0, len(text) - (len(text) + len(kept)) // 2) :]
    if shape == "glued":
        state.texts = [twice]
    elif shape and state.mode != "cumulative" and queued:
        state.texts = [text if text.startswith(kept) else twice]
    elif shape == "whole":
        state.texts = [text]
    else:
        state.texts.append(text)


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


def integers(value: Any) -> list[int]:
    """A list of numbers from 0 to 2**31 - 1, or the base64 of little-endian int32."""
    if type(value) is not list:
        raw = decoded(value)
        if len(raw) % 4:
            bad("metadata")
        value = np.frombuffer(raw, "<i4").tolist()
    if not all(type(item) is int and 0 <= item <= LARGEST_TOKEN for item in value):
        bad("metadata")
    return list(value)


def take_sets(state: State, meta_info: dict[str, Any], new: int) -> None:
    """Top-p: what each token was chosen from, for the new tokens or for all."""
    ids, offsets = (
        next((meta_info[key] for key in keys if meta_info.get(key) is not None), None)
        for keys in (("top_p_token_ids", "top_p_kept_token_ids"), ("top_p_token_offsets", "top_p_kept_token_offsets"))
    )
    mask = meta_info.get("output_token_sampling_mask")
    if ids is not None or offsets is not None:
        tokens, ends = integers(ids), integers(offsets)
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] != len(tokens):
            bad("metadata")
        sets = [tokens[start:end] for start, end in itertools.pairwise(ends)]
    elif mask is not None:
        if type(mask) is not list or not all(type(tokens) is list for tokens in mask):
            bad("metadata")
        sets = [integers(tokens) for tokens in mask]
    else:
        state.sets += [None] * new
        return
    if len(sets) not in (new, len(state.ids)):
        bad("metadata")
    state.sets_told = True
    state.sets = list(sets) if len(sets) == len(state.ids) else [*state.sets, *sets]


def take_experts(state: State, asked: Asked, meta_info: dict[str, Any]) -> None:
    if meta_info.get("routed_experts") is None:
        return
    raw = decoded(meta_info["routed_experts"])
    dtype = meta_info.get("routed_experts_dtype")
    if dtype is None:
        dtype = asked.experts.dtype if asked.experts else "int32"
    if type(dtype) is not str or dtype not in EXPERT_DTYPES:
        bad("metadata")
    form = np.dtype(EXPERT_DTYPES[dtype])
    if len(raw) % form.itemsize:
        bad("metadata")
    array = np.frombuffer(raw, form)
    if asked.experts:
        width = asked.experts.num_layers * asked.experts.top_k
        prompt = state.prompt_tokens if asked.prompt_len is None else asked.prompt_len
        rows = None if prompt is None else max(0, prompt + len(state.ids) - 1 - asked.experts_start)
        if len(array) % width or rows not in (None, len(array) // width):
            bad("metadata")
        largest = asked.experts.num_experts
        if largest is not None and not all(-1 <= expert < largest for expert in array.tolist()):
            bad("metadata")
        array = array.reshape(-1, asked.experts.num_layers, asked.experts.top_k)
    state.experts, state.experts_at = array, len(state.ids)


def take_versions(state: State, meta_info: dict[str, Any], version: str | None, new: int, *, final: bool) -> None:
    state.versions += [version] * new
    told_spans = meta_info.get("weight_versions") if final else None
    if told_spans is None:
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
