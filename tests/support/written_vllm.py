"""Random generations, written as vLLM might write them, with what must be read back."""

from __future__ import annotations

import base64
import io
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import Reading
from support.bodies import Shape
from support.bodies_vllm import WIRES, Wire, dialect_of
from support.written import (
    BOM,
    Layout,
    Written,
    doubles,
    keys,
    laid_out,
    layouts,
    offsets_of,
    runs,
    texts,
    tokens,
    values,
)

REASONS = ["stop", "length", "abort", "cancelled", "repetition"]
WORDS = {"cancelled": "abort", "repetition": "stop"}
Level = dict[str, Any]


@dataclass
class Plan:
    """What is told in a stream."""

    wire: Wire
    ids: list[int]
    logprobs: list[float] | None
    pieces: list[str]  # the text of each token
    cuts: list[int]  # tokens after each event, the last event's being all
    reason: str
    stop_reason: int | str | None
    text_mode: bool = False  # of the token endpoint
    named: bool = True  # whether ids stand beside the logprobs
    counted: str = "every"  # which events tell the usage
    likely: int = 1  # how many tokens stand beside each one
    labels: list[str | None] = field(default_factory=list)  # the weight version of each event
    spans: list[tuple[str, int]] | None = None  # told with the last event: a version, and the number of its tokens
    sets: list[list[int]] | None = None
    experts: tuple[Shape, int] | None = None  # with the start
    knows_start: bool = True  # whether the engine sends the rows from there on, or all
    prompt: int = 3
    prompt_ids: list[int] | None = None  # in the first event
    cached: int | None = None
    extras: list[tuple[Level, Level, Level]] = field(default_factory=list)  # of each event: its own, choice's, usage's

    @property
    def has_text(self) -> bool:
        return self.text_mode or self.wire == "completions"

    @property
    def has_side_data(self) -> bool:
        return self.wire in ("0.32", "0.28")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ids = draw(st.lists(tokens, max_size=draw(st.sampled_from([3, 12, 40]))))
    n = len(ids)
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    lengths = [end - start for start, end in itertools.pairwise([0, *cuts, n])]
    shape = st.builds(
        Shape, st.integers(1, 3), st.integers(1, 3), st.just(200), st.sampled_from(["int32", "uint8", "uint16"])
    )
    extras = st.dictionaries(keys, values, max_size=2)
    prompt = draw(st.integers(3, 9))
    return Plan(
        wire=draw(st.sampled_from(WIRES)),
        ids=ids,
        logprobs=draw(st.none() | st.lists(doubles, min_size=n, max_size=n)),
        pieces=draw(st.lists(texts, min_size=n, max_size=n)),
        cuts=[*cuts, n],
        reason=draw(st.sampled_from(REASONS)),
        stop_reason=draw(st.none() | tokens | texts),
        text_mode=draw(st.booleans()),
        named=draw(st.booleans()),
        counted=draw(st.sampled_from(["every", "late", "none"])),
        likely=draw(st.sampled_from([1, 1, 0, 3])),
        labels=[draw(st.none() | st.sampled_from("abc")) for _ in range(len(cuts) + 1)],
        spans=draw(st.none() | st.just([(f"v{number % 3}", length) for number, length in enumerate(lengths)])),
        sets=draw(st.none() | st.lists(st.lists(tokens, max_size=4), min_size=n, max_size=n)),
        experts=draw(st.none() | st.tuples(shape, st.integers(0, 2))),
        knows_start=draw(st.booleans()),
        prompt=prompt,
        prompt_ids=draw(st.none() | st.lists(tokens, min_size=prompt, max_size=prompt)),
        cached=draw(st.none() | st.integers(0, 2**31)),
        extras=[(draw(extras), draw(extras), draw(extras)) for _ in range(len(cuts) + 2)],
    )


@st.composite
def written(draw: st.DrawFn) -> Written:
    """A stream that is as it should be."""
    return write(draw(plans()), draw(layouts))


