"""Options of a fault's rule: their types, their checks, and numbers drawn from a range.

Each function returns the metadata of a dataclass field::

    seconds: float | None = field(default=1.0, metadata=options.number(none=True))
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = [
    "Option",
    "anything",
    "choice",
    "count",
    "flag",
    "headers",
    "number",
    "numbers",
    "options",
    "path",
    "text",
]

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"([!-~\x80-\xff]([ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?")
_FRAMING = ("content-length", "transfer-encoding")


@dataclass(frozen=True)
class Option:
    """One key: ``wanted`` describes what ``fits`` accepts; ``draw`` makes one value of a range."""

    wanted: str
    fits: Callable[[Any], bool]
    draw: Callable[[Any, random.Random], Any] = lambda value, _chance: value


Metadata = dict[str, Option]


def options(cls: type) -> dict[str, Option]:
    """Return the options among the fields of a dataclass, by name."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(cls) if "option" in f.metadata}


def count(
    least: int = 0, most: float = math.inf, *, none: bool = False, ranges: Literal["drawn", "kept", "refused"] = "drawn"
) -> Metadata:
    """A whole number, or a pair of them to draw one from; with "kept" the pair itself is the value."""

    def draw(value: Any, chance: random.Random) -> Any:  # noqa: ANN401  # any value that fits
        if not is_list(value) or ranges == "kept":
            return value
        return value[0] + math.floor(chance.random() * (value[1] + 1 - value[0]))

    def fits(value: Any) -> bool:  # noqa: ANN401  # any JSON
        return _is_whole(value) and least <= value <= most

    span = _span(least, most)
    return {"option": _ranged(Option(f"a whole number {span}", fits, draw), none=none, ranges=ranges != "refused")}


def number(most: float = math.inf, *, none: bool = False, ranges: bool = True) -> Metadata:
    """A number from 0 on, or a pair of them to draw one from."""

    def draw(value: Any, chance: random.Random) -> Any:  # noqa: ANN401  # any value that fits
        return value[0] + chance.random() * (value[1] - value[0]) if is_list(value) else value

    def fits(value: Any) -> bool:  # noqa: ANN401  # any JSON
        return (_is_whole(value) or isinstance(value, float)) and 0 <= value <= most

    return {"option": _ranged(Option(f"a number {_span(0, most)}", fits, draw), none=none, ranges=ranges)}


def numbers() -> Metadata:
    """A whole number, or a list of any length."""

    def fits(value: Any) -> bool:  # noqa: ANN401  # any JSON
        return all(_is_whole(n) and n >= 0 for n in (value if is_list(value) else [value]))

    return {"option": Option("a whole number from 0 on, or a list of them", fits)}


def choice(*words: str) -> Metadata:
    """One word of several."""
    return {"option": Option(f"one of {', '.join(words)}", lambda value: value in words)}


def flag() -> Metadata:
    """A boolean."""
    return {"option": Option("true or false", lambda value: isinstance(value, bool))}


def text(*, none: bool = False) -> Metadata:
    """A string."""

    def fits(value: object) -> bool:
        return (isinstance(value, str) and _is_json(value)) or (none and value is None)

    return {"option": Option(f"a string{' or null' if none else ''}", fits)}


def path() -> Metadata:
    """A path of the engine, or null."""

    def fits(value: object) -> bool:
        return value is None or (isinstance(value, str) and value.startswith("/"))

    return {"option": Option('a string like "/generate", or null', fits)}


def headers() -> Metadata:
    """The headers of a response, except those that give its length."""

    def fits(value: object) -> bool:
        return isinstance(value, dict) and all(
            isinstance(field, str)
            and _HEADER_NAME.fullmatch(name)
            and name.lower() not in _FRAMING
            and _HEADER_VALUE.fullmatch(field)
            for name, field in value.items()
        )

    wanted = 'an object of strings, as in {"Retry-After": "1"}, that HTTP can carry, and none of '
    return {"option": Option(wanted + " and ".join(_FRAMING), fits)}


def anything() -> Metadata:
    """Any JSON."""
    return {"option": Option("any JSON, its numbers of 64 bits", _is_json)}


def is_list(value: object) -> bool:
    """Whether a value is a list, from JSON or from Python."""
    return isinstance(value, (list, tuple))


def _is_json(value: object) -> bool:
    """Whether it can be encoded without loss: no NaN, no lone surrogate, no number beyond 64 bits."""
    try:
        orjson.dumps(value)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ranged(option: Option, *, none: bool, ranges: bool) -> Option:
    """Accept a pair or null, too."""

    def fits(value: Any) -> bool:  # noqa: ANN401  # any JSON
        if is_list(value):
            return ranges and len(value) == 2 and all(map(option.fits, value)) and value[0] <= value[1]
        return none if value is None else option.fits(value)

    wanted = option.wanted + (", or [least, most]" if ranges else "") + (", or null" if none else "")
    return Option(wanted, fits, option.draw)


def _span(least: float, most: float) -> str:
    return f"from {least} {'on' if most == math.inf else f'to {most:g}'}"
