"""The agent of several turns in examples/multi_turn: cut anywhere and called again, it gives the undisturbed sample."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, Sample
from streamfold.loopback import Faults, Loopback
from support.host import installed
from support.host.helpers import LIMIT, until
from support.host.slime.rollout.sglang_rollout import GenerateState, generate_and_rm
from support.host.slime.utils.types import Sample as HostSample
from support.host_calls import entry_module, loopback_engine, streaming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_turn"
PROMPT = "What is 12 times 3?"
TURNS, TOKENS = 4, 64
WAYS = ("alone", "slime", "vime")


class Cut(Exception):  # what a host's cancel is between two awaits
    pass


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("calculator", "alone", "in_slime"):
        sys.modules.pop(name, None)


class Way:
    """The agent alone, in slime or in vime."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module: ModuleType = importlib.import_module("in_slime" if name == "slime" else "alone")
        self.functions: list[tuple[Any, str]] = [(self.module, "complete"), (Sample, "append_observation")]
        if name != "alone":
            self.functions = [(entry_module(), "turn"), (entry_module(), "append_observation")]

    def engine(self) -> Loopback:
        return Loopback(stop_probability=0) if self.name == "alone" else loopback_engine(stop_probability=0)

    def sample(self) -> Any:
        kind = Sample if self.name == "alone" else HostSample
        return kind(index=0, prompt=PROMPT, tokens=list(PROMPT.encode()))

    async def run(self, engine: Loopback, sample: Any) -> None:
        params = {"max_new_tokens": 1000, "seed" if self.name == "vime" else "sampling_seed": 3, "temperature": 1.0}
        if self.name == "alone":
            async with Client(engine.url, tokenizer=engine.tokenizer) as client:
                await self.module.Agent(client)(sample, params, aborted=lambda: False)
            return
        await self.generate(streaming(engine), sample, params)

    async def generate(self, args: Any, sample: Any, params: dict[str, Any]) -> Any:
        if self.name == "slime":
            return await self.module.generate(args, sample, params)
        calculator, vime = importlib.import_module("calculator"), entry_module()
        encode = GenerateState(args).tokenizer.encode
        return await calculator.play(
            sample,
            turn=lambda sample: vime.turn(args, sample, params, max_new_tokens=TOKENS),
            append=lambda *given: vime.append_observation(args, *given),
            encode=partial(encode, add_special_tokens=False),
        )


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    if request.param == "alone":
        yield Way("alone")
        return
    with installed(request.param):
        yield Way(request.param)


def fields_of(sample: Any) -> dict[str, Any]:
    names = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs")
    return {**{name: getattr(sample, name) for name in names}, "status": sample.status.name}


async def undisturbed(way: Way) -> dict[str, Any]:
    with way.engine() as engine:
        sample = way.sample()
        await asyncio.wait_for(way.run(engine, sample), LIMIT)
        assert engine.stats().requests == TURNS
    return fields_of(sample)


async def test_turns_alternate_with_answers_which_are_not_trained_on(way: Way) -> None:
    whole = await undisturbed(way)
    answer = "\n[calculator] write an expression, such as 17 * 3\n"
    parts = whole["response"].split(answer)
    assert len(parts) == TURNS
    runs = [(trained, len(list(run))) for trained, run in itertools.groupby(whole["loss_mask"])]
    assert runs[::2] == [(1, TOKENS)] * TURNS
    assert len(runs) == 2 * TURNS - 1
    placeholders = [
        value for value, trained in zip(whole["rollout_log_probs"], whole["loss_mask"], strict=True) if not trained
    ]
    assert set(placeholders) == {0.0}


@pytest.mark.parametrize("tokens", [0, 1, 40, TOKENS - 1])
@pytest.mark.parametrize("turn", range(TURNS))
async def test_cut_within_a_turn_and_called_again_it_gives_the_undisturbed_sample(
    way: Way, turn: int, tokens: int
) -> None:
    whole = await undisturbed(way)
    with way.engine() as engine:
        path = "/generate" if engine.config.engine == "sglang" else "/inference/v1/generate"
        engine.faults = Faults([{"kind": "abort", "requests": turn, "after_tokens": tokens, "path": path}])
        sample = way.sample()
        for _ in range(2):
            await asyncio.wait_for(way.run(engine, sample), LIMIT)
        assert engine.faults.done["abort"] == 1
    assert fields_of(sample) == whole


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(TURNS))
@pytest.mark.parametrize("function", [0, 1], ids=["turn", "answer"])
async def test_cut_between_a_turn_and_an_answer_it_gives_the_undisturbed_sample(
    way: Way, function: int, number: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended COMPLETED without its last turn, and was rewarded."""
    if function == 1 and number == TURNS - 1:
        pytest.skip("the last turn has no answer behind it")
    whole = await undisturbed(way)
    owner, name = way.functions[function]
    with way.engine() as engine:
        sample = way.sample()
        with monkeypatch.context() as patch, contextlib.suppress(Cut):
            patch.setattr(owner, name, _cutting(getattr(owner, name), number, moment))
            await asyncio.wait_for(way.run(engine, sample), LIMIT)
            pytest.fail("it was not cut")
        sample.status = type(sample.status)["ABORTED"]  # as a host does with what it cancels
        await asyncio.wait_for(way.run(engine, sample), LIMIT)
        assert engine.stats().requests == TURNS, "a turn was generated twice"
    assert fields_of(sample) == whole


def _cutting(function: Callable[..., Any], number: int, moment: str) -> Callable[..., Any]:
    """The function, cut before or after its call of that number."""
    calls = iter(range(100))

    def check(call: int, now: str) -> None:
        if call == number and now == moment:
            raise Cut

    async def awaited(*args: Any, **options: Any) -> Any:
        call = next(calls)
        check(call, "before")
        result = await function(*args, **options)
        check(call, "after")
        return result

    def called(*args: Any, **options: Any) -> Any:
        call = next(calls)
        check(call, "before")
        result = function(*args, **options)
        check(call, "after")
        return result

    return awaited if asyncio.iscoroutinefunction(function) else called


async def test_a_hosts_abort_cancels_the_agent_and_the_next_rollout_resumes_it() -> None:
    with installed("slime"):
        way = Way("slime")
        whole = await undisturbed(way)
        assert way.module.generate.abort_mode == "request"
        with way.engine() as engine:
            sample = way.sample()
            args = streaming(engine, custom_generate_function_path=way.module.generate, partial_rollout=True)
            params = {"max_new_tokens": 1000, "sampling_seed": 3, "temperature": 1.0}
            state = GenerateState(args)
            task = asyncio.ensure_future(generate_and_rm(args, sample, dict(params)))
            await until(lambda: sample.response_length > TOKENS)
            state.aborted = True
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, LIMIT)
            assert sample.response_length < whole["response_length"]
            state.aborted = False
            sample.status = type(sample.status)["ABORTED"]
            await asyncio.wait_for(way.module.generate(args, sample, params), LIMIT)
    assert fields_of(sample) == whole


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 17 * 3 =", "17 * 3 = 51"),
        ("1+2, then 10 - 4/8", "10 - 4/8 = 9.5"),
        ("3/0", "3/0: float division by zero"),
        ("no number", "write an expression, such as 17 * 3"),
    ],
)
def test_the_calculator_evaluates_the_last_expression(text: str, answer: str) -> None:
    assert importlib.import_module("calculator").calculate(text) == answer
