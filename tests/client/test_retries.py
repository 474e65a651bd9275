"""Retries: which failures are retried, after which pause, under which request id, and what ends the pause.

The kind of fault is THUDM/slime#1542: permanent refusals that are retried sixty times, limits that are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import re
from typing import TYPE_CHECKING

import pytest

from streamfold import (
    Client,
    DecodeError,
    EngineError,
    EngineTimeout,
    Retries,
    StreamfoldError,
    StreamTruncated,
    Timeouts,
)
from support.replay import (
    ASKED,
    DONE,
    END,
    FIN,
    HANG,
    LAST_CHUNK,
    PROMPT,
    RST,
    Step,
    answer,
    answer_json,
    chunk,
    head,
    stream,
    until,
)
from support.tries import BUSY, SOON, in_turn, rids
from support.unreachable import closed_port, full_house

if TYPE_CHECKING:
    from support.speaking import Speech, Spoken

BOTH_LOOPS = True


# What is tried again.


@pytest.mark.parametrize(
    ("fault", "aborts"),
    [
        (BUSY, False),
        (answer(b"", 500), False),
        (answer_json({"detail": "timeout"}, 408), False),
        ([FIN], True),
        ([RST], True),
        ([b"HTTP/1.1 200 OK\r\ncontent-", RST], True),
        ([head(), FIN], True),
        ([head(), LAST_CHUNK, END], True),
        ([head(), chunk(DONE), LAST_CHUNK, END], True),
        (lambda speech: [head(), chunk(b": ping\n\n" + speech.events(1)[0][:20]), RST], True),
        ([HANG], True),
        ([head(), HANG], True),
        ([head(), *[chunk(b": ping\n\n"), 0.05] * 100], True),
        (stream(b'data: {"error": {"message": "broke", "code": 500}}\n\n', DONE), False),
        (lambda speech: stream(speech.refusal(503), DONE), False),
    ],
    ids=[
        *("503", "500", "408", "fin", "reset", "half a head", "headers and fin", "headers and the end"),
        *("[DONE] alone", "half an event", "silence", "headers and silence", "comments", "error event", "queue full"),
    ],
)
async def test_a_transient_failure_is_retried_after_the_first_try_was_aborted_at_the_engine(
    speech: Speech, fault: Spoken, *, aborts: bool
) -> None:
    timeouts = Timeouts(first_token=0.25)
    async with speech.replay() as server, speech.client(server.url, retries=SOON, timeouts=timeouts) as client:
        server.routes[speech.path] = in_turn(server, speech.told(fault), speech.whole)
        call = client.start(PROMPT, ASKED)
        generation = await call
        assert generation.token_ids.tolist() == [1, 2, 3]
        assert generation.finish_reason == "stop"
        first, second = rids(server)
        assert call.rid == second
        assert call.tries == 2
        order = [request.rid for request in server.requests if request.method == "POST"]
        assert set(server.aborts) == ({first} if aborts else set())
        assert order.index(second) == len(order) - 1, "the abort was sent too late"
    await until(lambda: server.open == 0)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *[(answer_json({"error": "no"}, status), EngineError) for status in (400, 401, 403, 404, 409, 422)],
        (answer(b"", 307, location="/there"), EngineError),
        (answer(b"<html>", kind="text/html"), EngineError),
        (stream(b'data: {"error": {"message": "too long", "code": 400}}\n\n', DONE), EngineError),
        (stream(b'data: {"error": "broke"}\n\n', DONE), EngineError),
        (lambda speech: stream(speech.refusal(400), DONE), EngineError),
        (stream(b"data: {damage\n\n"), DecodeError),
    ],
)
async def test_what_would_only_be_refused_again_is_asked_for_once(
    speech: Speech, fault: Spoken, kind: type[StreamfoldError]
) -> None:
    async with speech.replay(speech.told(fault)) as server, speech.client(server.url, retries=SOON) as client:
        call = client.start(PROMPT, ASKED)
        with pytest.raises(kind) as failed:
            await call
        assert len(server.generates) == call.tries == 1
        assert "tries" not in str(failed.value)


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        ([FIN], StreamTruncated),
        ([RST], StreamTruncated),
        ([chunk(b'data: {"error": {"message": "broke", "code": 503}}\n\n'), LAST_CHUNK, END], EngineError),
        (lambda speech: [chunk(speech.refusal(503, 2)), LAST_CHUNK, END], EngineError),
        ([chunk(b"data: {damage\n\n"), HANG], DecodeError),
        ([HANG], EngineTimeout),
    ],
    ids=["fin", "reset", "error event", "queue full", "damage", "silence"],
)
async def test_once_a_token_has_come_the_client_does_not_try_again_and_the_tokens_are_kept(
    speech: Speech, rest: Spoken, kind: type[StreamfoldError]
) -> None:
    timeouts = Timeouts(next_token=0.25)
    async with (
        speech.replay([*speech.two, *speech.told(rest)]) as server,
        speech.client(server.url, retries=SOON, timeouts=timeouts) as client,
    ):
        with pytest.raises(kind) as failed:
            await client.generate(PROMPT, ASKED)
        assert failed.value.partial is not None
        assert failed.value.partial.token_ids.tolist() == [1, 2]
        assert len(server.generates) == 1


async def test_tokens_that_arrive_while_a_silent_try_is_aborted_prevent_a_retry(speech: Speech) -> None:
    async with speech.replay(routes={speech.abort_path: [0.2, *answer_json(None)]}) as server:
        server.routes[speech.path] = lambda request: [
            head(),
            server.aborted[request.rid],
            *map(chunk, speech.events(2, finish=None)),
            HANG,
        ]
        async with speech.client(server.url, retries=SOON, timeouts=Timeouts(first_token=0.2)) as client:
            with pytest.raises(EngineTimeout) as silent:
                await client.generate(PROMPT, ASKED)
        assert silent.value.partial is not None
        assert silent.value.partial.token_ids.tolist() == [1, 2]
        assert len(server.generates) == 1


async def test_an_empty_response_that_ends_during_the_abort_after_its_timeout_is_not_retried(speech: Speech) -> None:
    async with speech.replay(routes={speech.abort_path: [0.2, *answer_json(None)]}) as server:
        server.routes[speech.path] = lambda request: [
            head(),
            server.aborted[request.rid],
            *stream(speech.event([], 0, "stop"), DONE)[1:],
        ]
        async with speech.client(server.url, retries=SOON, timeouts=Timeouts(first_token=0.2)) as client:
            generation = await client.generate(PROMPT, ASKED)
        assert (generation.finish_reason, len(generation.token_ids)) == ("stop", 0)
        assert len(server.generates) == 1


async def test_an_abort_that_the_engine_decided_on_is_never_tried_again(speech: Speech) -> None:
    steps = stream(speech.event([], 0, "abort"), DONE)
    async with speech.replay(steps) as server, speech.client(server.url, retries=SOON) as client:
        generation = await client.generate(PROMPT, ASKED)
        assert (generation.finish_reason, len(generation.token_ids)) == ("abort", 0)
        assert len(server.generates) == 1


async def test_an_engine_that_comes_up_while_it_is_being_asked_for_is_reached(speech: Speech) -> None:
    async with speech.replay(speech.whole) as server:
        with closed_port() as (front, url):
            async with speech.client(url, retries=Retries(first=0.01, longest=0.05)) as client:
                call = client.start(PROMPT, ASKED)
                await until(lambda: call.tries >= 3)
                assert server.accepted == 0
                gate = await asyncio.start_server(server._accept, sock=front)
                assert (await call).finish_reason == "stop"
                gate.close()
        assert len(server.generates) == 1


async def test_a_connect_that_takes_too_long_is_tried_again() -> None:
    with full_house() as (_, url):
        timeouts, retries = Timeouts(connect=0.15), Retries(tries=2, first=0.001)
        async with Client(url, timeouts=timeouts, retries=retries) as client:
            with pytest.raises(EngineTimeout, match=r"0\.15 s .* after 2 tries") as failed:
                await client.generate(PROMPT, ASKED)
        assert failed.value.phase == "connect"


async def test_when_the_tries_are_used_up_the_last_error_is_raised_and_says_how_many_there_were(speech: Speech) -> None:
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        last = answer_json({"error": "down for good"}, 502)
        # Closed after it: a kept connection that is reset is no try of its own.
        busy = answer(b"busy", 503, connection="close")
        server.routes[speech.path] = in_turn(server, [FIN], busy, [RST], last)
        call = client.start(PROMPT, ASKED)
        with pytest.raises(EngineError, match=r"^down for good \(status 502\), after 4 tries$") as failed:
            await call
        assert len(server.generates) == call.tries == 4
        assert failed.value.message == "down for good"
        assert (failed.value.status, failed.value.retryable) == (502, True)
        assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
        with pytest.raises(EngineError) as again:
            await call
        assert again.value is failed.value


# What leaves with another try.


async def test_every_try_asks_for_the_same_under_an_id_of_its_own(speech: Speech) -> None:
    params = {"max_new_tokens": 8, "temperature": 0.5, "stop": ['"', "é"]}
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, BUSY, [FIN], BUSY, speech.whole)
        headers = {"X-Mine": "1"}
        call = client.start(PROMPT, params, rid='mine "1"', extra={"priority": 3}, headers=headers)
        assert call.rid == 'mine "1"'
        headers["X-Mine"] = "2"
        await call
        given, *later = rids(server)
        assert given == 'mine "1"'
        assert len(set(later)) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", rid) for rid in later)
        assert call.rid == later[-1]
        asked = [{**request.json, speech.rid_key: None} for request in server.generates]
        assert speech.params(server.generates[0]) == params
        assert all(other == asked[0] for other in asked)
        kinds = [{**request.headers, "content-length": None, "x-request-id": None} for request in server.generates]
        assert all(other == kinds[0] for other in kinds)


async def test_no_id_of_any_try_begins_with_another(speech: Speech, soak: bool) -> None:
    # Engines abort every request whose id begins with the one in the abort (sgl-project/sglang#39461).
    count = 500 if soak else 50
    async with speech.replay() as server, speech.client(server.url, retries=Retries(tries=3, first=0.001)) as client:
        server.routes[speech.path] = BUSY
        calls = [client.start(PROMPT, ASKED) for _ in range(count)]
        await asyncio.gather(*calls, return_exceptions=True)
        sent = sorted(rids(server))
    assert len(sent) == len(set(sent)) == 3 * count
    assert not any(after.startswith(before) for before, after in itertools.pairwise(sent))


async def test_a_try_that_failed_half_way_leaves_nothing_of_its_own_in_the_answer(speech: Speech) -> None:
    # Its first event differs in text and counts, as after a restart of the engine.
    half: list[Step] = [head(), chunk(speech.event([], 0, version="1")), FIN]
    whole = [speech.event([1], 1, version="2"), speech.event([2], 2, "stop", version="2")]
    async with speech.replay(stream(*whole, DONE)) as server, speech.client(server.url) as client:
        undisturbed = await client.generate(PROMPT, ASKED)
    async with speech.replay() as server, speech.client(server.url, retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, half, stream(*whole, DONE))
        disturbed = await client.generate(PROMPT, ASKED)
        assert len(server.generates) == 2
    assert disturbed == undisturbed
    assert disturbed.version_spans == [("2", 0, 2)]


async def test_calls_that_a_full_engine_refuses_come_out_as_if_undisturbed(speech: Speech) -> None:
    params = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7}
    prompts = [[300 + number, 301, 302] for number in range(6)]
    with speech.loopback(max_running_requests=1, max_queued_requests=0, token_rate=1000, incremental=True) as box:
        retries = Retries(first=0.005, longest=0.02)
        async with speech.client(box.url, retries=retries) as client:
            calls = [client.start(prompt, params) for prompt in prompts]
            generations = await asyncio.gather(*calls)
        assert sum(call.tries for call in calls) > len(calls), "no call was refused: this tests nothing"
        for prompt, generation in zip(prompts, generations, strict=True):
            reply = speech.undisturbed(box, prompt, params)
            assert generation.token_ids.tolist() == reply.token_ids
            assert generation.logprobs is not None
            assert generation.logprobs.tolist() == reply.logprobs
            assert generation.text == speech.text("".join(reply.pieces or []))


# What is logged.


async def test_a_thousand_tries_that_fail_alike_are_one_warning(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    async with speech.replay(BUSY) as server, speech.client(server.url, retries=SOON) as client:
        with caplog.at_level(logging.INFO, "streamfold"):
            calls = [client.start(PROMPT, ASKED) for _ in range(50)]
            await asyncio.gather(*calls, return_exceptions=True)
    levels = [record.levelno for record in caplog.records]
    assert levels.count(logging.WARNING) == 1
    assert len(levels) == 50 * 3
    assert all("busy (status 503)" in record.getMessage() for record in caplog.records)
    assert any(f"request {calls[0].rid}" not in record.getMessage() for record in caplog.records)


async def test_without_a_limit_a_call_is_tried_until_it_succeeds(speech: Speech) -> None:
    more_than_usual = (Retries().tries or 0) + 5
    no_limit = Retries(tries=None, first=0.0, longest=0.0)
    async with speech.replay() as server, speech.client(server.url, retries=no_limit) as client:
        server.routes[speech.path] = in_turn(server, *[BUSY] * more_than_usual, speech.whole)
        call = client.start(PROMPT, ASKED)
        await call
        assert call.tries == len(server.generates) == more_than_usual + 1
