"""Tiny random models in directories, and what transformers itself computes of them; imported where torch is there."""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["DENSE_LAYER", "NUM_EXPERTS", "NUM_LAYERS", "TOP_K", "VOCAB_SIZE", "Reference", "make_model", "make_moe"]

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS, TOP_K = 320, 4, 8, 2
EOS, CONTEXT = 0, 512
# Layer without experts, whose rows are zeros.
DENSE_LAYER = 1
TEXT = ["the quick brown fox jumps over the lazy dog, and the dog sleeps on: äöü 你好 🙂 " * 4]


def make_moe(path: Path, seed: int) -> Reference:
    """A random Qwen3-MoE in a directory, as transformers saves it, with a tokenizer."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[DENSE_LAYER],
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.15,  # so large that the model is no near-uniform distribution
    )
    return make_model(path, config, seed)


def make_model(path: Path, config: Any, seed: int) -> Reference:
    """A random model of any architecture in a directory, with a tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    logging.disable_progress_bar()  # its thread would outlive the test
    network.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return Reference(path, network.eval())


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@dataclass
class Reference:
    """A model, as transformers computes it: whole sequences at once, without a KV cache."""

    path: Path
    network: Any

    @property
    def model(self) -> str:
        """As the loopback engine takes it."""
        return f"hf:{self.path}"

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What ``generate`` of transformers makes of the prompt; no token ends it."""
        ids = torch.tensor([[*prompt]])
        made = self.network.generate(  # it computes no gradients
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=VOCAB_SIZE,
            pad_token_id=0,
        )
        found: list[int] = made[0, len(prompt) :].tolist()
        return found

    def logits(self, tokens: Sequence[int], experts: np.ndarray | None = None) -> np.ndarray:
        """The logits after each token, float64 ``[n, vocab]``; ``experts``: routed so, int ``[n, layers, top_k]``."""
        with torch.no_grad(), self._routed(experts):
            found: np.ndarray = self.network(torch.tensor([[*tokens]])).logits[0].double().numpy()
        return found

    def logprobs(
        self,
        prompt: Sequence[int],
        output: Sequence[int] | np.ndarray,
        experts: np.ndarray | None = None,
        *,
        temperature: float = 1.0,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> np.ndarray:
        """The logprobs of the output's tokens, float64 ``[len(output)]``; ``kept``: renormalised over these ids."""
        logits = self.logits([*prompt, *output][:-1], experts)[len(prompt) - 1 :] / temperature
        values = log_softmax(logits)
        chosen: np.ndarray = values[np.arange(len(output)), [*output]]
        if kept is None:
            return chosen
        mass = [np.logaddexp.reduce(row[[*ids]]) for row, ids in zip(values, kept, strict=True)]
        renormalised: np.ndarray = chosen - np.array(mass)
        return renormalised

    def experts(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """How a pass over the tokens routes them: ids ``[n, layers, top_k]`` and gaps ``[n, layers]``.

        A gap is by how much the last expert that was taken is more probable than the first that was not: where it is
        tiny, a rounding error decides.
        """
        ids = np.zeros((len(tokens), NUM_LAYERS, TOP_K), np.int64)
        gaps = np.ones((len(tokens), NUM_LAYERS))
        with torch.no_grad(), contextlib.ExitStack() as hooks:
            for layer, gate in self._gates():

                def note(_gate: Any, _args: Any, output: Any, layer: int = layer) -> None:
                    probs = output[0].softmax(-1).sort(-1, descending=True).values
                    ids[:, layer] = output[2].numpy()
                    gaps[:, layer] = (probs[:, TOP_K - 1] - probs[:, TOP_K]).numpy()

                hooks.callback(gate.register_forward_hook(note).remove)
            self.network(torch.tensor([[*tokens]]))
        return ids, gaps

    def bucket(self, *names: str) -> str:
        """Some weights, by the names of ``state_dict``, as the engine takes them: safetensors in base64."""
        state = self.network.state_dict()
        return bucket({name: state[name] for name in names})

    def file_buckets(self, count: int) -> list[str]:
        """All weights in some buckets, as the files of the model have them."""
        tensors = safetensors.torch.load_file(self.path / "model.safetensors")
        return [bucket({name: tensors[name] for name in [*tensors][i::count]}) for i in range(count)]

    def wrong_bucket(self, wrong: str) -> str:
        """A bucket with one tensor that fits, and something that does not."""
        if wrong == "bytes":
            return base64.b64encode(b"a pickle would be here").decode()
        state = self.network.state_dict()
        fitting = {"model.embed_tokens.weight": state["model.embed_tokens.weight"]}
        tensors = {
            "name": {**fitting, "model.norm.bias": torch.zeros(32)},
            "shape": {**fitting, "model.norm.weight": torch.zeros(31)},
            "part": {**fitting, "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(24, 31)},
            "expert": {**fitting, "model.layers.0.mlp.experts.8.up_proj.weight": torch.zeros(24, 32)},
            "empty": {},
        }
        return bucket(tensors[wrong])

    @property
    def names(self) -> list[str]:
        """The names of all weights."""
        return [*self.network.state_dict()]

    def _gates(self) -> Iterator[tuple[int, Any]]:
        for index, layer in enumerate(self.network.model.layers):
            if hasattr(layer.mlp, "gate"):
                yield index, layer.mlp.gate

    @contextlib.contextmanager
    def _routed(self, experts: np.ndarray | None) -> Iterator[None]:
        """Route as the given ids say: the gate's weights are computed, its choice is replaced."""
        with contextlib.ExitStack() as hooks:
            for layer, gate in self._gates() if experts is not None else ():

                def replay(_gate: Any, _args: Any, output: Any, layer: int = layer) -> Any:
                    assert experts is not None
                    ids = torch.from_numpy(experts[:, layer].astype(np.int64))
                    weights = output[0].softmax(-1).gather(1, ids)
                    return output[0], weights / weights.sum(-1, keepdim=True), ids

                hooks.callback(gate.register_forward_hook(replay).remove)
            yield


def bucket(tensors: dict[str, torch.Tensor]) -> str:
    """A bucket as the engine takes it."""
    packed = safetensors.torch.save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    return base64.b64encode(packed).decode()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    found: np.ndarray = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return found
