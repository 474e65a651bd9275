"""What one request has generated: the facts that every engine tells, each in its own way."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DONE", "Finish", "Frame", "Reply", "length", "shuffled", "stopped", "version_spans"]

DONE = b"data: [DONE]\n\n"

Finish = dict[str, Any]
Frame = dict[str, Any]


@dataclass(kw_only=True)
class Reply:
    """What one request has generated so far, and what else is told about it.

    Lists have one entry per output token; a prefix of them is a legal earlier state. ``logprobs``, ``pieces`` (the text
    of the first n tokens is ``"".join(pieces[:n])``), ``top_p`` and the like are None where the engine tells none.
    """

    rid: str = "00000000000000000000000000000000"
    prompt_tokens: int = 1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None
    pieces: list[str] | None = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # weight version of each token; empty: all alike
    label: str = "default"  # the engine's weight version now
    finish: Finish | None = None
    in_queue: bool = False  # aborted while queued or retracted: told by a frame of its own shape

    input_logprobs: list[tuple[float | None, int]] | None = None  # of the prompt; told with ``logprobs`` only
    logprob_texts: list[str] | None = None
    ranks: list[int] | None = None  # of the sampled tokens in the vocabulary; None: always the first
    top_logprobs: list[list[tuple[float | None, int]]] | None = None
    spare_pair: tuple[float, int] | None = None  # the pair that comes with a request for no tokens at all
    sampling_mask: list[list[int]] | None = None
    sampling_logprobs: list[float] | None = None
    custom: dict[str, list[Any]] = field(default_factory=dict)
    # Told with the terminal event:
    top_p: list[list[int]] | None = None
    routed_experts: bytes | None = None  # little-endian ids, [rows, layers, top_k]; of vLLM a .npy file

    prompt_token_ids: list[int] | None = None
    index: int | None = None
    cached_tokens: int = 0
    cached_tokens_details: dict[str, int] | None = None
    retractions: int = 0
    arrived: float = 0.0  # unix seconds


def stopped(matched: int | str | None) -> Finish:
    """Finish by a stop token or a stop string; None is the end of the sequence, where an engine does not name it."""
    return {"type": "stop", "matched": matched}


def length(max_new_tokens: int) -> Finish:
    """Finish by the budget."""
    return {"type": "length", "length": max_new_tokens}


def version_spans(reply: Reply, tokens: int) -> list[Frame]:
    """Give the weight versions of the first tokens, as half-open spans."""
    versions: Iterable[str] = reply.versions[:tokens] or [reply.label] * tokens
    spans, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def shuffled(value: Any, salt: bytes) -> Any:  # noqa: ANN401  # any JSON
    """Put the keys of each object into another order, by chance that the salt decides."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shuffled(each, salt) for each in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: zlib.crc32(salt + key.encode()))
    return {key: shuffled(value[key], salt) for key in keys}
