"""Rollouts of the trainer that is installed by ours, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.host.helpers import nowhere
from support.host.slime.rollout.base_types import RolloutFnTrainOutput
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host_calls import entry_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace


def scripted(generate: Callable[..., Any], **settings: Any) -> SimpleNamespace:
    """Arguments for a generator without an engine; one sample to a group, one group to a rollout."""
    usual = {"n_samples_per_prompt": 1, "rollout_batch_size": 1, "over_sampling_batch_size": 1, "streamfold_tries": 3}
    return nowhere(**{**usual, "custom_generate_function_path": generate, **settings})


def rolled(args: SimpleNamespace, source: Any = None, rollout_id: int = 0) -> tuple[list[list[Any]], dict[str, Any]]:
    """Do one rollout of a newer release: its groups and its metrics."""
    output = entry_module().generate_rollout(args, rollout_id, source or RolloutDataSourceWithBuffer(args))
    assert type(output) is RolloutFnTrainOutput
    assert not GenerateState(args).aborted
    return output.samples, output.metrics or {}
