"""Finished or not: one rule for samples of ours and of hosts, whose statuses are enums of their own."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import pytest

from streamfold import Client, Sample, complete
from streamfold.loopback import Loopback
from streamfold.rollout.groups import unfinished_samples
from streamfold.samples.status import is_finished
from support.completing import sample_of

FINISHED = ("COMPLETED", "TRUNCATED", "FAILED")


class HostStatus(Enum):
    """Other values than ours, and one name more."""

    PENDING = 1
    COMPLETED = 2
    TRUNCATED = 3
    ABORTED = 4
    FAILED = 5
    FILTERED = 6


@pytest.mark.parametrize("statuses", [Sample.Status, HostStatus])
def test_a_sample_is_finished_by_the_name_of_its_status(statuses: type[Enum]) -> None:
    samples: list[Any] = []
    for status in statuses:
        samples.append(sample_of())
        samples[-1].status = status
    assert tuple(sample.status.name for sample in samples if is_finished(sample)) == FINISHED
    assert [sample for sample in samples if not is_finished(sample)] == unfinished_samples(samples)


@pytest.mark.parametrize("name", FINISHED)
@pytest.mark.parametrize("statuses", [Sample.Status, HostStatus])
async def test_complete_returns_a_finished_sample_unchanged_without_a_request(statuses: type[Enum], name: str) -> None:
    sample: Any = sample_of()
    sample.status = statuses[name]
    before = copy.deepcopy(vars(sample))
    with Loopback() as engine:
        async with Client(engine.url) as client:
            assert await complete(client, sample, {"max_new_tokens": 8}) is sample
        assert [seen for seen in engine.seen() if seen.path == "/generate"] == []
    assert vars(sample) == before
