"""Connections that break as they open, and requests that are aborted in transit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, EngineError, Retries
from streamfold.client.drivers.httpx_connection import Connection
from support.replay import HANG, PROMPT, WHOLE, Replay, Step, head, until
from support.tries import SOON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Request

BOTH_LOOPS = True


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the next connections are reset in the moment in which they open."""
    plan: list[bool] = []
    trace = Connection._trace

    async def breaking(connection: Connection, name: str, info: dict[str, Any]) -> None:
        await trace(connection, name, info)
        is_stream = connection._on_ready.__self__.is_stream  # type: ignore[union-attr]
        if is_stream and name.endswith("connect_tcp.complete") and plan and plan.pop(0):
            info["return_value"]._stream._transport.abort()
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Connection, "_trace", breaking)
    return plan


async def test_a_connection_that_is_reset_as_httpx_opens_it_is_worth_another_try(broken: list[bool]) -> None:
    """MagicStack/uvloop#471, aio-libs/aiohttp#10506: uvloop has no socket any more then, and httpx asks for it."""
    async with Replay(WHOLE) as server:
        async with Client(server.url, retries=SOON, transport="httpx") as client:
            broken += [True, True]
            call = client.start(PROMPT, {})
            assert (await call).token_ids.tolist() == [1, 2, 3]
            assert call.tries == 3
        async with Client(server.url, retries=Retries(tries=1), transport="httpx") as client:
            broken += [True]
            with pytest.raises(EngineError) as caught:
                await client.generate(PROMPT, {})
            assert caught.value.retryable
        assert len(server.generates) == 1


async def test_a_connection_that_is_reset_as_it_opens_is_worth_another_try_on_every_loop() -> None:
    async with Replay(WHOLE) as server:
        async with Client(server.url, retries=SOON) as client:
            server.resets = 1
            call = client.start(PROMPT, {})
            assert (await call).token_ids.tolist() == [1, 2, 3]
            assert call.tries == 2
        async with Client(server.url, retries=Retries(tries=1)) as client:
            server.resets = 1
            with pytest.raises(EngineError) as caught:
                await client.generate(PROMPT, {})
            assert caught.value.retryable
        assert len(server.generates) == 1


@pytest.mark.parametrize("comes", [True, False], ids=["late", "never"])
async def test_an_abort_is_repeated_when_a_request_that_was_slow_in_transit_has_arrived(comes: bool) -> None:
    """vllm-project/vime#294. A router that is busy may hand a request on after both aborts: the engine has forgotten
    them, and if it does not notice the disconnect, the request keeps running for no client."""
    aborts_before: list[int] = []

    def reply(_: Request) -> Iterator[Step]:
        if comes:
            yield 0.25
            aborts_before.append(len(server.aborts))
            yield head()
        yield HANG

    async with Replay(reply) as server, Client(server.url) as client:
        call = client.start(PROMPT, {})
        await until(lambda: server.generates)
        assert len((await asyncio.wait_for(call.abort(), 20)).token_ids) == 0
        await until(lambda: len(server.aborts) == 2)
        assert aborts_before == ([1] if comes else [])
        await asyncio.wait_for(server.generates[0].peer_closed.wait(), 20)
