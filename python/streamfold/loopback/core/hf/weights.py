"""New weights for a model that runs: all of them from a directory, or some from a bucket in safetensors format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from streamfold.loopback.core.causal_lm import WeightsError
from streamfold.loopback.core.hf.checkpoint_names import CheckpointNames
from streamfold.loopback.core.hf.networks import read_network

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Weights", "check_report"]


class Weights:
    """The weights of a model.

    Args:
        network: transformers' model.
    """

    def __init__(self, network: Any) -> None:  # noqa: ANN401  # transformers' PreTrainedModel, untyped here
        self._network = network
        self._names = CheckpointNames(network)

    def load_bucket(self, data: bytes) -> None:
        """Replace the weights that a bucket names; the others stay.

        Args:
            data: a safetensors file. Its names are those of the model's ``state_dict``, or of its checkpoint files,
                which may hold a tensor of the model in parts, such as one for each expert.

        Raises:
            WeightsError: it is no safetensors file, or holds a name that the model has not, or a tensor of another
                shape; no weight was changed.
        """
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            msg = f"the bucket is no safetensors file: {error}"
            raise WeightsError(msg) from error
        if not tensors:
            msg = "the bucket holds no tensor"
            raise WeightsError(msg)
        self._replace(tensors)

    def load_directory(self, path: str) -> None:
        """Replace all weights by those of a directory, as transformers saves it.

        Raises:
            WeightsError: the directory lacks weights, or holds a model of another shape; no weight was changed.
            OSError: there is no such directory, or no model in it.
        """
        fresh, report = read_network(path, self._network.config, self._network.dtype)
        check_report(path, report)
        self._replace(fresh.state_dict())

    def _replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the named weights, all or none of them."""
        state = self._network.state_dict()
        places = self._names.places([name for name in tensors if name not in state])
        for name, tensor in tensors.items():
            if name not in state and name not in places:
                msg = f"the model has no weight {name!r}"
                raise WeightsError(msg)
            shape = state[name].shape if name in state else places[name].index.shape
            if tensor.shape != shape:
                msg = f"{name} must have the shape {[*shape]}, not {[*tensor.shape]}"
                raise WeightsError(msg)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in state:
                    state[name].copy_(tensor)
                else:
                    whole = state[places[name].weight]
                    whole.view(-1)[places[name].index.flatten()] = tensor.flatten().to(whole.dtype)


def check_report(path: str, report: Mapping[str, Any]) -> None:
    """Raise WeightsError if transformers reports weights that are missing, left over or of another shape."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            wrong = ", ".join(sorted(map(str, report[kind]))[:5])
            msg = f"the weights in {path} do not fit the model: {kind.replace('_', ' ')}: {wrong}"
            raise WeightsError(msg)
