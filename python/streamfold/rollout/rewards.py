"""Reward functions: asynchronous ones as they are, others in threads, so that they do not hold up the streams."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from typing import TYPE_CHECKING, Any

from streamfold.client.limits import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rewards"]

log = logging.getLogger("streamfold")


class Rewards:
    """Calls a reward function, in the running event loop or in a thread, so many threads at the same time.

    Each call has a thread of its own, which ends with it: none waits for work, and none is left over. A thread cannot
    be cut off. Whoever awaits a call may be cancelled at once; the thread then comes to its end alone, its result is
    thrown away, and until then it counts. It never keeps the interpreter from ending.

    Args:
        function: takes what is to be judged.
        threads: how many run at once.
    """

    def __init__(self, function: Callable[[Any], Any], threads: int) -> None:
        self._function = function
        self._slots = Slots(threads)
        self._running = 0
        call = getattr(function, "__call__", None)  # noqa: B004  # not whether: how it is called
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def of(self, judged: Any) -> Any:  # noqa: ANN401  # a sample or a list of them; whatever the function gives
        """The reward. Raises what the function raises."""
        made = self._function(judged) if self._is_async else await self._in_thread(judged)
        return await made if inspect.isawaitable(made) else made

    def report(self) -> None:
        """Say so if threads are left that nobody waits for."""
        if self._running:
            log.warning(
                "%d calls of the reward function go on in their threads, after the rollout; their results are thrown "
                "away, and the rewards are computed again in the next one",
                self._running,
            )

    async def _in_thread(self, judged: Any) -> Any:  # noqa: ANN401
        await self._slots.wait(self._slots.request())
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            made: object = None
            error: BaseException | None = None
            try:
                made = context.run(self._function, judged)
            except StopIteration as stop:  # which no future takes
                error = RuntimeError("the reward function raised StopIteration")
                error.__cause__ = stop
            except BaseException as failure:  # noqa: BLE001  # for whoever awaits it
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(end, made, error)

        def end(made: object, error: BaseException | None) -> None:
            thread.join()  # it has nothing left to do
            self._running -= 1
            self._slots.release()
            if outcome.done():
                return
            if error is None:
                outcome.set_result(made)
            else:
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name="streamfold reward", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._slots.release()
            raise
        self._running += 1
        return await outcome
