"""The job of ``streamfold demo``: two rollouts on two loopback engines, checked for lost, doubled or changed tokens.

The engines serve real HTTP behind a router. The first rollout aborts what is in flight when it has enough groups, the
weights get a new version, and the second rollout resumes what was aborted. The mock model is deterministic and does not
depend on the version, so each sample must equal the undisturbed generation of its prompt.
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

from streamfold.cli.prompts import numbered_lines
from streamfold.client.client import Client
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import count_tokens, prompt_groups, samples_of, sort_key
from streamfold.rollout.rollout import Rollout, RolloutConfig
from streamfold.samples.sample import Sample
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from streamfold.client.trace import Trace
    from streamfold.loopback import Loopback
    from streamfold.loopback.core.reply import Reply
    from streamfold.rollout.groups import Group

__all__ = ["Judge", "Outcome", "Report", "compare", "read_prompts", "run", "write"]

ROLLOUTS: Final = 2
SAMPLES_PER_PROMPT: Final = 2
PARAMS: Final[Mapping[str, Any]] = {"max_new_tokens": 400, "temperature": 1.0}
# Slow enough to abort streams in the middle, and for two cores to keep up.
ENGINE: Final[Mapping[str, Any]] = {
    "token_rate": 150.0,
    "prefill_delay": 0.03,
    "stream_interval": 4,
    "stop_probability": 1 / 150,
    "weight_version": "1",
}
_CONCURRENCY: Final = 40
_FINISH_REASONS: Final = {Sample.Status.COMPLETED: "stop", Sample.Status.TRUNCATED: "length"}


class Judge:
    """A reward function for the demo: the number of different words in a response. It records its calls.

    Attributes:
        texts: for the index of each sample, the text of each call.
    """

    def __init__(self) -> None:
        self.texts: defaultdict[int | None, list[str]] = defaultdict(list)

    async def __call__(self, sample: Sample) -> float:
        """The reward of a finished sample."""
        self.texts[sample.index].append(sample.response)
        return float(len(set(sample.response.split())))

    @property
    def most(self) -> int:
        """The largest number of calls for one sample."""
        return max(map(len, self.texts.values()), default=0)


@dataclass(frozen=True)
class Outcome:
    """A sample, and the result of the checks on it.

    Attributes:
        calls: how many requests the engines got for it. All but the first one resumed it from its tokens.
        equal: whether tokens, log-probabilities, text and finish reason equal those of the undisturbed generation; for
            an unfinished sample, whether its tokens and log-probabilities are the start of that generation.
        judged: whether the reward function was called once, with the whole text; for an unfinished sample, never.
    """

    sample: Sample
    calls: int
    equal: bool
    judged: bool

    @property
    def is_finished(self) -> bool:
        """Whether the sample is finished."""
        return is_finished(self.sample)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the response."""
        return self.sample.tokens[len(self.sample.tokens) - self.sample.response_length :]

    @property
    def mean_logprob(self) -> float:
        """Of all tokens of the response; NaN if there is none."""
        return float(np.mean(self.sample.rollout_log_probs)) if self.sample.rollout_log_probs else float("nan")


