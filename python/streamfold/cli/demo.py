"""The main job on a small scale: two rollouts that ask for more than they need, cut the rest, and lose nothing of it.

Two engines in a box generate on real HTTP behind a router. The first rollout cuts what is still running when it has its
groups, the weights get a new version, and the second one goes on with what was cut. The model is deterministic and
knows nothing of its version, so each sample has to end as one undisturbed generation of its prompt.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import httpx
import numpy as np
import orjson

from streamfold.client.client import Client
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import count_tokens, is_finished, prompt_groups, samples_of, sort_key
from streamfold.rollout.rollout import Rollout, RolloutConfig
from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from streamfold.loopback import Loopback
    from streamfold.loopback.core.reply import Reply

__all__ = ["Judge", "Outcome", "Report", "compare", "read_prompts", "run", "write"]

ROLLOUTS: Final = 2
SAMPLES_PER_PROMPT: Final = 2
PARAMS: Final[Mapping[str, Any]] = {"max_new_tokens": 400, "temperature": 1.0}
# Slow enough for the streams to be real ones, and for two cores to keep up with all of them.
ENGINE: Final[Mapping[str, Any]] = {
    "token_rate": 150.0,
    "prefill_delay": 0.03,
    "stream_interval": 4,
    "stop_probability": 1 / 150,
    "weight_version": "1",
}
_AT_ONCE: Final = 40
_FINISH: Final = {Sample.Status.COMPLETED: "stop", Sample.Status.TRUNCATED: "length"}


class Judge:
    """A stand-in for a reward function: how many different words a response has. It notes what it is asked.

    Attributes:
        texts: by the index of a sample, the text that was judged in each call for it.
    """

    def __init__(self) -> None:
        self.texts: defaultdict[int | None, list[str]] = defaultdict(list)

    async def __call__(self, sample: Sample) -> float:
        """The reward of one finished sample."""
        self.texts[sample.index].append(sample.response)
        return float(len(set(sample.response.split())))

    @property
    def most(self) -> int:
        """Calls for one sample at most."""
        return max(map(len, self.texts.values()), default=0)


@dataclass(frozen=True)
class Outcome:
    """One sample with what came of it.

    Attributes:
        calls: how often it was asked for, as the engines have counted. All but the first went on from its own tokens.
        equal: whether tokens, log-probabilities, text and finish are those of the undisturbed generation; of a sample
            that is not at its end, whether its tokens and log-probabilities begin it.
        judged: whether the reward function got its whole text, once; of one that is not at its end, whether never.
    """

    sample: Sample
    calls: int
    equal: bool
    judged: bool

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end."""
        return is_finished(self.sample)

    @property
    def token_ids(self) -> list[int]:
        """The response's tokens."""
        return self.sample.tokens[len(self.sample.tokens) - self.sample.response_length :]

    @property
    def mean_logprob(self) -> float:
        """NaN without a token."""
        return float(np.mean(self.sample.rollout_log_probs)) if self.sample.rollout_log_probs else float("nan")


@dataclass(frozen=True)
class Report:
    """What the rollouts came to.

    Attributes:
        groups: how many there were in the source, one for each prompt.
        rollouts: the metrics of each rollout, with ``reward_calls``, the calls of the reward function for one sample
            at most, up to its end.
        given: the indices of the groups that the trainer got, rollout after rollout.
        waiting: of those that wait for the next rollout, cut ones and finished ones.
        undrawn: of those that nobody has asked for yet.
        in_flight: groups that were taken, and neither given nor put back; none, if all went well.
        outcomes: of all samples of groups that were taken.
    """

    groups: int
    rollouts: list[dict[str, float]]
    given: list[int]
    waiting: list[int]
    undrawn: list[int]
    in_flight: int
    outcomes: list[Outcome]

    @property
    def finished(self) -> list[Outcome]:
        """Samples at their end."""
        return [outcome for outcome in self.outcomes if outcome.is_finished]

    @property
    def resumed(self) -> list[Outcome]:
        """Of those, samples that were cut before."""
        return [outcome for outcome in self.finished if outcome.calls > 1]

    @property
    def lost(self) -> int:
        """Tokens that came and are in no sample."""
        came = sum(metrics["rollout/tokens/generated"] for metrics in self.rollouts)
        return int(came) - count_tokens(outcome.sample for outcome in self.outcomes)

    @property
    def reward_calls(self) -> int:
        """Calls of the reward function for one sample at most."""
        return int(max(metrics["reward_calls"] for metrics in self.rollouts))

    @property
    def problems(self) -> list[str]:
        """What went wrong, in words; empty if nothing was lost, doubled or changed."""
        told = sum(metrics["rollout/tokens/lost"] for metrics in self.rollouts)
        there = sorted([*self.given, *self.waiting, *self.undrawn])
        unequal = [outcome.sample.index for outcome in self.outcomes if not outcome.equal]
        misjudged = [outcome.sample.index for outcome in self.outcomes if not outcome.judged]
        checks = {
            f"samples {unequal} are not as in their undisturbed generation": not unequal,
            f"{self.lost} tokens are in no sample, {told:.0f} were dropped": not self.lost and not told,
            f"samples {misjudged} were not judged exactly once, at their end, by all of their text": not misjudged,
            f"groups {there} are there, and {self.in_flight} in flight, instead of each of {self.groups} once": (
                there == list(range(self.groups)) and not self.in_flight
            ),
        }
        return [problem for problem, is_well in checks.items() if not is_well]


