"""For the tests of the training loop: the tiny model, an engine that runs it, samples of it, their scores."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from streamfold import Client, CompletionOptions, Experts, Sample, collate, complete
from streamfold.loopback import Loopback
from streamfold.training.replay import batch_log_probs
from streamfold.training.task import read_prompts
from streamfold.training.tiny_model import make_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

logging.disable_progress_bar()

SHAPE = (4, 2, 8)  # layers, experts of a token, experts of a layer
PAD = 1
PARAMS: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.0, "ignore_eos": True}
TOP_P: dict[str, Any] = {**PARAMS, "top_p": 0.8, "custom_params": {"return_top_p_token_ids": True}}
PROMPTS = [prompt["prompt"] for prompt in read_prompts()]
MODES = [{"incremental": False}, {"incremental": True}]


def make(path: Path, seed: int = 0) -> Path:
    """The model, in a folder."""
    return make_model(path, PROMPTS, seed=seed)


def load(path: Path) -> Any:
    """The model, as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def engine(path: Path, **options: Any) -> Loopback:
    """An engine that runs the model, each request alone; its weights are version "0"."""
    return Loopback(model=f"hf:{path}", **{"batch_invariant": True, "weight_version": "0", **options})


def client(server: Loopback, path: Path) -> Client:
    """A client that asks for routed experts."""
    layers, top_k, experts = SHAPE
    return Client(server.url, tokenizer=AutoTokenizer.from_pretrained(path), experts=Experts(layers, top_k, experts))


def prompt_samples(path: Path, count: int, *, seed: int = 5) -> list[Sample]:
    """Samples with nothing but their prompts."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    labels = ["digits", "capitals"]
    return [
        Sample(index=i, group_index=i // 2, tokens=tokenizer.encode(PROMPTS[i // 2]), label=labels[i // 2 % 2])
        for i in range(count)
    ]


async def completed(asking: Client, samples: Sequence[Sample], params: Mapping[str, Any], *, seed: int = 5) -> None:
    """Generate all samples at once; sample i has the seed ``seed + i``."""
    await asyncio.gather(
        *(
            complete(asking, sample, {**params, "sampling_seed": seed + i}, options=CompletionOptions())
            for i, sample in enumerate(samples)
        )
    )


def generate(server: Loopback, path: Path, count: int, params: Mapping[str, Any] = PARAMS) -> list[Sample]:
    """Finished samples, two of each prompt."""
    samples = prompt_samples(path, count)

    async def run() -> None:
        async with client(server, path) as asking:
            await completed(asking, samples, params)

    asyncio.run(run())
    return samples


def perturbed(path: Path, amount: float = 0.05) -> Any:
    """The model with noise on every weight: what an optimizer step leaves."""
    model = load(path)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.add_(amount * torch.randn(weight.shape, generator=generator))
    return model


def scores(model: Any, samples: Sequence[Sample], *, temperature: float = 1.0, replay: bool = True) -> list[Any]:
    """The log-probabilities of the responses under the model, an array for each sample."""
    tensors = collate(samples, pad_id=PAD).torch()
    with torch.no_grad():
        found = batch_log_probs(model, tensors, temperature=temperature, replays_experts=replay).numpy()
    ends = [(len(sample.tokens) - sample.response_length, len(sample.tokens)) for sample in samples]
    return [row[start:end] for row, (start, end) in zip(found, ends, strict=True)]


def streamed(samples: Sequence[Sample]) -> list[Any]:
    """The log-probabilities that the engine sent, an array for each sample."""
    return [np.array(sample.rollout_log_probs) for sample in samples]


def gap(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference between two lists of arrays."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


async def post(server: Loopback, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send one control request."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        return await http.post(path, json=body)


def bucket_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """A bucket as the engine takes it."""
    return [base64.b64encode(safetensors.torch.save(tensors)).decode()]
