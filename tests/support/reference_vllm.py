"""The obvious reader's rules for one event of vLLM's token endpoint, and of its completions."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from support.reference_json import Undecodable, bad, parse
from support.reference_rules import (
    LARGEST_TOKEN,
    Asked,
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

FINISH = {None: None, "stop": "stop", "repetition": "stop", "length": "length", "abort": "abort", "cancelled": "abort"}
# Of each level, what has an attribute of its own.
OWN_OF_EVENT = ("choices", "prompt_token_ids", "usage", "weight_versions")
OWN_OF_CHOICE = (
    "token_ids",
    "prompt_token_ids",
    "logprobs",
    "text",
    "routed_experts",
    "sampling_mask",
    "weight_versions",
)
OWN_OF_USAGE = ("prompt_tokens",)
# The version, and where the header's text begins behind its length.
NPY_STARTS = {b"\x93NUMPY\1\0": 10, b"\x93NUMPY\2\0": 12}
COUNT = rb"(?:0|[1-9][0-9]*)"
NPY_HEADER = re.compile(
    rb"\{ *'descr' *: *'(\|u1|<u2|<i4)' *, *'fortran_order' *: *False *, *"
    rb"'shape' *: *\( *((?:COUNT *, *)*(?:COUNT *)?)\) *,? *\} *\n".replace(b"COUNT", COUNT)
)


def after(before: State, asked: Asked, name: bytes, data: bytes, *, completions: bool) -> State:
    """The state after one more event. After the last one, only an event without choices is looked at."""
    try:
        event = parse(data)
        refuse_if_error(event, name, "choices")
    except (Undecodable, Refused):
        if before.finish is not None:
            return before
        raise
    choices = event.get("choices") if isinstance(event, dict) else None
    if before.finish is not None and choices != []:
        return before
    if type(choices) is not list or len(choices) > 1:
        bad("schema")
    choice = choices[0] if choices else {}
    if type(choice) is not dict or told(choice, "finish_reason", str) not in FINISH:
        bad("schema")
    finish = FINISH[choice.get("finish_reason")]
    state = copy.deepcopy(before)
    apply(state, asked, event, choice, completions=completions, final=finish is not None)
    if finish is not None:
        state.finish = finish
        state.matched = matched_value(choice.get("stop_reason"))
        if state.matched is None and choice["finish_reason"] == "repetition":
            state.matched = "repetition"
    return state


def apply(
    state: State, asked: Asked, event: dict[str, Any], choice: dict[str, Any], *, completions: bool, final: bool
) -> None:
    """All checks in their order; the state is the caller's copy, so what is half done on an error is thrown away."""
    # index, id, types
    if count(choice, "index") not in (None, 0):
        bad("schema")
    request_id = told(event, "id" if completions else "request_id", str)
    if state.request_id is not None and request_id not in (None, state.request_id):
        bad("schema")
    ids = told(choice, "token_ids", list)
    text = told(choice, "text", str)
    prompt = told(choice if completions else event, "prompt_token_ids", list)
    prompt_ids = None if prompt is None else [token_value(token) for token in prompt]
    logprobs, names = logprobs_of(choice, completions=completions) if asked.logprobs else (None, None)
    told(choice, "routed_experts", str)
    versions = [told(place, "weight_version", str, int, float) for place in (choice, event)]
    usage = told(event, "usage", dict) or {}
    completion_tokens = count(usage, "completion_tokens")
    prompt_tokens = count(usage, "prompt_tokens")
    cached_tokens = count(told(usage, "prompt_tokens_details", dict) or {}, "cached_tokens")
    if (ids is None and (text or logprobs)) or (asked.logprobs and ids and logprobs is None):
        bad("schema")

    # the number of tokens was never told
    state.counted = state.counted or ids is not None or completion_tokens is not None
    if final and not state.counted:
        bad("schema")

    # counts
    ids = ids or []
    if any(items is not None and len(items) != len(ids) for items in (logprobs, names)):
        bad("length")
    if completion_tokens not in (None, len(state.ids) + len(ids)):
        bad("length")
    if None not in (prompt_tokens, asked.prompt_len) and prompt_tokens != asked.prompt_len:
        bad("length")
    check_prompt_length(state, asked, prompt_ids, prompt_tokens)

    # ids beside logprobs
    if event.get("output_mode") != "text":
        for token, named in zip(ids, names or [], strict=False):
            is_token = type(token) is int and 0 <= token <= LARGEST_TOKEN
            if is_token and named is not None and not (type(named) is int and named == token):
                bad("mismatch")

    take_prompt_ids(state, prompt_ids)
    take_tokens(state, asked, ids, logprobs or [])
    if text is not None:
        state.texts.append(text)
    state.text_missing |= text is None and len(ids) > 0
    take_meta(state, event, choice, usage)
    state.request_id = request_id if state.request_id is None else state.request_id
    state.prompt_tokens = state.prompt_tokens if prompt_tokens is None else prompt_tokens
    state.cached_tokens = state.cached_tokens if cached_tokens is None else cached_tokens
    take_mask(state, choice.get("sampling_mask"), len(ids))
    if choice.get("routed_experts") is not None:
        state.experts = routed_npy(state, asked, *npy(decoded(choice["routed_experts"])))
        state.experts_at = len(state.ids)
    spans = [place["weight_versions"] for place in (choice, event) if place.get("weight_versions") is not None]
    version = next((version for version in versions if version is not None), None)
    take_versions(state, version, spans[0] if spans else None, len(ids), final=final)


