"""Generates with a loopback engine that runs a real model, through the client."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from streamfold import Client, Experts
from streamfold.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from streamfold import Generation
    from support.hf_reference import Reference

__all__ = ["MODES", "PROMPTS", "client", "experts", "generate", "generate_all", "kept_ids", "logprobs", "serve"]

# Of different lengths, so that a batch needs padding.
PROMPTS = [[7, 8, 9, 10], [40], [100, 101, 102, 103, 104, 105, 106, 107, 108], [300, 20, 300], [55, 54, 53, 52, 51, 50]]
# Each way in which an engine streams.
MODES: list[dict[str, Any]] = [{"incremental": False}, {"incremental": True}, {"engine": "vllm"}]

_VLLM_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


def serve(reference: Reference, **options: Any) -> Loopback:
    """An engine with this model, which returns routed experts; its logprobs are those that it samples from."""
    if options.get("engine") == "vllm":
        options = {"return_routed_experts": True, "logprobs_mode": "processed_logprobs", **options}
    return Loopback(model=reference.model, **options)


def client(engine: Loopback, **options: Any) -> Client:
    """A client of the engine that asks for routed experts, if the model has any."""
    config = engine.config
    dtype: Any = "uint8" if config.engine == "vllm" else "int32"
    shape = Experts(config.num_layers, config.top_k, config.num_experts, dtype) if config.num_layers else None
    return Client(engine.url, engine=config.engine, **{"experts": shape, **options})


def generate_all(
    engine: Loopback, prompts: Sequence[Sequence[int]], params: dict[str, Any], **call: Any
) -> list[Generation]:
    """Generate for all prompts at once, with logprobs and routed experts; the parameters have SGLang's names."""
    if engine.config.engine == "vllm":
        params = {_VLLM_NAMES.get(name, name): value for name, value in params.items()}

    async def run() -> list[Generation]:
        async with client(engine) as asking:
            return await asyncio.gather(*(asking.generate([*prompt], params, **call) for prompt in prompts))

    return asyncio.run(run())


def generate(engine: Loopback, prompt: Sequence[int], params: dict[str, Any], **call: Any) -> Generation:
    """Generate for one prompt."""
    (generation,) = generate_all(engine, [prompt], params, **call)
    return generation


def logprobs(generation: Generation) -> np.ndarray:
    """Its logprobs, which must be there."""
    assert generation.logprobs is not None
    return generation.logprobs


def experts(generation: Generation) -> np.ndarray:
    """Its routed experts, which must be there."""
    assert generation.routed_experts is not None
    return generation.routed_experts


def kept_ids(generation: Generation) -> list[list[int]]:
    """The ids that each token could have been sampled from."""
    assert generation.top_p is not None
    ids, offsets = generation.top_p
    return [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]
