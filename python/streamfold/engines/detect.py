"""Detects which engine a URL is, for ``Client(engine="auto")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from streamfold.engines.sglang import Sglang
from streamfold.engines.vllm import Vllm, VllmCompletions
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from streamfold.engines.base import EngineSpec

__all__ = ["ENGINES", "detect"]

ENGINES: Final[dict[str, type[EngineSpec]]] = {kind.name: kind for kind in (Sglang, Vllm, VllmCompletions)}
"""Every engine by the name that :class:`~streamfold.Client` takes."""


async def detect(
    ask: Callable[[Literal["GET", "POST"], str, str, dict[str, Any] | None], Awaitable[bytes]],
    base: str,
    workers: Callable[[], Awaitable[Sequence[str]]],
) -> EngineSpec:
    """Detect the engine at a URL, or behind it if it is a router.

    Args:
        ask: sends a request (method, base URL, path, body) and returns the body of the reply.
        base: the server's base URL.
        workers: returns the base URLs of the router's workers, or the server's own.

    Raises:
        EngineError: the server cannot be reached, is busy, rejects the credentials, or is of no known kind.
    """
    busy: list[EngineError] = []  # a busy server's refusals do not tell which endpoints it has

    async def status(method: Literal["GET", "POST"], base: str, path: str, body: dict[str, Any] | None = None) -> int:
        try:
            await ask(method, base, path, body)
        except EngineError as error:
            if error.status in (None, 401):
                raise
            if error.retryable:
                busy.append(error)
            return error.status
        return 200

    async def first_of(bases: Iterable[str]) -> EngineSpec | None:
        for one in bases:
            before = len(busy)
            if await status("GET", one, "/model_info") == 200 or await status("GET", one, "/get_model_info") == 200:
                return Sglang()
            # SGLang has /v1/models too.
            if await status("GET", one, "/version") == 200 or (
                len(busy) == before and await status("GET", one, "/v1/models") == 200
            ):
                # An empty request gets 400 or 422 if the endpoint exists.
                answer = await status("POST", base, Vllm.path, {})
                if answer in (400, 422):
                    return Vllm()
                if answer in (403, 404, 405):
                    return VllmCompletions()
        return None

    found = await first_of([base]) or await first_of(worker for worker in await workers() if worker != base)
    if found is not None:
        return found
    if busy:
        raise busy[0]
    raise EngineError("the server answers like neither SGLang nor vLLM: pass engine= explicitly")
