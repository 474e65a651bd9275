"""Staleness by token: in which rollout or weight version the call was sent that has generated a token.

The runner of a rollout sets :data:`call_version` for the tasks of a group; :func:`~streamfold.complete` reads it when
it sends a call, and notes it with the tokens that the call has generated. Tokens of generate functions that do not use
``complete`` get the version in which the function was called. Engines' own version strings have no order.

``metadata["streamfold_call_versions"]`` holds ``[version, start, end]`` over the response tokens, half-open, in order.
Tokens that no span covers count as of ``start_rollout_id``, where that is known.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from streamfold.samples.metadata import CALL_VERSIONS, START_ROLLOUT_ID, metadata_of, own_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamfold._types import SampleLike

__all__ = [
    "call_version", "cut_versions", "mask_stale", "note_version", "noting_versions", "stale_tokens", "would_mask_all",
]  # fmt: skip

call_version: Final[ContextVar[Callable[[], int] | None]] = ContextVar("streamfold_call_version", default=None)
"""Gives the version of calls that are sent now; None: versions are not noted."""


def note_version(sample: SampleLike, version: int, start: int) -> None:
    """Note the version of the response tokens from ``start`` on, which a call has just generated."""
    end = sample.response_length
    if start >= end:
        return
    spans = [[known, first, min(last, start)] for known, first, last in _spans(sample) if first < start]
    if spans and spans[-1][0] == version and spans[-1][2] == start:
        spans[-1][2] = end
    else:
        spans.append([version, start, end])
    own_metadata(sample)[CALL_VERSIONS] = spans


@contextlib.contextmanager
def noting_versions(sample: SampleLike) -> Iterator[list[SampleLike]]:
    """Note the version of now for the tokens that a generate function makes of a sample without ``complete``.

    The caller fills the list with the samples that were made, if not ``sample`` alone.
    """
    get_version, start = call_version.get(), sample.response_length
    made: list[SampleLike] = []
    if get_version is None:
        yield made
        return
    cut_versions(sample, start)
    version = get_version()
    oldest = min([version, *(known for known, _, _ in _all_spans(sample))])
    try:
        yield made
    finally:
        for each in made or [sample]:
            if each is sample:
                _note_rest(each, version, start)
            else:
                _note_rest(each, oldest, 0)


def cut_versions(sample: SampleLike, length: int) -> None:
    """Forget the versions of the response tokens from ``length`` on."""
    spans = metadata_of(sample).get(CALL_VERSIONS)
    if spans and spans[-1][2] > length:
        kept = [[version, start, min(end, length)] for version, start, end in spans if start < length]
        own_metadata(sample)[CALL_VERSIONS] = kept


def _note_rest(sample: SampleLike, version: int, start: int) -> None:
    """Note the version of those response tokens from ``start`` on that no span covers."""
    covered: list[list[int]] = []
    at = start
    spans = _spans(sample)
    for known, first, last in [*spans, [version, sample.response_length, sample.response_length]]:
        if first > at:
            covered.append([version, at, first])
        if first < last:
            covered.append([known, first, last])
        at = max(at, last)
    if len(covered) > len(spans):
        own_metadata(sample)[CALL_VERSIONS] = covered


def stale_tokens(sample: SampleLike, oldest: int) -> int:
    """How many response tokens have a version below ``oldest``."""
    return sum(end - start for version, start, end in _all_spans(sample) if version < oldest)


def mask_stale(sample: SampleLike, oldest: int) -> None:
    """Set the loss mask of the response tokens with a version below ``oldest`` to 0."""
    if stale_tokens(sample, oldest):
        sample.loss_mask = _mask_without_stale(sample, oldest)


def would_mask_all(sample: SampleLike, oldest: int) -> bool:
    """Whether :func:`mask_stale` leaves no token of the response to be trained on."""
    return not any(_mask_without_stale(sample, oldest))


def _mask_without_stale(sample: SampleLike, oldest: int) -> list[int]:
    mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    for version, start, end in _all_spans(sample):
        if version < oldest:
            mask[start:end] = [0] * (end - start)
    return mask


def _spans(sample: SampleLike) -> list[list[int]]:
    """The spans that were noted, as far as the response reaches."""
    length = sample.response_length
    spans = metadata_of(sample).get(CALL_VERSIONS, ())
    return [[version, start, min(end, length)] for version, start, end in spans if start < length]


def _all_spans(sample: SampleLike) -> list[list[int]]:
    """And spans of ``start_rollout_id`` where none was noted."""
    spans, start = _spans(sample), metadata_of(sample).get(START_ROLLOUT_ID)
    if not isinstance(start, int):
        return spans
    gaps, at = [], 0
    for _, first, last in [*spans, [start, sample.response_length, sample.response_length]]:
        if first > at:
            gaps.append([start, at, first])
        at = max(at, last)
    return [*spans, *gaps]
