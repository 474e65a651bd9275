"""The public names of Client and Call, and internals_of(), the access to everything else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfold import Call, Client, Retries, StreamfoldError, Timeouts
from streamfold.client._internal import internals_of
from streamfold.client.attempt import Attempt
from support.replay import ASKED, PROMPT, WHOLE, Replay, until


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_client_and_a_call_show_only_what_their_users_need() -> None:
    assert public(Client) == {
        *("start", "generate", "abort_all", "abort_engines", "aclose"),
        *("discover", "workers", "load", "running", "retried"),
        *("base_url", "engine", "tokenizer", "experts", "retries"),
    }
    assert public(Call) == {
        *("abort", "aborting", "error", "rid", "tries"),
        *("token_ids", "snapshot", "wait_tokens"),
        *("age", "token_count", "tokens_per_second", "ttft", "last_event"),
    }
    client = Client("127.0.0.1:9")
    assert {name for name in vars(client) if not name.startswith("_")} == set()


def test_the_layers_above_a_client_get_its_settings_and_its_engine() -> None:
    timeouts, retries = Timeouts(drain=0.5), Retries(tries=3)
    client = Client("127.0.0.1:9", timeouts=timeouts, retries=retries, engine="vllm")
    internals = internals_of(client)
    assert (internals.timeouts, internals.retries) == (timeouts, retries)
    assert internals.engine_spec.name == client.engine == "vllm"
    assert (internals.experts, internals.tokenizer) == (client.experts, client.tokenizer) == (None, None)
    with pytest.raises(RuntimeError, match="discover"):
        _ = internals_of(Client("127.0.0.1:9", engine="auto")).engine_spec


@pytest.mark.parametrize("how", ["abort_all", "aclose"])
async def test_the_end_of_all_calls_is_signalled_once_to_those_who_worked_by_then(how: str) -> None:
    async with Client("127.0.0.1:9") as client:
        signal = internals_of(client).abort_signal
        waiter = asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)
        await getattr(client, how)()
        assert await asyncio.wait_for(waiter, 20) is True
        assert signal.is_set()
        assert not internals_of(client).abort_signal.is_set(), "work that starts now is not concerned"


@pytest.mark.parametrize("kind", ["connected", "head", "first_token", "finished", "ended"])
@pytest.mark.parametrize("transport", ["direct", "httpx"])
async def test_a_fault_in_what_hears_the_driver_ends_the_call_and_the_others_go_on(
    kind: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, heard = Attempt._reports[kind], 0

    def fail_once(attempt: Attempt, detail: object) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            raise LookupError("no such transition")
        hear(attempt, detail)

    async with Replay(WHOLE) as server:
        async with Client(server.url, transport=transport) as client:
            monkeypatch.setitem(Attempt._reports, kind, fail_once)
            calls = [client.start(PROMPT, ASKED) for _ in range(3)]
            ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
            (error,) = [end for end in ends if isinstance(end, BaseException)]
            assert isinstance(error, StreamfoldError)
            assert isinstance(error.__cause__, LookupError)
            assert client.running == []
        await until(lambda: server.open == 0)
