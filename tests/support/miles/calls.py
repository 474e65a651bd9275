"""Shared by the tests of miles's integration: samples, calls of our function, and the fields of events."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from streamfold import miles
from support.host.helpers import LIMIT
from support.miles.install import arguments
from support.miles.rollout import GenerateFnInput, GenerateFnOutput, GenerateState
from support.miles.types import Sample
from support.replay import PROMPT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace

    from streamfold.loopback import Loopback
    from support.replay import Replay

PARAMS: dict[str, Any] = {"max_new_tokens": 64}
LAYERS, TOP_K = 2, 3


def state_of(server: Replay | Loopback, **settings: Any) -> GenerateState:
    """A rollout function's state for one engine."""
    return GenerateState(arguments(server.url, getattr(server, "config", None), **settings))


def sample_of(kind: type[Sample] = Sample, **fields: Any) -> Sample:
    """A sample with the prompt that written replies answer."""
    return kind(**{"index": 0, "prompt": "x", "tokens": list(PROMPT), **fields})


def partial(*tokens: int, kind: type[Sample] = Sample, **fields: Any) -> Sample:
    """A sample that was aborted after some tokens of a written reply."""
    return sample_of(
        kind,
        tokens=[*PROMPT, *tokens],
        response="".join(chr(97 + token % 26) for token in tokens),
        response_length=len(tokens),
        rollout_log_probs=[-token / 8 for token in tokens],
        status=kind.Status.ABORTED,
        **fields,
    )


async def ask(
    state: GenerateState, sample: Sample, params: dict[str, Any] | None = None, *, evaluation: bool = False
) -> Sample:
    """Call our function as miles does, within the time after which something hangs."""
    given = GenerateFnInput(
        state=state, sample=sample, sampling_params=dict(PARAMS if params is None else params), evaluation=evaluation
    )
    output = await asyncio.wait_for(miles.generate_streaming(given), LIMIT)
    assert type(output) is GenerateFnOutput
    assert output.samples is sample
    return sample


async def ask_legacy(args: SimpleNamespace, sample: Sample, **options: Any) -> Sample:
    """Call our function for releases without that input."""
    made: Sample = await asyncio.wait_for(miles.generate_streaming_legacy(args, sample, dict(PARAMS), **options), LIMIT)
    assert made is sample
    return sample


def response_of(sample: Sample) -> list[int]:
    return sample.tokens[len(sample.tokens) - sample.response_length :]


def rows_of(count: int, first: int = 0) -> Any:
    """Rows of as many tokens, each value another one."""
    return np.arange(first, first + count * LAYERS * TOP_K, dtype=np.int32).reshape(count, LAYERS, TOP_K)


def written(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode()


def indexer(count: int, first: int = 0) -> dict[str, Any]:
    """What an event says of the indexers."""
    return {"indexer_topk": written(rows_of(count, first)), "indexer_topk_num_layers": LAYERS}


def spans(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def tokens_in(bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [body["input_ids"] for body in bodies]
