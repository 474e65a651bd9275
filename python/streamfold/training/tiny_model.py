"""A random mixture-of-experts model with a tokenizer, small enough to be trained on a CPU. Nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["make_model"]

_EOS: Final = "<|end|>"
_PAD: Final = "<|pad|>"
_VOCABULARY: Final = 384  # 256 bytes, the two special tokens, merges


def make_model(
    path: Path, texts: Iterable[str], *, seed: int = 0, dtype: Literal["float32", "bfloat16"] = "float32"
) -> Path:
    """Write a Qwen3-MoE with random weights, and a byte-level BPE tokenizer trained on some texts.

    It has half a million parameters: 4 layers of 8 experts, of which each token takes 2.

    Args:
        path: a folder, made if it is not there: ``config.json``, ``model.safetensors`` and the tokenizer's files.
        texts: what the tokenizer learns its merges from.
        seed: of the weights.
        dtype: of the weights, and of an engine that runs them. In float32 its log-probabilities equal a trainer's to
            1e-5.

    Returns:
        The folder.
    """
    import torch  # noqa: PLC0415  # extras
    from transformers import Qwen3MoeForCausalLM  # noqa: PLC0415

    tokenizer = _tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(_config(tokenizer)).to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _config(tokenizer: Any) -> Any:  # noqa: ANN401  # transformers has no types
    from transformers import Qwen3MoeConfig  # noqa: PLC0415

    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _tokenizer(texts: Iterable[str]) -> Any:  # noqa: ANN401  # transformers has no types
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_EOS, _PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_EOS, pad_token=_PAD, clean_up_tokenization_spaces=False
    )
