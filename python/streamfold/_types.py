"""Protocols and aliases that the layers share: what counts as a sample, a group, a source of groups, a tokenizer."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SampleLike", "Tokenizer"]


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn ids into text."""


class SampleLike(Protocol):
    """What :func:`merge` needs of a sample, ours or a host's."""

    index: int | None
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    status: Any
    metadata: dict[str, Any]

    def append_response_tokens(
        self,
        args: Any,  # noqa: ANN401  # the host's own
        *,
        tokens: list[int],
        log_probs: list[float] | None,
        trainable: bool,
        meta_info: dict[str, Any],
        text: str,
        update_terminal_info: bool,
    ) -> object:
        """Extend the response and all that is beside it."""
