"""Aborts and cancels: which abort requests are sent, in which order, what is kept, and that nothing keeps running."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Call, Experts, Generation, Limits, StreamTruncated, Timeouts
from support.calls import abort_soon, has_ended, runner_of
from support.replay import (
    ASKED,
    DONE,
    END,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RST,
    Replay,
    Request,
    Route,
    Step,
    answer_json,
    begun,
    chunk,
    head,
    stream,
    until,
)
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.speaking import Speech

BOTH_LOOPS = True
EACH_DRIVER = True

EXPERTS = Experts(2, 1)
drains = pytest.mark.parametrize("speech", [SGLANG], ids=repr)  # vLLM sends no side data with an abort


def obeys(speech: Speech, server: Replay, *last: bytes, after: float = 0.0) -> Route:
    """An engine that ends a request on its abort, with a terminal event that may be slow."""

    def route(request: Request) -> Iterator[Step]:
        yield from (head(), *map(chunk, speech.events(2, finish=None)))
        yield server.aborted[request.rid]
        yield after
        yield from stream(*last, DONE)[1:]

    return route


def with_experts(ids: list[int], total: int) -> bytes:
    rows = np.arange((len(PROMPT) + total - 1) * 2, dtype=np.int32)
    return SGLANG.event(ids, total, "abort", experts=rows.reshape(-1, 2, 1))


# The order of an abort.


async def test_an_abort_tells_the_engine_first_and_closes_the_socket_after_its_reply(speech: Speech) -> None:
    left: list[bool] = []

    def reply(request: Request) -> Iterator[Step]:
        (running,) = server.generates
        left.append(running.peer_closed.is_set())
        yield 0.1
        left.append(running.peer_closed.is_set())
        yield from answer_json(None)

    async with (
        speech.replay(speech.running, routes={speech.abort_path: reply}) as server,
        speech.client(server.url) as client,
    ):
        call = await begun(client)
        generation = await call.abort()
        assert left == [False, False]
        assert generation.token_ids.tolist() == [1, 2]
        assert generation.finish_reason is None
        assert await call is generation
        assert server.aborts == [call.rid]
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)


@pytest.mark.parametrize("silence", [[HANG], [head(200), HANG]], ids=["no reply", "half a reply"])
async def test_an_engine_that_does_not_answer_the_abort_is_left_after_a_second(
    speech: Speech, silence: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 1.2)
    async with (
        speech.replay(speech.running, routes={speech.abort_path: silence}) as server,
        speech.client(server.url) as client,
    ):
        call = await begun(client)
        generation = await asyncio.wait_for(call.abort(), 20)
        assert generation.token_ids.tolist() == [1, 2]
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)
    await until(lambda: server.open == 0)


async def test_tokens_that_arrive_while_the_abort_is_sent_are_kept(speech: Speech) -> None:
    async with speech.replay(routes={speech.abort_path: [0.2, *answer_json(None)]}) as server:
        server.routes[speech.path] = obeys(speech, server, speech.event([3], 3, "abort"))
        async with speech.client(server.url) as client:
            generation = await (await begun(client)).abort()
            assert generation.token_ids.tolist() == [1, 2, 3]
            assert generation.finish_reason == "abort"


async def test_an_answer_that_ends_by_itself_while_it_is_aborted_is_whole(speech: Speech) -> None:
    async with speech.replay(routes={speech.abort_path: [0.2, *answer_json(None)]}) as server:
        server.routes[speech.path] = obeys(speech, server, speech.event([3], 3, "stop"))
        async with speech.client(server.url) as client:
            assert (await (await begun(client)).abort()).finish_reason == "stop"


async def test_without_side_data_an_abort_does_not_wait_for_the_terminal_event(speech: Speech) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, speech.event([3], 3, "abort"), after=60)
        async with speech.client(server.url, timeouts=Timeouts(drain=60)) as client:
            generation = await asyncio.wait_for((await begun(client)).abort(), 20)
            assert generation.token_ids.tolist() == [1, 2]
            assert generation.finish_reason is None


async def test_where_an_abort_brings_no_side_data_it_is_not_waited_for() -> None:
    async with VLLM.replay() as server:
        server.routes[VLLM.path] = obeys(VLLM, server, VLLM.event([3], 3, "abort"), after=60)
        async with VLLM.client(server.url, experts=EXPERTS, timeouts=Timeouts(drain=60)) as client:
            generation = await asyncio.wait_for((await begun(client, top_p=True)).abort(), 20)
            assert (generation.token_ids.tolist(), generation.finish_reason) == ([1, 2], None)


# Draining.


@drains
async def test_with_side_data_an_abort_reads_on_to_the_terminal_event_that_carries_it(speech: Speech) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, with_experts([3], 3), after=0.2)
        async with speech.client(server.url, experts=EXPERTS) as client:
            generation = await (await begun(client)).abort()
            assert generation.finish_reason == "abort"
            assert generation.token_ids.tolist() == [1, 2, 3]
            assert generation.routed_experts is not None
            assert generation.routed_experts.shape == (len(PROMPT) + 3 - 1, 2, 1)


@drains
@pytest.mark.parametrize("asked", [{"top_p": True}, {"extra": {"return_routed_experts": True}}], ids=["top_p", "extra"])
async def test_every_way_to_ask_for_side_data_makes_an_abort_drain(speech: Speech, asked: dict[str, Any]) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, speech.event([3], 3, "abort"), after=0.2)
        async with speech.client(server.url) as client:
            assert (await (await begun(client, **asked)).abort()).finish_reason == "abort"


@drains
async def test_a_drain_ends_when_its_time_is_up_and_keeps_what_was_received(speech: Speech) -> None:
    async with (
        speech.replay(speech.running) as server,
        speech.client(server.url, experts=EXPERTS, timeouts=Timeouts(drain=0.2)) as client,
    ):
        generation = await asyncio.wait_for((await begun(client)).abort(), 20)
        assert generation.token_ids.tolist() == [1, 2]
        assert generation.routed_experts is None
        assert generation.finish_reason is None


@drains
async def test_a_drain_that_is_given_wins_over_the_clients(speech: Speech) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, speech.event([3], 3, "abort"), after=0.2)
        async with speech.client(server.url, experts=EXPERTS, timeouts=Timeouts(drain=60)) as client:
            assert (await asyncio.wait_for((await begun(client)).abort(drain=0), 20)).finish_reason is None
        async with speech.client(server.url) as client:
            assert (await (await begun(client)).abort(drain=10)).finish_reason == "abort"
            with pytest.raises(ValueError, match="drain"):
                await (await begun(client)).abort(drain=-1)


@drains
@pytest.mark.parametrize("second", ["abort", "cancel", "cancel of the waiter", "close"])
async def test_a_second_abort_or_cancel_ends_the_drain(speech: Speech, second: str) -> None:
    async with (
        speech.replay(speech.running) as server,
        speech.client(server.url, experts=EXPERTS, timeouts=Timeouts(drain=60)) as client,
    ):
        call = await begun(client)
        waiter = asyncio.ensure_future(call.abort() if second != "cancel of the waiter" else client_wait(call))
        if second == "cancel of the waiter":
            await asyncio.sleep(0)
            waiter.cancel()
        await until(lambda: server.aborts)
        await asyncio.sleep(0.1)
        assert not waiter.done(), "it does not drain: this tests nothing"
        if second == "abort":
            generation = await asyncio.wait_for(call.abort(), 20)
            assert await waiter is generation
        elif second == "close":
            await asyncio.wait_for(client.aclose(), 20)
            generation = await waiter
        else:
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            generation = await asyncio.wait_for(call.abort(), 20)
        assert generation.token_ids.tolist() == [1, 2]
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)


async def client_wait(call: Call) -> Generation:
    return await call


async def test_damage_in_a_drain_does_not_turn_an_abort_into_an_error(speech: Speech) -> None:
    async with speech.replay() as server:

        def damaged(request: Request) -> Iterator[Step]:
            yield from speech.running[:-1]
            yield server.aborted[request.rid]
            yield from (chunk(b"data: {damage\n\n"), HANG)

        server.routes[speech.path] = damaged
        async with speech.client(server.url) as client:
            generation = await asyncio.wait_for((await begun(client)).abort(drain=60), 20)
            assert generation.token_ids.tolist() == [1, 2]


@drains
async def test_abort_all_leaves_a_drain_alone_that_is_under_way(speech: Speech) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, with_experts([3], 3), after=0.3)
        async with speech.client(server.url, experts=EXPERTS) as client:
            call = await begun(client)
            abort_soon(call)
            await until(lambda: server.aborts)
            await client.abort_all()
            assert (await call).routed_experts is not None


# An abort in every phase.


async def test_an_abort_before_the_first_token_is_sent_twice_as_the_first_may_arrive_too_early(
    speech: Speech,
) -> None:
    async with speech.replay([HANG]) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        generation = await call.abort()
        assert len(generation.token_ids) == 0
        assert generation.finish_reason is None
        assert server.aborts == [call.rid] * 2


async def test_an_abort_after_which_the_stream_has_ended_is_not_repeated(speech: Speech) -> None:
    async with speech.replay() as server:

        def queued(request: Request) -> Iterator[Step]:
            yield head()
            yield server.aborted[request.rid]
            yield from (
                chunk(speech.event([], 0, "abort")),
                chunk(DONE),
                LAST_CHUNK,
                END,
            )

        server.routes[speech.path] = queued
        async with speech.client(server.url) as client:
            call = client.start(PROMPT, ASKED)
            await until(lambda: server.generates)
            assert (await call.abort()).finish_reason == "abort"
            await asyncio.sleep(0.2)
            assert server.aborts == [call.rid]


async def test_an_abort_in_the_queue_for_a_slot_sends_nothing_and_lets_the_next_one_in(speech: Speech) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url, limits=Limits(calls=1)) as client:
        first = await begun(client)
        second, third = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED)
        generation = await asyncio.wait_for(second.abort(), 20)
        assert len(generation.token_ids) == 0
        assert await second is generation
        assert not [task for task in asyncio.all_tasks() if second.rid in task.get_name()], "it waits on for a slot"
        assert [running.rid for running in client.running] == [first.rid, third.rid]
        await first.abort()
        await until(lambda: third.token_count == 2)
        assert [request.rid for request in server.generates] == [first.rid, third.rid]
        assert server.aborts == [first.rid]


async def test_no_request_leaves_after_its_abort_at_any_step(speech: Speech) -> None:
    # A step of the event loop at a time, from before the connect until after the request.
    async with speech.replay(speech.running) as server:
        for steps in range(60):
            async with speech.client(server.url) as client:
                call = client.start(PROMPT, ASKED)
                for _ in range(steps):
                    await asyncio.sleep(0)
                abort_soon(call)
                ended_at_once = has_ended(call)
                await call
            await until(lambda: server.open == 0)
            arrived = call.rid in [request.rid for request in server.generates]
            assert arrived <= (call.rid in server.aborts), "it left, and was not aborted at the engine"
            assert not (arrived and ended_at_once), "it left after its abort had ended the call"
        assert server.generates, "none of them left"
        assert len(server.generates) < 60, "all did"


async def test_an_abort_after_the_end_changes_nothing_and_sends_nothing(speech: Speech) -> None:
    async with speech.replay(stream(*speech.events(3), DONE)) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        generation = await call
        assert await call.abort() is generation
        assert await call.abort(drain=1) is generation
        assert server.aborts == []
        assert server.at("/workers") == []


async def test_an_abort_after_a_failure_gives_what_was_kept_and_the_error_stays(speech: Speech) -> None:
    async with (
        speech.replay(stream(*speech.events(2, finish=None), end=RST)) as server,
        speech.client(server.url) as client,
    ):
        call = client.start(PROMPT, ASKED)
        with pytest.raises(StreamTruncated) as failed:
            await call
        sent = len(server.aborts)
        assert await call.abort() is failed.value.partial
        assert len(server.aborts) == sent
        with pytest.raises(StreamTruncated):
            await call


async def test_an_abort_while_an_error_page_is_read_is_a_result(speech: Speech) -> None:
    async with speech.replay([head(500, length=10) + b"abc", HANG]) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        await asyncio.sleep(0.05)
        assert len((await call.abort()).token_ids) == 0
        assert (await call).finish_reason is None


# Cancelling.


@pytest.mark.parametrize("by", ["await call", "generate"])
async def test_a_cancelled_await_aborts_the_call_and_reraises(speech: Speech, by: str) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        call = None
        if by == "generate":
            waiter = asyncio.ensure_future(client.generate(PROMPT, ASKED))
            await until(lambda: client.running and client.running[0].token_count == 2)
        else:
            call = await begun(client)
            waiter = asyncio.ensure_future(client_wait(call))
            await asyncio.sleep(0)
        rid = client.running[0].rid
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert server.aborts == [rid], "it has ended before the error is passed on"
        assert client.running == []
        if call is not None:
            assert has_ended(call)
            assert (await call.abort()).token_ids.tolist() == [1, 2]
            assert (await call).token_ids.tolist() == [1, 2]
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)


@drains
async def test_a_cancel_drains_as_an_abort_does(speech: Speech) -> None:
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, with_experts([3], 3), after=0.2)
        async with speech.client(server.url, experts=EXPERTS) as client:
            call = await begun(client)
            waiter = asyncio.ensure_future(client_wait(call))
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert (await call.abort()).routed_experts is not None


@drains
async def test_a_host_that_sets_its_flag_and_cancels_has_aborted_once(speech: Speech) -> None:
    """The cancel ended the drain of the abort that the flag had begun, and side data was lost."""
    async with speech.replay() as server:
        server.routes[speech.path] = obeys(speech, server, with_experts([3], 3), after=0.3)
        async with speech.client(server.url, experts=EXPERTS) as client:
            # It is read when the headers come.
            call = client.start(PROMPT, {"max_new_tokens": 9}, aborted=lambda: bool(server.generates))
            waiter = asyncio.ensure_future(client_wait(call))
            await until(lambda: call.aborting)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert (await call.abort()).routed_experts is not None


async def test_a_timeout_around_a_call_aborts_it(speech: Speech) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.generate(PROMPT, ASKED), 0.2)
        assert len(server.aborts) == 1
        assert client.running == []


async def test_cancelling_one_of_several_that_wait_gives_the_others_what_was_kept(speech: Speech) -> None:
    async with speech.replay(speech.running) as server, speech.client(server.url) as client:
        call = await begun(client)
        first, second = (asyncio.ensure_future(client_wait(call)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).token_ids.tolist() == [1, 2]
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_a_cancel_in_the_moment_of_the_end_is_still_a_cancel(speech: Speech) -> None:
    async with speech.replay(stream(*speech.events(3), DONE)) as server, speech.client(server.url) as client:
        call = client.start(PROMPT, ASKED)
        waiter = asyncio.ensure_future(client_wait(call))
        runner_of(call).ended.add_done_callback(lambda _: waiter.cancel())
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert (await call).finish_reason == "stop"
        assert server.aborts == []
