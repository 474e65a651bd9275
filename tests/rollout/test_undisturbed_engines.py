"""Whatever befalls requests and calls, a sample ends as one undisturbed call on either engine."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from streamfold import Retries, StreamfoldError, Timeouts
from streamfold.loopback import Faults
from support.completing import ENDED, completed, differs, sample_of
from support.replay import PROMPT

if TYPE_CHECKING:
    from support.speaking import Speech

KINDS = (
    {"kind": "status", "status": 503},
    {"kind": "drop"},
    {"kind": "cut", "how": "rst", "after_events": [0, 20]},
    {"kind": "cut", "how": "fin", "after_events": [0, 20]},
    {"kind": "abort", "after_tokens": [1, 20]},
    {"kind": "split", "size": [1, 9]},
    {"kind": "glue"},
    {"kind": "comments"},
    {"kind": "double_event", "after_events": [1, 20]},
    {"kind": "drop_event", "after_events": [1, 20]},
)


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
async def test_samples_among_faults_and_cancels_end_as_undisturbed(speech: Speech, count: int) -> None:
    faults = Faults([{**kind, "rate": 0.05} for kind in KINDS], seed=3)
    dice = random.Random(count)
    with speech.loopback(token_rate=800, stop_probability=1 / 60, faults=faults) as engine:
        ends = {engine.tokenizer.eos_token_id}
        async with speech.client(
            engine.url,
            tokenizer=engine.tokenizer,
            retries=Retries(first=0.01, longest=0.1),
            timeouts=Timeouts(first_token=2, next_token=2),
        ) as client:

            async def bring(seed: int) -> None:
                sample = sample_of(max_new_tokens=dice.randint(8, 60), sampling_seed=seed)
                for cuts in range(1000):
                    task = asyncio.ensure_future(completed(client, sample, stop_ids=ends))
                    if cuts < 3:
                        await asyncio.wait({task}, timeout=dice.uniform(0, 0.08))
                        task.cancel()
                    try:
                        await task
                    except (asyncio.CancelledError, StreamfoldError):  # a damaged event before any token is final
                        assert sample.status not in ENDED or cuts < 3
                    if sample.status in ENDED:
                        break
                assert differs(speech, sample, engine, PROMPT) == {}

            await asyncio.gather(*[bring(seed) for seed in range(count)])
            assert client.running == []
            assert await client.load() == 0
        assert len([kind for kind, times in engine.faults.done.items() if times]) >= 5
