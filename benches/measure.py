"""Measures one client under one load, in a process of its own: ``python -m benches.measure JOB`` prints JSON.

CPU time is getrusage's for the whole process, kernel included, from the first request to the last response, connecting
included. Imports and the first call of the process are not counted. The garbage collector stays on, as in a trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from benches.clients.base import Target
from benches.clients.registry import make
from benches.server import ROOT, stats

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from benches.clients.base import Reading, StreamClient
    from benches.clients.product import Product

Figures = dict[str, Any]
Kind = Literal["stream", "sweeps", "lag", "abort", "blocked", "start", "memory"]

BLOCKED: Final = 5.0  # seconds
_WARM: Final = "f" * 32
_LONGEST: Final = 300.0  # seconds of one measurement
_LAG_STEP: Final = 0.005
# Soon enough that every stream is under way, in the order of the streams.
_ABORTS_LAST: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement.

    Attributes:
        kind: what is measured; each has a function of that name below.
        client: which client, by its name in the registry.
        loop: the event loop.
        target: where requests go.
        streams: requests at once.
        tokens: of each response.
        waves: how often that many requests are sent, one wave behind the other.
        cpu: the CPU that the process is pinned to; None: any.
    """

    kind: Kind = "stream"
    client: str
    loop: Literal["asyncio", "uvloop"]
    target: Target
    streams: int
    tokens: int
    waves: int = 1
    cpu: int | None = None


def measure(job: Job) -> Figures:
    """Run one measurement in a process of its own.

    Raises:
        subprocess.TimeoutExpired: it hangs.
        subprocess.CalledProcessError: it failed; its traceback is on standard error.
    """
    command = [sys.executable, "-m", "benches.measure", json.dumps(asdict(job))]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, timeout=_LONGEST)
    figures: Figures = json.loads(run.stdout)
    return figures


def cpus() -> tuple[int | None, int | None]:
    """A CPU for the client and another one for the server; None where there are no two, or no way to pin."""
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[-1]) if len(allowed) > 1 else (None, None)


async def stream(client: StreamClient, job: Job) -> Figures:
    """CPU and wall seconds, and how long after the server's last byte each response was there."""
    ended: dict[str, float] = {}

    async def one(rid: str) -> Reading:
        reading = await client.read(rid, job.tokens)
        ended[rid] = time.time()
        return reading

    readings: list[Reading] = []
    server_cpu = (await asyncio.to_thread(stats, job.target.url))["cpu"]
    with _counted() as figures:
        for wave in range(job.waves):
            rids = _rids(job, wave)
            readings += await asyncio.gather(*[one(rid) for rid in rids])
    counted = await asyncio.to_thread(stats, job.target.url)
    finished = counted["finished"]
    after = [ended[rid] - finished[rid] for rid in ended]
    figures |= {"finish_p99": float(np.percentile(after, 99)), "digest": _digest(readings, job)}
    figures["server_cpu"] = counted["cpu"] - server_cpu
    return figures | {f"server_{name}": counted[name] for name in ("events", "late", "latest")}


async def sweeps(client: Product, job: Job) -> Figures:
    """As :func:`stream`, and how long the reactor's sweeps take, each with what it reports; by the clock and of CPU."""
    from streamfold.client.drivers.loop_reactor import LoopReactor  # noqa: PLC0415  # not on every system

    took: list[float] = []
    used: list[float] = []

    def timed(sweep: Callable[[LoopReactor], None]) -> Callable[[LoopReactor], None]:
        def run(reactor: LoopReactor) -> None:
            began, cpu = time.perf_counter(), time.thread_time()
            sweep(reactor)
            took.append(time.perf_counter() - began)
            used.append(time.thread_time() - cpu)

        return run

    with contextlib.ExitStack() as undo:
        for name in ("_sweep", "_sweep_urgent"):
            undo.callback(setattr, LoopReactor, name, getattr(LoopReactor, name))
            setattr(LoopReactor, name, timed(getattr(LoopReactor, name)))
        await client.client.aclose()  # the next one's reactor calls the timed sweeps
        async with make(job.client, job.target) as timed_client:
            figures = await stream(timed_client, job)
    return figures | {"sweep_p99": float(np.percentile(took, 99)), "longest_sweep": max(took), "sweep_cpu": max(used)}


async def lag(client: StreamClient, job: Job) -> Figures:
    """How late a timer of the event loop fires beside the streams, while another thread is busy."""
    late: list[float] = []
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(100))

    async def watch() -> None:
        while True:
            due = time.perf_counter() + _LAG_STEP
            await asyncio.sleep(_LAG_STEP)
            late.append(time.perf_counter() - due)

    thread = threading.Thread(target=busy)
    watching = asyncio.create_task(watch())
    thread.start()
    try:
        figures = await stream(client, job)
    finally:
        stop.set()
        watching.cancel()
        thread.join()
    return figures | {"lag_mean": float(np.mean(late)), "lag_p99": float(np.percentile(late, 99))}


