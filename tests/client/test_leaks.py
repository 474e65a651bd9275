"""No leaks after any number of aborts and cancels: no task, no socket, no slot, no work for the engine.

The kind of fault is encode/httpx#1461 and #3782, encode/httpcore#1093: a request that is cancelled while it connects,
or twice, keeps its place in the pool for good, and in the end every request waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from conftest import LOOPS
from streamfold import Call, Client, Generation, Limits, Parser, Timeouts, _core
from streamfold.client.drivers.base import HttpRequest
from streamfold.client.drivers.direct_exchange import DirectExchange
from streamfold.client.drivers.httpx_connection import Connection
from streamfold.loopback import Loopback
from support.calls import abort_soon, has_ended
from support.leftovers import open_files, settled
from support.paths import DATA
from support.replay import DONE, HANG, PROMPT, Replay, Step, chunk, events, head, stream, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

BOTH_LOOPS = True
EACH_DRIVER = True

pytestmark = pytest.mark.usefixtures("kept_briefly")

SLOTS = 48
WAYS = ("abort", "abort twice", "cancel", "cancel twice", "cancel generate", "abort and cancel", "finish")
TLS = DATA / "tls"


@pytest.fixture(scope="module")
def engine() -> Iterator[Loopback]:
    """An engine that generates for a minute unless the request is aborted: it never notices a disconnect."""
    with Loopback(token_rate=500, prefill_delay=0.01, incremental=True, stop_probability=0, leave_delay=None) as box:
        yield box


async def disturb(client: Client, dice: random.Random, asked: dict[str, Any]) -> None:
    """One call that is ended at a random moment of its first 30 ms, one way or another, sometimes twice."""
    delay, again = dice.uniform(0, 0.03), dice.uniform(0, 0.01)
    how = dice.choice(WAYS)
    if how == "finish":
        assert (await client.generate(PROMPT, {"max_new_tokens": 2}, **asked)).finish_reason == "length"
        return
    parameters = {"max_new_tokens": 30_000}
    if how == "cancel generate":
        waiter = asyncio.ensure_future(client.generate(PROMPT, parameters, **asked))
        await asyncio.sleep(delay)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        return
    call = client.start(PROMPT, parameters, **asked)
    waiter = asyncio.ensure_future(_wait(call))
    await asyncio.sleep(delay)
    if "abort" in how:
        abort_soon(call)
    else:
        waiter.cancel()
    if how not in {"abort", "cancel"}:
        await asyncio.sleep(again)
        if how == "abort twice":
            await call.abort()
        else:
            waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiter
    assert has_ended(call)
    assert len((await call).token_ids) == call.token_count


async def _wait(call: Any) -> Any:
    return await call


async def storm(client: Client, count: int, seed: int, asked: dict[str, Any]) -> None:
    """``count`` disturbed calls, twice as many at once as there are slots."""
    dice = random.Random(seed)
    places = asyncio.Semaphore(2 * SLOTS)

    async def one() -> None:
        async with places:
            await disturb(client, dice, asked)

    await asyncio.gather(*[one() for _ in range(count)])


async def leaves_nothing(
    client: Client, count: int, seed: int, asked: dict[str, Any], connections: Callable[[], int]
) -> None:
    """A storm, after which tasks, descriptors and slots are as before. ``connections`` counts those of the server."""
    await client.generate(PROMPT, {"max_new_tokens": 1})
    await until(lambda: connections() == 0)
    assert client._session is not None
    tasks, files = await settled()

    await storm(client, count, seed, asked)

    await until(lambda: asyncio.all_tasks() == tasks)
    await until(lambda: open_files() <= files)
    assert client.running == []
    assert client._session.slots.free == SLOTS


@pytest.mark.parametrize("asked", [{}, {"extra": {"return_routed_experts": True}}], ids=["plain", "draining"])
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_after_a_storm_of_aborts_and_cancels_nothing_is_left(
    engine: Loopback, count: int, asked: dict[str, Any]
) -> None:
    tasks = asyncio.all_tasks()
    async with Client(engine.url, limits=Limits(calls=SLOTS), timeouts=Timeouts(drain=0.5)) as client:
        for seed in range(3):
            await leaves_nothing(client, count // 3, seed, asked, lambda: engine.stats().open_connections)
        assert (await client.generate(PROMPT, {"max_new_tokens": 5})).finish_reason == "length"
        for _ in range(100):  # an abort takes effect at the engine's next step
            if not (load := await client.load()):
                break
            await asyncio.sleep(0.05)
        assert load == 0, "the engine keeps working for no client"
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_after_a_storm_over_tls_nothing_is_left(count: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    running: list[Step] = [head(), 0.005, *map(chunk, events(2, finish=None)), HANG]
    ending = stream(*events(2, finish="length"), DONE)

    async with Replay(tls=context) as server:
        server.routes["/generate"] = lambda request: (
            ending if request.json["sampling_params"]["max_new_tokens"] <= 2 else running
        )
        trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
        async with Client(server.url, ssl_context=trusting, limits=Limits(calls=SLOTS)) as client:
            await leaves_nothing(client, count, 0, {}, lambda: server.open)
        await until(lambda: server.open == 0)


async def test_a_client_that_is_closed_in_the_middle_of_a_storm_leaves_nothing(engine: Loopback) -> None:
    async with Client(engine.url) as client:
        await client.generate(PROMPT, {"max_new_tokens": 1})
    tasks, files = await settled()
    for pause in (0.0, 0.003, 0.01, 0.02):
        async with Client(engine.url, limits=Limits(calls=SLOTS)) as client:
            calls = [client.start(PROMPT, {"max_new_tokens": 30_000}) for _ in range(2 * SLOTS)]
            waiters = [asyncio.ensure_future(_wait(call)) for call in calls]
            await asyncio.sleep(pause)
            for waiter in waiters[::3]:
                waiter.cancel()
        ends = await asyncio.gather(*waiters, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, Exception)]
        assert all(has_ended(call) for call in calls)
    await until(lambda: asyncio.all_tasks() == tasks)
    await until(lambda: open_files() <= files)


async def test_an_ended_call_without_references_is_freed(engine: Loopback) -> None:
    def kept() -> int:
        kinds = (Call, Generation, HttpRequest, _core.Exchange, DirectExchange, Parser, Connection, httpx.Request)
        # By type(), as isinstance asks things for their class, and some of torch's warn when they are asked.
        return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())

    async with Client(engine.url) as client:
        await settled()
        before = kept()
        await asyncio.gather(*[client.generate(PROMPT, {"max_new_tokens": 2}) for _ in range(50)])
        await asyncio.gather(*[client.start(PROMPT, {"max_new_tokens": 30_000}).abort() for _ in range(50)])
        await settled()
        assert kept() == before


@pytest.mark.parametrize("factory", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_ends_while_calls_run_ends_them_and_tells_the_engine(
    engine: Loopback,
    factory: Callable[[], asyncio.AbstractEventLoop],
    recwarn: pytest.WarningsRecorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Call] = []

    async def main() -> None:
        client = Client(engine.url, limits=Limits(calls=3))
        calls.extend(client.start(PROMPT, {"max_new_tokens": 30_000}) for _ in range(5))
        waiting = asyncio.ensure_future(_wait(calls[0]))
        await until(lambda: all(call.token_count for call in calls[:3]))
        assert not waiting.done()

    run_to_the_end(factory, main())
    gc.collect()
    assert all(has_ended(call) for call in calls)
    assert {call.rid for call in calls[:3]} <= set(engine.stats().aborts)
    assert not caplog.records
    assert not recwarn.list


def run_to_the_end(factory: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    """What asyncio.run does at its end: it cancels all running tasks, once."""
    with contextlib.closing(factory()) as loop:
        loop.run_until_complete(main)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        assert not asyncio.all_tasks(loop)


@pytest.mark.parametrize("factory", LOOPS.values(), ids=LOOPS)
def test_closing_a_client_after_its_loop_closes_the_sockets_that_the_loop_left_open(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        calls: list[Call] = []  # held, so that nothing is closed because it is collected

        async def begin() -> None:
            calls.append(client.start(PROMPT, {}))
            await until(lambda: calls[0].tries == 1)
            await asyncio.sleep(0.05)

        with contextlib.closing(factory()) as loop:
            loop.run_until_complete(begin())
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            while not peer.recv(1 << 16).endswith(b"}"):
                pass
            asyncio.run(client.aclose())
            assert peer.recv(1) == b""
