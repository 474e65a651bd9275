"""A generate function that a trainer's rollout cancels behind a finished turn: whose sample is finished?"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, slime
from streamfold.integrations.hooks import RewardModel, SampleGenerator
from streamfold.samples.metadata import LastWrite
from support.host import installed
from support.host.slime.utils.types import Sample
from support.host_calls import PARAMS, partial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with installed("slime"):
        yield


def finishing(*, noted: bool) -> Callable[..., Any]:
    """A function that is cancelled when its sample is finished; ``noted``: by a turn."""

    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
        sample.status = Sample.Status.COMPLETED
        if noted:
            LastWrite.save(sample, limit=64)
        raise asyncio.CancelledError

    return generate


@pytest.mark.parametrize(
    ("owner", "noted", "is_final"), [("ours", True, True), ("a user's", True, False), ("a user's", False, True)]
)
async def test_a_finished_sample_is_final_unless_a_users_function_may_go_on_behind_a_turn(
    owner: str, noted: bool, is_final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(custom_generate_function_path=None)
    if owner == "ours":
        monkeypatch.setattr(slime, "generate_streaming", finishing(noted=noted))
    else:
        args.custom_generate_function_path = finishing(noted=noted)
    client = Client("http://127.0.0.1:9", engine="sglang")
    state = SimpleNamespace()
    generator = SampleGenerator(slime.SLIME, args, state, client, RewardModel(slime.SLIME, args), resumes=True)
    call = generator(partial(1, 2), dict(PARAMS), aborted=lambda: True)
    if is_final:
        assert (await call).status is Sample.Status.COMPLETED
    else:
        with pytest.raises(asyncio.CancelledError):
            await call