def write(plan: Plan, layout: Layout) -> Written:
    """The stream of a plan."""
    told = [told_by(plan, number) for number in range(len(plan.cuts))]
    if plan.counted != "none":
        told.append(told_last(plan))
    events = [laid_out(event, layout, number) for number, event in enumerate(told)]
    if layout.tail == "done":
        events.append((b"data: " if layout.lead != b"data:" else b"data:") + b"[DONE]" + 2 * layout.ending)
    elif layout.tail != "blank":
        events[-1] = events[-1].removesuffix(layout.ending * (1 if layout.tail == "line" else 2))
    if layout.bom:
        events[0] = BOM + events[0]
    shape, start = plan.experts or (None, 0)
    sets = plan.sets if plan.has_side_data else None
    repeated = "repetition" if plan.reason == "repetition" else None
    return Written(
        events=events,
        dialect=dialect_of(plan.wire),
        asked={
            "logprobs": plan.logprobs is not None,
            "prompt_len": plan.prompt,
            "experts": shape,
            "experts_start": start,
        },
        expected=Reading(
            token_ids=plan.ids,
            logprobs=plan.logprobs,
            text="".join(plan.pieces) if plan.has_text else None,
            finish_reason=WORDS.get(plan.reason, plan.reason),
            matched=repeated if plan.stop_reason is None else plan.stop_reason,
            routed_experts=routed(plan, start) if plan.experts and plan.has_side_data else None,
            top_p=None if sets is None else ([*itertools.chain(*sets)], offsets_of(sets)),
            version_spans=spans_of(plan),
            prompt_token_ids=plan.prompt_ids,
            prompt_tokens=None if plan.counted == "none" else plan.prompt,
            cached_tokens=None if plan.counted == "none" else plan.cached,
            max_tokens_per_event=max(end - start for start, end in itertools.pairwise([0, *plan.cuts])),
            meta=meta_of(told),
            done=layout.tail == "done",
        ),
    )


def told_by(plan: Plan, number: int) -> Level:
    """The fields of one event."""
    last = number == len(plan.cuts) - 1
    new = range(plan.cuts[number - 1] if number else 0, plan.cuts[number])
    of_event, of_choice, of_usage = plan.extras[number]
    choice: Level = {
        "index": 0,
        "finish_reason": plan.reason if last else None,
        "stop_reason": plan.stop_reason if last else None,
        "token_ids": [plan.ids[i] for i in new],
        "logprobs": None if plan.logprobs is None else logprobs_of(plan, new),
        **of_choice,
    }
    if plan.has_text:
        choice["text"] = "".join(plan.pieces[i] for i in new)
    if plan.has_side_data:
        choice["routed_experts"] = None
        if last and plan.experts is not None:
            choice["routed_experts"] = npy(routed(plan, plan.experts[1] if plan.knows_start else 0))
        choice["sampling_mask"] = None if plan.sets is None else [plan.sets[i] for i in new]
    if last and plan.spans is not None:
        ends = [0, *itertools.accumulate(length for _, length in plan.spans)]
        choice["weight_versions"] = [
            {"version": version, "start": start, "end": end}
            for (version, _), (start, end) in zip(plan.spans, itertools.pairwise(ends), strict=True)
        ]
    usage = {**usage_of(plan, plan.cuts[number], None), **of_usage} if plan.counted == "every" else None
    event = {**outer(plan), "usage": usage, "choices": [choice], **of_event}
    if plan.wire == "completions":
        choice["prompt_token_ids"] = None if number else plan.prompt_ids
    elif plan.prompt_ids is not None and number == 0:
        event["prompt_token_ids"] = plan.prompt_ids
    if plan.labels[number] is not None:
        event["weight_version"] = plan.labels[number]
    if plan.wire != "rust":
        return event
    told = {key: value for key, value in choice.items() if value is not None}
    return {key: value for key, value in {**event, "choices": [told]}.items() if value is not None}