@dataclass(frozen=True)
class Report:
    """The result of the demo.

    Attributes:
        groups: number of groups in the source, one per prompt.
        rollouts: the metrics of each rollout, and ``reward_calls``, the largest number of calls of the reward function
            for one sample until the end of the rollout.
        given: indices of the groups that the trainer got, in the order of the rollouts.
        waiting: indices of the groups that wait for the next rollout, partial or finished.
        undrawn: indices of the groups that were not taken from the source.
        in_flight: number of groups that were taken, and neither given nor returned: 0 if no group is lost.
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
        """Of finished samples."""
        return [outcome for outcome in self.outcomes if outcome.is_finished]

    @property
    def resumed(self) -> list[Outcome]:
        """Of finished samples that were aborted and resumed."""
        return [outcome for outcome in self.finished if outcome.calls > 1]

    @property
    def lost(self) -> int:
        """Tokens that were received and are in no sample."""
        received = sum(metrics["streamfold/tokens/generated"] for metrics in self.rollouts)
        return int(received) - count_tokens(outcome.sample for outcome in self.outcomes)

    @property
    def reward_calls(self) -> int:
        """The largest number of calls of the reward function for one sample."""
        return int(max(metrics["reward_calls"] for metrics in self.rollouts))

    @property
    def problems(self) -> list[str]:
        """The checks that failed, in words; empty if nothing was lost, doubled or changed."""
        dropped = sum(metrics["streamfold/tokens/lost"] for metrics in self.rollouts)
        indices = sorted([*self.given, *self.waiting, *self.undrawn])
        unequal = [outcome.sample.index for outcome in self.outcomes if not outcome.equal]
        misjudged = [outcome.sample.index for outcome in self.outcomes if not outcome.judged]
        checks = {
            f"samples {unequal} differ from their undisturbed generation": not unequal,
            f"{self.lost} tokens are in no sample, {dropped:.0f} were dropped": not self.lost and not dropped,
            f"samples {misjudged} were not judged exactly once, when finished, with their whole text": not misjudged,
            f"groups {indices} were found, and {self.in_flight} in flight, instead of each of {self.groups} once": (
                indices == list(range(self.groups)) and not self.in_flight
            ),
        }
        return [problem for problem, passed in checks.items() if not passed]


def read_prompts(path: Path | None = None) -> list[str]:
    """The prompts of a file with a JSON object with ``prompt`` in each line; None: those that come with the package.

    Raises:
        ValueError: a line is anything else, or there is no line; the message names the line.
    """
    source = importlib.resources.files("streamfold") / "prompts.jsonl" if path is None else path
    with source.open("rb") as file:
        lines = list(numbered_lines(file))
    if not lines:
        raise ValueError(f'{source} is empty: it must have lines like {{"prompt": "..."}}')
    return [_prompt(line, f"{source}, line {number}") for number, line in lines]


def _prompt(line: bytes, place: str) -> str:
    try:
        return str(orjson.loads(line)["prompt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f'{place}: not a JSON object like {{"prompt": "..."}}') from None


def run(
    prompts: Sequence[str],
    *,
    engine: Literal["sglang", "vllm"] = "sglang",
    incremental: bool = False,
    seed: int = 0,
    trace: Trace | None = None,
    on_step: Callable[[str], object] = lambda _line: None,
    progress: bool = True,
) -> Report:
    """Run the rollouts, and compare their samples with what the engines generate undisturbed.

    Args:
        prompts: each makes one group.
        engine: whose HTTP API the loopback engines have.
        incremental: whether each event holds only new tokens, or the whole response; vLLM's hold only new tokens.
        seed: of the sampling.
        trace: of all calls.
        on_step: called with a line of text at each step.
        progress: whether the rollouts show their progress.

    Raises:
        ImportError: the loopback engine needs an extra; the message names it.
        StreamfoldError: too many groups failed.
    """
    from streamfold.loopback import Loopback, Router  # noqa: PLC0415  # an extra that only this function needs

    format_ = {"incremental": incremental} if engine == "sglang" else {}
    options = {**ENGINE, **format_, "engine": engine, "keep_requests": 64 + 8 * SAMPLES_PER_PROMPT * len(prompts)}
    judge = Judge()
    with Loopback(**options) as one, Loopback(**options) as two, Router([one, two], "least_load") as router:
        tokenizer = one.tokenizer
        groups = max(1, 7 * len(prompts) // 16)  # so that two rollouts do not use all of them
        config = RolloutConfig(
            sampling_params=PARAMS,
            groups=groups,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            over_sampling=groups + max(1, 4 * groups // 7),
            concurrency=_CONCURRENCY,
            partial_rollout=True,
            stop_ids=(tokenizer.eos_token_id,),
            seed=seed,
            progress=progress,
            trace=trace,
        )
        on_step(f"Two loopback engines behind a router at {router.url}: a deterministic mock model, real HTTP")
        on_step(
            f"{len(prompts)} prompts, {SAMPLES_PER_PROMPT} samples each; a rollout needs {config.groups} groups "
            f"and starts {config.take_size}"
        )
        samples = (Sample(prompt=prompt, tokens=tokenizer.encode(prompt)) for prompt in prompts)
        buffer = Buffer(prompt_groups(samples, SAMPLES_PER_PROMPT))
        client = Client(router.url, engine=engine, tokenizer=tokenizer)
        metrics, given = asyncio.run(
            _rollouts(client, config, buffer, judge=judge, engines=[one, two], on_step=on_step)
        )
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
    on_step: Callable[[str], object],
) -> tuple[list[dict[str, float]], list[Group]]:
    """Run the rollouts, with new weights in between; returns their metrics and their groups."""
    metrics: list[dict[str, float]] = []
    given: list[Group] = []
    async with client:
        rollout = Rollout(client, config, reward=judge)
        for number in range(1, ROLLOUTS + 1):
            if number > 1:
                await _update_weights(engines, str(number))
                on_step(f"The engines have new weights, version {number}, with which aborted samples are resumed")
            result = await rollout.run(buffer, number)
            metrics.append({**result.metrics, "reward_calls": float(judge.most)})
            given += result.groups
            on_step(f"Rollout {number}: {len(result.groups)} groups are done, {len(buffer)} wait for the next rollout")
    return metrics, given


async def _update_weights(engines: Sequence[Loopback], version: str) -> None:
    """Set the version of the weights, as a trainer does. By default an engine would abort all requests then."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for engine in engines:
            body = {"new_version": version, "abort_all_requests": False}
            reply = await http.post(f"{engine.url}/update_weight_version", json=body)
            reply.raise_for_status()


