"""The contract of drivers: exchanges that the caller ends or aborts, and drivers that are closed."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from support.driving import Driven, asked
from support.leftovers import open_files, settled
from support.replay import (
    FIN,
    HANG,
    RST,
    RUNNING,
    WHOLE,
    Step,
    chunk,
    event,
    head,
    until,
)
from support.ways import BEGUN, Way

if TYPE_CHECKING:
    from streamfold.client.drivers.base import Kind

BOTH_LOOPS = True

# Ending early.


async def test_an_end_after_any_step_is_reported_once_and_nothing_follows(way: Way) -> None:
    async with way.replay(RUNNING) as server, way.driving() as driver:
        for steps in range(0, 60, 2):
            driven = Driven(driver, asked(server.url))
            for _ in range(steps):
                await asyncio.sleep(0)
            before = list(driven.kinds)
            driven.exchange.end()
            driven.exchange.end()
            assert await driven.ended() == [*before, "ended"]
            driven.exchange.end()
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("last", ["connected", "head", "first_token", "finished", "error", "failed"])
async def test_an_end_within_any_report_is_the_last_but_for_its_own(way: Way, last: Kind) -> None:
    refusal = event([], 1, {"type": "abort", "message": "full", "status_code": 503})
    steps = {"error": [head(), chunk(refusal), HANG], "failed": [FIN]}.get(last, WHOLE)

    class Ending(Driven):
        def _on_event(self, kind: Kind, detail: Any) -> None:
            super()._on_event(kind, detail)
            if kind == last:
                self.exchange.end()

    async with way.replay(steps) as server, way.driving() as driver:
        driven = Ending(driver, asked(server.url), holds=last == "connected")
        kinds = await driven.ended()
        assert kinds[-2:] == [last, "ended"]
        if last == "connected":
            await asyncio.sleep(0.05)
            assert server.requests == []
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("end", [FIN, RST])
async def test_an_aborted_stream_is_read_on_without_complaint(way: Way, end: str) -> None:
    more, over = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [*RUNNING[:-1], more, chunk(event([3], 3)), over, end]
    async with way.replay(steps) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        driven.exchange.abort()
        driven.exchange.abort()
        more.set()
        await until(lambda: driven.exchange.token_count == 3)
        over.set()
        assert await driven.ended() == [*BEGUN, "ended"]
        assert driven.exchange.take().token_ids.tolist() == [1, 2, 3]
        driven.exchange.end()


async def test_nothing_is_parsed_after_the_taking(way: Way) -> None:
    more = asyncio.Event()
    async with way.replay([*RUNNING[:-1], more, chunk(event([3], 3)), HANG]) as server, way.driving() as driver:
        driven = Driven(driver, asked(server.url))
        await until(lambda: driven.exchange.token_count == 2)
        assert driven.exchange.take().token_ids.tolist() == [1, 2]
        more.set()
        await asyncio.sleep(0.1)
        driven.exchange.end()
        assert await driven.ended() == [*BEGUN, "ended"]


async def test_closing_the_driver_ends_all_exchanges_and_leaves_no_descriptor(way: Way) -> None:
    async with way.replay(RUNNING, routes={"/whole": WHOLE}) as server:
        async with way.driving() as driver:  # what the loop keeps for good is opened
            await Driven(driver, asked(server.url, "/whole")).ended()
        await until(lambda: server.open == 0)
        _, files = await settled()
        for _ in range(3):
            async with way.driving() as driver:
                kept = Driven(driver, asked(server.url, "/whole"))
                await kept.ended()
                running = [Driven(driver, asked(server.url)) for _ in range(5)]
                await until(lambda: all(driven.exchange.token_count == 2 for driven in running))  # noqa: B023
                connecting = [Driven(driver, asked(server.url)) for _ in range(20)]
                looking_up = Driven(driver, asked("http://localhost:9"))
                await driver.aclose()
                await driver.aclose()
                for driven in [kept, *running, *connecting, looking_up]:
                    assert driven.kinds.count("ended") == 1
                    assert driven.kinds[-1] == "ended"
        await until(lambda: server.open == 0)
        gc.collect()
        await until(lambda: open_files() <= files)
