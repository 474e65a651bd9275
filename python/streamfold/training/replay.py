"""Log-probabilities of a batch as the engine computed them: through the streamed experts, over the streamed top-p ids.

**Routing replay.** An engine and a trainer compute the same router logits in another order of sums or in another dtype,
so now and then they pick another expert for the same token, and its log-probability jumps. :func:`routing_replay` lets
the routers of a Qwen3-MoE take the experts that the engine took; the gate weights still come from the trainer's own
router logits, so that the router gets its gradient.

**Top-p replay.** A token sampled with top-p was drawn from a part of the vocabulary. :func:`token_log_probs`
renormalises over that part: log p(x) - log sum of p over the kept ids.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Tensors = Mapping[str, torch.Tensor]

__all__ = ["batch_log_probs", "routing_replay", "token_log_probs"]

_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")


def batch_log_probs(
    model: Any,  # noqa: ANN401  # transformers has no types
    batch: Tensors,
    *,
    temperature: float = 1.0,
    replays_experts: bool = True,
) -> torch.Tensor:
    """The log-probability of each token of a batch under the model: float32 ``[batch, length]``, 0.0 at position 0.

    Args:
        model: a causal language model of transformers; a Qwen3-MoE, if experts are replayed.
        batch: of :meth:`streamfold.Batch.torch`. Top-p ids are replayed if it has them.
        temperature: with which the engine sampled.
        replays_experts: whether tokens take the experts of ``batch["routed_experts"]`` rather than the model's own.
    """
    inputs = batch["input_ids"][:, :-1].long()
    experts = batch.get("routed_experts") if replays_experts else None
    with routing_replay(model, experts):
        logits = model(input_ids=inputs, attention_mask=batch["attention_mask"][:, :-1], use_cache=False).logits
    return token_log_probs(logits.float() / temperature, batch)


@contextmanager
def routing_replay(model: Any, experts: torch.Tensor | None) -> Iterator[None]:  # noqa: ANN401
    """Within it, the routers of a Qwen3-MoE take given experts.

    Args:
        model: of transformers.
        experts: ``[batch, length, num_layers, top_k]`` of the inputs of a forward pass, one for each hidden layer; what
            stands there for a layer without experts is ignored. Rows of padding (every slot -1, 255 of uint8, or 65535
            of uint16) leave the choice to the router. None: all do.

    Raises:
        ValueError: the model has no router, or another number of layers.
    """
    with ExitStack() as stack:
        if experts is not None:
            for layer, router in _routers(model, experts.shape[2]):
                handle = router.register_forward_hook(_Replay(experts[:, :, layer]))
                stack.callback(handle.remove)
        yield


def _routers(model: Any, layers: int) -> list[tuple[int, Any]]:  # noqa: ANN401  # transformers has no types
    """The routers of a model, each with the number of its layer."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: PLC0415

    found = [
        (int(place[1]), module)
        for name, module in model.named_modules()
        if isinstance(module, Qwen3MoeTopKRouter) and (place := _LAYER.search(name))
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no router of a Qwen3-MoE")
    if layers != model.config.num_hidden_layers:
        raise ValueError(f"routed_experts have {layers} layers, but the model has {model.config.num_hidden_layers}")
    return found


class _Replay:
    """A hook on a router that replaces its choice of experts, ``[batch, length, top_k]``."""

    def __init__(self, experts: torch.Tensor) -> None:
        mark = -1 if experts.dtype.is_signed else torch.iinfo(experts.dtype).max
        chosen = experts.reshape(-1, experts.shape[-1]).long()
        self._is_padding = (chosen == mark).all(dim=-1, keepdim=True)
        self._chosen = chosen

    def __call__(self, router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        logits, weights, own = output
        chosen = torch.where(self._is_padding, own, self._chosen)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return logits, probabilities.to(weights.dtype), chosen


def token_log_probs(logits: torch.Tensor, batch: Tensors) -> torch.Tensor:
    """The log-probability of each token, renormalised over the top-p ids where the batch has them.

    Args:
        logits: float32 ``[batch, length - 1, vocabulary]``, over the temperature: of the inputs but the last.
        batch: of :meth:`streamfold.Batch.torch`.

    Returns:
        float32 ``[batch, length]``; 0.0 at position 0, which no logits predict.
    """
    targets = batch["input_ids"][:, 1:].long()
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    log_sum = logits.logsumexp(dim=-1)
    if "top_p_offsets" in batch:
        log_sum = _kept_log_sum(logits, log_sum, batch)
    return torch.nn.functional.pad(chosen - log_sum, (1, 0))


def _kept_log_sum(logits: torch.Tensor, log_sum: torch.Tensor, batch: Tensors) -> torch.Tensor:
    """The log of the sum over the kept ids of each position; where there are none, over the vocabulary."""
    rows, inputs, _ = logits.shape
    offsets = batch["top_p_offsets"]
    counts = offsets.diff().reshape(rows, inputs + 1)[:, 1:].reshape(-1)
    first = offsets[:-1].reshape(rows, inputs + 1)[:, 1:].reshape(-1)
    position = torch.repeat_interleave(torch.arange(rows * inputs), counts)
    within = torch.arange(len(position)) - (counts.cumsum(0) - counts)[position]
    kept = batch["top_p_token_ids"].long()[first[position] + within]
    whole = log_sum.reshape(-1)
    # Over the share of the whole, so that no exponential is out of range.
    shares = torch.exp(logits.reshape(rows * inputs, -1)[position, kept] - whole.detach()[position])
    sums = torch.zeros_like(whole).index_add(0, position, shares)
    kept_sum = whole.detach() + torch.where(counts > 0, sums, 1.0).log()
    return torch.where(counts > 0, kept_sum, whole).reshape(rows, inputs)
