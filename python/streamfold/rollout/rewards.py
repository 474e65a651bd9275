"""Calls reward functions: ``async`` ones in the event loop, others in threads, so that they do not block streams."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import math
import threading
from typing import TYPE_CHECKING, Any, Final

from streamfold.client.limits import Slots
from streamfold.rollout.user_code import UserCode, exit_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamfold.samples.sample import Sample

__all__ = ["RewardError", "Rewards", "as_number", "check_reward"]

_logger = logging.getLogger("streamfold")

_WHAT: Final = "the reward function"
# A future does not accept the first, and the others would end who awaits it.
_NO_RESULTS: Final = (StopIteration, SystemExit, GeneratorExit, asyncio.CancelledError)


class RewardError(ValueError):
    """A reward that cannot be trained on. The message names the sample.

    Attributes:
        kind: what is wrong, in the same words for every sample.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)  # the kind is no argument, so that str() and pickle do as for any error
        self.kind = kind


class Rewards:
    """Calls one reward function, in the running event loop or in at most ``threads`` threads at the same time.

    Each call gets a thread of its own, which ends with the call, so no idle thread is left. A thread cannot be
    cancelled: if the caller is, the function runs to its end, its result is discarded, and until then it counts as
    running. These threads are daemons: they do not delay the end of the process.

    Args:
        function: takes a sample, or a list of samples.
        threads: how many calls run at once.
    """

    def __init__(self, function: Callable[[Any], Any], threads: int) -> None:
        self._function = function
        self._slots = Slots(threads)
        self._running = 0
        call = getattr(function, "__call__", None)  # noqa: B004  # an object whose __call__ is async
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def compute(self, judged: Any) -> Any:  # noqa: ANN401  # a sample, or a list of them with a list of rewards
        """The result of the function for a sample or a list of samples.

        Raises:
            RuntimeError: the function raised ``SystemExit``, or another exception that ends an event loop or a task.
            Exception: anything else that the function raised.
        """
        with UserCode(_WHAT, self._function):
            made = self._function(judged) if self._is_async else await self._run_in_thread(judged)
            return await made if inspect.isawaitable(made) else made

    def cancel_error(self, error: BaseException) -> RuntimeError:
        """The error in place of a cancel that the function has raised by itself; it names the function."""
        return exit_error(_WHAT, self._function, error)

    def warn_if_running(self) -> None:
        """Log how many threads are still running whose callers were cancelled."""
        if self._running:
            _logger.warning(
                "%d calls of the reward function are still running in threads after the end of the rollout; their "
                "results are discarded, and computed again for the groups that were kept",
                self._running,
            )

    async def _run_in_thread(self, judged: Any) -> Any:  # noqa: ANN401
        await self._slots.wait(self._slots.request())
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            made: object = None
            error: BaseException | None = None
            try:
                made = context.run(self._function, judged)
            except _NO_RESULTS as failure:
                error = exit_error(_WHAT, self._function, failure)
                error.__cause__ = failure
            except BaseException as failure:  # noqa: BLE001  # raised where the result is awaited
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
                loop.call_soon_threadsafe(finish, made, error)

        def finish(made: object, error: BaseException | None) -> None:
            thread.join()  # returns at once: this call was its last act
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


def check_reward(sample: Sample, reward: object, key: str | None = None) -> None:
    """Check that a reward can be trained on.

    Args:
        sample: whose reward it is.
        reward: a finite number, also of numpy or torch, or a dict. In a dict every number must be finite, and there
            must be one; what is no number, such as a parsed answer, is a note.
        key: of the number in a dict that is trained on; None: not known.

    Raises:
        RewardError: it is anything else; the message names the sample and what is wrong.
    """
    if isinstance(reward, dict):
        numbers = {name: value for name, value in reward.items() if as_number(value) is not None}
        if key is not None:
            numbers[key] = reward.get(key)
        if not numbers:
            message = f"the reward of sample {sample.index} is {reward!r}: no value of this dict is a number"
            raise RewardError(message, "a dict without a number")
    else:
        numbers = {None: reward}
    for name, value in numbers.items():
        what = _flaw_of(value)
        if what is not None:
            which = "" if name is None else f"[{name!r}]"
            message = f"the reward{which} of sample {sample.index} is {value!r}: it must be a finite number"
            raise RewardError(message, f"the reward{which} is {what}")


def _flaw_of(value: object) -> str | None:
    """What a value is that is no finite number: NaN, infinite or of another type; None: it is one."""
    number = as_number(value)
    if number is None:
        return type(value).__name__
    if math.isfinite(number):
        return None
    return "nan" if math.isnan(number) else "inf"


def as_number(value: object) -> float | None:
    """A number as a float; None for anything else, arrays of several numbers too."""
    is_array = getattr(value, "ndim", None) not in (None, 0)
    if is_array or isinstance(value, complex) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:  # a huge int
        return math.inf
    except (TypeError, ValueError):
        return None
