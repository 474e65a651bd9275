"""Which driver carries a client's requests. Each is imported only if it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from streamfold.client.drivers.base import Driver

__all__ = ["driver_factory"]


def driver_factory(transport: object, ssl_context: ssl.SSLContext | None, calls: int) -> Callable[[], Driver]:
    """Return what makes a client's driver, on the event loop that it runs on.

    Args:
        transport: the argument of :class:`~streamfold.Client`.
        ssl_context: the argument of :class:`~streamfold.Client`.
        calls: how many calls may run at once.

    Raises:
        ValueError: ``transport`` is none, its pool has no room for all calls, or ``ssl_context`` is given beside it.
    """
    if transport == "direct":
        return lambda: _direct(ssl_context)
    return _httpx(transport, ssl_context, calls)


def _direct(ssl_context: ssl.SSLContext | None) -> Driver:
    from streamfold.client.drivers.by_loop import SocketsByLoop  # noqa: PLC0415
    from streamfold.client.drivers.direct import DirectDriver  # noqa: PLC0415

    return DirectDriver(SocketsByLoop(ssl_context))


def _httpx(transport: object, ssl_context: ssl.SSLContext | None, calls: int) -> Callable[[], Driver]:
    import httpx  # noqa: PLC0415

    from streamfold.client.drivers.httpx_driver import HttpxDriver, check_pool  # noqa: PLC0415

    if transport == "httpx":
        return lambda: HttpxDriver(ssl_context=ssl_context)
    if not isinstance(transport, httpx.AsyncBaseTransport):
        raise ValueError(f'transport must be "direct", "httpx" or an httpx.AsyncBaseTransport, not {transport!r}')
    if ssl_context is not None:
        raise ValueError('ssl_context is for "direct" and "httpx": your own transport has its own')
    check_pool(transport, calls)
    given = transport
    return lambda: HttpxDriver(given)
