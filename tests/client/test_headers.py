"""Headers of users: what is refused, when, and that nothing of it leaves."""

from __future__ import annotations

import pytest

from streamfold import Client
from support.replay import ASKED, PROMPT, WHOLE, Replay
from support.speaking import VLLM

BOTH_LOOPS = True
EACH_DRIVER = True

RESERVED = ("Content-Length", "Transfer-Encoding", "Connection", "Host", "Expect", "Upgrade", "TE", "Trailer")

# The header, and what the message has to name.
WRONG: dict[str, tuple[str, str, str]] = {
    **{name: (name, "1", name) for name in RESERVED},
    "in lower case": ("transfer-encoding", "chunked", "Transfer-Encoding"),
    "in capitals": ("TE", "trailers", "TE"),
    "no name": ("", "1", "header name"),
    "a colon": ("X-Mine:", "1", "X-Mine:"),
    "a space": ("X Mine", "1", "X Mine"),
    "a space behind": ("X-Mine ", "1", "X-Mine "),
    "a line break in the name": ("X-Mine\r\nX-Other", "1", "X-Mine"),
    "a name beyond ASCII": ("X-Größe", "1", "X-Größe"),
    "a line break": ("X-Mine", "1\r\nX-Other: 2", "X-Mine"),
    "a line feed": ("X-Mine", "1\n", "X-Mine"),
    "a zero": ("X-Mine", "1\0", "X-Mine"),
    "a tab": ("X-Mine", "1\t2", "X-Mine"),
    "a delete": ("X-Mine", "\x7f", "X-Mine"),
    "beyond latin-1": ("X-Mine", "€", "X-Mine"),
    "half a character": ("X-Mine", "\ud800", "X-Mine"),
}


@pytest.fixture(params=WRONG.values(), ids=[*WRONG])
def wrong(request: pytest.FixtureRequest) -> tuple[dict[str, str], str]:
    name, value, named = request.param
    return {name: value}, named


def test_a_client_is_not_made_with_a_header_that_cannot_be_sent(wrong: tuple[dict[str, str], str]) -> None:
    headers, named = wrong
    with pytest.raises(ValueError, match="header") as refused:
        Client("engine:1", headers=headers)
    assert named in str(refused.value)


async def test_a_call_is_not_started_with_a_header_that_cannot_be_sent_and_the_next_one_is(
    wrong: tuple[dict[str, str], str],
) -> None:
    headers, named = wrong
    async with Replay(WHOLE) as server, Client(server.url) as client:
        with pytest.raises(ValueError, match="header") as refused:
            client.start(PROMPT, {}, headers=headers)
        assert named in str(refused.value)
        assert client.running == []
        assert server.accepted == 0
        assert (await client.generate(PROMPT, {}, headers={"X-Mine": "1"})).finish_reason == "stop"
        (request,) = server.requests
        assert request.headers["x-mine"] == "1"


async def test_each_header_leaves_once_and_with_every_character_that_it_may_have() -> None:
    value = "".join(map(chr, [*range(33, 127), *range(161, 256)]))
    async with Replay(WHOLE) as server, Client(server.url, headers={"X-Mine": "client", "X-Odd": value}) as client:
        await client.generate(PROMPT, {}, headers={"x-mine": "call", "Accept": "text/event-stream"})
        (request,) = server.requests
    names = [name for name, _ in request.fields]
    assert len(set(names)) == len(names)
    assert request.headers["x-mine"] == "call"
    assert request.headers["x-odd"] == value
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert int(request.headers["content-length"]) == len(request.body)
    assert "transfer-encoding" not in request.headers


@pytest.mark.parametrize("rid", ["a\nb", "€", "\ud800"], ids=ascii)
async def test_an_id_that_the_engine_takes_in_a_header_is_refused_like_one(rid: str) -> None:
    async with VLLM.replay(VLLM.whole) as server, VLLM.client(server.url) as client:
        with pytest.raises(ValueError, match="X-Request-Id"):
            client.start(PROMPT, ASKED, rid=rid)
        assert client.running == []
        assert (await client.generate(PROMPT, ASKED, rid="é")).finish_reason == "stop"
        assert server.accepted == len(server.requests) == 1
