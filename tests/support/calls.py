"""What tests see of a call that its users do not: whether it has ended, and its runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfold import Call
    from streamfold.client.runner import CallRunner


def runner_of(call: Call) -> CallRunner:
    return call._runner


def has_ended(call: Call) -> bool:
    return call._runner.ended.done()


def abort_soon(call: Call, drain: float | None = None) -> None:
    """Start an abort without waiting for its end."""
    call._runner.abort_soon(drain)


async def wait_for_end(call: Call) -> None:
    """Wait for the end, also of a call that fails. Cancelling this aborts the call."""
    await call._runner.wait([call._runner])