def told_last(plan: Plan) -> Level:
    """The usage event, whose choice is missing."""
    of_event, _, of_usage = plan.extras[-1]
    usage = usage_of(plan, len(plan.ids), None if plan.cached is None else {"cached_tokens": plan.cached})
    return {**outer(plan), "choices": [], "usage": {**usage, **of_usage}, **of_event}


def outer(plan: Plan) -> Level:
    if plan.wire == "completions":
        return {"id": "cmpl-r7", "object": "text_completion", "created": 1795951713, "model": "tiny"}
    mode = {"output_mode": "text" if plan.text_mode else "tokens"} if plan.wire == "0.32" or plan.text_mode else {}
    return {"request_id": "generate-tokens-r7", **mode}


def usage_of(plan: Plan, count: int, details: Level | None) -> Level:
    counts = {"prompt_tokens": plan.prompt, "total_tokens": plan.prompt + count, "completion_tokens": count}
    return {**counts, "prompt_tokens_details": details}


def logprobs_of(plan: Plan, new: range) -> Level:
    assert plan.logprobs is not None
    if plan.wire == "completions":
        names = [f"token_id:{plan.ids[i]}" if plan.named else plan.pieces[i] for i in new]
        return {
            "text_offset": [0 for _ in new],
            "token_logprobs": [plan.logprobs[i] for i in new],
            "tokens": names,
            "top_logprobs": [{name: plan.logprobs[i]} for i, name in zip(new, names, strict=True)],
        }
    return {"content": [entry(plan, plan.ids[i], plan.logprobs[i], plan.pieces[i]) for i in new]}


def entry(plan: Plan, token: int, logprob: float, piece: str) -> Level:
    def likely(token: int) -> Level:
        if plan.text_mode:
            # A text may look like the name of another id.
            text = "token_id:7" if piece == "a" else piece
            return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
        if plan.wire == "0.32":
            return {"token_id": token, "logprob": logprob, "rank": 1}
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}

    told = likely(token)
    if not plan.named:
        told = {key: value for key, value in told.items() if key not in ("token", "token_id")}
    return {**told, "top_logprobs": [told, likely(0), likely(1)][: plan.likely]}


def npy(array: np.ndarray[Any, Any]) -> str:
    """A file of numpy's, in base64."""
    file = io.BytesIO()
    np.save(file, array.astype(array.dtype.newbyteorder("<")))
    return base64.b64encode(file.getvalue()).decode()


def routed(plan: Plan, start: int) -> np.ndarray[Any, Any]:
    """Routed experts from a position on, which show their place: no two neighbours are equal."""
    assert plan.experts is not None
    shape, _ = plan.experts
    rows = plan.prompt + len(plan.ids) - 1
    count = rows * shape.num_layers * shape.top_k
    return (np.arange(count) * 7 % 200).astype(shape.dtype).reshape(rows, shape.num_layers, shape.top_k)[start:]


def spans_of(plan: Plan) -> list[tuple[str | None, int, int]]:
    if plan.spans is not None:
        ends = [0, *itertools.accumulate(length for _, length in plan.spans)]
        names = [version for version, _ in plan.spans]
        return [span for span in zip(names, ends, ends[1:], strict=False) if span[1] < span[2]]
    return runs(plan.labels, plan.cuts)


def meta_of(told: list[Level]) -> Level:
    """All that has no attribute of its own, the latest of each, of the innermost level that tells it."""
    own = {"choices", "usage", "token_ids", "logprobs", "text", "routed_experts", "sampling_mask", "prompt_tokens"}
    own |= {"prompt_token_ids"}
    levels: list[Level] = [{}, {}, {}]
    for event in told:
        for level, place in zip(levels, (event, *(event["choices"] or [{}]), event.get("usage") or {}), strict=True):
            level.update({key: value for key, value in place.items() if not isinstance(value, list)})
    merged = {key: value for level in levels for key, value in level.items()}
    return {key: value for key, value in merged.items() if key not in own}
