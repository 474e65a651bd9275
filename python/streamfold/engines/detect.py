"""Finds out what a server is that nobody has named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.engines.base import Sglang, Vllm, VllmCompletions
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from streamfold.engines.base import Engine

__all__ = ["discover"]


async def discover(
    ask: Callable[[str, str, str, dict[str, Any] | None], Awaitable[bytes]],
    base: str,
    workers: Callable[[], Awaitable[Sequence[str]]],
) -> Engine:
    """Find out what a server is, or what the engines behind it are if it is a router that does not tell.

    Args:
        ask: takes method, base URL, path and body, and gives the reply's body.
        base: of the server.
        workers: gives the base URLs of the engines behind it, or its own.

    Raises:
        EngineError: it cannot be reached, is busy, does not let us in, or is none of those that are known.
    """
    busy: list[EngineError] = []  # what another moment may answer otherwise tells nothing of what is there

    async def status(method: str, base: str, path: str, body: dict[str, Any] | None = None) -> int:
        try:
            await ask(method, base, path, body)
        except EngineError as error:
            if error.status in (None, 401):
                raise
            if error.retryable:
                busy.append(error)
            return error.status
        return 200

    async def first_of(bases: Iterable[str]) -> Engine | None:
        for one in bases:
            before = len(busy)
            if await status("GET", one, "/model_info") == 200 or await status("GET", one, "/get_model_info") == 200:
                return Sglang()
            # The second one SGLang has too.
            if await status("GET", one, "/version") == 200 or (
                len(busy) == before and await status("GET", one, "/v1/models") == 200
            ):
                # A request without anything is refused with another status where the endpoint is there.
                told = await status("POST", base, Vllm.path, {})
                if told in (400, 422):
                    return Vllm()
                if told in (403, 404, 405):
                    return VllmCompletions()
        return None

    found = await first_of([base]) or await first_of(worker for worker in await workers() if worker != base)
    if found is not None:
        return found
    if busy:
        raise busy[0]
    raise EngineError("the server is neither SGLang nor vLLM, as far as it tells: name the engine")