def _calls(engines: Sequence[Loopback]) -> Counter[str | None]:
    """The number of requests per sample, by its session id, which is in a header of all its requests."""
    seen = (request for engine in engines for request in engine.seen())
    # SGLang's header or vLLM's.
    sessions = (request.headers.get("x-smg-routing-key", request.headers.get("x-session-id")) for request in seen)
    return Counter(session for session in sessions if session)


def compare(sample: Sample, engine: Loopback, seed: int, *, calls: int, judged: Sequence[str]) -> Outcome:
    """Compare a sample, and its texts that the reward function got, with the undisturbed generation of its prompt."""
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    expected = _undisturbed(engine, prompt, seed)
    return Outcome(
        sample=sample,
        calls=calls,
        equal=not any(_differences(sample, expected)),
        judged=list(judged) == (["".join(expected.pieces or ())] if is_finished(sample) else []),
    )


def _undisturbed(engine: Loopback, prompt: Sequence[int], seed: int) -> Reply:
    """What an engine generates if a request is not aborted."""
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
        yield expected.finish is None or _FINISH_REASONS[sample.status] != expected.finish["type"]


def is_demo_line(line: bytes) -> bool:
    """Whether :func:`write` has written this line."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(fields, dict) and fields.keys() >= {"group_index", "token_ids", "calls", "equal"}


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the finished samples, one JSON object per line."""
    with path.open("wb") as file:
        for outcome in outcomes:
            sample = outcome.sample
            if not outcome.is_finished:
                continue
            line = {
                "group_index": sample.group_index,
                "index": sample.index,
                "prompt": sample.prompt,
                "input_ids": sample.tokens[: len(sample.tokens) - sample.response_length],
                "token_ids": outcome.token_ids,
                "logprobs": sample.rollout_log_probs,
                "text": sample.response,
                "finish_reason": _FINISH_REASONS[sample.status],
                "reward": sample.reward,
                "version_spans": sample.version_spans,
                "calls": outcome.calls,
                "equal": outcome.equal,
            }
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
