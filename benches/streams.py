"""The bodies that the benchmarks read, written as SGLang 0.5.23 and vLLM 0.32 write them.

Keys, their order and their spelling are those of recorded streams: 13 keys in SGLang's ``meta_info``, vLLM's usage with
every event, logprobs that are float32 widened to float64 and printed by orjson, one ``data:`` line per event. Recorded
streams of this size would be large files, so tokens are drawn from a seed: ids log-uniform up to 151,643 (Zipf's law),
logprobs log-uniform too (most tokens of a trained policy are nearly certain), three to four characters of text a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ: Final = 64 * 1024
_WORDS: Final = re.findall(
    r" ?\w+|\W",
    "Let us consider the remainder of the product modulo 7. It divides both sides, so there is an integer k with "
    '2k + 1 = n.\n\nTherefore \\frac{n - 1}{2} is "whole", which proves that every prime greater than 2 is odd.',
)


@dataclass(frozen=True)
class Stream:
    """One reply body, cut into the reads that a socket would give."""

    name: str
    dialect: str
    tokens: int
    events: int
    reads: list[bytes]

    @property
    def size(self) -> int:
        """Bytes of the whole body."""
        return sum(map(len, self.reads))


def incremental(tokens: int = 500_000, per_event: int = 20) -> Stream:
    """Each event holds only what is new."""
    name = "single-token" if per_event == 1 else "incremental"
    return _stream(name, tokens, per_event, incremental=True)


def cumulative(tokens: int = 32_768, per_event: int = 20) -> Stream:
    """Each event holds everything so far: about 1.2 GB at the default size."""
    return _stream("cumulative", tokens, per_event, incremental=False)


def vllm(tokens: int = 200_000, per_event: int = 20) -> Stream:
    """vLLM's token endpoint: logprobs of the sampled tokens, no text."""
    name = "vllm single-token" if per_event == 1 else "vllm"
    reads = list(_reads(_vllm_events(tokens, per_event)))
    return Stream(name, "vllm", tokens, -(-tokens // per_event) + 1, reads)


STREAMS: Final[dict[str, Callable[[], Stream]]] = {
    "incremental": incremental,
    "single-token": lambda: incremental(100_000, per_event=1),
    "cumulative": cumulative,
    "vllm": vllm,
    "vllm single-token": lambda: vllm(50_000, per_event=1),
}


def _stream(name: str, tokens: int, per_event: int, *, incremental: bool) -> Stream:
    reads = list(_reads(_events(tokens, per_event, incremental=incremental)))
    return Stream(
        name, f"sglang-{'incremental' if incremental else 'cumulative'}", tokens, -(-tokens // per_event), reads
    )


def _reads(events: Iterator[bytes]) -> Iterator[bytes]:
    pending = bytearray()
    for event in events:
        pending += event
        whole = len(pending) - len(pending) % READ
        for start in range(0, whole, READ):
            yield bytes(pending[start : start + READ])
        del pending[:whole]
    if pending:
        yield bytes(pending)


def _sampled(rng: np.random.Generator, tokens: int) -> tuple[list[int], list[float]]:
    ids = np.geomspace(10, 151_643, tokens).astype(np.int32)[rng.permutation(tokens)].tolist()
    return ids, (-(10 ** rng.uniform(-6, 0.5, tokens))).astype(np.float32).astype(np.float64).tolist()


def _events(tokens: int, per_event: int, *, incremental: bool) -> Iterator[bytes]:
    rng = np.random.default_rng(20)
    ids, logprobs = _sampled(rng, tokens)
    words = [_WORDS[index] for index in rng.integers(0, len(_WORDS), tokens)]
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    borders = list(accumulate(map(len, words), initial=0))
    text = "".join(words)

    for start in range(0, tokens, per_event):
        end = min(start + per_event, tokens)
        first = start if incremental else 0
        meta: dict[str, Any] = {
            "id": "7cdb173d6c36484cb237fa2951313c1f",
            "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
            "prompt_tokens": 512,
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": pairs[first:end],
            "output_token_logprobs_length": end,
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
        }
        if end == tokens:
            meta["weight_versions"] = [{"version": "default", "start": 0, "end": tokens}]
        meta |= {"cached_tokens_details": None, "dp_rank": None}
        if start == 0:
            meta["response_sent_to_client_ts"] = 1795951942.4590852
        if end == tokens:
            meta["e2e_latency"] = 374.3338000001586
        event = {"text": text[borders[first] : borders[end]], "output_ids": ids[first:end], "meta_info": meta}
        yield b"data: " + orjson.dumps(event) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _vllm_events(tokens: int, per_event: int) -> Iterator[bytes]:
    rng = np.random.default_rng(20)
    ids, logprobs = _sampled(rng, tokens)
    ranks = np.minimum(rng.geometric(0.7, tokens), 64).tolist()
    entries: list[dict[str, Any]] = []
    for token, logprob, rank in zip(ids, logprobs, ranks, strict=True):
        likely = {"token_id": token, "logprob": logprob, "rank": rank}
        entries.append({**likely, "top_logprobs": [likely]})

    outer: dict[str, Any] = {"request_id": "generate-tokens-7cdb173d6c36484cb237fa2951313c1f"}
    for start in range(0, tokens, per_event):
        end = min(start + per_event, tokens)
        usage = {"prompt_tokens": 512, "total_tokens": 512 + end, "completion_tokens": end}
        choice = {
            "index": 0,
            "finish_reason": "length" if end == tokens else None,
            "stop_reason": None,
            "token_ids": ids[start:end],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": tokens}] if end == tokens else None,
            "logprobs": {"content": entries[start:end]},
        }
        told: dict[str, Any] = {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}
        yield b"data: " + orjson.dumps({**outer, "usage": told, "output_mode": "tokens", "choices": [choice]}) + b"\n\n"
    told = {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    yield b"data: " + orjson.dumps({**outer, "usage": told, "output_mode": "tokens", "choices": []}) + b"\n\n"
    yield b"data: [DONE]\n\n"
