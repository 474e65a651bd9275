"""Addresses of servers: their normal form, their Origin, and the header value of an API key."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast
from urllib.parse import quote, unquote

__all__ = ["BaseUrl", "Origin", "bearer", "normalize_base_url"]

Scheme = Literal["http", "https", "http+unix"]

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_HOST = re.compile(r"[a-z0-9._~-]+")
_PATH_SAFE = "/%:@!$&'()*+,;=~"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_SOCKET_PATH_BYTES = 107


class Origin(NamedTuple):
    """A server: what a connection is opened to.

    Attributes:
        scheme: ``"http"``, ``"https"`` or ``"http+unix"``.
        host: a name, or an address without brackets (``fe80::1%eth0`` with its zone); the path of a Unix socket.
        port: 0 for a Unix socket.
    """

    scheme: Scheme
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The ``Host`` header: in brackets if it is IPv6, without zone, and without the scheme's own port."""
        if self.scheme == "http+unix":
            return "localhost"
        return self._with_port(_bracketed(self.host.partition("%")[0]))

    def _with_port(self, host: str) -> str:
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.scheme == "http+unix":
            return f"http+unix://{quote(self.host, safe='')}"
        return f"{self.scheme}://{self._with_port(_bracketed(self.host))}"


@dataclass(frozen=True)
class BaseUrl:
    """The address of an engine or router: its origin, and the path before that of each request.

    Attributes:
        origin: the server.
        prefix: ``""``, or a path without a trailing slash.
    """

    origin: Origin
    prefix: str

    def __str__(self) -> str:
        return f"{self.origin}{self.prefix}"

    @classmethod
    @lru_cache(maxsize=1024)  # control requests name their worker by its address
    def parse(cls, address: str) -> BaseUrl:
        """Parse ``scheme://host[:port][/path]``; a missing scheme is ``http``.

        An IPv6 host may be given with or without brackets. The path of a Unix socket is percent-encoded, as in
        ``http+unix://%2Ftmp%2Fengine.sock``.

        Raises:
            ValueError: the address has no host, another scheme, credentials, a query or a fragment, or an IPv6 host
                without brackets whose last group may be the port.
        """
        scheme, authority, path = _split(address)
        if scheme == "http+unix":
            origin = Origin(scheme, _socket_path(address, authority), 0)
        else:
            host, port = _split_port(address, _with_brackets(authority))
            origin = Origin(scheme, _checked_host(address, host), _DEFAULT_PORTS[scheme] if port is None else port)
        segments = [quote(segment, safe=_PATH_SAFE) for segment in path.split("/") if segment]
        return cls(origin, "".join(f"/{segment}" for segment in segments))


def normalize_base_url(address: str) -> str:
    """Normalize the address of an engine or router, without a trailing slash. See :meth:`BaseUrl.parse`.

    Raises:
        ValueError: it is none.
    """
    return str(BaseUrl.parse(address))


def bearer(api_key: str) -> str:
    """The value of the Authorization header for an API key.

    Raises:
        ValueError: the key cannot be sent in a header. The message does not repeat it.
    """
    if not api_key or api_key != api_key.strip() or not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key is empty, or has surrounding spaces, a line break or a character that no header can hold"
        )
    return f"Bearer {api_key}"


def _split(address: str) -> tuple[Scheme, str, str]:
    """Scheme, authority and path of an address.

    Raises:
        ValueError: it has parts that a base URL must not have.
    """
    text = address.strip()
    scheme = "http"
    if match := _SCHEME.match(text):
        scheme, text = match[1].lower(), text[match.end() :]
    if scheme not in ("http", "https", "http+unix"):
        raise ValueError(f"{address!r}: the scheme must be http or https (or http+unix), not {scheme!r}")
    for mark, part in (("?", "query string"), ("#", "fragment")):
        if mark in text:
            raise ValueError(
                f"{address!r}: a base URL must not contain a {part}, as the path of each request is appended to it"
            )
    authority, _, path = text.partition("/")
    if "@" in authority:
        raise ValueError("a base URL holds no credentials: use api_key= or headers=")  # which are not repeated here
    if not path.isprintable():
        raise ValueError(f"{address!r}: the path has a character that no URL can hold")
    return cast("Scheme", scheme), authority, path


def _socket_path(address: str, authority: str) -> str:
    path = unquote(authority)
    if not path.startswith("/") or "\0" in path:
        raise ValueError(
            f"{address!r}: the host must be the percent-encoded absolute path of a Unix socket, as in "
            "http+unix://%2Ftmp%2Fengine.sock"
        )
    if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{address!r}: the path of a Unix socket has at most {_MAX_SOCKET_PATH_BYTES} bytes")
    return path


def _split_port(address: str, authority: str) -> tuple[str, int | None]:
    """Host and port of an authority whose IPv6 host has brackets."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]*))?", authority)
    if match is None:
        raise ValueError(f"{address!r}: the host, or the port, is invalid")
    host, port = match[1], match[2]
    if not port:
        return host, None
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address!r}: the port must be 1 to 65535")
    return host, int(port)


def _checked_host(address: str, host: str) -> str:
    """The host in lower case, without brackets; a name with other letters in its IDNA form."""
    if not host:
        raise ValueError(f"{address!r} has no host")
    if host.startswith("["):
        inner = host[1:-1]
        if not _is_ipv6(inner):
            raise ValueError(f"{address!r}: {host} is no IPv6 address")
        return inner
    if any(character.isspace() for character in host):
        raise ValueError(f"{address!r} has a space in its host")
    name = host.lower()
    if not name.isascii():
        import idna  # noqa: PLC0415  # it takes longer than everything else here, and is rarely needed

        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"{address!r}: {host} is no host name: {error}") from None
    if not _HOST.fullmatch(name):
        raise ValueError(f"{address!r}: {host} is no host name")
    return name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _with_brackets(authority: str) -> str:
    """Put an IPv6 host into brackets if it has none."""
    if authority.startswith("["):
        return authority.replace("%25", "%")  # the zone of fe80::1%eth0 is %25eth0 in URLs, and plain for the resolver
    if authority.count(":") < 2:
        return authority
    host, _, port = authority.rpartition(":")
    with_port = _is_ipv6(host) and port.isdecimal()
    if _is_ipv6(authority):
        if with_port:
            raise ValueError(
                f"{authority!r} is ambiguous, with or without a port: write http://[{authority}] or http://[{host}]:{port}"
            )
        return f"[{authority}]"
    return f"[{host}]:{port}" if with_port else authority


def _is_ipv6(host: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(host).scope_id
    except ValueError:
        return False
    return zone is None or ":" not in zone
