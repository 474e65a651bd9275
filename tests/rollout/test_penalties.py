"""Penalties in a rollout: responses that are resumed although their engine counts them anew are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client
from streamfold.client.limits import Retries
from streamfold.loopback import Faults, Loopback
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.rollout import Rollout, RolloutConfig
from support.rollouts import bounded, groups_of

if TYPE_CHECKING:
    from streamfold.samples.options import ResumePenalties

PARAMS: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "presence_penalty": 0.3}


@pytest.mark.parametrize("resume", ["continue", "restart"])
async def test_a_response_that_goes_on_with_penalties_is_counted_in_the_metrics_and_a_restarted_one_is_not(
    resume: ResumePenalties,
) -> None:
    faults = Faults([{"kind": "cut", "after_events": 10, "requests": [0, 1], "path": "/generate"}])
    config = RolloutConfig(groups=2, sampling_params=PARAMS, resume_penalties=resume)
    with Loopback(faults=faults) as engine:
        async with Client(engine.url, retries=Retries(first=0.001)) as client:
            result = await bounded(Rollout(client, config).run(Buffer(groups_of(2)), 0))
        samples = [sample for group in result.groups for sample in group]
        whole = [engine.undisturbed(sample.tokens[:4], PARAMS).token_ids for sample in samples]
    noted = [sample.metadata.get("streamfold_resumed_penalties", 0) for sample in samples]
    same = [sample.tokens[4:] == tokens for sample, tokens in zip(samples, whole, strict=True)]
    assert result.metrics["streamfold/resumes"] == 2
    assert result.metrics["streamfold/resumed_penalties"] == sum(noted) == (2 if resume == "continue" else 0)
    assert same == [not count for count in noted], "what was not resumed with penalties is what one call gives"
    assert result.metrics["streamfold/tokens/lost"] == (0 if resume == "continue" else 20)


async def test_a_partial_response_of_an_earlier_rollout_with_penalties_is_restarted_on_request() -> None:
    config = RolloutConfig(groups=1, sampling_params=PARAMS, resume_penalties="restart", partial_rollout=True)
    with Loopback(token_rate=200) as engine:
        buffer = Buffer(groups_of(1, size=1))
        async with Client(engine.url) as client:
            rollout = Rollout(client, config)
            (first,) = buffer.take(1)
            first[0].append_response_tokens(tokens=[300, 301], log_probs=[-1.0, -1.0], text=" of it")
            first[0].status = first[0].Status.ABORTED
            buffer.put([first])
            result = await bounded(rollout.run(buffer, 1))
        (sample,) = result.groups[0]
        assert sample.tokens[4:] == engine.undisturbed(sample.tokens[:4], PARAMS).token_ids
    assert sample.metadata["streamfold_restarted_tokens"] == 2


def test_another_policy_is_refused() -> None:
    wrong: Any = "raise"
    with pytest.raises(ValueError, match="resume_penalties"):
        RolloutConfig(groups=1, resume_penalties=wrong)
