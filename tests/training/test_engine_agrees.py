"""Engine and trainer agree on each sample: experts, log-probabilities, and which weights sampled which token."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from streamfold import Sample, collate
from streamfold.training.config import TrainConfig
from streamfold.training.loss import clipped_loss, group_advantages
from streamfold.training.replay import batch_log_probs
from streamfold.training.trainer import Trainer, check_samples
from streamfold.training.weights import send_weights
from support.replay import until
from support.training import (
    MODES,
    PAD,
    PARAMS,
    SHAPE,
    TOP_P,
    client,
    completed,
    engine,
    gap,
    generate,
    load,
    perturbed,
    prompt_samples,
    scores,
    streamed,
)

if TYPE_CHECKING:
    from pathlib import Path

    from streamfold.training.weights import PauseMode

pytestmark = pytest.mark.torch

each_mode = pytest.mark.parametrize("mode", MODES, ids=["cumulative", "incremental"])
CLOSE = 1e-5
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": (PARAMS, 1.0),
    "top-p": (TOP_P, 1.0),
    "temperature": ({**PARAMS, "temperature": 0.6}, 0.6),
    "top-p and temperature": ({**TOP_P, "temperature": 1.5}, 1.5),
}


@each_mode
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_log_probs_are_the_streamed_ones_and_experts_have_one_row_for_each_token_but_the_last(
    tiny: Path, mode: dict[str, Any], way: str
) -> None:
    params, temperature = WAYS[way]
    with engine(tiny, **mode) as server:
        samples = generate(server, tiny, 4, params)
    layers, top_k, experts = SHAPE
    for sample in samples:
        rows = sample.rollout_routed_experts
        assert rows is not None
        assert rows.shape == (len(sample.tokens) - 1, layers, top_k)
        assert 0 <= rows.min() <= rows.max() < experts
        assert (rows[..., 0] != rows[..., 1]).all(), "an expert was chosen twice"
        assert (sample.rollout_top_p_token_ids is not None) == ("top-p" in way)
    check_samples(samples, SHAPE)
    assert gap(scores(load(tiny), samples, temperature=temperature), streamed(samples)) < CLOSE


def test_top_p_replay_is_needed_where_top_p_was_sampled_with(tiny: Path) -> None:
    with engine(tiny) as server:
        samples = generate(server, tiny, 2, TOP_P)
    for sample in samples:
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    assert gap(scores(load(tiny), samples), streamed(samples)) > 1e-2


def test_the_streamed_experts_are_those_that_the_model_chooses_itself(tiny: Path) -> None:
    with engine(tiny) as server:
        samples = generate(server, tiny, 2)
    assert gap(scores(load(tiny), samples, replay=False), streamed(samples)) < CLOSE
    for sample in samples:
        rows: Any = sample.rollout_routed_experts
        sample.rollout_routed_experts = (rows + 1) % SHAPE[2]
    assert gap(scores(load(tiny), samples), streamed(samples)) > 1e-3, "the replay takes whatever was streamed"


# The training step.


def first_step(path: Path, mode: dict[str, Any], params: dict[str, Any]) -> tuple[list[Sample], torch.Tensor, float]:
    """The samples, the ratio of each trained token, and the gradient norm."""
    with engine(path, **mode) as server:
        samples = generate(server, path, 6, params)
    groups = [samples[i : i + 2] for i in range(0, 6, 2)]
    for i, sample in enumerate(samples):
        sample.reward = float(i % 2)
    model = load(path)
    tensors = collate(samples, pad_id=PAD, advantages=group_advantages(groups)).torch()
    loss, ratio = clipped_loss(batch_log_probs(model, tensors), tensors)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    return samples, ratio[tensors["loss_mask"].bool()].detach(), norm


@pytest.mark.parametrize("params", [PARAMS, TOP_P], ids=["plain", "top-p"])
def test_at_the_first_step_the_ratio_is_1_and_both_stream_modes_give_the_same_gradient(
    tiny: Path, params: dict[str, Any]
) -> None:
    results = [first_step(tiny, mode, params) for mode in MODES]
    for _, ratio, norm in results:
        assert (ratio - 1).abs().max() < CLOSE
        assert math.isfinite(norm)
        assert norm > 1e-3
    (cumulative, _, first), (incremental, _, second) = results
    assert [sample.tokens for sample in cumulative] == [sample.tokens for sample in incremental]
    assert abs(first - second) < 1e-6


def test_a_step_of_the_trainer_changes_every_weight(tiny: Path) -> None:
    with engine(tiny) as server:
        samples = generate(server, tiny, 8)
    for i, sample in enumerate(samples):
        sample.reward = float(i % 2)
    trainer, before = Trainer(tiny, TrainConfig()), load(tiny).state_dict()
    stats = trainer.step([samples[i : i + 2] for i in range(0, 8, 2)], "0")
    assert stats.gap < CLOSE
    assert stats.gap_without_replay < CLOSE
    assert stats.ratio == pytest.approx(1, abs=CLOSE)
    assert stats.clipped == 0
    same = {name for name, weight in trainer.weights().items() if torch.equal(weight, before[name])}
    assert same == set()


BAD: dict[str, dict[str, Any]] = {
    "routed experts are of shape None": {"rollout_routed_experts": None},
    r"routed experts are of shape \(3, 4, 2\), not \(4, 4, 2\)": {
        "rollout_routed_experts": np.zeros((3, 4, 2), np.int32)
    },
    "experts are 8 to 8, not 0 to 7": {"rollout_routed_experts": np.full((4, 4, 2), 8, np.int32)},
    "experts are -1 to -1": {"rollout_routed_experts": np.full((4, 4, 2), -1, np.int32)},
    "log-probabilities are missing": {"rollout_log_probs": None},
    "or above 0": {"rollout_log_probs": [-1.0, 0.5, -1.0]},
    "2 of 3 tokens have a weight version": {"version_spans": [("0", 0, 2), (None, 2, 3)]},
    "rollout_log_probs has 2 entries": {"rollout_log_probs": [-1.0, -1.0]},
}


@pytest.mark.parametrize("message", BAD)
def test_nothing_is_trained_on_a_sample_that_is_not_whole(message: str) -> None:
    fields: dict[str, Any] = {
        "tokens": [3, 4, 5, 6, 7],
        "response_length": 3,
        "rollout_log_probs": [-1.0, 0.0, -1.0],
        "rollout_routed_experts": np.zeros((4, 4, 2), np.int32),
        "version_spans": [("0", 0, 3)],
    }
    check_samples([Sample(**fields)], SHAPE)
    with pytest.raises(ValueError, match=message):
        check_samples([Sample(**{**fields, **BAD[message]})], SHAPE)


# An update in the middle of a sample.

LONG: dict[str, Any] = {**PARAMS, "max_new_tokens": 24}


def cut_by_an_update(path: Path, mode: dict[str, Any], pause: PauseMode) -> tuple[Sample, Any]:
    """A sample whose first tokens are of the old weights, the others of the new ones, and the new model."""
    model = perturbed(path)
    (sample,) = prompt_samples(path, 1)

    async def run() -> None:
        async with client(server, path) as asking:
            work = asyncio.create_task(completed(asking, [sample], LONG))
            await until(lambda: any(call.token_count >= 6 for call in asking.running))
            await send_weights(server.url, model.state_dict(), "1", pause=pause)
            await work
            if sample.status is Sample.Status.ABORTED:
                assert pause == "abort"
                await completed(asking, [sample], LONG)

    with engine(path, token_rate=40.0, **mode) as server:
        asyncio.run(run())
    assert sample.status is Sample.Status.TRUNCATED
    return sample, model


def spans_of(sample: Sample) -> tuple[slice, slice]:
    """The response tokens of the old and of the new weights."""
    (old, start, border), (new, same, end) = sample.version_spans
    assert (old, new) == ("0", "1")
    assert 0 == start < 6 <= border == same < end == sample.response_length == 24
    return slice(start, border), slice(border, end)


def without_rows(sample: Sample, rows: slice) -> Sample:
    """The sample with some rows of experts padded, which leaves the choice to the routers."""
    experts = sample.rollout_routed_experts
    assert experts is not None
    experts = experts.copy()
    experts[rows] = -1
    return Sample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        rollout_log_probs=sample.rollout_log_probs,
        rollout_routed_experts=experts,
    )


@each_mode
def test_each_span_of_an_aborted_and_resumed_sample_scores_as_its_version_says(
    tiny: Path, mode: dict[str, Any]
) -> None:
    """The rows of the first call stay, with the experts of the weights that sampled its tokens.

    When the engine resumed, the new weights ran over the old tokens too, through experts of their own.
    """
    sample, model = cut_by_an_update(tiny, mode, "abort")
    old, new = spans_of(sample)
    check_samples([sample], SHAPE)
    (expected,) = streamed([sample])
    (first,) = scores(load(tiny), [sample])
    assert gap([first[old]], [expected[old]]) < CLOSE
    prompt = len(sample.tokens) - sample.response_length
    (second,) = scores(model, [without_rows(sample, slice(0, prompt + new.start - 1))])
    assert gap([second[new]], [expected[new]]) < CLOSE
    assert gap([first[new]], [expected[new]]) > 1e-2, "the update changed nothing"


@each_mode
def test_each_span_of_a_retracted_sample_scores_as_its_version_says(tiny: Path, mode: dict[str, Any]) -> None:
    """The KV cache is computed anew, and the rows of all tokens come at the end: they are of the new weights."""
    sample, model = cut_by_an_update(tiny, mode, "retract")
    old, new = spans_of(sample)
    check_samples([sample], SHAPE)
    (expected,) = streamed([sample])
    (second,) = scores(model, [sample])
    assert gap([second[new]], [expected[new]]) < CLOSE
    (first,) = scores(load(tiny), [sample], replay=False)
    assert gap([first[old]], [expected[old]]) < CLOSE
    assert gap([second[old]], [expected[old]]) > 1e-2, "the update changed nothing"


def test_after_an_update_in_place_the_spans_are_known_and_the_difference_is_measured(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The KV cache stays that of the old weights, so no model gives the tokens behind it the streamed scores."""
    sample, model = cut_by_an_update(tiny, {}, "in_place")
    old, new = spans_of(sample)
    check_samples([sample], SHAPE)
    (expected,) = streamed([sample])
    (first,), (second,) = scores(load(tiny), [sample]), scores(model, [sample])
    assert gap([first[old]], [expected[old]]) < CLOSE
    with capsys.disabled():
        print(f" [in_place: mean difference of the new span {np.abs(second[new] - expected[new]).mean():.3f}] ", end="")
