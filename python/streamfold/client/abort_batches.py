"""AbortBatches: posts the aborts of many requests to one worker, many in one go."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamfold.client.control_requests import EndpointMissing, Reply, Silent, Unreachable
from streamfold.client.deadlines import Deadline
from streamfold.client.sweep import REPEAT_SECONDS
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from streamfold.client.control_requests import ControlRequests
    from streamfold.client.deadlines import Deadlines
    from streamfold.engines.base import EngineSpec

__all__ = ["AbortBatches", "PendingAbort", "Shape"]

_logger = logging.getLogger("streamfold")

_TRANSIT_SECONDS = 0.5  # that a request may take to its engine through a busy router
_SILENT_SECONDS = 1.0  # without any answer: then no call waits for a worker any longer


class Shape(NamedTuple):
    """How posts to one worker are bundled: at most so many at once, of at most so many requests each."""

    posts: int
    requests: int


_LISTED = Shape(posts=1, requests=512)  # one list of ids; what is asked for meanwhile goes into the next
# A busy server takes turns between connections, and answers one request of each in its turn.
_PIPELINED = Shape(posts=16, requests=16)
_LEAST = 8  # in a row, rather than another connection
_SINGLE = Shape(posts=32, requests=1)


class PendingAbort:
    """The abort of one request, until each worker has answered it.

    Args:
        rid: the request id.
        has_tokens: whether the request has brought tokens. Otherwise it may not have reached the engine's queue.
        answered: called once: each worker has answered, failed, or is silent, or :meth:`finish` was called.

    Attributes:
        has_responded: whether headers were received, or never will be.
        is_finished: whether the terminal event was received: the request runs nowhere any more.
    """

    __slots__ = ("_answered", "_awaited", "has_responded", "is_early", "is_finished", "rid")

    def __init__(self, rid: str, *, has_tokens: bool, answered: Callable[[], object]) -> None:
        self.rid: str = rid
        self.is_early: bool = not has_tokens
        self.has_responded: bool = False
        self.is_finished: bool = False
        self._answered: Callable[[], object] | None = answered
        self._awaited: set[AbortBatches] = set()

    def finish(self) -> None:
        """The terminal event was received: no further worker is posted to, and none is waited for."""
        self.is_finished = True
        for batches in self._awaited:
            batches.unawait(self)
        self._awaited.clear()
        self._check()

    @classmethod
    def post_all(cls, aborts: Sequence[PendingAbort], workers: Sequence[AbortBatches]) -> None:
        """Post each of these aborts to each of these workers; none: they cannot be asked.

        Each worker begins at another place. A router does not tell which worker has a request: where its stream ends
        before all have their turn, the others are spared the post.
        """
        for abort in aborts:
            abort.wait_for(workers)
        running = [abort for abort in aborts if not abort.is_finished]
        for place, batches in enumerate(workers):
            start = place * len(running) // len(workers)
            batches.add(running[start:] + running[:start])

    # What AbortBatches calls.

    def wait_for(self, workers: Sequence[AbortBatches]) -> None:
        """Expect an answer of each of these workers."""
        if not self.is_finished:
            self._awaited.update(workers)
        self._check()

    def leave(self, batches: AbortBatches) -> None:
        """Nothing more is expected of a worker."""
        self._awaited.discard(batches)
        batches.unawait(self)
        self._check()

    def _check(self) -> None:
        if not self._awaited and self._answered is not None:
            answered, self._answered = self._answered, None
            answered()


class AbortBatches:
    """Posts aborts to one worker. Bound to the running event loop.

    What is asked for in one pass of the event loop leaves together: as one list of ids if the engine takes such, else
    as many small requests behind each other on a few connections. Where a server takes neither, one by one.

    Args:
        worker: its base URL.
        engine: what kind it is.
        requests: sends the posts.
        deadlines: of the client.
        spawn: makes a task that the client waits for.
    """

    def __init__(
        self,
        worker: str,
        *,
        engine: Callable[[], EngineSpec],
        requests: ControlRequests,
        deadlines: Deadlines,
        spawn: Callable[[Coroutine[Any, Any, int]], asyncio.Task[int]],
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._requests = requests
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[PendingAbort, bool]] = deque()  # each with whether it is the repeat
        self._posts = 0  # under way
        self._replies: dict[Reply, int] = {}  # to them, and how many have come of each when it was last looked at
        self._looking = 0  # rounds of repeats that are awaited
        self._flushing: asyncio.Handle | None = None
        self._idle: asyncio.Future[None] | None = None  # for who waits for the end
        self._is_single = False  # whether to post one by one
        self._missing: set[str] = set()  # paths that the worker does not have
        self._has_warned = False
        self._is_closing = False
        self._awaiting: dict[PendingAbort, float] = {}  # aborts whose calls wait for an answer, and since when
        self._silence = Deadline(deadlines, self._on_silence, self._look)
        self._heard_at = -math.inf

    def add(self, aborts: Sequence[PendingAbort]) -> None:
        """Post the aborts soon. Each is told when the worker has answered, or is silent."""
        if aborts and not self._awaiting:
            self._silence.set(_SILENT_SECONDS)
        self._awaiting.update(dict.fromkeys(aborts, self._loop.time()))
        self._enqueue([(abort, False) for abort in aborts])

    def forget(self) -> None:
        """What was found out about the worker may have changed: it may have been restarted."""
        self._has_warned = self._is_single = False
        if not self._engine().abort_by_disconnect:
            self._missing.clear()  # a proxy may have answered for a worker that was restarting

    def unawait(self, abort: PendingAbort) -> None:
        """The call waits for no answer any more."""
        self._awaiting.pop(abort, None)
        if not self._awaiting:
            self._silence.set(None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is posted or about to be."""
        return not (self._queue or self._posts or self._looking)

    async def wait_idle(self) -> None:
        """Post what was asked for; give up what a worker leaves unanswered that is silent or cannot be reached."""
        self._is_closing = True
        while not self.is_idle:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    def drop(self, reason: str) -> None:
        """Post nothing more of what was asked for; the log says so."""
        dropped = self._next(len(self._queue))
        if dropped:
            self._warn(f"{len(dropped)} aborts were not posted: {reason}")
        for abort, _ in dropped:
            abort.leave(self)
        self._check_idle()

    # The queue.

    def _enqueue(self, entries: Sequence[tuple[PendingAbort, bool]]) -> None:
        self._queue.extend(entries)
        if self._queue and self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        shape = self._shape()
        while self._queue and self._posts < shape.posts:
            share = max(_LEAST, math.ceil(len(self._queue) / (shape.posts - self._posts)))
            entries = self._next(min(share, shape.requests))
            if not entries:
                break
            self._posts += 1
            posting = self._spawn(self._post([abort.rid for abort, _ in entries]))
            posting.add_done_callback(partial(self._on_posted, entries))  # also if it is cancelled before it begins

    def _next(self, count: int) -> list[tuple[PendingAbort, bool]]:
        """Take so many from the queue, without those that need no post any more."""
        entries: list[tuple[PendingAbort, bool]] = []
        while self._queue and len(entries) < count:
            entry = self._queue.popleft()
            if not entry[0].is_finished:
                entries.append(entry)
        return entries

    def _shape(self) -> Shape:
        if self._is_single:
            return _SINGLE
        if self._engine().lists_aborts:
            return _LISTED
        return _PIPELINED if self._requests.pipelines else _SINGLE

    def _on_posted(self, entries: Sequence[tuple[PendingAbort, bool]], posting: asyncio.Task[int]) -> None:
        self._posts -= 1
        is_broken = posting.cancelled() or posting.exception() is not None  # the event loop is torn down
        count = len(entries) if is_broken else posting.result()
        early = []
        for abort, is_repeat in entries[:count]:
            if abort.is_finished:
                continue
            if abort.is_early and not (is_repeat or is_broken):
                early.append(abort)
            else:
                abort.leave(self)
        self._queue.extendleft(reversed(entries[count:]))
        if early:
            self._looking += 1
            self._loop.call_later(
                REPEAT_SECONDS, self._repeat, early, self._loop.time() + REPEAT_SECONDS + _TRANSIT_SECONDS
            )
        if is_broken:
            self.drop("the event loop is being torn down")
        else:
            self._flush()
        self._check_idle()

    def _repeat(self, early: Sequence[PendingAbort], until: float) -> None:
        """An engine ignores an abort that arrives before its request: post it again where that may have been so."""
        is_late = self._loop.time() >= until
        waiting: list[PendingAbort] = []
        due: list[PendingAbort] = []
        for abort in early:
            if not abort.is_finished:
                (due if abort.has_responded or is_late else waiting).append(abort)
        self._enqueue([(abort, True) for abort in due])
        if waiting:
            self._loop.call_later(REPEAT_SECONDS, self._repeat, waiting, until)
        else:
            self._looking -= 1
            self._check_idle()

    # Silence.

    def _look(self) -> None:
        """Read what has arrived: a busy event loop is not a silent worker."""
        for reply in self._replies:
            reply.urgent()

    def _on_silence(self) -> None:
        """Let no call wait for a worker that has answered nothing for a while; what was asked for is posted still."""
        now = self._loop.time()
        passed = {reply: reply.passed for reply in self._replies}
        if passed != self._replies:
            self._replies, self._heard_at = passed, now
        due = now - _SILENT_SECONDS
        if self._heard_at <= due:
            for abort in [abort for abort, since in self._awaiting.items() if since <= due]:
                abort.leave(self)
        if self._awaiting:  # in the order in which they came
            latest = max(self._heard_at, next(iter(self._awaiting.values())))
            self._silence.set(max(0.0, latest + _SILENT_SECONDS - now))

    def _check_idle(self) -> None:
        if self._idle is not None and self.is_idle:
            idle, self._idle = self._idle, None
            idle.set_result(None)

    # One post.

    async def _post(self, rids: Sequence[str]) -> int:
        """Post the aborts of these requests to the first path that the worker has.

        Returns:
            How many were posted, or could not be; the others have to be posted again.
        """
        missing: EndpointMissing | None = None
        for path, bodies in self._engine().aborts(rids):
            if path in self._missing:
                continue
            try:
                return await self._post_to(path, bodies, len(rids))
            except EndpointMissing as error:
                missing = None if path in self._missing else error  # concurrent aborts may find the same
                self._missing.add(path)
        if missing is not None:
            level = logging.INFO if self._engine().abort_by_disconnect else logging.WARNING
            _logger.log(level, "%s can abort a request only by closing its stream: %s", self._worker, missing)
        return len(rids)

    async def _post_to(self, path: str, bodies: Sequence[dict[str, Any]], count: int) -> int:
        reply, began_at = Reply(), self._loop.time()
        self._replies[reply] = 0
        try:
            await self._requests.post(self._worker, path, bodies, reply)
        except EndpointMissing:
            self._heard_at = self._loop.time()
            raise
        except EngineError as error:
            return self._after_failure(error, reply.passed, count, began_at)
        finally:
            self._replies.pop(reply, None)
        self._heard_at = self._loop.time()
        if len(bodies) == 1 or reply.passed + 1 == count:
            return count
        self._is_single = True  # it closes the connection before it has answered all
        return reply.passed + 1

    def _after_failure(self, error: EngineError, passed: int, count: int, began_at: float) -> int:
        """How many of ``count`` are dealt with; the others are posted again, one by one. Not to a silent worker."""
        if passed or not isinstance(error, (Silent, Unreachable)):
            self._heard_at = self._loop.time()
        is_silent = self._heard_at <= began_at  # on other connections too
        if count > 1 and not is_silent:
            self._is_single = True
            return passed
        self._warn(str(error))
        if is_silent and self._is_closing:
            self.drop("the client is being closed")
        return count

    def _warn(self, reason: str) -> None:
        """One warning for a dead worker, not one for each of 1,000 aborts."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("could not abort at %s, requests may keep running there: %s", self._worker, reason)
