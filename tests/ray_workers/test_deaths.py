"""Workers that are killed in the midst of long streams: what they had reported is resumed, token by token."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Buffer, StreamfoldError
from streamfold.loopback import Loopback
from streamfold.samples.metadata import count_of
from support.ray_jobs import DiesWhenOpened, config, open_workers, undisturbed
from support.rollouts import bounded

if TYPE_CHECKING:
    from pathlib import Path

    from streamfold import Sample
    from streamfold.ray import RolloutWorkers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("_ray")]

GROUPS = 3
TOKENS = 200
LONG = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


async def saved(shared: RolloutWorkers, path: Path) -> list[Sample]:
    """The samples as the buffer has them."""
    await shared.save(path)
    buffer = Buffer()
    buffer.load(path)
    return [sample for group in buffer.take(len(buffer)) for sample in group]


async def reported(shared: RolloutWorkers, path: Path, tokens: int) -> dict[int, Sample]:
    """The samples by their index, once each has so many tokens in the buffer."""
    while True:
        samples = await saved(shared, path)
        if len(samples) == 2 * GROUPS and all(sample.response_length >= tokens for sample in samples):
            return {sample.index or 0: sample for sample in samples}
        await asyncio.sleep(0.02)


def sent(engine: Loopback) -> list[dict[str, Any]]:
    """The requests for tokens, in their order."""
    return [seen.json() for seen in engine.seen() if seen.path == "/generate"]


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.parametrize("killed", [1, 2])
async def test_samples_go_on_from_the_tokens_that_a_killed_worker_had_reported(tmp_path: Path, killed: int) -> None:
    with Loopback(token_rate=25) as engine:
        async with open_workers(engine, config(GROUPS, sampling_params=LONG), GROUPS) as shared:
            first = asyncio.create_task(shared.next(GROUPS))
            held = await bounded(reported(shared, tmp_path / "buffer", 5))
            assert len(sent(engine)) == 2 * GROUPS, "nothing was resumed until then"
            for pid in shared.pids[:killed]:
                os.kill(pid, signal.SIGKILL)
            groups = await bounded(first)
        requests = sent(engine)
    samples = {sample.index or 0: sample for group in groups for sample in group}
    assert samples.keys() == held.keys()
    wholes = {index: undisturbed(engine, sample, LONG) for index, sample in samples.items()}
    for index, sample in samples.items():
        whole = wholes[index]
        assert held[index].tokens == whole.tokens[: len(held[index].tokens)], "a prefix, with nothing lost or doubled"
        assert sample.tokens == whole.tokens
        assert sample.rollout_log_probs == whole.rollout_log_probs
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1
        assert "streamfold_restarted_tokens" not in sample.metadata
        sample.check()
    resumes = requests[2 * GROUPS :]
    for request in resumes:
        ids = request["input_ids"]
        index = next(index for index, whole in wholes.items() if whole.tokens[: len(ids)] == ids)
        assert len(ids) >= len(held[index].tokens), "the prompt and all that was reported"
        kept = len(ids) - (len(wholes[index].tokens) - TOKENS)
        assert request["sampling_params"]["max_new_tokens"] == TOKENS - kept
        assert kept >= 5
    assert len(resumes) == 2 * GROUPS if killed == 2 else 0 < len(resumes) < 2 * GROUPS


@pytest.mark.parametrize("method", ["run", "next"])
@pytest.mark.parametrize("group_tries", [1, 3])
async def test_when_all_workers_have_died_for_good_it_is_an_error_and_the_buffer_has_their_groups(
    tmp_path: Path, method: str, group_tries: int
) -> None:
    path = tmp_path / "buffer"
    mortal = {"num_cpus": 0, "max_restarts": 0}
    settings = config(GROUPS, sampling_params=LONG, group_tries=group_tries)
    with Loopback(token_rate=25) as engine:
        async with open_workers(engine, settings, GROUPS, worker_options=mortal) as shared:
            first = asyncio.create_task(shared.run(0) if method == "run" else shared.next(GROUPS))
            held = await bounded(reported(shared, path, 5))
            for pid in shared.pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(StreamfoldError, match=r"all workers have died for good.* save\(\) .*max_restarts"):
                await bounded(first)
            with pytest.raises(StreamfoldError, match="all workers have died for good"):
                await bounded(shared.run(1) if method == "run" else shared.next(1))
            left = {sample.index or 0: sample for sample in await bounded(saved(shared, path))}
    assert left.keys() == held.keys()
    for index, sample in left.items():
        whole = undisturbed(engine, sample, LONG)
        assert held[index].response_length <= sample.response_length < TOKENS
        assert sample.tokens == whole.tokens[: len(sample.tokens)]
        assert count_of(sample, "failures") == 0


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_worker_that_is_killed_while_it_opens_its_client_opens_it_again(tmp_path: Path, deaths: int) -> None:
    for at in range(deaths):
        (tmp_path / str(at)).touch()
    with Loopback() as engine:
        client = functools.partial(DiesWhenOpened, engine.url, tmp_path)
        async with open_workers(engine, config(GROUPS), GROUPS, client=client) as shared:
            assert len(await bounded(shared.next(GROUPS))) == GROUPS
    assert not files_in(tmp_path), "they have died"


async def test_a_worker_that_dies_for_good_while_it_opens_its_client_is_told(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    mortal = {"num_cpus": 0, "max_restarts": 0}
    with Loopback() as engine:
        client = functools.partial(DiesWhenOpened, engine.url, tmp_path)
        with pytest.raises(StreamfoldError, match="a worker has died while it opened its client"):
            async with open_workers(engine, config(GROUPS), GROUPS, client=client, worker_options=mortal):
                raise AssertionError("it must not open")
