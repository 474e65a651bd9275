"""How connections speak TLS when the user gives no context."""

from __future__ import annotations

import ssl
from functools import cache
from typing import TYPE_CHECKING

import certifi

if TYPE_CHECKING:
    from streamfold.client.urls import Origin

__all__ = ["server_name", "verifying"]


@cache  # loading the certificates takes longer than everything else
def verifying() -> ssl.SSLContext:
    """A context that knows the certificates of certifi, whatever the environment says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not the default one, which reads environment variables
    context.load_verify_locations(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def server_name(origin: Origin) -> str:
    """The name that the server's certificate has to hold: without the zone of an IPv6 address."""
    return origin.host.partition("%")[0]
