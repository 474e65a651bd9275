"""What one request has generated, before it is written in an engine's wire format; the "[DONE]" event."""

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
    """What one request has generated so far, with its metadata.

    Lists have one entry per output token; a prefix of all of them is a valid earlier state. ``logprobs``, ``pieces``
    (the text of the first n tokens is ``"".join(pieces[:n])``), ``top_p`` and so on are None if they are not returned.
    """

    rid: str = "00000000000000000000000000000000"
    prompt_tokens: int = 1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = None
    pieces: list[str] | None = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # weight version of each token; empty: all ``label``
    label: str = "default"  # the engine's current weight version
    finish: Finish | None = None
    in_queue: bool = False  # aborted while queued or retracted; its frame has another shape

    input_logprobs: list[tuple[float | None, int]] | None = None  # of the prompt; returned with ``logprobs`` only
    logprob_texts: list[str] | None = None
    ranks: list[int] | None = None  # of the sampled tokens in the vocabulary; None: always 1
    top_logprobs: list[list[tuple[float | None, int]]] | None = None
    spare_pair: tuple[float, int] | None = None  # sent if max_new_tokens is 0
    sampling_mask: list[list[int]] | None = None
    sampling_logprobs: list[float] | None = None
    custom: dict[str, list[Any]] = field(default_factory=dict)
    # Sent with the terminal event:
    top_p: list[list[int]] | None = None
    routed_experts: bytes | None = None  # little-endian ids, [rows, layers, top_k]; for vLLM a .npy file

    prompt_token_ids: list[int] | None = None
    index: int | None = None
    cached_tokens: int = 0
    cached_tokens_details: dict[str, int] | None = None
    retractions: int = 0
    arrived: float = 0.0  # unix seconds


def stopped(matched: int | str | None) -> Finish:
    """Return the finish reason for a stop token or stop string; None: EOS, where the engine does not report it."""
    return {"type": "stop", "matched": matched}


def length(max_new_tokens: int) -> Finish:
    """Return the finish reason for an exhausted ``max_new_tokens``."""
    return {"type": "length", "length": max_new_tokens}


def version_spans(reply: Reply, tokens: int) -> list[Frame]:
    """Return the weight versions of the first ``tokens`` tokens, as half-open spans."""
    versions: Iterable[str] = reply.versions[:tokens] or [reply.label] * tokens
    spans, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def shuffled(value: Any, salt: bytes) -> Any:  # noqa: ANN401  # any JSON
    """Shuffle the keys of each object; the order depends on ``salt`` alone."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shuffled(each, salt) for each in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: zlib.crc32(salt + key.encode()))
    return {key: shuffled(value[key], salt) for key in keys}
