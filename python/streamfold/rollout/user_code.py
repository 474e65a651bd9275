"""Functions of users in a rollout: ``sys.exit()`` in one of them is an error of that function, and ends no event loop.

In a task ``SystemExit`` would stop the event loop under all samples, and in a thread it would vanish. So would a
``GeneratorExit``. A ``KeyboardInterrupt`` is the user's Ctrl-C, and is let through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["UserCode", "exit_error"]


class UserCode:
    """The context in which a function of a user is called and awaited.

    Args:
        what: the function's part, such as ``"the reward function"``, for the message.
        function: itself, whose name is in the message too; None: there is only one.

    Raises:
        RuntimeError: the function raised ``SystemExit`` or ``GeneratorExit``, which is the cause.
    """

    def __init__(self, what: str, function: object = None) -> None:
        self._what = what
        self._function = function

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Replace what would end the process."""
        # A coroutine that is closed gets a GeneratorExit where it awaits: that comes from no frame beneath.
        is_closed = isinstance(error, GeneratorExit) and (traceback is None or traceback.tb_next is None)
        if isinstance(error, (SystemExit, GeneratorExit)) and not is_closed:
            raise exit_error(self._what, self._function, error) from error


def exit_error(what: str, function: object, error: BaseException) -> RuntimeError:
    """The error in place of one that would end the process or an event loop; it names the function."""
    name = "" if function is None else f" {getattr(function, '__qualname__', None) or type(function).__qualname__}"
    return RuntimeError(f"{what}{name} raised {error!r}")
