"""The obvious reader: a whole body in, lists out.

It states the rules of reading once more, with json, base64 and lists of Python objects, and copies all it holds
before each event, so that "all or nothing" needs no thought. It is slow on purpose, shares no code with the
package, and is simpler than what it checks: the parser must agree with it in every field, bit for bit.

This file frames and sums up; reference_json.py reads one value, reference_sglang.py and reference_vllm.py read one
event of their dialects, by rules that they share in reference_rules.py.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from support import reference_sglang, reference_vllm
from support.reference_json import Undecodable, is_json
from support.reference_rules import Asked, ExpertsLike, Refused, State

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES: dict[str, Literal["cumulative", "incremental"] | None] = {
    "sglang": None,
    "sglang-cumulative": "cumulative",
    "sglang-incremental": "incremental",
    "vllm": "incremental",
    "vllm-completions": "incremental",
}


@dataclass(eq=False)
class Reading:
    """What came out: the fields of a Generation, then how the reading ended."""

    token_ids: list[int]
    logprobs: list[float] | None
    text: str | None = None
    finish_reason: str | None = None
    matched: int | str | None = None
    routed_experts: npt.NDArray[Any] | None = None
    padded_rows: int = 0
    top_p: tuple[list[int], list[int]] | None = None
    version_spans: list[tuple[str | None, int, int]] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    clamped_logprobs: int = 0
    missing: tuple[str, ...] = ()
    max_tokens_per_event: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    overrun: bool = False
    error: str | None = None
    kind: str | None = None
    status: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and exact(vars(self)) == exact(vars(other))

    __hash__ = None  # type: ignore[assignment]  # two readings are compared, never looked up


def differences(one: Reading, other: Reading) -> dict[str, tuple[Any, Any]]:
    """The fields in which two readings differ: empty if they are equal."""
    fields = vars(one)
    return {
        key: (fields[key], getattr(other, key)) for key in fields if exact(fields[key]) != exact(getattr(other, key))
    }


def exact(value: Any) -> Any:
    """A form in which == tells 1 from 1.0 from True, and 0.0 from -0.0, and no order of keys matters."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tolist())
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def read(
    body: bytes,
    dialect: str,
    *,
    logprobs: bool = True,
    experts: ExpertsLike | None = None,
    prompt_len: int | None = None,
    experts_start: int = 0,
    clamped: str = "raise",
    token_limit: int | None = None,
    aborted: bool = False,
) -> Reading:
    """Read a whole body; the arguments are those of ``Parser`` and of its ``close``."""
    asked = Asked(logprobs, experts, prompt_len, experts_start, keep_clamped=clamped == "keep")
    state = State(mode=MODES[dialect])
    done = overrun = False
    ending: dict[str, Any] = {}
    try:
        for name, data, complete in events(body):
            if data == b"[DONE]":
                done = True
            elif not done and not overrun and (complete or is_json(data)):
                state = after(dialect, state, asked, name, data)
                if token_limit is not None and len(state.ids) > token_limit and state.finish is None:
                    state.finish, overrun = "length", True
        if state.finish is None and not aborted:
            ending = {"error": "StreamTruncated"}
    except Undecodable as error:
        ending = {"error": "DecodeError", "kind": error.kind}
    except Refused as error:
        state = error.state or state
        ending = {"error": "EngineError", "status": error.status}
    has_experts = state.experts_at == len(state.ids)
    return Reading(
        token_ids=state.ids,
        logprobs=state.logprobs if logprobs else None,
        text=None if state.text_missing else state.text,
        finish_reason=state.finish,
        matched=state.matched,
        routed_experts=state.experts if has_experts else None,
        padded_rows=state.padded_rows if has_experts else 0,
        top_p=top_p_of(state),
        version_spans=spans_of(state),
        prompt_token_ids=state.prompt_ids,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        clamped_logprobs=state.clamped,
        max_tokens_per_event=state.most_at_once,
        meta=state.meta,
        done=done,
        overrun=overrun,
        **ending,
    )


def after(dialect: str, state: State, asked: Asked, name: bytes, data: bytes) -> State:
    """The state after one more event."""
    if dialect.startswith("vllm"):
        return reference_vllm.after(state, asked, name, data, completions=dialect == "vllm-completions")
    return reference_sglang.after(state, asked, name, data)


def top_p_of(state: State) -> tuple[list[int], list[int]] | None:
    sets = [tokens for tokens in state.sets if tokens is not None]
    if not state.sets_told or len(sets) < len(state.ids):
        return None
    return list(itertools.chain(*sets)), [0, *itertools.accumulate(len(tokens) for tokens in sets)]


def spans_of(state: State) -> list[tuple[str | None, int, int]]:
    if state.told_spans is not None:
        return list(state.told_spans)
    runs = [(version, len(list(run))) for version, run in itertools.groupby(state.versions)]
    ends = [0, *itertools.accumulate(length for _, length in runs)]
    return [(version, start, end) for (version, _), (start, end) in zip(runs, itertools.pairwise(ends), strict=True)]


def events(body: bytes) -> Iterator[tuple[bytes, bytes, bool]]:
    """The name and the data of each event that holds any, and whether a blank line ended it."""
    *lines, rest = re.split(rb"\r\n|\r|\n", body.removeprefix(b"\xef\xbb\xbf"))
    name, data = b"", []
    for line, complete in [*((line, True) for line in lines), (rest, False)]:
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value
        if line == b"" or not complete:
            joined = b"\n".join(data)
            if joined.strip(b" \t\r\n"):
                yield name, joined, complete
            name, data = b"", []
