"""The contract of drivers that keep connections: which are used again, and what a lost one means."""

from __future__ import annotations

import pytest

from support.driving import Driven, asked, told
from support.replay import (
    DONE,
    END,
    FIN,
    LAST_CHUNK,
    RST,
    WHOLE,
    Request,
    Steps,
    chunk,
    events,
    head,
    until,
)
from support.ways import ALL, BODY_OF_THREE, REFUSED, Way, until_close

BOTH_LOOPS = True

# Connections that are kept.


async def test_a_connection_carries_one_request_after_another_unless_a_fresh_one_is_asked_for(keeping: Way) -> None:
    async with keeping.replay(WHOLE) as server, keeping.driving() as driver:
        for _ in range(5):
            assert await Driven(driver, asked(server.url)).ended() == ALL
            assert await Driven(driver, told(server.url)).ended() == REFUSED
        assert server.accepted == 1
        assert await Driven(driver, asked(server.url, fresh=True)).ended() == ALL
        assert server.accepted == 2


UNKEPT: dict[str, Steps] = {
    "close": [head(connection="close"), *map(chunk, events(1)), LAST_CHUNK, END],
    "until close": until_close(BODY_OF_THREE),
    "a byte behind it": [b"".join(step for step in WHOLE if isinstance(step, bytes)) + b"x", END],
    "HTTP/1.0": [
        b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(DONE),
        DONE,
        END,
    ],
}


@pytest.mark.parametrize("reply", UNKEPT)
async def test_a_connection_is_not_kept_after_a_reply_that_may_not_be_its_last_word(keeping: Way, reply: str) -> None:
    async with keeping.replay(UNKEPT[reply]) as server, keeping.driving() as driver:
        for _ in range(2):
            driven = Driven(driver, asked(server.url))
            await driven.ended()
            driven.exchange.end()
        assert server.accepted == 2


async def test_a_kept_connection_that_fails_before_the_first_byte_of_a_reply_is_stale_and_later_it_is_not(
    keeping: Way,
) -> None:
    later: list[Steps] = [[FIN], [RST], [b"HTTP/1.1 2", 0.02, RST]]

    def reply(request: Request) -> Steps:
        return WHOLE if request.target == "/first" else later[0]

    async with keeping.replay(reply, routes={"/first": WHOLE}) as server, keeping.driving() as driver:
        for is_stale in (True, True, False):
            await Driven(driver, asked(server.url, "/first", fresh=True)).ended()
            driven = Driven(driver, asked(server.url))
            assert await driven.ended() == ["connected", "failed", "ended"]
            assert driven.detail("failed").is_stale is is_stale
            driven.exchange.end()
            later.pop(0)


async def test_a_kept_connection_that_the_server_has_closed_is_not_used(keeping: Way) -> None:
    async with keeping.replay([*WHOLE[:-1], 0.0, FIN]) as server, keeping.driving() as driver:
        for count in (1, 2):
            kinds = await Driven(driver, asked(server.url)).ended()
            assert kinds[kinds.count("connected") - 1 :] == ALL, "it may have been found closed at the sending only"
            assert server.accepted == count
            await until(lambda: server.open == 0)


async def test_a_request_that_finds_its_kept_connection_closed_leaves_when_it_is_told_once_more(keeping: Way) -> None:
    async with keeping.replay([*WHOLE[:-1], 0.0, FIN]) as server, keeping.driving() as driver:
        await Driven(driver, asked(server.url)).ended()
        await until(lambda: server.open == 0)
        driven = Driven(driver, asked(server.url), holds=True)
        await until(lambda: driven.kinds == ["connected"])
        driven.exchange.send()
        await until(lambda: driven.kinds == ["connected", "connected"])
        await until(lambda: server.accepted == 2)  # over TLS the client knows first
        assert len(server.requests) == 1
        driven.exchange.send()
        assert (await driven.ended())[1:] == ALL
        assert len(server.requests) == 2
