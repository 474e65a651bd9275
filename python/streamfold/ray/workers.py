"""``RolloutWorkers``: a rollout by many processes, seen from the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

import ray

from streamfold.ray.buffer import BufferActor
from streamfold.ray.worker import Setup, Worker, means_death, unpack_group
from streamfold.rollout.rollout import RolloutResult

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from streamfold.client.client import Client
    from streamfold.rollout.buffer import Buffer
    from streamfold.rollout.callbacks import Filter, Generate, RewardFunction, SampleFilter
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group

__all__ = ["RolloutWorkers"]

_logger = logging.getLogger("streamfold")

_CALLS: Final = 1_000_000  # at one actor at the same time: each group in flight is one


class RolloutWorkers:
    """Generates groups in many processes on Ray, which share one buffer.

    ::

        source = functools.partial(make_buffer, "prompts.jsonl")  # returns a Buffer
        client = functools.partial(Client, "http://127.0.0.1:30000")
        async with RolloutWorkers(8, client=client, config=config, source=source, reward=reward) as workers:
            while training:
                groups = await workers.next(64)
                ...
                await workers.pause()           # requests are aborted, what they generated is kept
                ...                             # load new weights into the engines
                await workers.set_version(version)
                await workers.resume()

    or, with nothing in flight while the trainer trains, ``result = await workers.run(rollout_id)``.

    Each worker is an actor with a client and an event loop. One more actor holds the buffer: all groups are drawn from
    it, and stay in it until the trainer has got them. What a worker has generated of them is reported there each half
    second, with the tokens that the open calls of :func:`~streamfold.complete` have received so far. If a worker dies,
    Ray starts it again, and others continue with its groups from these tokens. Generated again is only what was
    streamed since the last report: half a second, or 20 times the time that a report of all running samples takes, if
    that is longer; and what calls stream that a ``generate`` function makes in another way. A group with which
    ``config.group_tries`` workers die fails. Between processes samples are arrays in Ray's object store, in the form of
    a buffer's file.

    If all workers have died for good, :meth:`run` and :meth:`next` raise; the groups are with the buffer. If the
    buffer's actor dies, all calls raise Ray's ``ActorDiedError``, and everything is lost that came after the last
    :meth:`save`: save often, to a disk that outlives the node, with a ``source`` that loads the file.

    The arguments are pickled. Exceptions of these functions are raised or logged with their traceback in the worker.

    Args:
        num_workers: how many workers there are.
        client: makes the client of a worker, as ``functools.partial(Client, url)``.
        config: as for a :class:`~streamfold.Rollout`. The workers share ``concurrency`` evenly.
        source: makes the buffer, in its actor.
        reward: the reward function, called in the workers.
        filter: the dynamic filter, called at the buffer.
        sample_filter: called at the buffer.
        generate: takes a worker's client, and makes its generate function, in place of :func:`~streamfold.complete`.
        in_flight: how many groups are in flight on all workers together, for :meth:`next`: see
            :class:`~streamfold.Pool`.
        version: the initial weight version.
        worker_options: of Ray for the workers' actors, as ``{"num_cpus": 1, "max_restarts": -1}``, which is the
            default: they are always started again.

    Raises:
        ValueError: ``num_workers`` is below 1, or ``config`` has a ``trace``: each worker's client needs its own.
        TypeError: ``client`` or ``source`` cannot be called.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        client: Callable[[], Client],
        config: RolloutConfig,
        source: Callable[[], Buffer],
        reward: RewardFunction | None = None,
        filter: Filter | None = None,  # noqa: A002  # the field's name for it
        sample_filter: SampleFilter | None = None,
        generate: Callable[[Client], Generate] | None = None,
        in_flight: int | None = None,
        version: int = 0,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        for name, made, given in (("client", "Client", client), ("source", "Buffer", source)):
            if not callable(given):
                raise TypeError(f"{name} must be a function that makes a {made}, as functools.partial({made}, ...)")
        if config.trace is not None:
            raise ValueError(
                f"config has a trace ({config.trace.path}), which is one file of one process: leave it out, and let "
                'the function client make one for each worker: Client(url, trace=Trace(f"trace-{os.getpid()}.json"))'
            )
        self._num_workers = num_workers
        self._version = version
        self._config = config
        self._setup = Setup(client, config, reward, generate)
        self._buffer_arguments = (source, filter, sample_filter, in_flight)
        self._options: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1, **(worker_options or {})}
        self._actors: list[Any] = []
        self._buffer: Any = None
        self._pids: list[int] = []
        self._tickets = itertools.count()  # of calls that are given groups
        self._returns: set[asyncio.Task[None]] = set()  # of groups that a cancelled call was given

    def __repr__(self) -> str:
        state = "open" if self._buffer is not None else "closed"
        return f"<RolloutWorkers: {self._num_workers}, {state}: {self._config!r}>"

    async def __aenter__(self) -> Self:
        """Start the actors, and open their clients; Ray is started if it is not.

        Raises:
            StreamfoldError: a worker has died meanwhile, and Ray has not started it again within a minute.
            Exception: what ``client`` or ``source`` raised.
        """
        options = {"max_concurrency": _CALLS}
        worker: Any = ray.remote(Worker)
        buffer: Any = ray.remote(BufferActor)
        try:
            self._actors = [
                worker.options(**options, **self._options).remote(self._setup, self._num_workers)
                for _ in range(self._num_workers)
            ]
            self._buffer = buffer.options(num_cpus=0, **options).remote(self._setup, *self._buffer_arguments)
            self._pids = await self._buffer.open.remote(self._actors, self._version)
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As :meth:`aclose`."""
        await self.aclose()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids at their start, each on its node."""
        return list(self._pids)

    async def run(self, rollout_id: int = 0) -> RolloutResult:
        """One rollout, as :meth:`Rollout.run <streamfold.Rollout.run>`: at its end nothing is in flight.

        Raises:
            StreamfoldError: too many groups failed, all workers have died for good, or :meth:`next` was called before.
            Exception: what the source or a filter raised.
        """
        packed, metrics, shortage = await self._fetch("run", rollout_id)
        return RolloutResult([unpack_group(each) for each in packed], metrics, shortage)

    async def next(self, n: int) -> list[Group]:
        """Wait for ``n`` finished groups, as :meth:`Pool.next <streamfold.Pool.next>`; others stay in flight.

        Raises:
            StreamfoldError: too many groups failed, or all workers have died for good.
            Exception: what the source or a filter raised.
        """
        return [unpack_group(each) for each in await self._fetch("next", n)]

    async def pause(self) -> None:
        """Abort what is in flight on all workers, and wait for it; nothing starts until :meth:`resume`."""
        await self._open().pause.remote()

    async def resume(self) -> None:
        """Start groups again after :meth:`pause`."""
        await self._open().resume.remote()

    async def set_version(self, version: int) -> None:
        """Set the weight version at the buffer and on all workers; see :attr:`Pool.version <streamfold.Pool>`."""
        await self._open().set_version.remote(version)
        self._version = version

    async def metrics(self) -> dict[str, float]:
        """The metrics of :meth:`next` since the last call; those of :meth:`run` are in its result."""
        metrics: dict[str, float] = await self._open().metrics.remote()
        return metrics

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write the buffer to a file on the node of its actor: see :meth:`Buffer.save <streamfold.Buffer.save>`."""
        await self._settle()
        await self._open().save.remote(str(path))

    async def aclose(self) -> None:
        """Abort everything, close the clients, and end all actors."""
        buffer, self._buffer = self._buffer, None
        try:
            if buffer is not None:
                await self._settle()
                await buffer.close.remote()
        except ray.exceptions.RayError as error:
            if not means_death(error):
                raise
            _logger.warning("the buffer's actor has died: %s", error)
        finally:
            self._kill(buffer)
            await self._settle()

    def _open(self) -> Any:  # noqa: ANN401  # an actor handle
        if self._buffer is None:
            raise RuntimeError("the workers are not open: use them inside `async with RolloutWorkers(...) as workers:`")
        return self._buffer

    def _kill(self, buffer: Any = None) -> None:  # noqa: ANN401  # an actor handle
        for actor in (*self._actors, buffer or self._buffer):
            if actor is not None:
                ray.kill(actor)
        self._actors, self._buffer = [], None

    async def _fetch(self, method: str, argument: int) -> Any:  # noqa: ANN401  # what the method returns
        """Await a call that gives groups. If this is cancelled so is the call, and groups that it was given return."""
        await self._settle()
        buffer, ticket = self._open(), next(self._tickets)
        call = getattr(buffer, method).remote(argument, ticket)
        result = asyncio.ensure_future(call)
        try:
            value = await asyncio.shield(result)
        except asyncio.CancelledError:
            ray.cancel(call, recursive=False)  # the groups that it waits for go on
            task = asyncio.get_running_loop().create_task(self._return(buffer, result, ticket))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)
            raise
        buffer.received.remote(ticket)
        return value

    async def _return(self, buffer: Any, result: asyncio.Future[Any], ticket: int) -> None:  # noqa: ANN401
        """Return the groups of a call that was cancelled, if it has ended all the same."""
        with contextlib.suppress(Exception, asyncio.CancelledError):  # whatever it raised
            await result
        with contextlib.suppress(ray.exceptions.RayError):
            await buffer.give_back.remote(ticket)

    async def _settle(self) -> None:
        """Wait until calls that were cancelled have ended."""
        if self._returns:
            await asyncio.wait(self._returns)
