"""The contract of drivers (``drivers/base.py``): the tokens so far, and when there are as many as were asked for."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from streamfold import Parser
from support.driving import STREAM, Driven, asked, told
from support.replay import DONE, END, HANG, LAST_CHUNK, Step, answer_json, chunk, event, events, head, until
from support.ways import ALL, BEGUN, REFUSED, Way

BOTH_LOOPS = True


def has_come(driven: Driven, count: int) -> bool:
    return driven.exchange.token_count == count


@pytest.mark.parametrize("count", [1, 4, 7, 8])
async def test_enough_tokens_are_told_once_behind_the_first_one_and_before_the_end(way: Way, count: int) -> None:
    gates = [asyncio.Event() for _ in range(8)]
    steps: list[Step] = [head()]
    for gate, payload in zip(gates, events(8), strict=True):
        steps += [gate, chunk(payload)]
    async with way.replay([*steps, chunk(DONE), LAST_CHUNK, END]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert driven.exchange.notify_at(count) is False
        for come, gate in enumerate(gates, 1):
            assert ("tokens" in driven.kinds) is (come > count)
            gate.set()
            await until(partial(has_come, driven, come))
            if come == count:
                await driven.comes("tokens")
            assert driven.exchange.token_ids().tolist() == [*range(1, come + 1)]
        assert await driven.ended() == [*BEGUN, "tokens", "finished", "ended"]
        driven.exchange.end()


async def test_tokens_that_came_already_are_told_by_the_return_and_an_earlier_count_is_replaced(way: Way) -> None:
    go_on = asyncio.Event()
    begin, rest = events(6)[:2], events(6)[2:]
    steps: list[Step] = [head(), chunk(b"".join(begin)), go_on, *map(chunk, rest), chunk(DONE), LAST_CHUNK, END]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        assert driven.exchange.notify_at(0) is True
        assert driven.exchange.notify_at(1) is False
        assert driven.exchange.notify_at(4) is False
        await until(lambda: driven.exchange.token_count == 2)
        assert driven.exchange.notify_at(2) is True
        assert driven.exchange.notify_at(100) is False
        go_on.set()
        assert await driven.ended() == ALL, "nobody asked for fewer than the stream has"
        driven.exchange.end()


async def test_one_read_with_many_events_tells_of_them_once_and_it_can_be_asked_for_again(way: Way) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    parts = [b"".join(events(9)[:5]), b"".join(events(9)[5:])]
    steps: list[Step] = [head(), first, chunk(parts[0]), second, chunk(parts[1] + DONE), LAST_CHUNK, END]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        driven.exchange.notify_at(2)
        first.set()
        await driven.comes("tokens")
        await until(lambda: driven.exchange.token_count == 5)
        assert driven.exchange.notify_at(6) is False
        second.set()
        kinds = await driven.ended()
        assert kinds == [*BEGUN, "tokens", "tokens", "finished", "ended"]
        driven.exchange.end()


async def test_the_tokens_so_far_are_a_copy_and_none_before_the_first(way: Way) -> None:
    async with way.replay([head(), chunk(event([3, 1, 2], 3)), HANG]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        none = driven.exchange.token_ids()
        assert none.dtype == np.int32
        assert len(none) == 0
        await until(lambda: driven.exchange.token_count == 3)
        ids = driven.exchange.token_ids()
        assert ids.dtype == np.int32
        ids[:] = 9
        assert driven.exchange.token_ids().tolist() == [3, 1, 2]
        driven.exchange.end()
        await driven.ended()
        assert driven.exchange.token_ids().tolist() == [3, 1, 2]
        assert driven.exchange.take().token_ids.tolist() == [3, 1, 2]


async def test_a_snapshot_is_all_that_has_come_and_the_stream_goes_on(way: Way) -> None:
    gates = [asyncio.Event() for _ in range(4)]
    steps: list[Step] = [head()]
    for gate, payload in zip(gates, events(4), strict=True):
        steps += [gate, chunk(payload)]
    async with way.replay([*steps, chunk(DONE), LAST_CHUNK, END]) as server, way.driving() as driver:
        driven, fresh = Driven(driver, asked(server.url)), Parser(STREAM["dialect"])
        assert driven.exchange.snapshot() == Parser(STREAM["dialect"]).take()
        for come, (gate, payload) in enumerate(zip(gates, events(4), strict=True), 1):
            gate.set()
            await until(partial(has_come, driven, come))
            fresh.feed(payload)
            snapshot = driven.exchange.snapshot()
            assert snapshot == fresh.snapshot()
            assert snapshot.finish_reason == ("stop" if come == 4 else None)
            snapshot.token_ids[:] = 9
        assert await driven.ended() == ALL
        assert driven.exchange.snapshot() == driven.exchange.take() == fresh.take()
        driven.exchange.end()


async def test_a_reply_that_is_no_stream_brings_no_tokens(way: Way) -> None:
    async with way.replay(routes={"/load": answer_json({"load": 1})}) as server, way.driving() as driver:
        driven = Driven(driver, told(server.url, "/load"))
        driven.exchange.notify_at(1)
        assert await driven.ended() == REFUSED
        assert driven.exchange.token_ids().tolist() == []
        assert driven.exchange.snapshot().token_ids.tolist() == []
        driven.exchange.end()
