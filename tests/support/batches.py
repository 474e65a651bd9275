"""Samples for ``collate``, and the batch that loops over their tokens make of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streamfold.samples.sample import Sample

PAD = 7777
LAYERS, TOP_K = 2, 2


def sample_of(response: int, *, kind: Any = Sample, experts: Any = None, top_p: bool = False, **fields: Any) -> Any:
    """A sample of two prompt tokens and ``response`` others, all of version "1"."""
    values: dict[str, Any] = {
        "tokens": [*range(1, response + 3)],
        "response_length": response,
        "rollout_log_probs": [-i / 8 for i in range(1, response + 1)],
    }
    if kind is Sample:
        values["version_spans"] = [("1", 0, response)]
    if experts is not None:
        values["rollout_routed_experts"] = np.ones((response + 1, LAYERS, TOP_K), experts)
    if top_p:
        values["rollout_top_p_token_ids"] = np.arange(2 * response, dtype=np.int32)
        values["rollout_top_p_token_offsets"] = np.arange(0, 2 * response + 1, 2, dtype=np.int32)
    return kind(**{**values, **fields})


@st.composite
def samples_of(draw: Any, kind: Any) -> list[Any]:
    """Samples of any lengths, with masks, versions, tool tokens and side data."""
    experts = draw(st.sampled_from([None, np.int32, np.uint8, np.uint16]))
    top_p, logprobs = draw(st.booleans()), draw(st.booleans())
    return [draw(_samples(kind, experts, top_p=top_p, logprobs=logprobs)) for _ in range(draw(st.integers(1, 4)))]


@st.composite
def _samples(draw: Any, kind: Any, experts: Any, *, top_p: bool, logprobs: bool) -> Any:
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    total = prompt + response
    ints = st.integers(0, 200)
    sample = kind(tokens=draw(st.lists(ints, min_size=total, max_size=total)), response_length=response)
    sample.loss_mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=response, max_size=response))
    trained = sum(sample.loss_mask) if sample.loss_mask is not None else response
    if logprobs and (trained or draw(st.booleans())):
        floats = st.floats(-30, 0, width=32)
        sample.rollout_log_probs = draw(st.lists(floats, min_size=response, max_size=response))
    if experts is not None and (trained or draw(st.booleans())):
        flat = draw(st.lists(st.integers(0, 7), min_size=(total - 1) * 4, max_size=(total - 1) * 4))
        sample.rollout_routed_experts = np.array(flat, experts).reshape(total - 1, LAYERS, TOP_K)
    if top_p and (trained or draw(st.booleans())):
        kept = draw(st.lists(st.lists(ints, max_size=4), min_size=response, max_size=response))
        sample.rollout_top_p_token_ids = np.array([token for ids in kept for token in ids], np.int32)
        sample.rollout_top_p_token_offsets = np.cumsum([0, *map(len, kept)]).astype(np.int32)
    if hasattr(sample, "version_spans"):
        borders = sorted(draw(st.sets(st.integers(0, response), max_size=4)))
        names = st.sampled_from(["1", "2", None])
        sample.version_spans = [(draw(names), start, end) for start, end in itertools.pairwise(borders)]
    return sample


def reference(samples: list[Any], *, max_length: int | None, advantages: list[float] | None) -> dict[str, Any]:
    """Every array of the batch as lists, token by token."""
    length = max(min(len(sample.tokens), max_length or len(sample.tokens)) for sample in samples)
    versions: list[str] = []
    columns = {
        name: [[at(sample, i, versions) for i in range(length)] for sample in samples] for name, at in _AT.items()
    }
    return {
        **columns,
        "versions": tuple(versions),
        "logprobs": columns["logprobs"] if _any(samples, "rollout_log_probs") else None,
        "routed_experts": _experts(samples, length),
        "top_p": _top_p(samples, length),
        "advantages": None if advantages is None else _advantages(samples, length, advantages),
    }


def _any(samples: list[Any], name: str) -> bool:
    return any(getattr(sample, name) is not None for sample in samples)


def _in_response(sample: Any, i: int) -> int | None:
    """The number of the response token at position ``i``; None if there is none."""
    first = len(sample.tokens) - sample.response_length
    return i - first if first <= i < len(sample.tokens) else None


def _input_id(sample: Any, i: int, _versions: list[str]) -> int:
    return sample.tokens[i] if i < len(sample.tokens) else PAD


def _attended(sample: Any, i: int, _versions: list[str]) -> bool:
    return i < len(sample.tokens)


def _trained(sample: Any, i: int, _versions: list[str]) -> int:
    number = _in_response(sample, i)
    if number is None:
        return 0
    return 1 if sample.loss_mask is None else sample.loss_mask[number]


def _logprob(sample: Any, i: int, _versions: list[str]) -> float:
    number = _in_response(sample, i)
    return 0.0 if number is None or sample.rollout_log_probs is None else sample.rollout_log_probs[number]


def _version(sample: Any, i: int, versions: list[str]) -> int:
    number = _in_response(sample, i)
    for version, start, end in getattr(sample, "version_spans", ()):
        if number is not None and version is not None and start <= number < end:
            if version not in versions:
                versions.append(version)
            return versions.index(version)
    return -1


_AT = {
    "input_ids": _input_id,
    "attention_mask": _attended,
    "loss_mask": _trained,
    "logprobs": _logprob,
    "version_index": _version,
}


def _experts(samples: list[Any], length: int) -> Any:
    found = [sample.rollout_routed_experts for sample in samples]
    dtype = next((rows.dtype for rows in found if rows is not None), None)
    if dtype is None:
        return None
    mark = -1 if dtype == np.int32 else int(np.iinfo(dtype).max)
    padded = [[mark] * TOP_K] * LAYERS
    return [
        [padded if rows is None or i >= len(rows) else rows[i].tolist() for i in range(length - 1)] for rows in found
    ]


def _top_p(samples: list[Any], length: int) -> Any:
    if not _any(samples, "rollout_top_p_token_ids"):
        return None
    ids: list[int] = []
    offsets = [0]
    for sample in samples:
        for i in range(length):
            number = _in_response(sample, i)
            if number is not None and sample.rollout_top_p_token_ids is not None:
                start, end = sample.rollout_top_p_token_offsets[number : number + 2].tolist()
                ids += sample.rollout_top_p_token_ids[start:end].tolist()
            offsets.append(len(ids))
    return [ids, offsets]


def _advantages(samples: list[Any], length: int, advantages: list[float]) -> Any:
    return [
        [0.0 if _in_response(sample, i) is None else value for i in range(length)]
        for sample, value in zip(samples, advantages, strict=True)
    ]
