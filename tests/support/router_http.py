"""A plain HTTP client of the loopback router."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx

from support.loopback_http import PLAIN, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamfold.loopback import Router


@contextlib.asynccontextmanager
async def plain() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(**{**PLAIN, "timeout": 60}, limits=limits) as client:
        yield client


async def ask(router: Router, **more: Any) -> httpx.Response:
    async with plain() as client:
        return await client.post(f"{router.url}/generate", **{"json": payload(), **more})


def generate(router: Router, *, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"X-SMG-Routing-Key": key}
    return httpx.post(f"{router.url}/generate", json=payload(**body), headers=headers, **PLAIN)


def get(router: Router, path: str) -> httpx.Response:
    return httpx.get(f"{router.url}/{path}", **PLAIN)


def reported(router: Router, what: str) -> list[Any]:
    """One field of each worker, as the router lists them."""
    return [worker[what] for worker in get(router, "workers").json()["workers"]]
