"""Headers of requests: merging them, and checking those of users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamfold._core import RequestHead

if TYPE_CHECKING:
    from streamfold.client.drivers.base import Fields

__all__ = ["with_fields"]


def with_fields(fields: Fields, headers: Mapping[str, str] | None) -> Fields:
    """Add headers, which replace those of the same name, in any case.

    Raises:
        TypeError: ``headers`` is no mapping of text to text.
        ValueError: a name is no token or belongs to HTTP itself (``Content-Length``, ``Transfer-Encoding``,
            ``Connection``, ``Host``, ``Expect``, ``Upgrade``, ``TE``, ``Trailer``), or a value holds a control
            character or a character beyond latin-1. The message names the header.
    """
    if headers is None:
        return fields
    if not isinstance(headers, Mapping):  # which is not shown: it may hold a secret
        raise TypeError(f'headers must be a mapping, such as {{"X-Team": "math"}}; not a {type(headers).__name__}')
    if not headers:
        return fields
    named = {name.lower(): (name, value) for name, value in fields}
    for name, value in headers.items():
        _check(name, value)
        named[name.lower()] = (name, value)
    return tuple(named.values())


def _check(name: str, value: str) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        raise TypeError(f"the header {name!r} must be text, name and value; its value is a {type(value).__name__}")
    try:
        RequestHead.check_field(name, value)
    except UnicodeEncodeError:  # half of a surrogate pair, which Python's strings may hold
        raise ValueError(f"the header {name!r} holds a character that no encoding has") from None
