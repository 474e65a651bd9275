"""KV caches: one for each sequence, joined to a padded batch for one step of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["append", "can_join", "join", "new_cache"]

Cache = Any  # transformers' DynamicCache, untyped here


def new_cache(config: Any) -> Cache:  # noqa: ANN401  # transformers' PreTrainedConfig, untyped here
    """Return an empty cache of one sequence, with the layers that the model needs."""
    return DynamicCache(config=config)


def can_join(cache: Cache) -> bool:
    """Whether all layers keep all positions: sliding windows and recurrent states cannot be padded."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def join(caches: Sequence[Cache]) -> tuple[Cache, torch.Tensor]:
    """Join the caches of some sequences, padded in front, to one of a batch.

    Returns:
        The cache, and which positions are no padding: bool ``[batch, longest]``.
    """
    lengths = [cache.get_seq_length() for cache in caches]
    longest = max(lengths)
    joined = DynamicCache()
    for index, layer in enumerate(caches[0].layers):
        padded = []
        for kind in ("keys", "values"):
            _, heads, _, size = getattr(layer, kind).shape
            batch = layer.keys.new_zeros(len(caches), heads, longest, size)
            for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
                batch[row, :, longest - length :] = getattr(cache.layers[index], kind)[0]
            padded.append(batch)
        joined.update(*padded, index)
    places = torch.arange(longest)
    return joined, places >= longest - torch.tensor(lengths)[:, None]


def append(joined: Cache, caches: Sequence[Cache]) -> None:
    """Append the last position of the batch's cache to the cache of each sequence."""
    for row, cache in enumerate(caches):
        for index, layer in enumerate(joined.layers):
            cache.update(layer.keys[row : row + 1, :, -1:], layer.values[row : row + 1, :, -1:], index)
