"""Connections that are kept from one request to the next, and that the server closes under the next one."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import EngineError, Limits, Retries
from support.replay import ASKED, FIN, HANG, PROMPT, RST, Request, Steps, answer_json, begun, until
from support.tries import in_turn, rids

if TYPE_CHECKING:
    from support.speaking import Speech

BOTH_LOOPS = True

ONCE = Retries(tries=1)
LOST = pytest.mark.parametrize("lost", [[FIN], [RST], [0.02, RST]], ids=["fin", "reset", "reset later"])


@LOST
async def test_a_call_that_a_kept_connection_lost_is_sent_once_more_under_a_new_id_and_is_no_try(
    speech: Speech, lost: Steps
) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=ONCE) as client:
        server.routes[speech.path] = in_turn(server, speech.whole, lost, speech.whole)
        await client.generate(PROMPT, ASKED)
        call = client.start(PROMPT, ASKED, rid="mine-0001")
        assert (await call).token_ids.tolist() == [1, 2, 3]
        first, second, third = rids(server)
        assert (second, third) == ("mine-0001", call.rid)
        assert len({first, second, third}) == 3
        assert (call.tries, client.retried) == (1, 0)
        await until(lambda: server.aborts)
        assert set(server.aborts) == {second}, "the server may have read it before it closed the connection"
        assert client.running == []


async def test_a_call_is_sent_once_more_on_a_new_connection_whose_failure_counts(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=ONCE, limits=Limits(calls=4)) as client:
        server.routes[speech.path] = speech.whole
        await asyncio.gather(*[client.generate(PROMPT, ASKED) for _ in range(4)])
        server.routes[speech.path] = [RST]
        call = client.start(PROMPT, ASKED)
        with pytest.raises(EngineError, match="no reply") as failed:
            await call
        assert failed.value.retryable
        assert call.tries == 1
        sent = rids(server)[4:]
        assert len(sent) == len(set(sent)) == 2, "the other kept connections are not tried"
        await until(lambda: set(server.aborts) == set(sent))


async def test_a_reply_that_has_begun_is_not_asked_for_again(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=ONCE) as client:
        server.routes[speech.path] = in_turn(server, speech.whole, [b"HTTP/1.1 2", 0.02, RST], speech.whole)
        await client.generate(PROMPT, ASKED)
        with pytest.raises(EngineError, match="no reply"):
            await client.generate(PROMPT, ASKED)
        assert len(server.generates) == 2


async def test_an_abort_while_a_call_is_sent_once_more_lets_nothing_run_on(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=ONCE) as client:
        server.routes[speech.path] = in_turn(server, speech.whole, [RST], [HANG])
        await client.generate(PROMPT, ASKED)
        call = client.start(PROMPT, ASKED)
        await until(lambda: len(server.generates) == 3)
        assert len((await asyncio.wait_for(call.abort(), 20)).token_ids) == 0
        assert set(server.aborts) == set(rids(server)[1:])
        await until(server.generates[2].peer_closed.is_set)


@pytest.mark.parametrize("number", [3, 4])
async def test_a_flag_that_is_raised_while_a_closed_connection_is_replaced_lets_nothing_leave(
    speech: Speech, number: int
) -> None:
    looks = itertools.count(1)
    async with speech.replay() as server, speech.client(server.url, retries=ONCE) as client:
        server.routes[speech.path] = in_turn(server, [*speech.whole, FIN], speech.running)
        await client.generate(PROMPT, ASKED)
        await until(lambda: server.open == 0)
        # The looks: for the slot, before the send that finds it closed and soon after it, before the next send. A loop
        # may do the last two in the other order: then the fourth look is that after the send.
        asked = client.generate(PROMPT, ASKED, aborted=lambda: next(looks) >= number)
        assert (await asyncio.wait_for(asked, 20)).finish_reason is None
        assert set(server.aborts) >= set(rids(server)[1:]), "what has left is aborted"
        assert number == 4 or len(server.generates) == 1
    await until(lambda: server.open == 0)


@LOST
async def test_a_control_request_that_a_kept_connection_lost_is_sent_once_more(speech: Speech, lost: Any) -> None:
    def reply(request: Request) -> Steps:
        count = len(server.at(request.target.partition("?")[0]))
        return lost if count == 2 else speech.load(7)

    async with speech.replay(routes={speech.load_path: reply}) as server, speech.client(server.url) as client:
        assert await client.load() == 7
        assert await client.load() == 7
        assert len(server.at(speech.load_path)) == 3


async def test_calls_aborts_and_questions_share_the_connections_that_are_kept(speech: Speech) -> None:
    async with speech.replay(speech.whole, routes={speech.load_path: speech.load(0)}) as server:
        async with speech.client(server.url) as client:
            for _ in range(20):
                await client.generate(PROMPT, ASKED)
                assert await client.load() == 0
            assert server.accepted == 1
            server.routes[speech.path] = speech.running
            call = await begun(client)
            await call.abort()
            assert server.accepted == 2, "the abort came on another connection than its stream's"
            await asyncio.wait_for(server.generates[-1].peer_closed.wait(), 20)
        await until(lambda: server.open == 0)


async def test_a_refusal_with_a_body_of_its_own_length_keeps_the_connection(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=ONCE) as client:
        server.routes[speech.path] = in_turn(server, *[answer_json({"error": "no"}, 400)] * 3, speech.whole)
        for _ in range(3):
            with pytest.raises(EngineError, match="no"):
                await client.generate(PROMPT, ASKED)
        assert (await client.generate(PROMPT, ASKED)).finish_reason == "stop"
        assert server.accepted == 1
