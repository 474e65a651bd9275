"""Routing replay and top-p replay: what is recomputed is what the engine computed, and gradients reach the routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from streamfold import Sample, collate
from streamfold.training.replay import batch_log_probs, routing_replay, token_log_probs
from support.training import PAD, SHAPE, load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

LAYERS, TOP_K, EXPERTS = SHAPE
IDS = torch.tensor([[5, 9, 33, 70, 71], [8, 4, 90, 12, 6]])


@pytest.fixture
def model(tiny: Path) -> Any:
    return load(tiny)


def own_experts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The experts that the model's routers choose: ``[batch, length, layers, top_k]``."""
    with torch.no_grad():
        logits = model(input_ids=ids, output_router_logits=True).router_logits
    chosen = [layer.softmax(dim=-1).topk(TOP_K).indices.reshape(*ids.shape, TOP_K) for layer in logits]
    return torch.stack(chosen, dim=2)


def logits_of(model: Any, experts: torch.Tensor | None, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad(), routing_replay(model, experts):
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def test_the_model_s_own_choice_changes_nothing(model: Any) -> None:
    experts = own_experts(model, IDS)
    assert torch.equal(logits_of(model, experts), logits_of(model, None))
    assert torch.allclose(logits_of(model, experts.flip(-1)), logits_of(model, None), atol=1e-6), "their order counts"


def test_other_experts_take_the_tokens_with_weights_of_the_model_s_router(model: Any) -> None:
    """A router whose other logits are far below chooses the same experts, with the same softmax over the two."""
    experts = torch.randint(0, EXPERTS - 1, (*IDS.shape, LAYERS, TOP_K), generator=torch.Generator().manual_seed(1))
    experts[..., 1] = (experts[..., 0] + 1) % EXPERTS
    replayed = logits_of(model, experts)
    assert not torch.allclose(replayed, logits_of(model, None), atol=1e-3)

    def choosing(layer: int) -> Any:
        def hook(_router: Any, _inputs: Any, output: Any) -> Any:
            wanted = experts[:, :, layer].reshape(-1, TOP_K)
            masked = torch.full_like(output[0], -1e4).scatter(1, wanted, output[0].gather(1, wanted))
            weights, indices = masked.softmax(dim=-1).topk(TOP_K)
            return output[0], weights, indices

        return hook

    routers = [layer.mlp.gate for layer in model.model.layers]
    handles = [router.register_forward_hook(choosing(layer)) for layer, router in enumerate(routers)]
    obvious = logits_of(model, None)
    for handle in handles:
        handle.remove()
    assert torch.allclose(replayed, obvious, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint16])
def test_a_padded_row_leaves_the_choice_to_the_router(model: Any, dtype: torch.dtype) -> None:
    mark = -1 if dtype.is_signed else torch.iinfo(dtype).max
    padded = torch.full((*IDS.shape, LAYERS, TOP_K), mark, dtype=torch.int64).to(dtype)
    assert torch.equal(logits_of(model, padded), logits_of(model, None))


def test_gradients_reach_routers_and_experts_through_a_replay(model: Any) -> None:
    experts = torch.zeros((*IDS.shape, LAYERS, TOP_K), dtype=torch.int32)
    experts[..., 1] = 3
    with routing_replay(model, experts):
        model(input_ids=IDS).logits.square().mean().backward()
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
        used = layer.mlp.experts.down_proj.grad.abs().sum(dim=(1, 2)) > 0
        assert used.tolist() == [True, False, False, True, False, False, False, False]


def test_no_hook_stays_behind_and_a_wrong_number_of_layers_is_refused(model: Any) -> None:
    experts = own_experts(model, IDS)  # for which transformers leaves hooks of its own
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match="have 3 layers, but the model has 4"):
        logits_of(model, experts[:, :, :3])
    with pytest.raises(RuntimeError), routing_replay(model, experts):
        raise RuntimeError
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_a_model_without_such_routers_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="Linear has no router"),
        routing_replay(torch.nn.Linear(1, 1), torch.ones(1, 1, 1, 1)),
    ):
        pass


def random_samples(rng: np.random.Generator, *, top_p: bool) -> list[Sample]:
    samples = []
    for prompt, response in ((2, 5), (4, 3), (1, 1)):
        tokens = rng.integers(0, 40, prompt + response).tolist()
        sample = Sample(tokens=tokens, response_length=response)
        if top_p:
            kept = [[token, *rng.choice(range(40, 60), rng.integers(0, 5), replace=False)] for token in tokens[prompt:]]
            sample.rollout_top_p_token_ids = np.array([one for ids in kept for one in ids], np.int32)
            sample.rollout_top_p_token_offsets = np.cumsum([0, *map(len, kept)]).astype(np.int32)
        samples.append(sample)
    return samples


@pytest.mark.parametrize("top_p", [False, True])
def test_token_log_probs_are_those_of_the_obvious_loop(*, top_p: bool) -> None:
    rng = np.random.default_rng(2)
    samples = random_samples(rng, top_p=top_p)
    batch = collate(samples, pad_id=PAD)
    logits = torch.from_numpy(rng.normal(size=(3, 6, 60)) * 5).float()
    found = token_log_probs(logits, batch.torch())
    for row, sample in enumerate(samples):
        prompt = len(sample.tokens) - sample.response_length
        for number, token in enumerate(sample.tokens[prompt:]):
            distribution = logits[row, prompt + number - 1].double().softmax(dim=-1)
            share = 1.0
            if sample.rollout_top_p_token_ids is not None and sample.rollout_top_p_token_offsets is not None:
                start, end = sample.rollout_top_p_token_offsets[number : number + 2]
                share = distribution[sample.rollout_top_p_token_ids[start:end]].sum().item()
            assert found[row, prompt + number].item() == pytest.approx(
                np.log(distribution[token].item() / share), abs=1e-5
            )


def test_gradients_of_kept_ids_are_those_of_a_softmax_over_them() -> None:
    samples = random_samples(np.random.default_rng(4), top_p=True)[:1]
    tensors = collate(samples, pad_id=PAD).torch()
    logits = torch.randn(1, 6, 60, generator=torch.Generator().manual_seed(0), requires_grad=True)
    token_log_probs(logits, tensors)[0, -1].backward()
    ids, offsets = samples[0].rollout_top_p_token_ids, samples[0].rollout_top_p_token_offsets
    assert ids is not None
    assert offsets is not None
    kept = torch.from_numpy(ids[offsets[-2] :]).long()
    expected = torch.zeros(60)
    expected[kept] = -logits[0, -1, kept].softmax(dim=-1).detach()
    expected[samples[0].tokens[-1]] += 1
    assert logits.grad is not None
    assert torch.allclose(logits.grad[0, -1], expected, atol=1e-6)
    assert logits.grad[0, :-1].abs().sum() == 0


def test_the_temperature_divides_the_logits(model: Any) -> None:
    tensors = collate([Sample(tokens=IDS[0].tolist(), response_length=3)], pad_id=PAD).torch()
    with torch.no_grad():
        hot = batch_log_probs(model, tensors, temperature=2.0)
    assert torch.allclose(hot, token_log_probs(logits_of(model, None, IDS[:1, :-1]) / 2, tensors), atol=1e-6)
