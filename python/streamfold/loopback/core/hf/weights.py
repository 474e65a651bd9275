"""New weights for a model that runs: all of them from a directory, or some from a bucket in safetensors format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from streamfold.loopback.core.causal_lm import WeightsError
from streamfold.loopback.core.hf.networks import read_network

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_report", "load_bucket", "load_directory"]


def load_bucket(network: Any, data: bytes) -> None:  # noqa: ANN401  # transformers' PreTrainedModel, untyped here
    """Replace the weights that a bucket names; the others stay.

    Args:
        network: the model.
        data: a safetensors file, with names of the model's ``state_dict``.

    Raises:
        WeightsError: it is no safetensors file, or holds a name that the model has not, or a tensor of another shape;
            no weight was changed.
    """
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        msg = f"the bucket is no safetensors file: {error}"
        raise WeightsError(msg) from error
    if not tensors:
        msg = "the bucket holds no tensor"
        raise WeightsError(msg)
    _copy(network, tensors)


def load_directory(network: Any, path: str) -> None:  # noqa: ANN401  # as above
    """Replace all weights by those of a directory, as transformers saves it.

    Raises:
        WeightsError: the directory lacks weights, or holds a model of another shape; no weight was changed.
        OSError: there is no such directory, or no model in it.
    """
    fresh, report = read_network(path, network.config, network.dtype)
    check_report(path, report)
    _copy(network, fresh.state_dict())


def check_report(path: str, report: Mapping[str, Any]) -> None:
    """Raise WeightsError if transformers reports weights that are missing, left over or of another shape."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            wrong = ", ".join(sorted(map(str, report[kind]))[:5])
            msg = f"the weights in {path} do not fit the model: {kind.replace('_', ' ')}: {wrong}"
            raise WeightsError(msg)


def _copy(network: Any, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401  # as above
    """Copy tensors into the model, all or none of them."""
    state = network.state_dict()
    for name, tensor in tensors.items():
        if name not in state:
            msg = f"the model has no weight {name!r}"
            raise WeightsError(msg)
        if tensor.shape != state[name].shape:
            msg = f"{name} must have the shape {list(state[name].shape)}, not {list(tensor.shape)}"
            raise WeightsError(msg)
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
