"""Many samples completed at once: limited concurrency, each reported once, no task left when the run ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import RolloutConfig, Sample
from streamfold.cli.completing import complete_all
from streamfold.rollout.metrics import RolloutStats
from support.completing import SOON, answers, sample_of
from support.replay import DONE, HANG, Request, answer_json, chunk, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamfold.loopback import Loopback
    from support.replay import Step
    from support.speaking import Speech


def limits(concurrency: int) -> dict[str, Any]:
    config = RolloutConfig(groups=1, concurrency=concurrency, partial_rollout=True, sample_retries=0)
    return {"config": config, "stats": RolloutStats()}


@pytest.fixture
def engine(speech: Speech) -> Iterator[Loopback]:
    with speech.loopback(token_rate=400, prefill_delay=0.005, stop_probability=1 / 60) as running:
        yield running


async def test_no_more_samples_than_the_concurrency_are_in_flight(speech: Speech) -> None:
    slow = [head(), chunk(speech.part([10], finish="stop")), 0.02, *stream(DONE)[1:]]
    async with speech.replay(slow) as engine, speech.client(engine.url) as client:
        ended: list[Sample] = []
        work = [sample_of() for _ in range(20)]
        await complete_all(client, work, lambda sample, _error: ended.append(sample), **limits(3))
        assert engine.most_open == 3
        assert len(ended) == sum(sample.response_length for sample in ended) == 20


async def test_a_cancelled_run_reports_its_partial_samples_and_leaves_nothing(speech: Speech, engine: Loopback) -> None:
    ended: dict[int, tuple[Sample, BaseException | None]] = {}
    work = [sample_of(max_new_tokens=500, sampling_seed=seed, ignore_eos=True) for seed in range(40)]
    for index, sample in enumerate(work):
        sample.index = index
    async with speech.client(engine.url) as client:
        task = asyncio.ensure_future(
            complete_all(
                client, work, lambda sample, error: ended.update({sample.index or 0: (sample, error)}), **limits(16)
            )
        )
        await until(lambda: sum(call.token_count for call in client.running) > 400)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.running == []
        assert sorted(ended) == list(range(16))
        assert all(error is None and sample.status is Sample.Status.ABORTED for sample, error in ended.values())
        assert sum(sample.response_length for sample, _ in ended.values()) > 400
        assert {task.get_coro().__name__ for task in asyncio.all_tasks()} & {"work", "_keep"} == set()  # type: ignore[union-attr]
        await asyncio.to_thread(_idle, engine)


def _idle(engine: Loopback) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_failures_are_reported_with_their_samples_and_do_not_end_the_others(speech: Speech) -> None:
    def some(request: Request) -> Sequence[Step]:
        if speech.ids(request)[0] == 1:
            return answer_json({"error": "bad"}, status=400)
        return stream(speech.part([10], finish="stop"), DONE)

    reported: list[tuple[int, str | None]] = []
    async with speech.replay(some) as engine, speech.client(engine.url, retries=SOON) as client:
        work = [sample_of([bad, 6, 7]) for bad in (1, 0, 1, 0)]
        await complete_all(
            client,
            work,
            lambda sample, error: reported.append((sample.tokens[0], type(error).__name__ if error else None)),
            **limits(2),
        )
    assert sorted(reported, key=str) == [(0, None), (0, None), (1, "EngineError"), (1, "EngineError")]


async def test_an_error_of_the_callback_ends_the_run_and_what_is_in_flight(speech: Speech) -> None:
    def full(sample: Sample, _error: BaseException | None) -> None:
        raise OSError(28, "no space left")

    running: list[Step] = [head(), chunk(speech.part([10])), HANG]
    replies = [stream(speech.part([10], finish="stop"), DONE), *[running] * 3]
    async with speech.replay(answers(*replies)) as engine, speech.client(engine.url, retries=SOON) as client:
        with pytest.raises(OSError, match="no space left"):
            await complete_all(client, [sample_of() for _ in range(9)], full, **limits(4))
        assert client.running == []
        assert len(engine.generates) <= 4
