"""Bodies of streamed replies: the recorded ones, and small ones written here."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from support.paths import DATA

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

DONE = b"data: [DONE]\n\n"
LEFT_OUT: Any = object()


@dataclass(frozen=True)
class Shape:
    """Of routed experts: what ``streamfold.Experts`` holds, for the reader that must not import it."""

    num_layers: int
    top_k: int
    num_experts: int | None = None
    dtype: Literal["int32", "uint8", "uint16"] = "int32"


@dataclass(frozen=True)
class Recording:
    """A body with what must come out of it."""

    name: str
    body: bytes
    told: dict[str, Any]

    @property
    def dialect(self) -> str:
        return str(self.told["dialect"])

    @property
    def dialects(self) -> tuple[str, ...]:
        """Those that must give the same: all of SGLang's but a mix-up can be found out."""
        found_out = self.dialect.startswith("sglang") and "mix_up" not in self.told
        return (self.dialect, "sglang") if found_out else (self.dialect,)

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of the parser, and of the reader."""
        request = self.told.get("request", {})
        asked: dict[str, Any] = {"logprobs": self.told.get("logprobs", True)}
        if "prompt_len" in self.told:
            asked["prompt_len"] = self.told["prompt_len"]
        for key in ("input_ids", "token_ids"):
            if isinstance(request.get(key), list):
                asked["prompt_len"] = len(request[key])
        if "experts" in self.told:
            asked["experts"] = Shape(**self.told["experts"])
        if "return_routed_experts" in request:
            asked["experts"] = Shape(num_layers=3, top_k=2, num_experts=8)
            asked["experts_start"] = request.get("routed_experts_start_len", 0)
        if "routed_experts_prompt_start" in request.get("sampling_params", {}):
            asked["experts_start"] = request["sampling_params"]["routed_experts_prompt_start"]
        return asked

    def __str__(self) -> str:
        return self.name


def recordings(folder: str) -> list[Recording]:
    """All ``NAME.sse`` under a folder of the test data, each with its ``NAME.json``."""
    found = [
        Recording(
            path.relative_to(DATA / folder).with_suffix("").as_posix(),
            path.read_bytes(),
            json.loads(path.with_suffix(".json").read_bytes()),
        )
        for path in sorted((DATA / folder).rglob("*.sse"))
    ]
    if not found:
        raise FileNotFoundError(f"no recordings under {DATA / folder}")
    return found


def logprob(token: int) -> float:
    """The logprob that the events written here give to a token."""
    return -token / 8


def logprobs(*tokens: int) -> list[float]:
    return [logprob(token) for token in tokens]


def sse(event: Any) -> bytes:
    """One event as SGLang writes it; bytes are taken as JSON already written."""
    written = (
        event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    )
    return b"data: " + written + b"\n\n"


def finish(kind: str = "stop", **told: Any) -> dict[str, Any]:
    return {"type": kind, **told}


def fields(
    tokens: Sequence[int] | None,
    n: int | None,
    /,
    *,
    text: Any = LEFT_OUT,
    reason: Any = None,
    top: dict[str, Any] | None = None,
    **meta_info: Any,
) -> dict[str, Any]:
    """An event's fields: ``tokens`` (None: neither ids nor pairs) of ``n`` so far.

    ``top`` and ``meta_info`` replace or add fields at the top level and in ``meta_info``; LEFT_OUT removes one.
    """
    inner: dict[str, Any] = {
        "id": "r7",
        "finish_reason": reason,
        "prompt_tokens": 3,
        "output_token_logprobs": LEFT_OUT if tokens is None else [[logprob(t), t, None] for t in tokens],
        "output_token_logprobs_length": LEFT_OUT if n is None else n,
        "completion_tokens": LEFT_OUT if n is None else n,
        **meta_info,
    }
    outer: dict[str, Any] = {
        "text": text,
        "output_ids": LEFT_OUT if tokens is None else list(tokens),
        "meta_info": {key: value for key, value in inner.items() if value is not LEFT_OUT},
        **(top or {}),
    }
    return {key: value for key, value in outer.items() if value is not LEFT_OUT}


def event(tokens: Sequence[int] | None, n: int | None, /, **told: Any) -> bytes:
    """One event on the wire, see :func:`fields`."""
    return sse(fields(tokens, n, **told))


def queued_abort(tokens: Sequence[int], n: int, /, **told: Any) -> bytes:
    """The abort event of a request that waits in the engine's queue: no prompt_tokens, ids of its own."""
    return event(tokens, n, **{"reason": finish("abort"), "prompt_tokens": LEFT_OUT, **told})


def pieces(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The body cut at these offsets, in any order and more than once."""
    edges = [0, *sorted(cuts), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges)]


def random_cuts(body: bytes, rng: random.Random) -> list[int]:
    """A few cuts anywhere, or many close together."""
    return [rng.randint(0, len(body)) for _ in range(rng.choice([1, 2, 3, 8, 64]))]
