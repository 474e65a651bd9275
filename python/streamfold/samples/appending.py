"""Append to samples that have no ``append_response_tokens`` of their own, as those of miles have none.

They have the fields, and ``update_from_meta_info`` for what a request reports at its end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamfold.samples.log_probs import log_probs_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["append_of"]

_ARRAYS: Final = ("routed_experts", "routed_experts_start_len", "indexer_topk", "version_spans")


def append_of(sample: Any) -> Callable[..., object]:  # noqa: ANN401  # ours, or a host's
    """The sample's own ``append_response_tokens``, or what takes its place."""
    return getattr(sample, "append_response_tokens", None) or partial(_append_tokens, sample)


def _append_tokens(
    sample: Any,  # noqa: ANN401  # a host's, whose class has no such method
    args: Any,  # noqa: ANN401  # the host's own
    *,
    tokens: Sequence[int],
    log_probs: Sequence[float] | None,
    trainable: bool,
    meta_info: Mapping[str, Any],
    text: str,
    update_terminal_info: bool,
) -> None:
    """Do what the ``append_response_tokens`` of other samples does; see :class:`~streamfold.SampleLike`.

    ``update_from_meta_info`` is told ``output_token_logprobs`` of the new tokens, by whose number it places the spans
    of ``weight_versions``. Without a finish reason it is told that of an abort.

    Raises:
        ValueError: log-probabilities are missing before or among the new tokens. The sample may have been changed.
    """
    before = sample.response_length
    sample.rollout_log_probs = log_probs_after(sample, log_probs, len(tokens), trainable=trainable)
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * before
    sample.tokens = [*sample.tokens, *tokens]
    sample.response += text
    sample.response_length = before + len(tokens)
    sample.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
    if (experts := meta_info.get("routed_experts")) is not None:
        start = meta_info.get("routed_experts_start_len") or 0
        kept = [np.asarray(sample.rollout_routed_experts)[:start]] if start else []
        sample.rollout_routed_experts = np.concatenate([*kept, experts]) if kept else experts
    if (indexer := meta_info.get("indexer_topk")) is not None:
        sample.rollout_indexer_topk = indexer
    if update_terminal_info or (tokens and trainable):
        sample.update_from_meta_info(args, _report(tokens, log_probs, meta_info))


def _report(tokens: Sequence[int], log_probs: Sequence[float] | None, meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine reports with a response that is not streamed, without the arrays."""
    report = {key: value for key, value in meta_info.items() if key not in _ARRAYS}
    spans = [
        {"version": version, "start": start, "end": end}
        for version, start, end in meta_info.get("version_spans", ())
        if version is not None
    ]
    values = log_probs if log_probs is not None else [None] * len(tokens)
    return {
        "finish_reason": {"type": "abort"},
        **report,
        **({"weight_versions": spans} if spans else {}),
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, tokens, strict=True)],
    }
