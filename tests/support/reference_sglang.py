"""The obvious reader's rules for one event of SGLang's stream."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np

from support.reference_json import Undecodable, bad, parse
from support.reference_rules import (
    Asked,
    ExpertsLike,
    Refused,
    State,
    check_prompt_length,
    count,
    decoded,
    double,
    ids_of_set,
    matched_value,
    refuse_if_error,
    routed,
    rows_from,
    take_prompt_ids,
    take_tokens,
    take_versions,
    token_value,
    told,
)

EXPERT_DTYPES = {"int32": "<i4", "uint8": "|u1", "uint16": "<u2"}
SIZES = {"int32": 4, "uint8": 1, "uint16": 2}
OWN_ATTRIBUTE = (
    "text",
    "output_ids",
    "prompt_token_ids",
    "prompt_tokens",
    "cached_tokens",
    "routed_experts",
    "top_p_token_ids",
    "top_p_token_offsets",
    "top_p_kept_token_ids",
    "top_p_kept_token_offsets",
)


def after(before: State, asked: Asked, name: bytes, data: bytes) -> State:
    """The state after one more event; those that come after the last one are not looked at."""
    if before.finish is not None:
        return before
    event = parse(data)
    refuse_if_error(event, name, "meta_info")
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
        matched_value(matched),
        status if status is not None and 400 <= status <= 599 else None,
    )


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
    prompt = told(event, "prompt_token_ids", list)
    prompt_ids = None if prompt is None else [token_value(token) for token in prompt]
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
    check_prompt_length(state, asked, prompt_ids, prompt_tokens)

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

    take_prompt_ids(state, prompt_ids)

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
    take_tokens(state, asked, new_ids, [pair[0] for pair in new] if asked.logprobs else [])
    take_text(state, text, shape, brought=len(new), queued=prompt_tokens is None)
    take_sets(state, meta_info, len(new))
    take_experts(state, asked, meta_info)
    take_versions(state, version, meta_info.get("weight_versions"), len(new), final=finish is not None)


def pairs_of(meta_info: dict[str, Any]) -> list[tuple[float | None, Any]] | None:
    pairs = told(meta_info, "output_token_logprobs", list)
    if pairs is None:
        return None
    for pair in pairs:
        if type(pair) is not list or len(pair) < 2 or type(pair[0]) not in (int, float, type(None)):
            bad("schema")
    return [(double(pair[0]), token_value(pair[1])) for pair in pairs]


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


def integers(value: Any) -> list[int]:
    """A list of ids, or the base64 of little-endian int32."""
    if type(value) is list:
        return ids_of_set(value)
    raw = decoded(value)
    if len(raw) % 4:
        bad("metadata")
    return ids_of_set(np.frombuffer(raw, "<i4").tolist())


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
        sets = [ids_of_set(tokens) for tokens in mask]
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
    if dtype is not None and (type(dtype) is not str or dtype not in EXPERT_DTYPES):
        bad("metadata")
    if asked.experts is None:
        state.experts = numbers(raw, dtype or "int32")
    else:
        state.experts = one_of(raw, forms_of(state, asked, asked.experts, dtype, meta_info), state, asked)
    state.experts_at = len(state.ids)


def forms_of(
    state: State, asked: Asked, experts: ExpertsLike, dtype: str | None, meta_info: dict[str, Any]
) -> list[tuple[int, str]]:
    """The rows and the dtype that an engine may send, which may know neither how the one nor the other is asked for."""
    told_start = meta_info.get("routed_experts_start_len")
    if told_start is not None and (type(told_start) is not int or told_start not in (asked.experts_start, 0)):
        bad("metadata")
    starts = [asked.experts_start, 0] if told_start is None else [told_start]
    rows = dict.fromkeys(rows_from(state, asked, start) for start in starts)
    dtypes = dict.fromkeys(["int32", experts.dtype] if dtype is None else [dtype])
    return [(count, one) for count in rows for one in dtypes]


def one_of(raw: bytes, forms: list[tuple[int, str]], state: State, asked: Asked) -> Any:
    """The experts in the form that fits the bytes; of two that do, the one whose ids fit what was asked for."""
    assert asked.experts is not None
    width = asked.experts.num_layers * asked.experts.top_k
    fitting = [(rows, dtype) for rows, dtype in forms if rows * width * SIZES[dtype] == len(raw)]
    if not raw:
        fitting = fitting[-1:]
    if len(fitting) == 2:
        (rows, dtype), second = fitting
        largest = {1: 255, 2: 65535}[SIZES[second[1]]]
        try:
            experts = routed(numbers(raw, dtype), rows, state, asked)
        except Undecodable:
            return routed(numbers(raw, second[1]), second[0], state, asked)
        if all(-1 <= expert <= largest for expert in numbers(raw, dtype).tolist()):
            return experts
        fitting = [second]
    if not fitting:
        bad("metadata")
    ((rows, dtype),) = fitting
    return routed(numbers(raw, dtype), rows, state, asked)


def numbers(raw: bytes, dtype: str) -> Any:
    if len(raw) % SIZES[dtype]:
        bad("metadata")
    return np.frombuffer(raw, EXPERT_DTYPES[dtype])
