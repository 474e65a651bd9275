"""Resolver: the addresses of a server's name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from streamfold.client.drivers.sockets import Address

if TYPE_CHECKING:
    import asyncio

    from streamfold.client.urls import Origin

__all__ = ["Found", "Resolver", "interleaved", "literal_address"]

# How long a result is used. Longer, and a moved server is missed; the system keeps results as its operator wants.
_KEPT_SECONDS = 1.0

Found = Callable[[Sequence[Address] | OSError], None]
"""Gets the addresses in the order in which to try them, at least one, or why there are none."""


class Resolver:
    """Looks names up, each once for all who wait. Literal addresses are not looked up.

    Args:
        loop: the event loop that all calls are made in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._kept: dict[tuple[str, int], tuple[float, Sequence[Address]]] = {}
        self._lookups: dict[tuple[str, int], _LookUp] = {}

    def known(self, origin: Origin) -> Sequence[Address] | None:
        """The addresses of ``origin`` if no look-up is needed, in the order in which to try them.

        Raises:
            OSError: the address has a zone, and no interface of that name exists.
        """
        if origin.scheme == "http+unix":
            return (Address(socket.AF_UNIX, origin.host, 0),)
        if (address := literal_address(origin.host, origin.port)) is not None:
            return (address,)
        kept = self._kept.get((origin.host, origin.port))
        if kept is None or self._loop.time() >= kept[0]:
            return None
        return kept[1]

    def look_up(self, origin: Origin, found: Found) -> Callable[[], None]:
        """Look the name of ``origin`` up. ``found`` is not called before this returns.

        Returns:
            What cancels: ``found`` is not called afterwards. Idempotent.
        """
        key = (origin.host, origin.port)
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = _LookUp(self._loop, key, self._end)
        return lookup.join(found)

    def forget(self, origin: Origin) -> None:
        """Look the name up again the next time: a connection to its addresses failed."""
        self._kept.pop((origin.host, origin.port), None)

    def _end(self, lookup: _LookUp, result: Sequence[Address] | OSError | None) -> None:
        """A look-up has ended; None: nobody waits for it any more."""
        if self._lookups.get(lookup.key) is lookup:
            del self._lookups[lookup.key]
        now = self._loop.time()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[0] > now}
        if result is not None and not isinstance(result, OSError):
            self._kept[lookup.key] = (now + _KEPT_SECONDS, result)


class _LookUp:
    """One look-up and those who wait for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: tuple[str, int],
        on_end: Callable[[_LookUp, Sequence[Address] | OSError | None], None],
    ) -> None:
        self.key = key
        self._on_end = on_end
        self._waiting: dict[object, Found] = {}
        self._task = loop.create_task(self._run(loop))

    def join(self, found: Found) -> Callable[[], None]:
        """Let ``found`` get the result. Returns what cancels that."""
        ticket = object()
        self._waiting[ticket] = found

        def leave() -> None:
            if self._waiting.pop(ticket, None) is not None and not self._waiting and not self._task.done():
                self._on_end(self, None)
                if not self._task.get_loop().is_closed():
                    self._task.cancel()

        return leave

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        result: Sequence[Address] | OSError
        try:
            result = await _addresses(loop, *self.key)
        except OSError as error:
            result = error
        self._on_end(self, result)
        while self._waiting:  # one of them may cancel another
            self._waiting.pop(next(iter(self._waiting)))(result)


async def _addresses(loop: asyncio.AbstractEventLoop, host: str, port: int) -> Sequence[Address]:
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty or overlong label
        raise OSError(f"it is no host name: {error}") from None
    addresses = [
        Address(family, str(where[0]).partition("%")[0], port, int(where[3]) if len(where) == 4 else 0)
        for family, _, _, _, where in infos
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
    if not addresses:
        raise OSError("it has no IPv4 or IPv6 address")
    return interleaved(list(dict.fromkeys(addresses)))


def interleaved(addresses: Sequence[Address]) -> list[Address]:
    """The addresses with their families in turns, beginning with the first one's (RFC 8305, section 4)."""
    first = addresses[0].family
    mine = [address for address in addresses if address.family == first]
    others = [address for address in addresses if address.family != first]
    result: list[Address] = []
    while mine or others:
        result += [*mine[:1], *others[:1]]
        mine, others = mine[1:], others[1:]
    return result


def literal_address(host: str, port: int) -> Address | None:
    """The socket address of a literal IPv4 or IPv6 address; None if ``host`` is a name.

    Raises:
        OSError: the address has a zone, and no interface of that name exists.
    """
    plain, _, zone = host.partition("%")
    address = _literal(plain, port)
    if address is None or not zone:
        return address
    return address._replace(scope_id=int(zone) if zone.isdecimal() else socket.if_nametoindex(zone))


@lru_cache(maxsize=1024)
def _literal(host: str, port: int) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return Address(socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address), port)
