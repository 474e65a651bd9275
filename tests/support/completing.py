"""Helpers of the tests of complete(): samples, scripted replies, and what an uninterrupted generation gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.client.limits import Retries
from streamfold.samples.completion import complete
from streamfold.samples.options import CompletionOptions
from streamfold.samples.sample import Sample
from support.replay import FIN, PROMPT, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamfold import Client
    from streamfold.loopback import Loopback
    from streamfold.samples.options import Resume
    from support.replay import Request, Step
    from support.speaking import Speech

SOON = Retries(tries=4, first=0.001)
ENDED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def sample_of(ids: Sequence[int] = PROMPT, **params: Any) -> Sample:
    given = {"max_new_tokens": 8, **params}
    return Sample(index=0, tokens=list(ids), metadata={"sampling_params": given})


async def completed(client: Client, sample: Sample, *, resume: Resume = "continue", **options: Any) -> Sample:
    params = sample.metadata["sampling_params"]
    return await complete(client, sample, params, resume=resume, options=CompletionOptions(**options))


def differs(speech: Speech, sample: Sample, engine: Loopback, prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    """Fields that differ from the uninterrupted generation; text only if no character can have been split."""
    params = sample.metadata["sampling_params"]
    whole = speech.undisturbed(engine, prompt, params)
    assert whole.finish is not None
    status = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}[whole.finish["type"]]
    expected = {
        "tokens": [*prompt, *whole.token_ids],
        "response_length": len(whole.token_ids),
        "rollout_log_probs": whole.logprobs,
        "loss_mask": [1] * len(whole.token_ids),
        "status": status,
    }
    if "streamfold_text_joined" not in sample.metadata:
        expected["response"] = engine.tokenizer.decode(whole.token_ids)
    return {name: (getattr(sample, name), value) for name, value in expected.items() if getattr(sample, name) != value}


def answers(*replies: Sequence[Step]) -> Callable[[Request], Sequence[Step]]:
    """Give the n-th request the n-th reply."""
    left = iter(replies)
    return lambda _request: next(left)


def truncated(*payloads: bytes) -> list[Step]:
    """A reply whose body ends before the terminal event."""
    return stream(*payloads, end=FIN)
