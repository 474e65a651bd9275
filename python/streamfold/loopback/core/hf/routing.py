"""Records the experts that each token is routed to, in the forward passes of a mixture-of-experts model."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Routing"]

# transformers' name for the ids, int64 [tokens, top_k], that the module with a layer's experts is called with.
_IDS = "top_k_index"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Routing:
    """Hooks on the experts of all layers of a model; a dense model has none.

    What is recorded is what the experts are called with, so it holds for any router.

    Attributes:
        num_layers: hidden layers, dense ones included, as SGLang counts them; 0 if no layer has experts.
        top_k: experts per token.
        num_experts: experts per layer, at least 1.
    """

    def __init__(self, network: nn.Module) -> None:
        config: Any = network.config
        text = config.get_text_config()
        self._seen: dict[int, torch.Tensor] = {}
        layers = 0
        self.num_experts: int = 1
        for name, module in network.named_modules():
            place, layer = _place_of_ids(module), _LAYER.search(f".{name}.")
            if place is not None and layer is not None:
                module.register_forward_pre_hook(self._hook(int(layer.group(1)), place), with_kwargs=True)
                layers += 1
                self.num_experts = max(self.num_experts, getattr(module, "num_experts", 0))
        self.num_layers: int = text.num_hidden_layers if layers else 0
        self.top_k: int = text.num_experts_per_tok if layers else 0

    def _hook(self, layer: int, place: int) -> Any:  # noqa: ANN401  # a torch hook
        def record(_module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            self._seen[layer] = kwargs[_IDS] if _IDS in kwargs else args[place]

        return record

    def take(self, batch: int, length: int) -> torch.Tensor:
        """Return the experts of the last forward pass, int32 ``[batch, length, num_layers, top_k]``.

        Dense layers are rows of zeros.
        """
        ids = torch.zeros(self.num_layers, batch * length, self.top_k, dtype=torch.int32)
        for layer, seen in self._seen.items():
            ids[layer] = seen
        self._seen.clear()
        return ids.view(self.num_layers, batch, length, self.top_k).permute(1, 2, 0, 3)


def _place_of_ids(module: nn.Module) -> int | None:
    """The place of the ids among the arguments of a module with experts; None for any other module."""
    names = [*inspect.signature(module.forward).parameters]
    return names.index(_IDS) if _IDS in names else None
