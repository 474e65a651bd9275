"""Checks of the kinds of arguments, whose messages name the argument, what it got, and what to give instead."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

__all__ = ["check_kind", "check_mapping"]


def check_kind(name: str, value: object, kind: type, such_as: str) -> None:
    """Raise TypeError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {_with_article(kind)}, such as {such_as}; not {reprlib.repr(value)}")


def check_mapping(name: str, value: object, such_as: str) -> None:
    """Raise TypeError unless ``value`` is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, such as {such_as}; not {reprlib.repr(value)}")


def _with_article(kind: type) -> str:
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return f"{article} {kind.__name__}"