def routed_npy(state: State, asked: Asked, array: Any, shape: list[int]) -> Any:
    """Routed experts from where they were asked for, or all of them, in the shape that is told."""
    if asked.experts is None:
        return array
    some, every = (rows_from(state, asked, start) for start in (asked.experts_start, 0))
    if shape not in ([rows, asked.experts.num_layers, asked.experts.top_k] for rows in (some, every)):
        bad("metadata")
    return routed(array, shape[0], state, asked)


def logprobs_of(choice: dict[str, Any], *, completions: bool) -> tuple[list[float | None] | None, list[Any] | None]:
    """The logprobs, and the ids that are named beside them; None where there is no list."""
    logprobs = told(choice, "logprobs", dict) or {}
    if completions:
        values = told(logprobs, "token_logprobs", list)
        texts = told(logprobs, "tokens", list)
        names = None if texts is None else [placeholder(text) for text in texts]
    else:
        entries = told(logprobs, "content", list)
        if entries is None:
            return None, None
        if not all(type(entry) is dict for entry in entries):
            bad("schema")
        values = [entry.get("logprob") for entry in entries]
        ids = [entry.get("token_id") for entry in entries]
        texts = [entry.get("token") for entry in entries]
        names = [placeholder(text) if token is None else token for token, text in zip(ids, texts, strict=True)]
    if not all(type(value) in (int, float, type(None)) for value in values or []):
        bad("schema")
    return None if values is None else [double(value) for value in values], names


def placeholder(text: Any) -> int | None:
    """The id in "token_id:5", which is written in place of a token's text."""
    match = re.fullmatch("token_id:([0-9]+)", text) if type(text) is str else None
    # Python reads no more digits than these into a number.
    return int(match[1][:4000]) if match else None


def take_meta(state: State, event: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any]) -> None:
    state.levels = state.levels or [{}, {}, {}]
    told_here = ((event, OWN_OF_EVENT), (choice, OWN_OF_CHOICE), (usage, OWN_OF_USAGE))
    for level, (place, own) in zip(state.levels, told_here, strict=True):
        level.update({key: value for key, value in place.items() if key not in own and type(value) is not list})
    state.meta = {key: value for level in state.levels for key, value in level.items()}


def take_mask(state: State, mask: Any, new: int) -> None:
    """What each new token was chosen from."""
    if mask is None:
        state.sets += [None] * new
        return
    if type(mask) is not list or len(mask) != new:
        bad("metadata")
    state.sets_told = True
    state.sets += [ids_of_set(tokens) for tokens in mask]


def npy(raw: bytes) -> tuple[npt.NDArray[Any], list[int]]:
    """The numbers of a file of numpy's, and their shape."""
    start = next((length for version, length in NPY_STARTS.items() if raw.startswith(version)), 0)
    end = start + int.from_bytes(raw[8:start], "little")
    header = NPY_HEADER.fullmatch(raw[start:end])
    if not 0 < start <= end <= len(raw) or header is None:
        bad("metadata")
    dtype = np.dtype(header[1].decode())
    counts = [int(number) for number in header[2].split(b",") if number.strip()]
    if (len(counts) == 1 and b"," not in header[2]) or math.prod(counts) * dtype.itemsize != len(raw) - end:
        bad("metadata")
    return np.frombuffer(raw[end:], dtype), counts
