"""One spelling for the many engine_spec in which people write an engine's address."""

from __future__ import annotations

import ipaddress
import re

import httpx

__all__ = ["base_url", "bearer"]

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


def base_url(address: str) -> str:
    """Normalise the address of an engine or router to ``scheme://host[:port][/path]``, without a trailing slash.

    A missing scheme is ``http``. IPv6 hosts may come with or without brackets, and leave with them.

    Raises:
        ValueError: the address has no host, a scheme other than http and https, credentials, a query or a
            fragment, or an IPv6 host without brackets whose last group could as well be the port.
    """
    text = address.strip()
    scheme, rest = "http", text
    if found := _SCHEME.match(text):
        scheme, rest = found[1].lower(), text[found.end() :]
    if scheme not in ("http", "https"):
        raise ValueError(f"{address!r}: the scheme must be http or https, not {scheme!r}")
    for sign, what in (("?", "query string"), ("#", "fragment")):
        if sign in rest:
            raise ValueError(f"{address!r}: a base URL has no {what}; each request's path is appended to it")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise ValueError("a base URL holds no credentials: use api_key= or headers=")  # and is not repeated here
    parts = [part for part in (slash + path).split("/") if part]
    try:
        url = httpx.URL("/".join([f"{scheme}://{_bracketed(authority)}", *parts]))
    except httpx.InvalidURL as error:
        raise ValueError(f"{address!r} is no URL: {error}") from None
    if not url.host or "%20" in url.host:
        raise ValueError(f"{address!r} names no host" if not url.host else f"{address!r}: a blank in the host")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ValueError(f"{address!r}: the port must be 1 to 65535")
    return str(url).rstrip("/")


def bearer(api_key: str) -> str:
    """The value of the header that carries a key.

    Raises:
        ValueError: a header cannot carry it. It is not repeated in the message.
    """
    if not api_key or api_key != api_key.strip() or not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key is empty, or holds a blank, an end of line or a character that no header can carry"
        )
    return f"Bearer {api_key}"


def _bracketed(authority: str) -> str:
    """Put brackets around an IPv6 host that has none."""
    if authority.startswith("["):
        return authority.replace("%25", "%")  # the zone of fe80::1%eth0, as URLs spell it; the resolver wants it plain
    if authority.count(":") < 2:
        return authority
    host, _, port = authority.rpartition(":")
    with_port = _is_ipv6(host) and port.isdecimal()
    if _is_ipv6(authority):
        if with_port:
            raise ValueError(
                f"{authority!r} can be an address, or one with a port: write http://[{authority}] or http://[{host}]:{port}"
            )
        return f"[{authority}]"
    return f"[{host}]:{port}" if with_port else authority


def _is_ipv6(host: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(host).scope_id
    except ValueError:
        return False
    return zone is None or ":" not in zone
