"""What :func:`~streamfold.collate` reads from each sample, and the side data of all of them as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamfold.samples.experts import kept_experts, loaded, signed_experts
from streamfold.samples.validation import check_lengths
from streamfold.samples.versions import response_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from streamfold._types import SampleLike

__all__ = ["Row", "collate_experts", "collate_top_p", "collate_versions", "row_of"]

_LAST_TOKEN: Final = np.iinfo(np.int32).max
_MOST_VERSIONS: Final = np.iinfo(np.int16).max + 1


@dataclass(frozen=True)
class Row:
    """One sample, cut to the length that it may have.

    Attributes:
        place: how messages name it.
        sample: the sample as it was given.
        tokens: int32, its first ``max_length`` tokens.
        length: how many of them are of the response.
        loss_mask: int8 ``[length]``.
    """

    place: str
    sample: SampleLike
    tokens: npt.NDArray[np.int32]
    length: int
    loss_mask: npt.NDArray[np.int8]

    @property
    def response(self) -> slice:
        """The positions of the response."""
        return slice(len(self.tokens) - self.length, len(self.tokens))

    def check_untrained(self, name: str) -> None:
        """Raise ValueError if tokens are trained on, although the sample lacks a field that others have."""
        if trained := int(self.loss_mask.sum()):
            raise ValueError(
                f"{self.place}.{name} is None, but {trained} of its tokens are trained on and others have it"
            )


def row_of(place: str, sample: SampleLike, max_length: int | None) -> Row:
    """Read a sample, and check its lengths and tokens.

    Raises:
        ValueError: it has no tokens, lengths disagree, or values are out of range.
    """
    try:
        check_lengths(sample)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    tokens = np.asarray(sample.tokens)
    if not len(tokens):
        raise ValueError(f"{place} has no tokens")
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > _LAST_TOKEN:
        raise ValueError(f"{place}.tokens must be integers from 0 to {_LAST_TOKEN}")
    prompt = len(tokens) - sample.response_length
    tokens = tokens[:max_length].astype(np.int32)
    length = max(0, len(tokens) - prompt)
    return Row(place, sample, tokens, length, _loss_mask(place, sample, length))


def _loss_mask(place: str, sample: SampleLike, length: int) -> npt.NDArray[np.int8]:
    if getattr(sample, "remove_sample", False):
        return np.zeros(length, np.int8)
    if sample.loss_mask is None:
        return np.ones(length, np.int8)
    mask = np.asarray(sample.loss_mask)
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{place}.loss_mask must be of 0 and 1, but it has {mask.min()} to {mask.max()}")
    return mask[:length].astype(np.int8)


def collate_experts(rows: Sequence[Row], shape: tuple[int, int]) -> npt.NDArray[Any] | None:
    """Routed experts of all samples, ``[batch, length - 1, num_layers, top_k]``; None if no sample has any.

    Raises:
        ValueError: shapes disagree, or rows are missing before a token that is trained on.
    """
    found = [kept_experts(row.sample) for row in rows]
    if all(experts is None for experts in found):
        return None
    model, dtype = _common(rows, found)
    collated = np.empty((shape[0], shape[1] - 1, *model), dtype)
    mark = -1 if dtype.kind == "i" else np.iinfo(dtype).max
    for target, experts, row in zip(collated, found, rows, strict=True):
        filled = 0 if experts is None else min(len(experts), len(row.tokens) - 1)
        _check_rows(row, filled)
        if experts is not None:
            target[:filled] = experts[:filled] if experts.dtype == dtype else signed_experts(experts[:filled])
        target[filled:] = mark
    return collated


def _common(rows: Sequence[Row], found: Sequence[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The layers and top-k of all routed experts, and their dtype, or int32."""
    there = [(row, experts) for row, experts in zip(rows, found, strict=True) if experts is not None]
    first, model = there[0][0], there[0][1].shape
    for row, experts in there:
        if experts.ndim != 3 or experts.shape[1:] != model[1:]:
            raise ValueError(
                f"{row.place}.rollout_routed_experts is of shape {experts.shape}, that of {first.place} of "
                f"[rows, num_layers, top_k] = {model}: samples of one batch are of one model"
            )
    dtypes = {experts.dtype for _, experts in there}
    return model[1:], dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int32)


def _check_rows(row: Row, count: int) -> None:
    """Check that the rows reach the last token that is trained on, whose own row is not needed."""
    trained = np.flatnonzero(row.loss_mask)
    needed = row.response.start + int(trained[-1]) if len(trained) else 0
    if count < needed:
        raise ValueError(
            f"{row.place}.rollout_routed_experts has {count} rows, but token {needed} is trained on: "
            f"{needed} rows are needed before it"
        )


def collate_top_p(
    rows: Sequence[Row], shape: tuple[int, int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None:
    """Top-p ids of all samples, and where those of each position start; None if no sample has any.

    Raises:
        ValueError: a sample with tokens to train on lacks them.
    """
    found = [getattr(row.sample, "rollout_top_p_token_ids", None) for row in rows]
    if all(ids is None for ids in found):
        return None
    counts, parts = np.zeros(shape, np.int64), []
    for target, ids, row in zip(counts, found, rows, strict=True):
        if ids is None:
            row.check_untrained("rollout_top_p_token_ids")
            continue
        starts = np.asarray(loaded(getattr(row.sample, "rollout_top_p_token_offsets", None)))[: row.length + 1]
        target[row.response] = np.diff(starts)
        parts.append(np.asarray(loaded(ids), np.int32)[: starts[-1]])
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return np.concatenate(parts), offsets


def collate_versions(rows: Sequence[Row], shape: tuple[int, int]) -> tuple[npt.NDArray[np.int16], tuple[str, ...]]:
    """Which weights have sampled which token, as indices, and the versions that they stand for.

    Raises:
        ValueError: a span lies outside its response, or there are more versions than int16 can tell apart.
    """
    index = np.full(shape, -1, np.int16)
    versions: dict[str, int] = {}
    for target, row in zip(index, rows, strict=True):
        response = target[row.response]
        for version, start, end in response_spans(row.sample):
            if not 0 <= start <= end <= row.sample.response_length:
                raise ValueError(
                    f"{row.place}: version {version!r} spans tokens {start} to {end} of the response, but "
                    f"response_length is {row.sample.response_length}"
                )
            if version is None or start >= row.length:
                continue
            if version not in versions and len(versions) == _MOST_VERSIONS:
                raise ValueError(f"{row.place}: version {version!r} is one more than the {_MOST_VERSIONS} of a batch")
            response[start:end] = versions.setdefault(version, len(versions))
    return index, tuple(versions)
