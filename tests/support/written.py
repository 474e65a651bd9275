"""Random generations, written as an engine might write them, with what must be read back.

What must come out is known from what was drawn, not from reading: a third witness beside parser and reader.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from reference import Reading
from support.bodies import Shape
from support.reference_rules import CLAMPED

INCREMENTAL, CUMULATIVE = "sglang-incremental", "sglang-cumulative"
BOM = b"\xef\xbb\xbf"

tokens = st.integers(0, 2**31 - 1) | st.sampled_from([0, 1, 2**31 - 1])
doubles = st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: value not in CLAMPED)
odd_texts = st.sampled_from(["", "\u2028", "\n\ndata: [DONE]\n\n", "\0", "a"])
texts = st.text(st.characters(codec="utf-8"), max_size=4) | odd_texts
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).map("x{}".format)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@dataclass
class Layout:
    """How the bytes are laid out, which must not matter."""

    ending: bytes = b"\n"
    separators: tuple[str, str] = (",", ":")
    indent: int | None = None
    ascii: bool = False
    noise: tuple[bytes, ...] = ()
    seed: int | None = None  # of the order of keys
    bom: bool = False
    lead: bytes = b"data: "
    tail: Literal["done", "blank", "line", "nothing"] = "done"


@dataclass
class Written:
    """A stream, event by event, and what must be read back."""

    events: list[bytes]
    dialect: str
    asked: dict[str, Any]
    expected: Reading

    @property
    def body(self) -> bytes:
        return b"".join(self.events)


@dataclass
class Plan:
    """What is told in a stream."""

    ids: list[int]
    logprobs: list[float] | None
    pieces: list[str] | None  # the text of each token
    cuts: list[int]  # tokens after each event, the last event's being all
    cumulative: bool
    finish: dict[str, Any]
    ending: Literal["plain", "queued", "glued"] = "plain"  # how it was aborted, if not by a usual event
    labels: list[str | None] = field(default_factory=list)  # the weight version of each event
    spans: list[tuple[str, int]] | None = None  # told with the last event: a version, and the number of its tokens
    sets: list[list[int]] | None = None
    sets_as: Literal["mask", "list", "base64", "last"] = "last"
    experts: tuple[Shape, int, bool] | None = None  # with the start, and whether the reply tells the dtype
    knows_start: bool = True  # whether the engine sends the rows from there on, or all
    tells_start: bool = False
    prompt: int = 3
    prompt_ids: list[int] | None = None  # in every event
    cached: int | None = None
    extras: list[dict[str, Any]] = field(default_factory=list)  # of each event
    bare: bool = False  # empty lists are left out, as the Rust frontend does


layouts = st.builds(
    Layout,
    ending=st.sampled_from([b"\n", b"\r", b"\r\n"]),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :  ")]),
    indent=st.sampled_from([None, None, 0, 2]),
    ascii=st.booleans(),
    noise=st.lists(
        st.sampled_from([b": ping", b":", b"id: 7", b"retry: 3000", b"event: message", b"x", b"", b"data:"]), max_size=3
    ).map(tuple),
    seed=st.none() | st.integers(0, 99),
    bom=st.booleans(),
    lead=st.sampled_from([b"data: ", b"data:", b"data:  \t"]),
    tail=st.sampled_from(["done", "done", "blank", "line", "nothing"]),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ids = draw(st.lists(tokens, max_size=draw(st.sampled_from([3, 12, 40]))))
    n = len(ids)
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    cumulative = draw(st.booleans())
    logprobs = draw(st.none() | st.lists(doubles, min_size=n, max_size=n))
    ending: Any = draw(st.sampled_from(["plain", "plain", "queued", "glued"]))
    if cumulative and ending == "glued":
        ending = "queued"
    stopped = {"type": "stop", "matched": draw(st.none() | tokens | texts)}
    usual: list[dict[str, Any]] = [stopped, {"type": "length", "length": n}, {"type": "abort", "status_code": None}]
    finish = draw(st.sampled_from(usual))
    span_lengths = [end - start for start, end in itertools.pairwise([0, *cuts, n])]
    shape = st.builds(
        Shape, st.integers(1, 3), st.integers(1, 3), st.just(200), st.sampled_from(["int32", "uint8", "uint16"])
    )
    prompt = draw(st.integers(3, 9))
    return Plan(
        ids=ids,
        logprobs=logprobs,
        pieces=draw(st.none() | st.lists(texts, min_size=n, max_size=n)),
        cuts=[*cuts, n],
        cumulative=cumulative,
        finish=finish if ending == "plain" else {"type": "abort", "message": draw(texts)},
        ending=ending,
        labels=[draw(st.none() | st.sampled_from("abc")) for _ in range(len(cuts) + 1)],
        spans=draw(st.none() | st.just([(f"v{number % 3}", length) for number, length in enumerate(span_lengths)])),
        sets=draw(st.none() | st.lists(st.lists(tokens, max_size=4), min_size=n, max_size=n)),
        sets_as=draw(st.sampled_from(["mask", "list", "base64", "last"])),
        experts=draw(st.none() | st.tuples(shape, st.integers(0, 2), st.booleans())),
        knows_start=draw(st.booleans()),
        tells_start=draw(st.booleans()),
        prompt=prompt,
        prompt_ids=draw(st.none() | st.lists(tokens, min_size=prompt, max_size=prompt)),
        cached=draw(st.none() | st.integers(0, 2**31)),
        extras=[draw(st.dictionaries(keys, values, max_size=3)) for _ in range(len(cuts) + 1)],
        bare=draw(st.booleans()),
    )


def ambiguous(plan: Plan) -> bool:
    """Whether the abort event of a queued request can be read in two ways without pairs to tell."""
    if plan.ending == "plain" or plan.cumulative or plan.logprobs is not None:
        return False
    sent = plan.cuts[-2] if len(plan.cuts) > 1 else 0
    pieces = plan.pieces or []
    kept, new = "".join(pieces[:sent]), "".join(pieces[sent:])
    like_whole = plan.ending == "glued" and new != "" and (new + kept + new).startswith(kept)
    return like_whole or (sent == 1 and len(plan.ids) > 1 and plan.ids[0] == plan.ids[1])


@st.composite
def written(draw: st.DrawFn) -> Written:
    """A stream that is as it should be."""
    plan, layout = draw(plans().filter(lambda plan: not ambiguous(plan))), draw(layouts)
    named = CUMULATIVE if plan.cumulative else INCREMENTAL
    return write(plan, layout, draw(st.sampled_from([named, "sglang"])))


def write(plan: Plan, layout: Layout, dialect: str) -> Written:
    """The stream of a plan."""
    told = [told_by(plan, number) for number in range(len(plan.cuts))]
    events = [laid_out(event, layout, number) for number, event in enumerate(told)]
    if layout.tail == "done":
        events.append((b"data: " if layout.lead != b"data:" else b"data:") + b"[DONE]" + 2 * layout.ending)
    elif layout.tail != "blank":
        events[-1] = events[-1].removesuffix(layout.ending * (1 if layout.tail == "line" else 2))
    if layout.bom:
        events[0] = BOM + events[0]
    with_prompt = [event for event in told if "prompt_tokens" in event["meta_info"]]
    shape, start, _ = plan.experts or (None, 0, False)
    experts = None if plan.experts is None or plan.ending != "plain" else routed(plan, start)
    return Written(
        events=events,
        dialect=dialect,
        asked={
            "logprobs": plan.logprobs is not None,
            "prompt_len": plan.prompt,
            "experts": shape,
            "experts_start": start,
        },
        expected=Reading(
            token_ids=plan.ids,
            logprobs=plan.logprobs,
            text=None if plan.pieces is None else "".join(plan.pieces),
            finish_reason=plan.finish["type"],
            matched=plan.finish.get("matched"),
            routed_experts=experts,
            top_p=None if plan.sets is None else ([*itertools.chain(*plan.sets)], offsets_of(plan.sets)),
            version_spans=spans_of(plan),
            prompt_token_ids=plan.prompt_ids,
            prompt_tokens=plan.prompt if with_prompt else None,
            cached_tokens=plan.cached if with_prompt else None,
            max_tokens_per_event=max(end - start for start, end in itertools.pairwise([0, *plan.cuts])),
            meta=meta_of(told),
            done=layout.tail == "done",
        ),
    )


def told_by(plan: Plan, number: int) -> dict[str, Any]:
    """The fields of one event."""
    last = number == len(plan.cuts) - 1
    sent = plan.cuts[number - 1] if number else 0
    n = plan.cuts[number]
    queued = last and plan.ending != "plain"
    start = 0 if plan.cumulative or queued else sent
    glued = [*range(sent, n)] if last and plan.ending == "glued" else []
    order = [*glued, *range(start, n)]
    extras = list(plan.extras[number].items())

    meta: dict[str, Any] = {"id": "r7", "finish_reason": plan.finish if last else None, "completion_tokens": n}
    event: dict[str, Any] = {"output_ids": [plan.ids[i] for i in order], "meta_info": meta, **dict(extras[::2])}
    meta.update(extras[1::2])
    if queued and not plan.cumulative:
        # Only what was not sent yet, and the last one again.
        event["output_ids"] = plan.ids[sent:n] + plan.ids[-1:]
    if plan.prompt_ids is not None:
        event["prompt_token_ids"] = plan.prompt_ids
    if plan.pieces is not None:
        event["text"] = "".join(plan.pieces[i] for i in order)
    if plan.logprobs is not None:
        meta["output_token_logprobs"] = [[plan.logprobs[i], plan.ids[i], None] for i in order]
        meta["output_token_logprobs_length"] = n
    if plan.labels[number] is not None:
        meta["weight_version"] = plan.labels[number]
    if not queued:
        meta["prompt_tokens"] = plan.prompt
        if plan.cached is not None:
            meta["cached_tokens"] = plan.cached
    if plan.sets is not None and (last or plan.sets_as != "last"):
        meta.update(sets_told(plan.sets[0 if last else sent : n], plan.sets_as))
    if last and plan.spans is not None:
        ends = [0, *itertools.accumulate(length for _, length in plan.spans)]
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": end}
            for (version, _), (start, end) in zip(plan.spans, itertools.pairwise(ends), strict=True)
        ]
    if last and not queued and plan.experts is not None:
        shape, _, tells_dtype = plan.experts
        rows = routed(plan, plan.experts[1] if plan.knows_start else 0)
        meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        if tells_dtype:
            meta["routed_experts_dtype"] = shape.dtype
        if plan.tells_start:
            meta["routed_experts_start_len"] = plan.experts[1] if plan.knows_start else 0
    if plan.bare and not order and plan.finish["type"] != "abort":
        event.pop("output_ids")
        meta.pop("output_token_logprobs", None)
    return event


def sets_told(sets: list[list[int]], written_as: str) -> dict[str, Any]:
    ids, offsets = [*itertools.chain(*sets)], offsets_of(sets)
    if written_as == "mask":
        return {"output_token_sampling_mask": sets}
    if written_as == "list":
        return {"top_p_kept_token_ids": ids, "top_p_kept_token_offsets": offsets}
    return {
        "top_p_token_ids": base64.b64encode(np.array(ids, "<i4").tobytes()).decode(),
        "top_p_token_offsets": base64.b64encode(np.array(offsets, "<i4").tobytes()).decode(),
    }


def offsets_of(sets: list[list[int]]) -> list[int]:
    return [0, *itertools.accumulate(len(tokens) for tokens in sets)]


def routed(plan: Plan, start: int) -> np.ndarray[Any, Any]:
    """Routed experts from a position on, which show their place: no two neighbours are equal."""
    assert plan.experts is not None
    shape, *_ = plan.experts
    rows = plan.prompt + len(plan.ids) - 1
    count = rows * shape.num_layers * shape.top_k
    return (np.arange(count) * 7 % 200).astype(shape.dtype).reshape(rows, shape.num_layers, shape.top_k)[start:]


def spans_of(plan: Plan) -> list[tuple[str | None, int, int]]:
    if plan.spans is not None:
        ends = [0, *itertools.accumulate(length for _, length in plan.spans)]
        names = [version for version, _ in plan.spans]
        return [span for span in zip(names, ends, ends[1:], strict=False) if span[1] < span[2]]
    return runs(plan.labels, plan.cuts)


def runs(labels: list[str | None], cuts: list[int]) -> list[tuple[str | None, int, int]]:
    """The spans of equal labels, each label being that of the tokens up to its cut."""
    each: list[str | None] = []
    for label, (start, end) in zip(labels, itertools.pairwise([0, *cuts]), strict=True):
        each += [label] * (end - start)
    borders = [i for i in range(len(each) + 1) if i in (0, len(each)) or each[i] != each[i - 1]]
    return [(each[start], start, end) for start, end in itertools.pairwise(borders)]


def meta_of(told: list[dict[str, Any]]) -> dict[str, Any]:
    """All that has no attribute of its own, the latest of each."""
    own = {"text", "meta_info", "prompt_tokens", "cached_tokens", "routed_experts"}
    own |= {"top_p_token_ids", "top_p_token_offsets"}
    every = [[*event.items(), *event["meta_info"].items()] for event in told]
    return {key: value for pairs in every for key, value in pairs if key not in own and not isinstance(value, list)}


def laid_out(event: dict[str, Any], layout: Layout, number: int) -> bytes:
    """The bytes of one event."""
    if layout.seed is not None:
        event = shuffled(event, random.Random(f"{layout.seed} {number}"))
    raw = json.dumps(event, ensure_ascii=layout.ascii, separators=layout.separators, indent=layout.indent).encode()
    lines = [*layout.noise, *(layout.lead + line for line in raw.split(b"\n"))]
    return layout.ending.join(lines) + 2 * layout.ending


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}
