"""Loads a causal language model and its tokenizer from a directory, as transformers saves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from streamfold.loopback.core.hf.model import HfModel
from streamfold.loopback.core.hf.networks import LOCAL, checked, empty_network, read_config, read_network
from streamfold.loopback.core.hf.routing import Routing
from streamfold.loopback.core.hf.tokenizer import HfTokenizer
from streamfold.loopback.core.hf.weights import check_report

__all__ = ["Shape", "load_model", "load_tokenizer", "read_shape"]

# The context of a model that tells no limit.
_NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class Shape:
    """What requests must fit: sizes of the vocabulary, of the routed experts (0 layers: none), and of the context."""

    vocab_size: int
    num_layers: int
    top_k: int
    num_experts: int
    context_length: int


def read_shape(path: str) -> Shape:
    """Read the shape of a model, without its weights.

    Raises:
        OSError: there is no such directory, or no config.json in it.
        ValueError: it is not a causal language model that transformers knows.
    """
    config = read_config(path)
    routing = Routing(empty_network(config))
    text = config.get_text_config()
    return Shape(
        vocab_size=text.vocab_size,
        num_layers=routing.num_layers,
        top_k=routing.top_k,
        num_experts=routing.num_experts,
        context_length=getattr(text, "max_position_embeddings", None) or _NO_LIMIT,
    )


def load_model(path: str, *, batch_invariant: bool = False) -> HfModel:
    """Load a model in the dtype of its weights.

    Raises:
        OSError: there is no such directory, or no model in it.
        ValueError: weights are missing, or it is not a causal language model that transformers knows.
    """
    network, report = read_network(path, read_config(path), "auto")
    check_report(path, report)
    return HfModel(network, batch_invariant=batch_invariant)


def load_tokenizer(path: str) -> HfTokenizer:
    """Load a tokenizer, and the ids that end a response. Raises OSError or ValueError."""
    tokenizer = AutoTokenizer.from_pretrained(checked(path), **LOCAL)
    ends: set[int] = {tokenizer.eos_token_id} - {None}
    for source in (read_config(path).get_text_config(), _generation_config(path)):
        found = getattr(source, "eos_token_id", None)
        ends |= set(found if isinstance(found, list) else [found]) - {None}
    return HfTokenizer(tokenizer, frozenset(ends))


def _generation_config(path: str) -> Any:  # noqa: ANN401  # transformers' GenerationConfig, untyped here
    if not (Path(path) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(path, **LOCAL)
