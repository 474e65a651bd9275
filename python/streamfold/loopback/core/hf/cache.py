"""KV caches: one for each sequence, joined to a padded batch for one step of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SequenceCache", "append", "join"]


class SequenceCache:
    """What the layers keep of one sequence.

    Args:
        config: transformers' configuration of the model.

    Attributes:
        layers: transformers' cache, with the layers that the model needs.
        length: tokens that have run through the model.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401  # transformers' PreTrainedConfig, untyped here
        self.layers: Any = DynamicCache(config=config)
        self.length: int = 0

    @property
    def can_join(self) -> bool:
        """Whether all layers keep all positions: sliding windows and recurrent states cannot be padded."""
        return all(type(layer) is DynamicLayer for layer in self.layers.layers)


def join(caches: Sequence[SequenceCache]) -> tuple[Any, torch.Tensor]:
    """Join the caches of some sequences, padded in front, to one of a batch.

    Returns:
        transformers' cache, and which positions are no padding: bool ``[batch, longest]``.
    """
    lengths = torch.tensor([cache.length for cache in caches])
    longest = int(lengths.max())
    joined = DynamicCache()
    for index, like in enumerate(caches[0].layers.layers):
        padded = []
        for kind in ("keys", "values"):
            _, heads, _, size = getattr(like, kind).shape
            batch = like.keys.new_zeros(len(caches), heads, longest, size)
            for row, cache in enumerate(caches):
                batch[row, :, longest - cache.length :] = getattr(cache.layers.layers[index], kind)[0]
            padded.append(batch)
        joined.update(*padded, index)
    return joined, torch.arange(longest) >= longest - lengths[:, None]


def append(joined: Any, caches: Sequence[SequenceCache]) -> None:  # noqa: ANN401  # transformers' cache, untyped here
    """Append the last position of the batch's cache to the cache of each sequence."""
    for row, cache in enumerate(caches):
        for index, layer in enumerate(joined.layers):
            cache.layers.update(layer.keys[row : row + 1, :, -1:], layer.values[row : row + 1, :, -1:], index)
        cache.length += 1
