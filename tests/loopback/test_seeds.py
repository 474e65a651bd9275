"""Seeds of requests: samples of one prompt differ where sampling is random, and every run can be repeated."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Buffer, Client, Rollout, RolloutConfig, Sample, prompt_groups
from streamfold.loopback import Config, Loopback

if TYPE_CHECKING:
    from support.speaking import Speech

PROMPT = [300, 301, 302]
USUAL = next(field.default for field in fields(Config) if field.name == "sampling_seed")
RANDOM: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


async def several(speech: Speech, params: dict[str, Any], n: int = 6, **config: Any) -> list[tuple[int, ...]]:
    """The tokens of n requests of one prompt, one after the other, on an engine of its own."""
    with speech.loopback(**{"sampling_seed": USUAL, **config}) as engine:
        async with speech.client(engine.url) as client:
            return [tuple((await client.generate(PROMPT, params)).token_ids.tolist()) for _ in range(n)]


async def test_requests_of_one_prompt_without_a_seed_differ_and_a_second_run_gives_the_same(speech: Speech) -> None:
    assert USUAL is not None
    once = await several(speech, RANDOM)
    assert len(set(once)) == len(once)
    assert await several(speech, RANDOM) == once
    assert await several(speech, RANDOM, sampling_seed=1) != once


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"sampling_seed": 5}])
async def test_a_request_with_a_seed_or_without_chance_gives_the_same_each_time(
    speech: Speech, params: dict[str, Any]
) -> None:
    name = "sampling_seed" if speech.engine == "sglang" else "seed"
    params = {name if key == "sampling_seed" else key: value for key, value in params.items()}
    assert len(set(await several(speech, {**RANDOM, **params}))) == 1


async def test_without_a_generator_all_requests_get_the_engines_seed(speech: Speech) -> None:
    assert len(set(await several(speech, RANDOM, sampling_seed=None))) == 1


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_undisturbed_generation_whose_seed_is_not_known_is_refused_by_name(engine: Any) -> None:
    name = "sampling_seed" if engine == "sglang" else "seed"
    most = "max_new_tokens" if engine == "sglang" else "max_tokens"
    with Loopback(engine=engine, sampling_seed=USUAL) as server:
        with pytest.raises(ValueError, match=rf"name it \({name}\).*sampling_seed=None"):
            server.undisturbed(PROMPT, {most: 4})
        assert len(server.undisturbed(PROMPT, {most: 4, name: 3, "ignore_eos": True}).token_ids) == 4
        server.undisturbed(PROMPT, {most: 4, "temperature": 0})


async def test_the_samples_of_a_group_differ_in_a_rollout_that_names_no_seed() -> None:
    config = RolloutConfig(sampling_params=RANDOM, groups=1)
    with Loopback(sampling_seed=USUAL) as engine:
        async with Client(engine.url) as client:
            source = Buffer(prompt_groups([Sample(tokens=PROMPT)], n_samples_per_prompt=8))
            (group,) = (await Rollout(client, config).run(source)).groups
    assert len({tuple(sample.tokens) for sample in group}) == 8
