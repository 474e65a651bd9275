"""The requests beside the streams: tell engines to end one request or all, ask for their load, find them.

They have a small pool of their own, so that an abort never queues behind the streams it is to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx
import orjson

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.limits import Deadline, Slots
from streamfold.client.responses import error_message
from streamfold.client.transport import Connection, Stopped
from streamfold.client.urls import base_url
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from streamfold.engines.base import EngineSpec, Post

__all__ = ["EngineControl"]

T = TypeVar("T")

log = logging.getLogger("streamfold")

_AT_ONCE = 32  # for each worker, so that one that hangs does not keep the others from being told
_SECONDS = 3.0  # for a small request, from the connect to the end of its reply
_LONGEST_REPLY = 1 << 20
_REPEAT_AFTER = 0.075  # an engine forgets an abort that comes before its request is in
_UNDER_WAY = 0.5  # seconds that a request may take to its engine, behind a router that is busy
_WORKERS_LAST = 10.0  # routers gain and lose workers
_FAILURE_LASTS = 1.0
_SWEEP_AGAIN = 0.25  # seconds between two sweeps of a server abort
_NOT_THERE = (403, 404, 405)
_FAILURES = 2  # in a row, after which a worker counts as gone


class _NotThere(EngineError):
    """A server has no such endpoint, or does not let us at it."""


class EngineControl:
    """Speaks to one engine, or to each worker behind a router. Bound to the running event loop.

    Args:
        base: the normalised base URL of the engine or router.
        engine: how the engine is spoken to.
        headers: sent with each request.
        transport: where requests go; closed by :meth:`aclose`.
    """

    def __init__(
        self, base: str, engine: EngineSpec, headers: httpx.Headers, transport: httpx.AsyncBaseTransport
    ) -> None:
        self._base = base
        self.engine = engine
        self._headers = headers
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._slots: defaultdict[str, Slots] = defaultdict(lambda: Slots(_AT_ONCE))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._search: asyncio.Task[list[str]] | None = None
        self._search_again = 0.0
        self._known = [base]
        self._reported: set[str] = set()
        self._gave_up: set[str] = set()
        self._missing: set[tuple[str, str]] = set()  # paths that a worker does not have
        self._closed = False

    def tell(
        self, rid: str, *, ended: asyncio.Future[None], answered: asyncio.Future[None], begun: bool
    ) -> asyncio.Task[None]:
        """Tell every worker to end ``rid``; done when all have answered. Failures are logged.

        A request that has not ``begun`` may not have reached the engine's queue, so it is told again a little
        later, unless it has ``ended`` by then: not before it is ``answered``, if that does not take too long.
        """
        return self._keep(self._tell(rid, ended, answered, begun=begun))

    async def load(self) -> int:
        """Requests that run or wait, over all workers.

        Raises:
            EngineError: a worker cannot be reached, or does not tell its load.
        """
        return await asyncio.shield(self._keep(self._load()))

    async def abort_all(self, seconds: float) -> bool:
        """End every request of every worker, anybody's, until all are idle, or so many seconds have passed.

        Returns:
            Whether all workers that answer are idle. What is wrong with one of them is logged.
        """
        until = self._loop.time() + seconds
        search = self._keep(self.workers(anew=True))
        await asyncio.wait({search}, timeout=seconds)
        workers = search.result() if search.done() else self._known
        stop = AbortSignal()
        sweeps = [self._keep(self._empty(worker, stop)) for worker in workers]
        try:
            await asyncio.wait(sweeps, timeout=until - self._loop.time())
            for worker, sweep in zip(workers, sweeps, strict=True):
                if not sweep.done():  # nobody has broken it off: the time is over
                    log.warning("%s was not seen idle in time after the abort of all its requests", worker)
        finally:
            stop.set()
            await asyncio.wait(sweeps)  # an abort of all that came late would end what is started next
        return all(sweep.result() for sweep in sweeps)

    async def ask(self, method: str, base: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send one small request to the server at that base URL and give the reply's body.

        Raises:
            EngineError: no reply in time, or one with a status of 300 or more.
        """
        return await asyncio.shield(self._keep(self._ask(method, base, path, body)))

    async def workers(self, *, anew: bool = False) -> list[str]:
        """Base URLs of the engines: what a router lists, otherwise the base URL itself. RequestOptions now and then."""
        if self._search is None or (self._search.done() and (anew or self._loop.time() >= self._search_again)):
            self._search = self._keep(self._find_workers())
        return await asyncio.shield(self._search)

    async def aclose(self) -> None:
        """Wait for the requests that are under way, but not for all that queue up before a worker that hangs."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SECONDS)
        while self._tasks:
            for slots in self._slots.values():
                slots.dismiss()
            await asyncio.wait(self._tasks, timeout=0.1)
        await self._transport.aclose()

    async def _tell(
        self, rid: str, ended: asyncio.Future[None], answered: asyncio.Future[None], *, begun: bool
    ) -> None:
        told = [self._tell_at(worker, rid, ended, answered, begun=begun) for worker in await self.workers()]
        await asyncio.gather(*told)

    async def _tell_at(
        self, worker: str, rid: str, ended: asyncio.Future[None], answered: asyncio.Future[None], *, begun: bool
    ) -> None:
        await self._end_at(worker, rid)
        if not begun:
            await asyncio.wait({ended}, timeout=_REPEAT_AFTER)
            await asyncio.wait({ended, answered}, timeout=_UNDER_WAY, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._end_at(worker, rid)

    async def _end_at(self, worker: str, rid: str) -> None:
        posts = [post for post in self.engine.aborts(rid) if (worker, post[0]) not in self._missing]
        if not posts:
            return
        try:
            await self._post(worker, posts)
        except _NotThere as error:
            last = (worker, posts[-1][0])
            if last not in self._missing:  # others may have asked at the same time
                self._missing.add(last)
                level = logging.INFO if self.engine.abort_by_disconnect else logging.WARNING
                log.log(level, "%s has no way to end a request but by closing its stream: %s", worker, error)
        except EngineError as error:
            if worker not in self._reported:  # one word for a dead worker, not one for each of a thousand aborts
                self._reported.add(worker)
                log.warning("could not abort at %s, its requests may run on: %s", worker, error)

    async def _empty(self, worker: str, stop: AbortSignal) -> bool:
        """Sweep a worker until it is seen idle twice: a request that was just coming in may not have been counted.

        False if it answers and may not be idle. Nothing is sent once ``stop`` is set.
        """
        failures = idle = 0
        while not (stop.is_set() or self._closed):
            answers = False
            try:
                await self._post(worker, self.engine.aborts_all(), stop)
                answers = True
                load = await self._load_of(worker, stop)
            except EngineError as error:
                failures, idle = failures + 1, 0
                if (failures >= _FAILURES or not error.retryable) and not stop.is_set():
                    if worker not in self._gave_up:  # a rollout's end asks over and over
                        self._gave_up.add(worker)
                        log.warning("gave up the abort of all requests at %s, some may run on: %s", worker, error)
                    return not answers and error.status is None
            else:
                failures, idle = 0, 0 if load else idle + 1
                if idle > 1:
                    return True
            await stop.wait(_REPEAT_AFTER if idle else _SWEEP_AGAIN)
        return False

    async def _load(self) -> int:
        asked = [self._load_of(worker) for worker in await self.workers()]
        loads = await asyncio.gather(*asked, return_exceptions=True)  # all of them end, whichever fails
        for load in loads:
            if isinstance(load, BaseException):
                raise load
        return sum(cast("list[int]", loads))

    async def _load_of(self, worker: str, stop: AbortSignal | None = None) -> int:
        *others, last = self.engine.loads
        for path in others:
            with contextlib.suppress(_NotThere):
                return self.engine.read_load(await self._ask("GET", worker, path, stop=stop))
        return self.engine.read_load(await self._ask("GET", worker, last, stop=stop))

    async def _post(self, worker: str, posts: Sequence[Post], stop: AbortSignal | None = None) -> None:
        """Send the first of some requests that the worker has."""
        *others, last = posts
        for path, body in others:
            try:
                await self._ask("POST", worker, path, body, stop)
            except _NotThere:  # noqa: PERF203  # there are two at most
                self._missing.add((worker, path))
            else:
                return
        await self._ask("POST", worker, *last, stop)

    async def _find_workers(self) -> list[str]:
        self._reported.clear()
        if not self.engine.abort_by_disconnect:
            self._missing.clear()  # it may have been a proxy's word, before a worker that was restarted
        lasts = _WORKERS_LAST
        try:
            reply = await self._ask("GET", self._base, self.engine.workers_path)
            urls = [self._worker_url(worker) for worker in self.engine.read_workers(orjson.loads(reply))]
            self._known = list(filter(None, urls)) or self._known
        except EngineError as error:
            if error.status == 404:  # an engine without a router
                self._known = [self._base]
            else:  # a router in trouble: its workers are likely still those that were known
                lasts = _FAILURE_LASTS
        except orjson.JSONDecodeError:
            self._known = [self._base]
        self._search_again = self._loop.time() + lasts
        return self._known

    def _worker_url(self, worker: str) -> str | None:
        try:
            return base_url(worker)
        except ValueError as error:
            log.warning("the router lists a worker that cannot be spoken to: %s", error)
            return None

    async def _ask(
        self,
        method: str,
        base: str,
        path: str,
        body: dict[str, Any] | None = None,
        stop: AbortSignal | None = None,
    ) -> bytes:
        """Send one small request and give the reply's body.

        Raises:
            EngineError: no reply in time or before ``stop`` was set, or one with a status of 300 or more.
        """
        slots = self._slots[base]
        place = slots.request()
        connection = Connection(self._transport)

        def end() -> None:
            slots.leave(place)
            connection.close_soon()

        unsubscribe = (stop or AbortSignal()).subscribe(end)
        try:
            if not await slots.wait(place):
                raise EngineError(f"{base}{path} was not asked, as the client is being closed or the time is over")
            try:
                return await self._exchange(connection, method, base + path, body)
            finally:
                slots.release()
        finally:
            unsubscribe()

    async def _exchange(self, connection: Connection, method: str, url: str, body: dict[str, Any] | None) -> bytes:
        """Send one request and give its reply's body, in ``_SECONDS`` at most."""
        deadline = Deadline(connection.close_soon)
        deadline.set(_SECONDS)
        reply = bytearray()

        def take(chunk: bytes) -> None:
            reply.extend(chunk)
            if len(reply) > _LONGEST_REPLY:
                connection.close_soon()

        request = httpx.Request(
            method,
            url,
            headers=self._headers,
            content=None if body is None else orjson.dumps(body),
            extensions={"timeout": {"connect": _SECONDS}},
        )
        try:
            response = await connection.send(request)
            await connection.read(response, take)
        except Stopped:
            raise EngineError(f"no reply from {url} within {_SECONDS:g} s", retryable=True) from None
        except Exception as error:  # of any kind: a transport may be anybody's
            raise EngineError(f"no reply from {url}: {str(error) or type(error).__name__}", retryable=True) from error
        finally:
            deadline.set(None)
        if connection.stopped:
            raise EngineError(f"the reply from {url} did not end within {_SECONDS:g} s", retryable=True)
        if response.status_code >= 300:
            kind = _NotThere if response.status_code in _NOT_THERE else EngineError
            raise kind(error_message(bytes(reply)), status=response.status_code)
        return bytes(reply)

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if whoever asked has been cancelled
