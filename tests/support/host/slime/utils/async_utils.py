"""One event loop for the trainer's whole life, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

_running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in that thread, and wait for it here."""
    global _running  # noqa: PLW0603  # it is one for the process
    if _running is None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        _running = loop, thread
    return asyncio.run_coroutine_threadsafe(work, _running[0]).result()


def forget() -> None:
    """End the loop, which the real one never does."""
    global _running  # noqa: PLW0603  # as above
    if _running is None:
        return
    loop, thread = _running
    asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    _running = None
