"""Base URLs of engines and routers in one normal form, and the header value of an API key."""

from __future__ import annotations

import ipaddress
import re

import httpx

__all__ = ["bearer", "normalize_base_url"]

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


def normalize_base_url(address: str) -> str:
    """Normalize the address of an engine or router to ``scheme://host[:port][/path]``, without a trailing slash.

    A missing scheme is ``http``. An IPv6 host may be given with or without brackets; the result has them.

    Raises:
        ValueError: the address has no host, a scheme other than http and https, credentials, a query or a
            fragment, or an IPv6 host without brackets whose last group may be the port.
    """
    scheme, authority, path = _split(address)
    segments = [segment for segment in path.split("/") if segment]
    try:
        url = httpx.URL("/".join([f"{scheme}://{_bracketed(authority)}", *segments]))
    except httpx.InvalidURL as error:
        raise ValueError(f"{address!r} is no URL: {error}") from None
    if not url.host:
        raise ValueError(f"{address!r} has no host")
    if "%20" in url.host:
        raise ValueError(f"{address!r} has a space in its host")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ValueError(f"{address!r}: the port must be 1 to 65535")
    return str(url).rstrip("/")


def _split(address: str) -> tuple[str, str, str]:
    """Scheme, authority and path of an address.

    Raises:
        ValueError: it has parts that a base URL must not have.
    """
    text = address.strip()
    scheme = "http"
    if match := _SCHEME.match(text):
        scheme, text = match[1].lower(), text[match.end() :]
    if scheme not in ("http", "https"):
        raise ValueError(f"{address!r}: the scheme must be http or https, not {scheme!r}")
    for mark, part in (("?", "query string"), ("#", "fragment")):
        if mark in text:
            raise ValueError(
                f"{address!r}: a base URL must not contain a {part}, as the path of each request is appended to it"
            )
    authority, _, path = text.partition("/")
    if "@" in authority:
        raise ValueError("a base URL holds no credentials: use api_key= or headers=")  # which are not repeated here
    return scheme, authority, path


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


def _bracketed(authority: str) -> str:
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
