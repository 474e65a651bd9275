"""The time to the first token, extended once while requests wait at the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
from typing import TYPE_CHECKING

import pytest

from streamfold import EngineTimeout, Retries, Timeouts
from streamfold.client.limits import Default
from support.replay import ASKED, DONE, HANG, PROMPT, Replay, Steps, answer_json, chunk, head, stream, until
from support.tries import in_turn

if TYPE_CHECKING:
    from support.speaking import Speech

ONCE = Retries(tries=1)
UNSET = Timeouts(first_token=Default(0.3))  # as it is if nobody sets it, but shorter


def engine(speech: Speech, *replies: Steps, waiting: int = 1) -> Replay:
    server = speech.replay()
    server.routes[speech.path] = in_turn(server, *replies)
    server.routes[speech.load_path] = speech.load(3, waiting)
    return server


def late(speech: Speech, seconds: float) -> Steps:
    return [head(), seconds, *map(chunk, speech.events(3)), *stream(DONE)[1:]]


def test_what_nobody_has_set_is_known_and_reads_like_any_other_number() -> None:
    unset, given = Timeouts(), Timeouts(first_token=600.0)
    assert (unset, repr(unset), hash(unset)) == (given, repr(given), hash(given))
    assert unset.first_token == 600.0
    for same in (unset, dataclasses.replace(unset, connect=1.0), pickle.loads(pickle.dumps(unset))):
        assert isinstance(same.first_token, Default)
    for other in (given, Timeouts(first_token=None), dataclasses.replace(unset, first_token=5)):
        assert not isinstance(other.first_token, Default)


async def test_a_call_waits_as_long_again_while_requests_wait_at_the_engine(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(speech, late(speech, 0.45)) as server:
        async with speech.client(server.url, timeouts=UNSET, retries=ONCE) as client:
            calls = [client.start(PROMPT, ASKED) for _ in range(5)]
            assert [len((await call).token_ids) for call in calls] == [3] * 5
            assert {call.tries for call in calls} == {1}
        assert server.aborts == []
        assert len(server.at(speech.load_path)) < 5, "those who ask together share a question"
    told = [record for record in caplog.records if "requests wait at the engine" in record.getMessage()]
    assert len(told) == 5
    assert {record.levelno for record in told} == {logging.WARNING}


async def test_it_is_extended_once(speech: Speech) -> None:
    async with engine(speech, [head(), HANG]) as server:
        async with speech.client(server.url, timeouts=UNSET, retries=ONCE) as client:
            call = client.start(PROMPT, ASKED)
            with pytest.raises(EngineTimeout, match=r"Timeouts\.first_token, extended once") as raised:
                await asyncio.wait_for(call, 20)
            assert raised.value.phase == "first_token"
            assert set(server.aborts) == {call.rid}
        assert len(server.at(speech.load_path)) == 1


@pytest.mark.parametrize("case", ["no queue", "no load", "set by the user"])
async def test_it_is_not_extended_without_a_queue_or_where_the_user_has_set_it(speech: Speech, case: str) -> None:
    async with engine(speech, late(speech, 20), waiting=0 if case == "no queue" else 1) as server:
        if case == "no load":
            server.routes[speech.load_path] = answer_json({"error": "no"}, 500)
        timeouts = Timeouts(first_token=0.3) if case == "set by the user" else UNSET
        async with speech.client(server.url, timeouts=timeouts, retries=ONCE) as client:
            with pytest.raises(EngineTimeout, match=r"within 0\.3 s \(Timeouts\.first_token\)"):
                await asyncio.wait_for(client.generate(PROMPT, ASKED), 15)
        assert len(server.at(speech.load_path)) == (
            0 if case == "set by the user" else len(server.at(speech.load_path))
        )


async def test_each_try_may_be_extended(speech: Speech) -> None:
    retries = Retries(tries=2, first=0.001)
    async with (
        engine(speech, [head(), HANG], late(speech, 0.45)) as server,
        speech.client(server.url, timeouts=UNSET, retries=retries) as client,
    ):
        call = client.start(PROMPT, ASKED)
        assert len((await asyncio.wait_for(call, 20)).token_ids) == 3
        assert call.tries == 2


async def test_an_abort_during_the_extension_ends_the_call(speech: Speech) -> None:
    async with engine(speech, [head(), HANG]) as server:
        server.routes[speech.load_path] = [HANG]
        async with speech.client(server.url, timeouts=UNSET, retries=ONCE) as client:
            call = client.start(PROMPT, ASKED)
            await until(lambda: server.at(speech.load_path))
            generation = await asyncio.wait_for(call.abort(), 20)
            assert (len(generation.token_ids), call.error) == (0, None)


async def test_a_queue_of_the_loopback_engine_is_waited_for(speech: Speech) -> None:
    with speech.loopback(token_rate=100, stop_probability=0, max_running_requests=1) as box:
        async with speech.client(box.url, timeouts=UNSET, retries=ONCE) as client:
            calls = [client.start(PROMPT, {"max_new_tokens": 45}) for _ in range(2)]
            assert [len((await call).token_ids) for call in calls] == [45, 45]
