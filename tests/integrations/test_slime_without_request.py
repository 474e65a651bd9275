"""What needs no request, as in tests of a trainer's contracts: no options, and a state without a tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from support.host import installed
from support.host.slime.rollout import sglang_rollout
from support.host.slime.utils.types import Sample
from support.host_calls import HOSTS, Server, Status, ask, partial, sample_of, streaming, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH_LOOPS = True


@pytest.fixture(params=HOSTS)
def newer(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


@pytest.fixture(params=[True, False], ids=["newer", "older"])
def slimes(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed("slime", new=request.param):
        yield


async def test_without_the_trainers_options_a_response_that_is_complete_is_answered(newer: None) -> None:
    sample = await ask(None, partial(1, 2), {"max_new_tokens": 2})  # type: ignore[arg-type]
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 2)
    noted = partial(1, 2, metadata={"streamfold_written": [3, 2, 2, "COMPLETED", None]})
    assert (await ask(None, noted)).status is Status.COMPLETED  # type: ignore[arg-type]


async def test_without_the_trainers_options_a_request_is_refused_by_what_is_missing(newer: None) -> None:
    with pytest.raises(ValueError, match="args is None, and a request needs the router's address"):
        await ask(None, sample_of())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the sample is COMPLETED"):
        await ask(None, sample_of(status=Status.COMPLETED))  # type: ignore[arg-type]


async def test_a_state_without_a_tokenizer_serves_samples_that_have_tokens(
    slimes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: SimpleNamespace(aborted=False))
    async with Server(whole()) as server:
        assert (await ask(streaming(server), sample_of())).status is Status.COMPLETED
        with pytest.raises(ValueError, match="GenerateState has no tokenizer, and the sample has no tokens"):
            await ask(streaming(server), Sample(prompt="x"))
