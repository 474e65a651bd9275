"""Tokenizer, processor and images, in the shapes that transformers gives them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from streamfold.loopback import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What the loopback engine puts in front of a prompt for each image.
IMAGE_TOKENS = 16


class HostTokenizer:
    """The engine's tokenizer with the methods and the defaults of one from transformers.

    ``decoded`` holds what was decoded, call by call.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.pad_token_id = tokenizer.pad_token_id
        self.image_token_id = tokenizer.image_token_id
        self.decoded: list[list[int]] = []

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        ids = [int(token) for token in token_ids]
        self.decoded.append(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> str | list[int]:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation]
        text = "".join(turns) + "<|im_start|>assistant\n" * add_generation_prompt
        return self.encode(text, add_special_tokens=False) if tokenize else text


class HostProcessor:
    """Makes ids of a text with images as the engine does: a run of placeholders for each, in front."""

    def __init__(self, tokenizer: HostTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *, text: str, images: Sequence[bytes]) -> dict[str, Any]:
        placeholders = [self._tokenizer.image_token_id] * (IMAGE_TOKENS * len(images))
        ids = placeholders + self._tokenizer.encode(text, add_special_tokens=False)
        return {
            "input_ids": [ids],
            "attention_mask": [[1] * len(ids)],
            "pixel_values": [len(image) for image in images],
        }


def load_tokenizer(hf_checkpoint: str) -> HostTokenizer:
    """Load the tokenizer of ``loopback/VOCABULARY`` or ``loopback-vl/VOCABULARY``."""
    return HostTokenizer(Tokenizer(int(hf_checkpoint.rpartition("/")[2])))


def load_processor(hf_checkpoint: str) -> HostProcessor | None:
    """Load the processor of ``loopback-vl/VOCABULARY``; other models have none."""
    return HostProcessor(load_tokenizer(hf_checkpoint)) if hf_checkpoint.startswith("loopback-vl/") else None


def encode_image_for_rollout_engine(image: bytes) -> str:
    """Write an image, here the bytes of a PNG file, as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
