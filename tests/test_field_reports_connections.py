"""Connections that break where a loop or a library tells it in its own way: the same error, and another try."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replay import PROMPT, WHOLE, Replay
from streamfold import Client, EngineError, Retries
from streamfold.connection import Connection
from tries import SOON

BOTH_LOOPS = True


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the next connections are reset in the moment in which they open."""
    plan: list[bool] = []
    trace = Connection._trace

    async def breaking(connection: Connection, name: str, info: dict[str, Any]) -> None:
        await trace(connection, name, info)
        is_stream = connection._on_sent is not None
        if is_stream and name.endswith("connect_tcp.complete") and plan and plan.pop(0):
            info["return_value"]._stream._transport.abort()
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Connection, "_trace", breaking)
    return plan


async def test_a_connection_that_is_reset_as_it_opens_is_worth_another_try_on_every_loop(broken: list[bool]) -> None:
    """MagicStack/uvloop#471, aio-libs/aiohttp#10506: uvloop has no socket any more then, and httpx asks for it."""
    async with Replay(WHOLE) as server:
        async with Client(server.url, retries=SOON) as client:
            broken += [True, True]
            call = client.start(PROMPT, {})
            assert (await call).token_ids.tolist() == [1, 2, 3]
            assert call.tries == 3
        async with Client(server.url, retries=Retries(tries=1)) as client:
            broken += [True]
            with pytest.raises(EngineError) as caught:
                await client.generate(PROMPT, {})
            assert caught.value.retryable
        assert len(server.generates) == 1
