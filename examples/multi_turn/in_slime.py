"""The calculator's agent as a generate function of slime: ``--custom-generate-function-path in_slime.generate``.

Put this folder on ``PYTHONPATH`` where slime's rollout runs. For vime, import ``streamfold.vime`` and vime's
``rollout.vllm_rollout`` instead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from calculator import TOKENS_PER_TURN, play

import streamfold.slime

if TYPE_CHECKING:
    from collections.abc import Mapping


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:  # noqa: ANN401  # slime's
    """Return the sample, finished or aborted."""
    from slime.rollout.sglang_rollout import GenerateState  # noqa: PLC0415  # slime need not be installed here

    tokenizer = GenerateState(args).tokenizer

    async def turn(sample: Any) -> Any:  # noqa: ANN401  # slime's
        return await streamfold.slime.turn(args, sample, sampling_params, max_new_tokens=TOKENS_PER_TURN)

    return await play(
        sample,
        turn=turn,
        append=partial(streamfold.slime.append_observation, args),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


# slime then cancels this function to abort its requests, one by one, instead of aborting all that its engines run.
vars(generate)["abort_mode"] = "request"
