"""What the tests of the slime adapter share: a trainer's arguments, samples to ask for, and ways to look at them."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

from host import arguments
from host.helpers import LIMIT
from host.slime.utils.types import Sample
from replay import PROMPT, Replay
from streamfold import hosts
from streamfold.loopback import Loopback
from streamfold.slime import generate_streaming

if TYPE_CHECKING:
    from types import SimpleNamespace

    from streamfold.loopback.wire import Reply

Status = Sample.Status
TEXT = " the story"  # two ids
TOP_P: dict[str, Any] = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}


def streaming(engine: Loopback | Replay, **settings: Any) -> SimpleNamespace:
    """Arguments of a trainer that generates through the adapter; what fails is not asked for again."""
    config = engine.config if isinstance(engine, Loopback) else None
    settings = {"custom_generate_function_path": generate_streaming, "streamfold_tries": 1, **settings}
    return arguments(engine.url, config, **settings)


def sample_of(**fields: Any) -> Sample:
    """A sample with the prompt that written replies answer."""
    return Sample(**{"prompt": "x", "tokens": list(PROMPT), **fields})


def partial(*tokens: int, **fields: Any) -> Sample:
    """A sample that was cut after some tokens of a written reply."""
    logprobs = [-token / 8 for token in tokens]
    text = "".join(chr(97 + token % 26) for token in tokens)
    return sample_of(
        tokens=[*PROMPT, *tokens],
        response=text,
        response_length=len(tokens),
        loss_mask=[1] * len(tokens),
        rollout_log_probs=logprobs,
        status=Status.ABORTED,
        **fields,
    )


async def ask(args: SimpleNamespace, sample: Sample, params: dict[str, Any] | None = None) -> Sample:
    """Call the adapter as the host does, within the time after which something hangs."""
    found: Sample = await asyncio.wait_for(generate_streaming(args, sample, params or {}), LIMIT)
    assert found is sample
    return found


def arrived() -> int:
    """How many tokens have come of the calls that the adapter has running in this loop."""
    seats = hosts._seats.get(asyncio.get_running_loop(), {})
    return sum(call.token_count for seat in seats.values() for call in seat.client.running)


def response_of(sample: Sample) -> list[int]:
    return sample.tokens[len(sample.tokens) - sample.response_length :]


def aligned(sample: Sample) -> bool:
    """Whether everything that goes with the response is as long as it."""
    n = sample.response_length
    offsets = sample.rollout_top_p_token_offsets
    return (
        len(sample.loss_mask or []) == n
        and len(sample.rollout_log_probs or []) == n
        and (offsets is None or len(offsets) == n + 1)
    )


def undisturbed(engine: Loopback, args: SimpleNamespace, prompt: list[int], params: dict[str, Any]) -> Reply:
    """What one call gives that nobody cuts."""
    return engine.undisturbed(
        prompt, params, return_logprob=True, return_routed_experts=args.use_rollout_routing_replay
    )


def assert_undisturbed(engine: Loopback, args: SimpleNamespace, sample: Sample, params: dict[str, Any]) -> None:
    """Check that a finished sample is, in all of its fields, what one call gives that nobody cuts."""
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    wanted = undisturbed(engine, args, prompt, params)
    assert response_of(sample) == wanted.token_ids
    assert sample.rollout_log_probs == wanted.logprobs
    assert sample.status.name == {"stop": "COMPLETED", "length": "TRUNCATED"}[(wanted.finish or {})["type"]]
    assert aligned(sample)
    if wanted.top_p is not None:
        assert sample.rollout_top_p_token_ids is not None
        assert sample.rollout_top_p_token_ids.tolist() == [token for kept in wanted.top_p for token in kept]
    if wanted.routed_experts is not None:
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.tobytes() == wanted.routed_experts


def snapshot(sample: Sample) -> dict[str, Any]:
    """All of a sample, to be compared later."""
    return copy.deepcopy(vars(sample))
