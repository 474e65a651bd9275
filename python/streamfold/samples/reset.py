"""Reset a sample: to its prompt (:func:`restart`), or to where its current turn started (:func:`rewind`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from streamfold.samples.experts import kept_experts, kept_rows, loaded
from streamfold.samples.metadata import (
    CALL_VERSIONS,
    SECONDS,
    START_ROLLOUT_ID,
    LastWrite,
    TurnState,
    add_counts,
    remove_keys,
)
from streamfold.samples.staleness import cut_versions

if TYPE_CHECKING:
    from streamfold._types import SampleLike

__all__ = ["end_before_observations", "restart", "rewind", "shorten"]

# The fields that calls and rewards write, ours and the hosts'.
_WRITTEN_FIELDS: Final = (
    "response", "response_length", "reward", "loss_mask", "rollout_log_probs", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets", "rollout_top_p_log_probs", "rollout_topk_token_ids", "rollout_topk_log_probs",
    "rollout_routed_experts", "rollout_indexer_topk", "weight_versions", "version_spans", "spec_info",
    "prefix_cache_info", "prompt_tokens", "cached_tokens", "status",
)  # fmt: skip


def restart(sample: SampleLike) -> None:
    """Reset a sample, ours or a host's, to its prompt: every field that calls have written gets its default.

    ``metadata["streamfold_restarted_tokens"]`` counts the tokens that are dropped; the metadata of others stays.
    """
    dropped, clean = sample.response_length, type(sample)()
    sample.tokens = sample.tokens[: len(sample.tokens) - dropped]
    for name in _WRITTEN_FIELDS:
        if hasattr(sample, name):
            setattr(sample, name, getattr(clean, name))
    TurnState().save(sample)
    LastWrite.save(sample, limit=None)
    remove_keys(sample, CALL_VERSIONS, SECONDS, START_ROLLOUT_ID)
    _count_dropped(sample, dropped)


def rewind(sample: SampleLike, tokens: int, characters: int) -> None:
    """Shorten a response to what stood before its current turn; see :func:`shorten`.

    ``metadata["streamfold_restarted_tokens"]`` counts the tokens that are dropped.
    """
    dropped = sample.response_length - tokens
    shorten(sample, tokens, characters)
    _count_dropped(sample, dropped)


def shorten(sample: SampleLike, tokens: int, characters: int) -> None:
    """Shorten a response to its first ``tokens`` and ``characters``, with everything beside them; it is ABORTED then.

    What engines have counted (``prompt_tokens``, ``cached_tokens``, ``weight_versions``) stays: that work was done.
    """
    dropped = sample.response_length - tokens
    sample.tokens = sample.tokens[: len(sample.tokens) - dropped]
    sample.response = sample.response[:characters]
    sample.response_length = tokens
    rows = len(sample.tokens) - 1
    ends = {"loss_mask": tokens, "rollout_log_probs": tokens, "rollout_indexer_topk": rows}
    if kept_rows(sample) > rows:
        cast("Any", sample).rollout_routed_experts = kept_experts(sample)[:rows]
    if (offsets := getattr(sample, "rollout_top_p_token_offsets", None)) is not None:
        ends |= {"rollout_top_p_token_ids": int(loaded(offsets)[tokens]), "rollout_top_p_token_offsets": tokens + 1}
    for name, end in ends.items():
        if (values := getattr(sample, name, None)) is not None:
            setattr(sample, name, loaded(values)[:end])
    _cut_spans(sample, tokens)
    cut_versions(sample, tokens)
    sample.status = type(sample.status)["ABORTED"]
    replace(TurnState.of(sample), exact_characters=None, text_joined=False).save(sample)
    written = LastWrite.of(sample)
    if written is None or written.tokens > tokens:
        LastWrite.save(sample, limit=None if written is None else written.limit)


def _cut_spans(sample: Any, tokens: int) -> None:  # noqa: ANN401  # only our own samples have spans
    if hasattr(sample, "version_spans"):
        spans = [(label, start, min(end, tokens)) for label, start, end in sample.version_spans if start < tokens]
        sample.version_spans = spans


def end_before_observations(sample: SampleLike, written: LastWrite) -> None:
    """Make a sample TRUNCATED that has no room for a turn: it ends where the last call was written."""
    if sample.response_length > written.tokens:
        shorten(sample, written.tokens, written.characters)
    sample.status = type(sample.status)["TRUNCATED"]


def _count_dropped(sample: SampleLike, dropped: int) -> None:
    if dropped:
        add_counts(sample, restarted_tokens=dropped)