async def abort(client: Product, job: Job) -> Figures:
    """How long an abort takes, to the call's end: each stream is aborted at its own moment."""
    loop = asyncio.get_running_loop()
    calls = [client.start(rid, job.tokens) for rid in _rids(job)]
    await _until(lambda: all(call.token_count for call in calls))
    took: list[float] = []

    async def end(index: int) -> None:
        await asyncio.sleep(_ABORTS_LAST * index / len(calls))
        started = loop.time()
        await calls[index].abort()
        took.append(loop.time() - started)

    await asyncio.gather(*[end(index) for index in range(len(calls))])
    reasons = {(await call).finish_reason for call in calls}
    assert reasons <= {"abort", None}, f"the response was too short: {reasons}"  # None: closed before its last event
    return {"abort_p50": float(np.percentile(took, 50)), "abort_p99": float(np.percentile(took, 99))}


async def blocked(client: StreamClient, job: Job) -> Figures:
    """How long after the event loop was blocked for five seconds every response is there; the server did not wait."""
    loop = asyncio.get_running_loop()
    unblocked = 0.0

    def block() -> None:
        nonlocal unblocked
        time.sleep(BLOCKED)
        unblocked = time.time()

    async def block_once_all_run() -> None:
        await _until(lambda: stats(job.target.url)["events"] > 0)
        loop.call_later(0.5, block)  # a few events later

    blocker = asyncio.create_task(block_once_all_run())
    readings = await asyncio.gather(*[client.read(rid, job.tokens) for rid in _rids(job)])
    caught_up = time.time()
    await blocker
    last = max((await asyncio.to_thread(stats, job.target.url))["finished"].values())
    return {"catch_up": caught_up - max(unblocked, last), "digest": _digest(readings, job)}


async def start(_: StreamClient, job: Job) -> Figures:
    """What this package's Python costs for a call of one event, with a driver that answers at once."""
    import httpx  # noqa: PLC0415  # only this measurement needs it

    from benches.clients.instant import InstantDriver  # noqa: PLC0415
    from benches.clients.product import Product  # noqa: PLC0415

    async with httpx.AsyncClient(trust_env=False) as asked:
        response = await asked.post(job.target.endpoint, json=job.target.payload(_WARM, job.tokens))
    instant = Product(job.target, new_driver=lambda: InstantDriver(response.content))
    async with instant:
        await instant.read(_WARM, job.tokens)
        with _counted() as figures:
            for wave in range(job.waves):
                await asyncio.gather(*[instant.read(rid, job.tokens) for rid in _rids(job, wave)])
    return figures


async def memory(client: StreamClient, job: Job) -> Figures:
    """Resident bytes for each stream that waits for its first token, beyond its request.

    Of the second wave, over what was resident before the first: what the first one left behind counts. The server
    waits for one stream more than there are.
    """
    before = _resident()
    grown = 0
    for wave in range(2):
        reads = [asyncio.create_task(client.read(rid, job.tokens)) for rid in _rids(job, wave)]
        await _until(lambda: bool(stats(job.target.url)["waiting"] == job.streams))
        grown = _resident() - before
        await asyncio.gather(*reads, client.read(_WARM, job.tokens))
    request = len(json.dumps(job.target.payload(_WARM, job.tokens)))
    return {"waiting_bytes": grown / job.streams - request}


KINDS: Final[dict[Kind, Callable[[Any, Job], Coroutine[Any, Any, Figures]]]] = {
    "stream": stream,
    "sweeps": sweeps,
    "lag": lag,
    "abort": abort,
    "blocked": blocked,
    "start": start,
    "memory": memory,
}


@contextlib.contextmanager
def _counted() -> Iterator[Figures]:
    """CPU and wall seconds of the block, in the dictionary that it gives."""
    figures: Figures = {}
    wall, cpu = time.perf_counter(), _cpu()
    yield figures
    figures |= {"cpu": _cpu() - cpu, "wall": time.perf_counter() - wall}


async def _until(holds: Callable[[], bool]) -> None:
    """Ask a thread again and again, which may wait for the server, until this holds."""
    while not await asyncio.to_thread(holds):  # noqa: ASYNC110  # what is waited for is in another process
        await asyncio.sleep(0.02)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _rids(job: Job, wave: int = 0) -> list[str]:
    return [f"{wave * job.streams + index:032x}" for index in range(job.streams)]


def _digest(readings: list[Reading], job: Job) -> str | None:
    """A digest of one reading, after all were found to be complete and equal; None if the bytes were dropped."""
    first = readings[0]
    for reading in readings:
        assert reading.size == first.size
        if first.token_ids is not None and first.logprobs is not None:
            assert len(first.token_ids) == job.tokens
            np.testing.assert_array_equal(reading.token_ids, first.token_ids, strict=True)
            np.testing.assert_array_equal(reading.logprobs, first.logprobs, strict=True)
    if first.token_ids is None or first.logprobs is None:
        return None
    return hashlib.sha256(first.token_ids.tobytes() + first.logprobs.tobytes()).hexdigest()


async def _run(job: Job) -> Figures:
    async with make(job.client, job.target) as client:
        await client.read(_WARM, 1)  # one event: the server answers it at once
        await asyncio.to_thread(stats, job.target.url)
        return await KINDS[job.kind](client, job)


def _main(argument: str) -> None:
    given = json.loads(argument)
    job = replace(Job(**given), target=Target(**given["target"]))
    if job.cpu is not None:
        os.sched_setaffinity(0, {job.cpu})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if job.loop == "uvloop":
        import uvloop  # noqa: PLC0415  # not every process pays for it

        run = uvloop.run(_run(job))
    else:
        run = asyncio.run(_run(job))
    print(json.dumps(run))


if __name__ == "__main__":
    _main(sys.argv[1])
