"""The abort of all requests on all engines, in any state of the engines.

The kinds of fault are THUDM/slime#1615 (one engine is down when the abort goes out, and the rollout ends) and
vllm-project/vime#294 (a request that reaches the engine just after the sweep, for which the drain waits for ever).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, EngineError, Limits
from support.leftovers import settled
from support.replay import ASKED, END, HANG, PROMPT, RST, Replay, Step, Steps, answer, answer_json, begun, head, until
from support.speaking import SGLANG
from support.tries import in_turn
from support.unreachable import closed_port, full_house

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.speaking import Speech

BOTH_LOOPS = True
EACH_DRIVER = True

NO_ROUTER = answer_json({"detail": "Not Found"}, 404)


def engine(speech: Speech, *loads: int | Steps, abort: Steps | None = None) -> Replay:
    """An engine that tells these loads one after the other, the last one ever after."""
    server = speech.replay(routes={} if abort is None else {speech.abort_path: abort, speech.abort_all_path: abort})
    responses = [speech.load(load) if isinstance(load, int) else load for load in loads]
    server.routes[speech.load_path] = in_turn(server, *responses, path=speech.load_path)
    return server


def sweeps(speech: Speech, server: Replay) -> int:
    """How many aborts of all requests it got; no abort of a single one."""
    bodies = [request.json for request in server.at(speech.abort_all_path)]
    assert bodies == [speech.abort_all_body] * len(bodies)
    return len(bodies)


def warnings(caplog: pytest.LogCaptureFixture, server: Replay) -> int:
    return sum(server.url in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("streamfold.client.sweep._SWEEP_SECONDS", 0.02)
    monkeypatch.setattr("streamfold.client.sweep.REPEAT_SECONDS", 0.01)
    monkeypatch.setattr("streamfold.client.control._FIND_SECONDS", 0.02)


# One engine.


async def test_everything_on_an_engine_is_ended_and_it_is_idle_afterwards(speech: Speech) -> None:
    with speech.loopback(token_rate=200, incremental=True, stop_probability=0, leave_delay=None) as box:
        async with speech.client(box.url, limits=Limits(calls=8)) as client, speech.client(box.url) as other:
            calls = [one.start(PROMPT, {"max_new_tokens": 20_000}) for one in (client, other) for _ in range(5)]
            await until(lambda: all(call.token_count for call in calls))
            assert await client.abort_engines() is True
            assert await client.load() == 0
            ends = await asyncio.gather(*calls)
            assert {end.finish_reason for end in ends} == {"abort"}
            assert all(len(end.token_ids) for end in ends)
            assert (await client.generate(PROMPT, {"max_new_tokens": 3})).finish_reason == "length"


async def test_an_engine_is_swept_again_until_what_slipped_in_is_gone_too(speech: Speech) -> None:
    async with engine(speech, 3, 2, 0) as server, speech.client(server.url) as client:
        assert await client.abort_engines() is True
        assert sweeps(speech, server) == len(server.at(speech.load_path)) == 4, "twice busy, and seen idle twice"


async def test_an_engine_that_is_idle_for_a_moment_only_is_swept_again(speech: Speech) -> None:
    async with engine(speech, 0, 1, 0) as server, speech.client(server.url) as client:
        assert await client.abort_engines() is True
        assert sweeps(speech, server) == 4


@pytest.mark.parametrize(
    ("load", "nothing"),
    [
        ([{"num_reqs": 2}, {"num_reqs": 0}], [{"num_reqs": 0}, {"num_reqs": 0}]),
        ({"loads": [{"num_reqs": 2}]}, {"loads": [{"num_reqs": 0}]}),
        ({"loads": [{"num_total_reqs": 1}]}, {"loads": [{"num_total_reqs": 0}]}),
        (
            {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 1}]},
            {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
        ),
        ({"num_reqs": 1}, {"num_reqs": 0}),
        ({"num_total_reqs": 1}, {"num_total_reqs": 0}),
        ({"num_running_reqs": 1, "num_waiting_reqs": 0}, {"num_running_reqs": 0, "num_waiting_reqs": 0}),
    ],
)
async def test_a_load_is_understood_in_each_of_its_shapes(load: Any, nothing: Any) -> None:
    async with engine(SGLANG, answer_json(load), answer_json(nothing)) as server, SGLANG.client(server.url) as client:
        assert await client.abort_engines() is True
        assert sweeps(SGLANG, server) == 3, "busy once, and seen idle twice"


async def test_an_engine_that_never_gets_idle_is_given_up_when_the_time_is_over(
    speech: Speech,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine(speech, 1) as server, speech.client(server.url) as client:
        assert await asyncio.wait_for(client.abort_engines(1), 20) is False
        assert sweeps(speech, server) > 1
        assert warnings(caplog, server) == 1
        count = sweeps(speech, server)
        await asyncio.sleep(0.1)
        assert sweeps(speech, server) == count, "it is over"


@pytest.mark.parametrize("queued", [False, True], ids=["hanging", "behind one that hangs"])
async def test_when_the_time_is_over_no_abort_of_all_is_left_that_could_end_what_is_started_next(
    speech: Speech, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.client.control_requests._TIMEOUT_SECONDS", 1.6)
    monkeypatch.setattr("streamfold.client.control_requests._MAX_CONCURRENT", 1)
    async with engine(speech, 0, abort=[HANG]) as server, speech.client(server.url) as client:
        if queued:
            server.routes[speech.path] = speech.running
            await (await begun(client)).abort()
        before = len(server.at(speech.abort_all_path))
        assert await asyncio.wait_for(client.abort_engines(0.2), 20) is False
        late = server.at(speech.abort_all_path)[before:]
        assert len(late) == (0 if queued else 1)
        for request in late:
            await asyncio.wait_for(request.peer_closed.wait(), 20)
        await asyncio.sleep(0.05)
        assert len(server.at(speech.abort_all_path)) == before + len(late)


# What goes wrong.


async def test_a_dead_and_a_hanging_worker_are_logged_once_and_do_not_delay_the_aborts_at_the_others(
    speech: Speech,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with speech.replay() as dead:
        pass
    async with engine(speech, 2, 0) as alive, engine(speech, abort=[HANG]) as deaf:
        workers = answer_json({"workers": [{"url": server.url} for server in (dead, deaf, alive)]})
        async with speech.replay(routes={"/workers": workers}) as router, speech.client(router.url) as client:
            assert await asyncio.wait_for(client.abort_engines(1.2), 20) is False, "nobody knows what the others run"
            assert sweeps(speech, alive) == 3
            assert [warnings(caplog, server) for server in (dead, deaf, alive)] == [1, 1, 0]
            assert router.at(speech.abort_all_path) == []


@pytest.mark.parametrize(
    ("load", "abort"),
    [
        (NO_ROUTER, None),
        (answer_json("busy"), None),
        (answer_json({"loads": [{}]}), None),
        ([head(200, "text/html", 6) + b"<html>", END], None),
        (answer_json({"detail": "starting"}, 503), None),
        ([HANG], None),
        ([RST], None),
        (0, answer_json({"error": "Unauthorized"}, 401)),
        (0, answer_json({"error": "broke"}, 500)),
    ],
    ids=["404", "no load", "no counts", "html", "503", "silent", "reset", "abort refused", "abort fails"],
)
async def test_a_worker_that_answers_and_may_not_be_idle_is_logged_once_and_counts_as_busy(
    speech: Speech, load: int | Steps, abort: Sequence[Step] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(speech, load, abort=abort) as odd, engine(speech, 1, 0) as alive:
        workers = answer_json({"workers": [{"url": server.url} for server in (odd, alive)]})
        async with speech.replay(routes={"/workers": workers}) as router, speech.client(router.url) as client:
            assert await asyncio.wait_for(client.abort_engines(), 20) is False
            assert sweeps(speech, alive) == 3
            assert 1 <= sweeps(speech, odd) <= 2, "the requests end"
            assert [warnings(caplog, server) for server in (odd, alive)] == [1, 0]


@pytest.mark.parametrize("fault", [[RST], answer_json({"detail": "busy"}, 503)], ids=["reset", "503"])
async def test_a_worker_that_fails_for_a_moment_is_not_given_up(
    speech: Speech, fault: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    # A kept connection that is reset is no failure of the worker's, so none is kept.
    taken = answer(b"", connection="close")
    async with engine(speech, fault, 1, fault, 0, abort=taken) as server, speech.client(server.url) as client:
        assert await client.abort_engines() is True
        assert sweeps(speech, server) == 5
        assert warnings(caplog, server) == 0


@pytest.mark.parametrize("workers", [answer_json({"workers": []}), NO_ROUTER], ids=["empty", "none"])
async def test_without_a_list_of_workers_the_base_url_is_the_engine(speech: Speech, workers: Steps) -> None:
    async with engine(speech, 1, 0) as server, speech.client(server.url) as client:
        server.routes["/workers"] = workers
        assert await client.abort_engines() is True
        assert sweeps(speech, server) == 3


@pytest.mark.parametrize(
    "workers",
    [answer_json({"detail": "busy"}, 503), [RST], [HANG], answer_json({"error": "Unauthorized"}, 401)],
    ids=["busy", "reset", "slow", "refused"],
)
async def test_while_a_router_does_not_list_its_workers_they_are_not_known_to_be_idle(
    speech: Speech, workers: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(speech, 1, 0) as server, speech.client(server.url) as client:
        server.routes["/workers"] = workers
        assert await asyncio.wait_for(client.abort_engines(1), 20) is False
        assert sweeps(speech, server) == 3, "it may be the engine"
        assert warnings(caplog, server) == 1
        assert "which engines it has is not known" in caplog.text


@pytest.mark.parametrize(
    "workers", [answer_json({"detail": "busy"}, 503), [RST], [HANG]], ids=["busy", "reset", "slow"]
)
async def test_a_router_that_lists_its_workers_a_little_later_is_asked_again(speech: Speech, workers: Steps) -> None:
    async with engine(speech, 2, 0) as one, engine(speech, 1, 0) as two, speech.replay() as router:
        listed = answer_json({"workers": [{"url": server.url} for server in (one, two)]})
        router.routes["/workers"] = in_turn(router, workers, workers, listed, path="/workers")
        async with speech.client(router.url) as client:
            assert await asyncio.wait_for(client.abort_engines(), 20) is True
        assert (sweeps(speech, one), sweeps(speech, two)) == (3, 3)


async def test_a_router_that_fails_after_it_has_listed_its_workers_hides_none(speech: Speech) -> None:
    async with engine(speech, 0) as one, engine(speech, 1) as two, speech.replay() as router:
        listed = answer_json({"workers": [{"url": server.url} for server in (one, two)]})
        router.routes["/workers"] = in_turn(router, listed, [RST], path="/workers")
        async with speech.client(router.url) as client:
            await client.workers()
            assert await asyncio.wait_for(client.abort_engines(0.5), 20) is False
        assert sweeps(speech, one) == 2
        assert sweeps(speech, two) > 2


async def test_an_engine_that_is_gone_altogether_raises_nothing_and_is_not_idle(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    async with speech.replay() as dead:
        pass
    async with speech.client(dead.url) as client:
        assert await asyncio.wait_for(client.abort_engines(0.5), 20) is False, "it may be busy, and unreachable"
        with pytest.raises(EngineError):
            await client.load()
    assert warnings(caplog, dead) == 1


async def test_an_engine_that_can_be_reached_again_in_time_is_aborted(speech: Speech) -> None:
    with closed_port() as (_, url):
        pass
    listed = {"/workers": answer_json({"workers": [{"url": url}]})}
    async with speech.replay(routes=listed) as router, speech.client(router.url) as client:
        aborting = asyncio.ensure_future(client.abort_engines())
        await until(lambda: router.at("/workers"))
        await asyncio.sleep(0.1)
        assert not aborting.done()
        with speech.loopback(port=int(url.rpartition(":")[2])) as box:
            assert await asyncio.wait_for(aborting, 20) is True
            assert "*" in box.stats().aborts


async def test_an_engine_to_which_each_connect_times_out_is_not_known_to_be_idle(
    speech: Speech, caplog: pytest.LogCaptureFixture
) -> None:
    with full_house() as (_, url):
        async with engine(speech, 1, 0) as alive, speech.replay() as router, speech.client(router.url) as client:
            router.routes["/workers"] = answer_json({"workers": [{"url": alive.url}, {"url": url}]})
            assert await asyncio.wait_for(client.abort_engines(1.2), 20) is False
            assert sweeps(speech, alive) == 3
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert url in said[0]


async def test_workers_that_have_joined_since_are_found(speech: Speech) -> None:
    async with engine(speech, 0) as one, engine(speech, 0) as two:
        workers = [answer_json({"workers": [{"url": server.url} for server in found]}) for found in ([one], [one, two])]
        async with speech.replay() as router, speech.client(router.url) as client:
            router.routes["/workers"] = in_turn(router, *workers, path="/workers")
            for _ in range(2):
                assert await client.abort_engines() is True
            assert (sweeps(speech, one), sweeps(speech, two)) == (4, 2)


# Ends.


@pytest.mark.parametrize("how", ["cancel", "aclose"])
async def test_a_server_abort_that_is_broken_off_leaves_nothing_and_warns_of_nothing(
    speech: Speech, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tasks, _ = await settled()
    async with engine(speech, 1) as server:
        async with speech.client(server.url) as client:
            aborting = asyncio.ensure_future(client.abort_engines())
            await until(lambda: len(server.at(speech.load_path)) > 1)
            if how == "cancel":
                aborting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(aborting, 20)
            else:
                await asyncio.wait_for(client.aclose(), 20)
                assert await asyncio.wait_for(aborting, 20) is False
            count = sweeps(speech, server)
            await asyncio.sleep(0.1)
            assert sweeps(speech, server) == count, "it continues"
            assert warnings(caplog, server) == 0, "a cancelled abort logs nothing"
        await until(lambda: server.open == 0)
    await until(lambda: asyncio.all_tasks() == tasks)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), None])
async def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ValueError, match="seconds"):
            await client.abort_engines(seconds)


async def test_calls_of_ours_that_are_not_on_an_engine_go_on(speech: Speech) -> None:
    async with engine(speech, 0) as server, speech.client(server.url, limits=Limits(calls=1)) as client:
        server.routes[speech.path] = [HANG]
        first, second = client.start(PROMPT, ASKED), client.start(PROMPT, ASKED)
        await until(lambda: server.generates)
        assert await client.abort_engines() is True
        assert [running.rid for running in client.running] == [first.rid, second.rid]
        assert not first.aborting
        assert not second.aborting
        server.routes[speech.abort_path] = answer_json(None)
        await client.abort_all()
