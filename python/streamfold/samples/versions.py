"""Spans of weight versions: which version of the weights has generated which tokens of a response."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Span = tuple[str | None, int, int]

__all__ = ["cover", "response_spans", "versions_of"]


def cover(spans: Sequence[Span], loss_mask: Sequence[int]) -> list[Span]:
    """Join neighbours of one version, and add spans without a version, so that all generated tokens are covered.

    Args:
        spans: ``(version, start, end)`` in order.
        loss_mask: of the response. Tokens with 0 that no span covers were not generated: they are a tool's, for
            example.
    """
    covered: list[Span] = []
    for version, start, end in _with_gaps(spans, loss_mask):
        if covered and covered[-1][0] == version and covered[-1][2] == start:
            covered[-1] = (version, covered[-1][1], end)
        else:
            covered.append((version, start, end))
    return covered


def _with_gaps(spans: Sequence[Span], loss_mask: Sequence[int]) -> Iterator[Span]:
    at, length = 0, len(loss_mask)
    for version, start, end in [*spans, (None, length, length)]:
        for is_generated, run in itertools.groupby(range(at, start), key=lambda token: loss_mask[token] != 0):
            if is_generated:
                tokens = list(run)
                yield None, tokens[0], tokens[-1] + 1
        if start < end:
            yield version, start, end
        at = end


def versions_of(spans: Sequence[Span]) -> list[str]:
    """The versions that are known, in order; one that goes on is listed once."""
    known = (version for version, _, _ in spans if version is not None)
    return [version for version, _ in itertools.groupby(known)]


def response_spans(sample: Any) -> list[Span]:  # noqa: ANN401  # ours or a host's
    """The spans over the response tokens of a sample; empty if it does not say which tokens a version has generated.

    Ours are in ``version_spans``. Newer samples of miles hold those of each call in ``weight_versions``, by positions
    of all tokens.
    """
    spans = getattr(sample, "version_spans", None)
    if spans is not None:
        return list(spans)
    calls = [getattr(call, "spans", ()) for call in getattr(sample, "weight_versions", None) or ()]
    prompt = len(sample.tokens) - sample.response_length
    return [(span.version, span.abs_start - prompt, span.abs_end - prompt) for call in calls for span in call]
