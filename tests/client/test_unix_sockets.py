"""Engines behind a Unix socket: ``http+unix://`` and the percent-encoded path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from streamfold import Client, EngineError, Retries
from support.leftovers import open_files, settled
from support.replay import PROMPT, RUNNING, WHOLE, Replay, answer_json, begun, until

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH_LOOPS = True
EACH_DRIVER = True


@pytest.fixture
def path() -> Iterator[str]:
    """Of a socket that is not there yet. pytest's own folders may be too deep for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="streamfold") as folder:
        yield str(Path(folder) / "engine one.sock")


async def test_calls_aborts_and_control_requests_go_through_a_unix_socket_and_leave_nothing(path: str) -> None:
    async with Replay(WHOLE, uds=path, routes={"/v1/loads": answer_json({"loads": []})}) as server:
        assert server.url == f"http+unix://{quote(path, safe='')}"
        async with Client(server.url) as client:
            await client.generate(PROMPT, {})
        _, files = await settled()
        async with Client(server.url) as client:
            assert client.base_url == server.url
            assert (await client.generate(PROMPT, {})).token_ids.tolist() == [1, 2, 3]
            assert await client.load() == 0
            server.routes["/generate"] = RUNNING
            call = await begun(client)
            assert (await call.abort()).token_ids.tolist() == [1, 2]
            assert server.aborts == [call.rid]
        await until(lambda: server.open == 0)
        await until(lambda: open_files() <= files)
        assert {request.headers["host"] for request in server.requests} == {"localhost"}


async def test_a_path_in_the_url_comes_before_that_of_each_request(path: str) -> None:
    async with Replay(uds=path, routes={"/base/generate": WHOLE}) as server, Client(f"{server.url}/base/") as client:
        assert (await client.generate(PROMPT, {})).finish_reason == "stop"
        assert [request.target for request in server.requests] == ["/base/generate"]


@pytest.mark.parametrize("listens", [True, False], ids=["nobody listens", "missing"])
async def test_a_socket_that_nobody_serves_is_a_failure_that_is_worth_another_try(path: str, listens: bool) -> None:
    if listens:
        async with Replay(WHOLE, uds=path):
            os.link(path, f"{path}2")  # the server unlinks its own name
        path = f"{path}2"
    async with Client(f"http+unix://{quote(path, safe='')}", retries=Retries(tries=1)) as client:
        with pytest.raises(EngineError, match="no reply from http") as failed:
            await client.generate(PROMPT, {})
        assert failed.value.retryable
