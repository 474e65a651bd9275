"""Samples to bring to their ends, written replies to do it with, and what an undisturbed generation gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.client.limits import Retries
from streamfold.samples.completion import CompletionOptions, complete
from streamfold.samples.sample import Sample
from support.replay import FIN, PROMPT, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamfold import Client
    from streamfold.loopback import Loopback
    from streamfold.samples.completion import Resume
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
    """What is not as in the undisturbed generation; the text is compared where no character can have been cut."""
    params = sample.metadata["sampling_params"]
    told = speech.undisturbed(engine, prompt, params)
    assert told.finish is not None
    status = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}[told.finish["type"]]
    expected = {
        "tokens": [*prompt, *told.token_ids],
        "response_length": len(told.token_ids),
        "rollout_log_probs": told.logprobs,
        "loss_mask": [1] * len(told.token_ids),
        "status": status,
    }
    if "text_joined" not in sample.metadata:
        expected["response"] = engine.tokenizer.decode(told.token_ids)
    return {name: (getattr(sample, name), value) for name, value in expected.items() if getattr(sample, name) != value}


def answers(*replies: Sequence[Step]) -> Callable[[Request], Sequence[Step]]:
    """The n-th request gets the n-th reply."""
    left = iter(replies)
    return lambda _request: next(left)


def cut(*payloads: bytes) -> list[Step]:
    """A reply whose body ends in the middle."""
    return stream(*payloads, end=FIN)
