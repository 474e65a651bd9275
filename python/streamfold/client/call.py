"""Call: one running generation request, to await, look into or abort."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    import numpy.typing as npt

    from streamfold._core import Generation
    from streamfold.client.runner import CallRunner

__all__ = ["Call"]


class Call:
    """One generation request that runs. Await it for its :class:`~streamfold.Generation`.

    Any number of tasks may await it, any number of times. It fails with a :class:`~streamfold.StreamfoldError`, whose
    ``partial`` holds what was received. A failure before the first token is retried: see :class:`~streamfold.Retries`.

    Cancelling a task that awaits the call aborts it as :meth:`abort` does. ``CancelledError`` is raised when the call
    has ended; what was received is still there, from :meth:`abort`. Cancelling that task again ends the drain.

    Made by :meth:`Client.start`.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    def __await__(self) -> Generator[object, None, Generation]:
        return self._runner.result().__await__()

    async def abort(self, drain: float | None = None) -> Generation:
        """Abort the call and return what was received. Safe to call at any time, from any task.

        The abort request goes to the engine first. The drain starts, and the socket is closed after it, when the engine
        has answered, or has answered nobody for 1 s. No request leaves afterwards; a retry pause ends at once. Aborting
        again ends the drain. After the call's end this returns what was received, also if the call failed; only
        awaiting the call raises the error.

        Args:
            drain: seconds to read on for the terminal event, which alone carries side data (routed experts, top-p; of
                vLLM the weight versions). None: ``timeouts.drain`` if side data was requested; else 0, with vLLM 0.1
                or ``timeouts.drain`` if that is less.

        Returns:
            The tokens so far. ``finish_reason`` is None, or the engine's if its terminal event arrived in time.

        Raises:
            ValueError: ``drain`` is negative or no finite number.
        """
        self._runner.abort_soon(drain)
        await self._runner.wait([self._runner])
        return self._runner.ended.result()

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far: int32 ``[n]``. At any time, also after the end."""
        return self._runner.token_ids()

    def snapshot(self) -> Generation:
        """Everything received so far, as a generation of its own, at any time. The call goes on undisturbed.

        It is what :meth:`abort` would return now if it did not drain: an empty one before the first token; while the
        response streams, without a finish reason and without what only the terminal event carries (``missing`` says
        what); after the end the generation of the call, also if it failed. It copies all tokens, 12 bytes each, and
        the text: look at :attr:`token_count` where a number is enough.
        """
        return self._runner.snapshot()

    async def wait_tokens(self, n: int) -> int:
        """Wait until ``n`` tokens have been received, or the call ends, also if it fails: only awaiting it raises.

        Nothing of Python runs for the events in between, so any number of tasks may wait, each for its own ``n``.
        Events are read in batches, up to 0.05 s apart. Cancelling this ends the wait, not the call.

        Args:
            n: tokens of this call, from its start.

        Returns:
            The tokens so far: ``n`` or more, fewer only if the call has ended.

        Raises:
            ValueError: ``n`` is negative.
            TypeError: ``n`` is no integer.
        """
        if operator.index(n) < 0:
            raise ValueError(f"n must be 0 or more tokens, not {n}")
        return await self._runner.wait_tokens(n)

    @property
    def rid(self) -> str:
        """Request id of the current try, as the engine knows it. Each try has a new one."""
        return self._runner.rid

    @property
    def tries(self) -> int:
        """Tries so far, the current one included; 0 while the call waits for its first slot."""
        return self._runner.tries

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        return self._runner.token_count

    @property
    def age(self) -> float:
        """Seconds since the start, waits for a slot and retry pauses included. Constant after the end."""
        return self._runner.age

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the current try's request was sent; 0.0 before the first token."""
        return self._runner.tokens_per_second

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from sending the current try's request. None before the first token."""
        return self._runner.ttft

    @property
    def last_event(self) -> float | None:
        """Seconds since the last event that brought a token. None before the first; constant after the end."""
        return self._runner.last_event

    @property
    def error(self) -> BaseException | None:
        """What the call failed with. None while it runs, and if it did not fail."""
        return self._runner.error

    @property
    def aborting(self) -> bool:
        """Whether the call is being aborted, or was."""
        return self._runner.aborting

    def __repr__(self) -> str:
        return f"<Call {self.rid}: {self.token_count} tokens, {self._runner.state}>"
