"""Which httpx transport carries a request."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

__all__ = ["chosen", "fresh"]


def chosen(transport: object, calls: int) -> Callable[[], httpx.AsyncBaseTransport]:
    """What gives the transport of each try: the one that was given, or with ``"httpx"`` a new one.

    Args:
        transport: a client's argument of that name.
        calls: how many calls may run at once.

    Raises:
        ValueError: it is no transport, or one in whose pool calls would wait for each other.
    """
    if transport == "httpx":
        return fresh
    if not isinstance(transport, httpx.AsyncBaseTransport):
        raise ValueError(f'transport must be "httpx" or an httpx.AsyncBaseTransport, not {transport!r}')
    _check_pool(transport, calls)
    given = transport
    return lambda: given


def fresh() -> httpx.AsyncHTTPTransport:
    """A transport of its own for a stream, or for a few small requests: it keeps no connection.

    At each step of a request httpx goes through all that its pool holds, so among thousands each has its own (which
    takes 15 us). And before the headers come httpx shows only fresh connections, so none is used twice.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(verify=_tls(), limits=limits)


@cache  # loading the certificates takes longer than all the rest
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _check_pool(transport: httpx.AsyncBaseTransport, calls: int) -> None:
    """Refuse a pool in which calls, and the aborts that are to end them, would wait for each other."""
    pool = getattr(transport, "_pool", None) if isinstance(transport, httpx.AsyncHTTPTransport) else None
    most = getattr(pool, "_max_connections", None)
    if most is not None and most <= calls:
        raise ValueError(
            f"the transport's pool has {most} connections for {calls} calls and their aborts: make it with "
            "limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)"
        )