def read_prompts(path: Path | None = None) -> list[str]:
    """The prompts of a JSON-lines file with a ``prompt`` in each line; None: those that come with the package.

    Raises:
        ValueError: a line is no such object, or there is none; the message names it.
    """
    source = importlib.resources.files("streamfold") / "prompts.jsonl" if path is None else path
    lines = source.read_bytes().splitlines()
    if not lines:
        raise ValueError(f'{source} is empty: lines like {{"prompt": "..."}} were expected')
    return [_prompt(line, f"{source}, line {number}") for number, line in enumerate(lines, start=1)]


def _prompt(line: bytes, place: str) -> str:
    try:
        return str(orjson.loads(line)["prompt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f'{place}: an object like {{"prompt": "..."}} was expected') from None


def run(
    prompts: Sequence[str],
    *,
    engine: Literal["sglang", "vllm"] = "sglang",
    incremental: bool = False,
    seed: int = 0,
    tell: Callable[[str], object] = lambda _line: None,
) -> Report:
    """Do the rollouts, and compare what came with what the engines generate undisturbed.

    Args:
        prompts: one group of samples for each.
        engine: whose HTTP interface the engines have.
        incremental: whether the engines' events hold what is new, or everything; vLLM's always hold what is new.
        seed: of the sampling.
        tell: is given a line at each step.

    Raises:
        ImportError: the engine in a box needs its extra; the message says which.
        StreamfoldError: too many groups failed, which the demo does not expect.
    """
    from streamfold.loopback import Loopback, Router  # noqa: PLC0415  # an extra, which only this needs

    how = {"engine": engine, "incremental": incremental} if engine == "sglang" else {"engine": engine}
    options = {**ENGINE, **how, "keep_requests": 64 + 8 * SAMPLES_PER_PROMPT * len(prompts)}
    judge = Judge()
    with Loopback(**options) as one, Loopback(**options) as two, Router([one, two], "least_load") as router:
        tokenizer = one.tokenizer
        groups = max(1, 7 * len(prompts) // 16)  # so that two rollouts leave something over
        config = RolloutConfig(
            sampling_params=PARAMS,
            groups=groups,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            over_sampling=groups + max(1, 4 * groups // 7),
            concurrency=_AT_ONCE,
            partial_rollout=True,
            stop_ids=(tokenizer.eos_token_id,),
            seed=seed,
        )
        tell(f"Two engines in a box, behind a router at {router.url}: a deterministic model, real HTTP")
        tell(
            f"{len(prompts)} prompts, {SAMPLES_PER_PROMPT} samples each; a rollout needs {config.groups} groups "
            f"and begins with {config.ask}"
        )
        samples = (Sample(prompt=prompt, tokens=tokenizer.encode(prompt)) for prompt in prompts)
        buffer = Buffer(prompt_groups(samples, SAMPLES_PER_PROMPT))
        client = Client(router.url, engine=engine, tokenizer=tokenizer)
        metrics, given = asyncio.run(_rollouts(client, config, buffer, judge=judge, engines=[one, two], tell=tell))
        in_flight = buffer.in_flight
        waiting = buffer.take(len(buffer))
        calls = _calls([one, two])
        outcomes = [
            compare(sample, one, seed + place, calls=calls[sample.session_id], judged=judge.texts[sample.index])
            for group in sorted([*given, *waiting], key=sort_key)
            for place, sample in enumerate(samples_of(group))
        ]
    return Report(
        groups=len(prompts),
        rollouts=metrics,
        given=[sort_key(group)[0] for group in given],
        waiting=[sort_key(group)[0] for group in waiting],
        undrawn=list(range(buffer.position, len(prompts))),
        in_flight=in_flight,
        outcomes=outcomes,
    )


async def _rollouts(
    client: Client,
    config: RolloutConfig,
    buffer: Buffer,
    *,
    judge: Judge,
    engines: Sequence[Loopback],
    tell: Callable[[str], object],
) -> tuple[list[dict[str, float]], list[list[Sample]]]:
    """One rollout after the other, with new weights in between: their metrics and their groups."""
    metrics, given = [], []
    async with client:
        rollout = Rollout(client, config, reward=judge)
        for number in range(1, ROLLOUTS + 1):
            if number > 1:
                await _update_weights(engines, str(number))
                tell(f"The engines have new weights, version {number}; what was cut goes on with them")
            result = await rollout.run(buffer, number)
            metrics.append({**result.metrics, "reward_calls": float(judge.most)})
            given += result.groups
            tell(f"Rollout {number}: {len(result.groups)} groups are done, {len(buffer)} wait for the next one")
    return metrics, given


async def _update_weights(engines: Sequence[Loopback], version: str) -> None:
    """Do as a trainer does when it has new weights. Who does not say false aborts everything that runs."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for engine in engines:
            body = {"new_version": version, "abort_all_requests": False}
            reply = await http.post(f"{engine.url}/update_weight_version", json=body)
            reply.raise_for_status()


def _calls(engines: Sequence[Loopback]) -> Counter[str | None]:
    """How often each sample was asked for. All its requests carry the id of its session, for routers to see."""
    seen = (request for engine in engines for request in engine.seen())
    # Under SGLang's name or vLLM's.
    sessions = (request.headers.get("x-smg-routing-key", request.headers.get("x-session-id")) for request in seen)
    return Counter(session for session in sessions if session)


def compare(sample: Sample, engine: Loopback, seed: int, *, calls: int, judged: Sequence[str]) -> Outcome:
    """Compare a sample, and the texts that were judged of it, with the undisturbed generation of its prompt."""
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    expected = _undisturbed(engine, prompt, seed)
    return Outcome(
        sample=sample,
        calls=calls,
        equal=not any(_differences(sample, expected)),
        judged=list(judged) == (["".join(expected.pieces or ())] if is_finished(sample) else []),
    )


def _undisturbed(engine: Loopback, prompt: Sequence[int], seed: int) -> Reply:
    """What an engine gives if nothing happens to the request; asked for in its own words."""
    if engine.config.engine == "sglang":
        return engine.undisturbed(prompt, {**PARAMS, "sampling_seed": seed}, return_logprob=True)
    params = {"max_tokens": PARAMS["max_new_tokens"], "temperature": PARAMS["temperature"], "seed": seed, "logprobs": 1}
    return engine.undisturbed(prompt, params)


def _differences(sample: Sample, expected: Reply) -> Iterator[bool]:
    length = sample.response_length
    tokens = sample.tokens[len(sample.tokens) - length :]
    yield tokens != expected.token_ids[:length]
    yield (sample.rollout_log_probs or []) != (expected.logprobs or [])[:length]
    if is_finished(sample):
        yield length != len(expected.token_ids)
        yield sample.response != "".join(expected.pieces or ())
        yield expected.finish is None or _FINISH[sample.status] != expected.finish["type"]


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Save the finished samples, one JSON object a line."""
    with path.open("wb") as file:
        for outcome in outcomes:
            sample = outcome.sample
            if not outcome.is_finished:
                continue
            told = {
                "group_index": sample.group_index,
                "index": sample.index,
                "prompt": sample.prompt,
                "input_ids": sample.tokens[: len(sample.tokens) - sample.response_length],
                "token_ids": outcome.token_ids,
                "logprobs": sample.rollout_log_probs,
                "text": sample.response,
                "finish_reason": _FINISH[sample.status],
                "reward": sample.reward,
                "version_spans": sample.version_spans,
                "calls": outcome.calls,
                "equal": outcome.equal,
            }
            file.write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
