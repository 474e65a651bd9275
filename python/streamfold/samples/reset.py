"""Going back: a sample to its prompt, or to where its turn begins. And the notes that samples carry of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    from streamfold._types import SampleLike

__all__ = ["KNOWN_TEXT", "TURN", "note", "restart", "rewind"]

# What a sample starts without: all that calls have written, and what was made of it.
_OF_CALLS: Final = (
    "response", "response_length", "reward", "loss_mask", "rollout_log_probs", "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets", "rollout_routed_experts", "weight_versions", "version_spans", "spec_info",
    "prefix_cache_info", "prompt_tokens", "cached_tokens", "status",
)  # fmt: skip
KNOWN_TEXT: Final = "streamfold_known_text"  # a note: how much of a joined text is certain
TURN: Final = "streamfold_turn"  # a note: the tokens and characters before the turn that is being generated
_NOTES_OF_TURNS: Final = ("text_joined", "streamfold_ended", KNOWN_TEXT)
_NOTES_OF_CALLS: Final = (*_NOTES_OF_TURNS, "start_rollout_id", TURN)


def restart(sample: SampleLike) -> None:
    """Go back to the prompt: clean in every field that calls have written, ours or a host's.

    ``metadata["restarted_tokens"]`` counts the tokens that are dropped; other notes stay.
    """
    dropped, clean = sample.response_length, type(sample)()
    sample.tokens = sample.tokens[: len(sample.tokens) - dropped]
    for name in _OF_CALLS:
        if hasattr(sample, name):
            setattr(sample, name, getattr(clean, name))
    _tell(sample, dropped, _NOTES_OF_CALLS)


def rewind(sample: SampleLike, tokens: int, characters: int) -> None:
    """Go back to where a turn begins, behind so many tokens and characters of the response.

    Whatever goes by tokens is cut there. What engines have counted stays: they did that work.
    ``metadata["restarted_tokens"]`` counts the tokens that are dropped.
    """
    dropped = sample.response_length - tokens
    sample.tokens = sample.tokens[: len(sample.tokens) - dropped]
    sample.response = sample.response[:characters]
    sample.response_length = tokens
    ends = {"loss_mask": tokens, "rollout_log_probs": tokens, "rollout_routed_experts": len(sample.tokens) - 1}
    if (offsets := getattr(sample, "rollout_top_p_token_offsets", None)) is not None:
        ends |= {"rollout_top_p_token_ids": int(offsets[tokens]), "rollout_top_p_token_offsets": tokens + 1}
    for name, end in ends.items():
        if (values := getattr(sample, name, None)) is not None:
            setattr(sample, name, values[:end])
    if isinstance(sample, Sample):
        spans = [(label, start, min(end, tokens)) for label, start, end in sample.version_spans if start < tokens]
        sample.version_spans = spans
    sample.status = type(sample.status)["ABORTED"]
    _tell(sample, dropped, _NOTES_OF_TURNS)


def _tell(sample: SampleLike, dropped: int, outdated: tuple[str, ...]) -> None:
    sample.metadata = {key: value for key, value in (sample.metadata or {}).items() if key not in outdated}
    if dropped:
        note(sample, restarted_tokens=dropped)


def note(sample: SampleLike, **notes: int) -> None:
    """Add to the counts that a sample carries in its metadata, or set a flag."""
    # A dict of its own: the old one may be shared.
    told = dict(sample.metadata or {})
    for key, value in notes.items():
        before = told.get(key)
        told[key] = value + before if type(before) is int and value is not True else value
    sample.metadata = told
