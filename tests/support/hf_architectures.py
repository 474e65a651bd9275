"""Tiny random models of other architectures: dense, learned positions, sliding window, another router, recurrent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GPT2Config, LlamaConfig, MambaConfig, MistralConfig, MixtralConfig

from support.hf_reference import VOCAB_SIZE, Reference, make_model

if TYPE_CHECKING:
    from pathlib import Path

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def make(architecture: str, path: Path) -> Reference:
    """A model of this architecture in a directory."""
    config: Any = {
        "llama": lambda: LlamaConfig(**_SHARED),
        "sliding": lambda: MistralConfig(**_SHARED, sliding_window=8),
        "mixtral": lambda: MixtralConfig(**_SHARED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        "gpt2": lambda: GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=0,
        ),
        "recurrent": lambda: MambaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            bos_token_id=None,
            eos_token_id=0,
            initializer_range=0.2,
        ),
    }[architecture]()
    return make_model(path, config, seed=3)
