"""``collate``: samples as one padded batch of numpy arrays, for a training step.

Everything beside the tokens keeps its place: what belongs to token ``i`` of a sample stands at position ``i`` of its
row.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamfold.samples.collating import Row, collate_experts, collate_top_p, collate_versions, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from streamfold._types import SampleLike

__all__ = ["Batch", "collate"]

_INT32: Final = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Samples side by side, padded on the right to one length. The arrays share nothing with the samples.

    Position ``i`` of a row is token ``i`` of its sample: of the prompt first, then of the response. A model's logits at
    position ``i - 1`` are those of the token at position ``i``, so ``logprobs[:, 1:]`` stands beside the logits of
    ``input_ids[:, :-1]``, as ``loss_mask[:, 1:]`` does; and ``routed_experts`` has one row for each input of that pass.

    Attributes:
        input_ids: int32 ``[batch, length]``; ``pad_id`` behind the last token of a sample.
        attention_mask: bool ``[batch, length]``: False at padding.
        loss_mask: int8 ``[batch, length]``: 1 at response tokens that are trained on, otherwise 0.
        logprobs: float32 ``[batch, length]``: the log-probability of the token at the same position, as the engine
            reported it; 0.0 at prompts, tokens of tools and padding. None: no sample has them.
        routed_experts: ``[batch, length - 1, num_layers, top_k]``, in the engine's dtype (int32 if samples differ):
            row ``i`` has the experts through which token ``i`` went. The last token of a sample was sampled and never
            computed, so it has none. Rows that a sample does not have are marked as engines mark padded ones: -1; in
            uint8 255, in uint16 65535. None: no sample has them.
        top_p: ``(token_ids int32 [m], offsets int64 [batch * length + 1])``: the token at position ``i`` of sample
            ``b`` was sampled from ``token_ids[offsets[j]:offsets[j + 1]]`` with ``j = b * length + i``. Empty at
            prompts, tokens of tools and padding. None: no sample has them.
        version_index: int16 ``[batch, length]``: index in ``versions`` of the weights that have sampled the token; -1
            at prompts, tokens of tools and padding, and where the version is not known.
        versions: the weight versions, in order of appearance.
        advantages: float32 ``[batch, length]``: of the token at the same position; 0.0 at prompts and padding. None:
            not given.
    """

    input_ids: npt.NDArray[np.int32]
    attention_mask: npt.NDArray[np.bool_]
    loss_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32] | None
    routed_experts: npt.NDArray[Any] | None
    top_p: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None
    version_index: npt.NDArray[np.int16]
    versions: tuple[str, ...]
    advantages: npt.NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        """The shape, and which arrays there are."""
        size = "{} samples of {} tokens at most".format(*self.input_ids.shape)
        there = [
            name for name in ("logprobs", "routed_experts", "top_p", "advantages") if getattr(self, name) is not None
        ]
        return f"<Batch: {', '.join([size, *there, f'{len(self.versions)} weight versions'])}>"

    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors that share their memory. Imports torch.

        Keys: ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs``, ``routed_experts``, ``top_p_token_ids``,
        ``top_p_offsets``, ``version_index`` and ``advantages``. Arrays that are None are left out.
        """
        import torch  # noqa: PLC0415  # an extra

        token_ids, offsets = self.top_p or (None, None)
        arrays = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "routed_experts": self.routed_experts,
            "top_p_token_ids": token_ids,
            "top_p_offsets": offsets,
            "version_index": self.version_index,
            "advantages": self.advantages,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def collate(
    samples: Sequence[SampleLike],
    *,
    pad_id: int,
    advantages: Sequence[float | npt.ArrayLike] | None = None,
    max_length: int | None = None,
) -> Batch:
    """Put samples, ours or a host's, side by side in padded arrays. No Python runs per token.

    A sample with ``remove_sample`` gets a loss mask of zeros. Versions are read from ``version_spans``, or from the
    spans that samples of miles hold; samples that do not say which tokens a version has generated get -1.

    Args:
        samples: at least one; each has tokens.
        pad_id: the token id at padding, which the attention mask hides.
        advantages: of each sample: a number for all tokens of its response, or an array ``[response_length]``.
        max_length: the number of tokens, prompt and response, behind which a sample is cut. None: no limit.

    Returns:
        A batch as long as its longest sample.

    Raises:
        ValueError: lengths or shapes disagree, a value is out of range, a log-probability of a token to train on is not
            finite, or some samples with tokens to train on lack log-probabilities, top-p ids or routed experts that
            others have. The message names the sample, the field and both numbers.
        TypeError: ``pad_id`` or ``max_length`` is no integer.
    """
    _check_arguments(len(samples), pad_id, advantages, max_length)
    rows = [row_of(f"samples[{number}]", sample, max_length) for number, sample in enumerate(samples)]
    shape = (len(rows), max(len(row.tokens) for row in rows))
    input_ids = np.full(shape, pad_id, np.int32)
    attention_mask, loss_mask = np.zeros(shape, np.bool_), np.zeros(shape, np.int8)
    for ids, attended, trained, row in zip(input_ids, attention_mask, loss_mask, rows, strict=True):
        ids[: len(row.tokens)] = row.tokens
        attended[: len(row.tokens)] = True
        trained[row.response] = row.loss_mask
    version_index, versions = collate_versions(rows, shape)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        logprobs=_collate_log_probs(rows, shape),
        routed_experts=collate_experts(rows, shape),
        top_p=collate_top_p(rows, shape),
        version_index=version_index,
        versions=versions,
        advantages=None if advantages is None else _collate_advantages(rows, shape, advantages),
    )


def _check_arguments(count: int, pad_id: int, advantages: Sequence[Any] | None, max_length: int | None) -> None:
    if not count:
        raise ValueError("there are no samples")
    if not _INT32.min <= operator.index(pad_id) <= _INT32.max:
        raise ValueError(f"pad_id is {pad_id}, which is no int32")
    if max_length is not None and operator.index(max_length) < 1:
        raise ValueError(f"max_length is {max_length}: it must be at least 1, or None for no limit")
    if advantages is not None and len(advantages) != count:
        raise ValueError(f"advantages has {len(advantages)} entries for {count} samples")


def _collate_log_probs(rows: Sequence[Row], shape: tuple[int, int]) -> npt.NDArray[np.float32] | None:
    found = [row.sample.rollout_log_probs for row in rows]
    if all(values is None for values in found):
        return None
    logprobs = np.zeros(shape, np.float32)
    for target, values, row in zip(logprobs, found, rows, strict=True):
        if values is None:
            row.check_untrained("rollout_log_probs")
            continue
        given = np.asarray(values[: row.length], np.float32)  # None, which JSON has in place of NaN, becomes NaN
        wrong = np.flatnonzero(~np.isfinite(given) & (row.loss_mask == 1))
        if len(wrong):
            raise ValueError(
                f"{row.place}.rollout_log_probs is {given[wrong[0]]} at token {wrong[0]} of the response, which is "
                "trained on"
            )
        target[row.response] = given
    return logprobs


def _collate_advantages(
    rows: Sequence[Row], shape: tuple[int, int], advantages: Sequence[Any]
) -> npt.NDArray[np.float32]:
    collated = np.zeros(shape, np.float32)
    for number, (target, given, row) in enumerate(zip(collated, advantages, rows, strict=True)):
        values = np.asarray(given, np.float32)
        if values.shape not in {(), (row.sample.response_length,)}:
            raise ValueError(
                f"advantages[{number}] is of shape {values.shape}, but {row.place}.response_length is "
                f"{row.sample.response_length}: give a number, or one for each of these tokens"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"advantages[{number}] is not finite: {given}")
        target[row.response] = values[..., : row.length] if values.ndim else values
    return collated
