"""The tokens that the indexer of a sparse attention chose, as SGLang sends them with ``return_indexer_topk``."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

__all__ = ["indexer_rows"]


def indexer_rows(meta: Mapping[str, Any], rows: int, num_layers: int | None = None) -> npt.NDArray[np.int32] | None:
    """The positions that each layer's indexer chose for each token but the last.

    Args:
        meta: of a generation: ``indexer_topk`` (base64 of little-endian int32) and ``indexer_topk_num_layers``.
        rows: how many there must be.
        num_layers: how many layers with an indexer the model has; None: not known.

    Returns:
        int32 ``[rows, indexer_layers, index_topk]``; None: the engine sent none.

    Raises:
        ValueError: they are damaged, or not of so many rows.
    """
    text, layers = meta.get("indexer_topk"), meta.get("indexer_topk_num_layers")
    if text is None:
        return None
    if type(layers) is not int or layers < 1:
        raise ValueError(f"indexer_topk came with indexer_topk_num_layers {layers!r}: its shape is not known")
    if num_layers is not None and layers != num_layers:
        raise ValueError(f"indexer_topk is of {layers} layers, but the model has {num_layers} with an indexer")
    values = _decoded(text)
    chosen, rest = divmod(len(values), rows * layers) if rows else (0, len(values))
    if rest or (rows and not chosen):
        raise ValueError(f"indexer_topk has {len(values)} values, which do not fit {rows} rows of {layers} layers")
    return values.reshape(rows, layers, chosen)


def _decoded(text: Any) -> npt.NDArray[np.int32]:  # noqa: ANN401  # what the engine sent
    try:
        return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), "<i4").astype(np.int32, copy=False)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"indexer_topk is no base64 of int32: {error}") from error
