"""AbortSignal: ends calls, retry pauses and resumes of one host, rollout or client from one flag.

It carries the ``aborted`` argument of :meth:`Client.start`, :meth:`Client.generate` and ``complete()``. A trainer's
flag can only be read, so waiting for it needs polling: each signal polls its flag at most once per event loop, and
only while something waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AbortSignal"]

_POLL_SECONDS: Final = 0.05


class AbortSignal:
    """Whether to abort: set by :meth:`set`, read from a host's flag, or taken from other signals.

    It is itself an ``aborted`` callable. May be used on several event loops; :meth:`set` may be called from any
    thread. A signal that was set by :meth:`set` stays set. A host's flag may become false again.

    Args:
        flag: a host's flag, for example ``lambda: state.aborted``. It is called often, and must be fast.
        parts: the signal is also set while one of these is. ``first | second`` combines two.
    """

    __slots__ = ("_flag", "_is_set", "_parts", "_watches")

    def __init__(self, flag: Callable[[], bool] | None = None, *, parts: tuple[AbortSignal, ...] = ()) -> None:
        self._flag = flag
        self._parts = parts
        self._is_set = False
        self._watches: dict[asyncio.AbstractEventLoop, _Watch] = {}

    @classmethod
    def of(cls, aborted: Callable[[], bool] | None) -> AbortSignal:
        """Return ``aborted`` if it is a signal, else a signal that reads it. None: a signal that is never set."""
        return aborted if isinstance(aborted, AbortSignal) else cls(aborted)

    def __or__(self, other: AbortSignal) -> AbortSignal:
        return AbortSignal(parts=(self, other))

    def __call__(self) -> bool:
        """Same as :meth:`is_set`, so that a signal can be passed on as ``aborted``."""
        return self.is_set()

    def is_set(self) -> bool:
        """Read the flag, and all parts, now. An exception of the flag is raised here."""
        return self._is_set_itself() or any(part.is_set() for part in self._parts)

    def _is_set_itself(self) -> bool:
        return self._is_set or (self._flag is not None and bool(self._flag()))

    def set(self) -> None:
        """Set it for good, and call its subscribers. Parts, and a host's flag, stay as they are."""
        if self._is_set:
            return
        self._is_set = True
        for watch in list(self._watches.values()):
            watch.observe_from_any_thread(is_set=True)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it was.

        Raises:
            Exception: what the host's flag raised.
        """
        if self.is_set():
            return True
        if timeout is not None and timeout <= 0:
            return False
        became_set: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def resolve() -> None:
            if not became_set.done():
                became_set.set_result(None)

        def fail(error: Exception) -> None:
            if not became_set.done():
                became_set.set_exception(error)

        unsubscribe = self.subscribe(resolve, on_error=fail)
        try:
            await asyncio.wait({became_set}, timeout=timeout)
        finally:
            unsubscribe()
            if not became_set.done():
                became_set.cancel()
        if became_set.cancelled():
            return self.is_set()
        became_set.result()
        return True

    def subscribe(
        self, callback: Callable[[], object], *, on_error: Callable[[Exception], object] | None = None
    ) -> Callable[[], None]:
        """Call ``callback`` in the running event loop each time the signal becomes set; soon, if it is set now.

        A flag that is true for less than the polling interval (50 ms) may be missed.

        Args:
            callback: may subscribe and unsubscribe. With several parts it may be called once for each.
            on_error: gets what the host's flag raised, which ends the subscription to that flag. None: the event
                loop's exception handler gets it.

        Returns:
            A function that ends the subscription: ``callback`` is not called afterwards.
        """
        subscriber = _Subscriber(callback, on_error)
        with contextlib.ExitStack() as undo:
            for part in self._parts:
                undo.callback(part.subscribe(callback, on_error=on_error))
            watch = self._watch()  # first: another thread may set the signal from here on
            undo.callback(self._unsubscribe, watch, subscriber)
            is_set = self._is_set_itself()
            watch.observe(is_set=is_set)
            watch.add(subscriber, is_set=is_set)
            return undo.pop_all().close
        raise AssertionError  # for the type checker: nothing above is suppressed

    def _unsubscribe(self, watch: _Watch, subscriber: _Subscriber) -> None:
        watch.remove(subscriber)
        if not watch.subscribers and self._watches.get(watch.loop) is watch:
            del self._watches[watch.loop]

    def _watch(self) -> _Watch:
        loop = asyncio.get_running_loop()
        if loop not in self._watches:
            for closed in [other for other in list(self._watches) if other.is_closed()]:
                del self._watches[closed]
            self._watches[loop] = _Watch(loop, None if self._flag is None else self._is_set_itself)
        return self._watches[loop]


class _Subscriber:
    """One call of :meth:`AbortSignal.subscribe`."""

    __slots__ = ("callback", "on_error")

    def __init__(self, callback: Callable[[], object], on_error: Callable[[Exception], object] | None) -> None:
        self.callback = callback
        self.on_error = on_error


class _Watch:
    """The subscribers of one signal on one event loop, and the timer that reads the host's flag for them.

    The timer runs while there are subscribers. It is no task: nothing is left to wait for when it is cancelled.
    """

    __slots__ = ("_poll_flag", "_timer", "_was_set", "loop", "subscribers")

    def __init__(self, loop: asyncio.AbstractEventLoop, poll_flag: Callable[[], bool] | None) -> None:
        self.loop = loop
        self.subscribers: dict[_Subscriber, None] = {}  # in the order of their subscription
        self._poll_flag = poll_flag
        self._was_set = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, subscriber: _Subscriber, *, is_set: bool) -> None:
        self.subscribers[subscriber] = None
        if is_set:
            self.loop.call_soon(self._call, subscriber)
        if self._timer is None and self._poll_flag is not None:
            self._timer = self.loop.call_later(_POLL_SECONDS, self._poll, self._poll_flag)

    def remove(self, subscriber: _Subscriber) -> None:
        self.subscribers.pop(subscriber, None)
        if not self.subscribers:
            self._stop()

    def observe(self, *, is_set: bool) -> None:
        """Note whether the signal is set; call the subscribers if it has become set."""
        became_set, self._was_set = is_set and not self._was_set, is_set
        if became_set:
            for subscriber in self.subscribers:
                self.loop.call_soon(self._call, subscriber)

    def observe_from_any_thread(self, *, is_set: bool) -> None:
        if _running_loop() is self.loop:
            self.observe(is_set=is_set)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(lambda: self.observe(is_set=is_set))

    def _call(self, subscriber: _Subscriber) -> None:
        if subscriber in self.subscribers:  # it may have been removed since
            subscriber.callback()

    def _poll(self, flag: Callable[[], bool]) -> None:
        self._timer = self.loop.call_later(_POLL_SECONDS, self._poll, flag)
        try:
            is_set = flag()
        except Exception as error:  # noqa: BLE001  # passed on to those who wait for the flag
            self._fail(error)
        else:
            self.observe(is_set=is_set)

    def _fail(self, error: Exception) -> None:
        subscribers = list(self.subscribers)
        self.subscribers.clear()
        self._stop()
        for subscriber in subscribers:
            if subscriber.on_error is not None:
                self.loop.call_soon(subscriber.on_error, error)
        if not all(subscriber.on_error for subscriber in subscribers):
            self.loop.call_exception_handler({"message": "the flag of an AbortSignal raised", "exception": error})

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
