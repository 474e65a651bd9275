"""The trainer's own HTTP: short requests, and a client that may be there or not."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx

from support.host import engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import SimpleNamespace

# No proxy, no certificates: everything is on this machine.
_OPTIONS: dict[str, Any] = {"timeout": 30.0, "trust_env": False, "verify": False}

_http_client: httpx.AsyncClient | None = None


def init_http_client(args: SimpleNamespace) -> None:
    """Open the client that all requests share; without it each has one of its own."""
    global _http_client  # noqa: PLW0603  # integrations read it under this name
    if _http_client is None:
        limit = httpx.Limits(max_connections=engine.current().option(args, "server_concurrency"))
        _http_client = httpx.AsyncClient(limits=limit, **_OPTIONS)


async def close_http_client() -> None:
    if _http_client is not None:
        await _http_client.aclose()
    forget_http_client()


def forget_http_client() -> None:
    global _http_client  # noqa: PLW0603  # as above
    _http_client = None


def get_rollout_num_engines(args: SimpleNamespace) -> int:
    engines: int = args.rollout_num_engines
    return engines


async def get(url: str) -> Any:
    async with _client() as client:
        return (await client.get(url)).raise_for_status().json()


async def post(url: str, payload: Any, headers: Mapping[str, str] | None = None) -> Any:
    """Post JSON; give the JSON of the answer, None for an empty one."""
    async with _client() as client:
        response = (await client.post(url, json=payload, headers=headers)).raise_for_status()
    return response.json() if response.content else None


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
    if _http_client is not None:
        yield _http_client
    else:
        async with httpx.AsyncClient(**_OPTIONS) as client:
            yield client
