"""Finds the tensors of a model's checkpoint files in its weights, where transformers fuses, renames or turns them.

A mixture of experts has the matrices of all experts in one weight, its files have one tensor for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CheckpointNames", "Place"]


@dataclass(frozen=True)
class Place:
    """Where a tensor of a file is in the model.

    Attributes:
        weight: the name of the model's weight.
        index: for each element its number in that weight, int64 of the tensor's shape.
    """

    weight: str
    index: torch.Tensor


class CheckpointNames:
    """The names in the files of a model.

    transformers converts weights when it reads files, and back when it writes them. What the way back does to numbers
    that count the elements of a weight tells where each element of a file belongs.
    """

    def __init__(self, network: Any) -> None:  # noqa: ANN401  # transformers' PreTrainedModel, untyped here
        self._network = network

    def places(self, names: Iterable[str]) -> dict[str, Place]:
        """Find the tensors with these names; those that the model's files do not have are left out."""
        wanted = {name: weight for name in names if (weight := self._owners.get(name)) is not None}
        state = self._network.state_dict()
        found: dict[str, Place] = {}
        for weight in {*wanted.values()}:
            count = torch.arange(state[weight].numel()).view(state[weight].shape)
            found |= {part: Place(weight, index) for part, index in self._split(weight, count).items()}
        return {name: found[name] for name in wanted}

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The model's weight that each tensor of a file is in."""
        state = self._network.state_dict()
        return {part: weight for weight, tensor in state.items() for part in self._split(weight, tensor.to("meta"))}

    def _split(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a weight as files have them."""
        parts: dict[str, torch.Tensor] = revert_weight_conversion(self._network, {weight: tensor})
        return parts
