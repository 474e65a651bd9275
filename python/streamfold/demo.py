"""The main job on a small scale: stream, cut in the middle, resume, and show that nothing is lost.

An engine in a box generates on real HTTP. Some of the streams are aborted once or twice while they run and go on from
their own tokens; each sample must end as the one undisturbed generation of its prompt.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from streamfold.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from streamfold._core import Generation
    from streamfold.loopback import Loopback

__all__ = ["Outcome", "read_prompts", "run", "write"]

AT_ONCE = 16
_LOOK_SECONDS = 0.002  # how often a stream is looked at, to be cut near a certain token


@dataclass
class Outcome:
    """One prompt with what came of it.

    Attributes:
        generations: one for each request, in order; their tokens make up the sample.
        aborted: how many of the requests were aborted in mid-stream.
        first_token: seconds from the start of the first request to its first token.
        seconds: the streaming time of all requests.
        finish_reason: why it ended.
        lost: tokens that are missing, doubled or other than in the undisturbed generation.
        equal: whether tokens, log-probabilities and text are those of the undisturbed generation.
    """

    prompt: str
    input_ids: list[int]
    generations: list[Generation] = field(default_factory=list)
    aborted: int = 0
    first_token: float = 0.0
    seconds: float = 0.0
    finish_reason: str | None = None
    lost: int = 0
    equal: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The sample's tokens."""
        return [token for generation in self.generations for token in generation.token_ids.tolist()]

    @property
    def logprobs(self) -> list[float]:
        """Their log-probabilities."""
        told = (generation.logprobs for generation in self.generations)
        return [logprob for logprobs in told if logprobs is not None for logprob in logprobs.tolist()]

    @property
    def resumed(self) -> int:
        """How many requests went on from earlier tokens."""
        return len(self.generations) - 1

    @property
    def mean_logprob(self) -> float:
        """NaN without a token."""
        return float(np.mean(self.logprobs)) if self.logprobs else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Over the streaming time."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def read_prompts(path: Path | None = None) -> list[str]:
    """The prompts of a JSON-lines file with a ``prompt`` in each line; None: those that come with the package.

    Raises:
        ValueError: a line is no such object; the message names it.
    """
    source = importlib.resources.files("streamfold") / "prompts.jsonl" if path is None else path
    lines = source.read_bytes().splitlines()
    return [_prompt(line, f"{source}, line {number}") for number, line in enumerate(lines, start=1)]


def _prompt(line: bytes, place: str) -> str:
    try:
        return str(orjson.loads(line)["prompt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f'{place}: an object like {{"prompt": "..."}} was expected') from None


async def run(
    engine: Loopback,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
    on_tokens: Callable[[int], object] = lambda _count: None,
) -> list[Outcome]:
    """Stream all prompts, :data:`AT_ONCE` at a time, and cut every second one once or twice.

    ``on_tokens`` is told, now and then, how many more tokens have arrived.

    Raises:
        StreamfoldError: a call failed, which the demo does not expect.
    """
    chance = random.Random(seed)  # noqa: S311  # nothing depends on it
    outcomes = [Outcome(prompt, engine.tokenizer.encode(prompt)) for prompt in prompts]
    plans = [
        sorted(chance.sample(range(8, 120), chance.randint(1, 2)) if index % 2 else []) for index in range(len(prompts))
    ]
    params = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "sampling_seed": seed}
    slots = asyncio.Semaphore(AT_ONCE)
    async with Client(engine.url) as client:

        async def sample(outcome: Outcome, cuts: Sequence[int]) -> None:
            async with slots:
                await _sample(client, outcome, params, cuts, on_tokens, eos=engine.tokenizer.eos_token_id)

        await asyncio.gather(*map(sample, outcomes, plans))
    for outcome in outcomes:
        _compare(engine, outcome, params)
    return outcomes


async def _sample(
    client: Client,
    outcome: Outcome,
    params: dict[str, Any],
    cuts: Sequence[int],
    on_tokens: Callable[[int], object],
    *,
    eos: int,
) -> None:
    """One prompt to its end; the n-th request is cut as soon as the sample has ``cuts[n]`` tokens."""
    budget = params["max_new_tokens"]
    for cut in [*cuts, None]:
        kept = outcome.token_ids
        call = client.start(outcome.input_ids + kept, {**params, "max_new_tokens": budget - len(kept)})
        ending = asyncio.ensure_future(call)
        reported, sent = 0, time.perf_counter()
        while not ending.done() and (cut is None or len(kept) + call.token_count < cut):
            await asyncio.wait({ending}, timeout=_LOOK_SECONDS)
            on_tokens(call.token_count - reported)
            reported = call.token_count
            if not reported:
                sent = time.perf_counter()
                if not kept:
                    outcome.first_token = call.age
        generation = await ending if ending.done() else await call.abort()
        await ending
        on_tokens(len(generation.token_ids) - reported)
        outcome.seconds += time.perf_counter() - sent
        outcome.generations.append(generation)
        outcome.finish_reason = generation.finish_reason
        outcome.aborted += generation.finish_reason not in ("stop", "length")
        if generation.token_ids[-1:].tolist() == [eos]:  # an abort may come with the very token that ends it all
            outcome.finish_reason = "stop"
        if outcome.finish_reason in ("stop", "length"):
            return


def _compare(engine: Loopback, outcome: Outcome, params: dict[str, Any]) -> None:
    expected = engine.undisturbed(outcome.input_ids, params, return_logprob=True)
    decode = engine.tokenizer.decode
    tokens = outcome.token_ids
    differing = sum(ours != theirs for ours, theirs in zip(tokens, expected.token_ids, strict=False))
    outcome.lost = differing + abs(len(tokens) - len(expected.token_ids))
    outcome.equal = (
        not outcome.lost
        and outcome.logprobs == expected.logprobs
        and decode(tokens) == decode(expected.token_ids)
        and expected.finish is not None
        and outcome.finish_reason == expected.finish["type"]
    )


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Save the samples, one JSON object a line."""
    with path.open("wb") as file:
        for outcome in outcomes:
            sample = {
                "prompt": outcome.prompt,
                "input_ids": outcome.input_ids,
                "token_ids": outcome.token_ids,
                "logprobs": outcome.logprobs,
                "text": "".join(generation.text or "" for generation in outcome.generations),
                "finish_reason": outcome.finish_reason,
                "aborted": outcome.aborted,
                "resumed": outcome.resumed,
                "equal": outcome.equal,
            }
            file.write(orjson.dumps(sample, option=orjson.OPT_APPEND_NEWLINE))
