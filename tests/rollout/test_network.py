"""The ends of rollouts over real HTTP, with engines that park requests, are dead, deaf, or slow to notice anything."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, Timeouts
from streamfold.client import control_requests as abort
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.rollout import parts_of
from streamfold.samples.merging import merge
from streamfold.samples.sample import Sample
from support.replay import ASKED, DONE, HANG, answer_json, chunk, head, stream
from support.rollouts import Counted, bounded, groups_of, nothing_left, rollout

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.replay import Request
    from support.speaking import Speech

BOTH_LOOPS = True


async def test_a_rollout_ends_though_the_engine_parks_what_comes_after_the_abort(speech: Speech) -> None:
    """vllm-project/vime#294: the drain waited for a request that came just behind the sweep, for ever."""
    aborting = asyncio.Event()

    def generate(request: Request) -> list[Any]:
        if aborting.is_set():
            return [HANG]  # parked
        if speech.ids(request)[-1] == 101:
            return [0.05, *stream(speech.event([9], 1, "stop", prompt=4), DONE)]
        parts = [speech.event([1], 1, prompt=4), speech.event([2], 2, prompt=4), speech.event([], 2, "abort", prompt=4)]
        first, second, last = map(chunk, parts)
        return [head(), first, second, aborting, last, chunk(DONE), b"0\r\n\r\n", "END"]

    def aborted(_request: Request) -> Any:
        aborting.set()
        return answer_json(None)

    class Turns:
        """Asks again and again, and looks at nothing."""

        abort_mode = "server"

        def __init__(self, client: Client) -> None:
            self.client = client

        async def __call__(self, sample: Any, params: Any, *, aborted: Callable[[], bool]) -> Any:
            while sample.status.name in ("PENDING", "ABORTED"):
                merge(sample, await self.client.generate(sample.tokens, params))
            return sample

    routes: dict[str, Any] = {
        speech.abort_all_path: aborted,
        speech.load_path: speech.load(0),
    }
    source = Buffer(groups_of(2, 1))
    async with nothing_left(), speech.replay(generate, routes=routes) as server, speech.client(server.url) as client:
        options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "abort_seconds": 0.4}
        trainer = rollout(Turns(client), client=client, sampling_params=ASKED, **options)
        result = await asyncio.wait_for(trainer.run(source), 20)
        assert [group[0].group_index for group in result.groups] == [1]
        assert any(request.json == speech.abort_all_body for request in server.at(speech.abort_all_path))
        assert len(server.generates) >= 3, "a late one was sent"
    ((sample,),) = source.take(1)
    assert sample.tokens == [5, 6, 7, 100, 1, 2]


@pytest.mark.parametrize("mode", ["request", "server"])
async def test_a_worker_that_is_dead_and_one_that_is_deaf_do_not_keep_a_rollout_from_its_end(
    speech: Speech, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """THUDM/slime#1615."""
    monkeypatch.setattr(abort, "_TIMEOUT_SECONDS", 0.4)  # that a deaf one is given
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        deaf = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def generate(request: Request) -> list[Any]:
            return (
                [0.05, *stream(speech.event([9], 1, "stop"), DONE)]
                if speech.ids(request)[0] == 1
                else [*speech.running]
            )

        async with nothing_left(), speech.replay(generate) as server:
            workers = {"workers": [{"url": url} for url in (dead, server.url, deaf)]}
            server.routes["/workers"] = answer_json(workers)
            server.routes[speech.load_path] = speech.load(0)
            groups = [
                [Sample(group_index=i, index=i, tokens=tokens)] for i, tokens in enumerate(([5, 6, 7], [1, 2, 3]))
            ]
            source = Buffer(groups)
            options: dict[str, Any] = {"groups": 1, "over_sampling": 2, "partial_rollout": True, "abort_seconds": 1.0}
            async with speech.client(server.url, timeouts=Timeouts(connect=0.5)) as client:
                generator: Any = None
                if mode == "server":
                    built_in = parts_of(rollout(client=client, groups=1)).generate

                    async def generator(sample: Any, params: Any, *, aborted: Any) -> Any:
                        return await built_in(sample, params, aborted=lambda: False)

                result = await asyncio.wait_for(rollout(generator, client=client, **options).run(source), 20)
                told = server.at(speech.abort_all_path if mode == "server" else speech.abort_path)
            assert result.groups == [groups[1]]
            assert told, "the one that lives was told"
            assert source.take(1) == [groups[0]]
            assert groups[0][0].tokens == [5, 6, 7, 1, 2]


async def test_aborts_at_any_moment_lose_and_double_nothing(speech: Speech, soak: bool) -> None:
    """Whole rollouts against an engine that never notices that a client has left, cut at random."""
    dice = random.Random(7)
    options: dict[str, Any] = {"token_rate": 1500, "stop_probability": 1 / 60, "incremental": True}
    with speech.loopback(**options, prefill_delay=0.002, leave_delay=None) as engine:
        source, rewards = Buffer(groups_of(12, 3)), Counted()
        params = {"max_new_tokens": 60, "temperature": 1.0}
        asked: dict[str, Any] = {"sampling_params": params, "partial_rollout": True, "seed": 3, "reward": rewards}
        asked["stop_ids"] = (engine.tokenizer.eos_token_id,)
        async with speech.client(engine.url, tokenizer=speech.tokenizer_of(engine)) as client:
            await client.load()
            async with nothing_left():
                for rollout_id in range(300 if soak else 10):
                    running = asyncio.ensure_future(rollout(client=client, groups=12, **asked).run(source, rollout_id))
                    await asyncio.wait({running}, timeout=dice.uniform(0, 0.03))
                    running.cancel()
                    await asyncio.wait({running})
                    if not running.cancelled():  # it was faster
                        source.put(running.result().groups)
                    assert (len(source), source.in_flight) == (12, 0)
                result = await bounded(rollout(client=client, groups=12, **asked).run(source, 999))
            assert await client.load() == 0
        for group in result.groups:
            for place, sample in enumerate(group):
                prompt = sample.tokens[: -sample.response_length]
                wanted = speech.undisturbed(engine, prompt, {**params, "sampling_seed": 3 + place})
                assert sample.tokens == [*prompt, *wanted.token_ids]
                assert sample.rollout_log_probs == wanted.logprobs
        assert sorted(index for index, _ in rewards.asked) == list(range(36))
