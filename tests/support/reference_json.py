"""The obvious reader's JSON: one value, strictly."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

DEEPEST = 128


class Undecodable(Exception):
    """The bytes are not what the dialect says."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def bad(kind: str) -> NoReturn:
    raise Undecodable(kind)


class Pairs(list[Any]):
    """An object of JSON with all its keys, those told twice too."""


def no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def parse(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        bad("utf8")
    try:
        value = json.loads(text, object_pairs_hook=Pairs, parse_constant=no_constant)
    except (ValueError, RecursionError):
        bad("json")
    return plain(value, 1)


def plain(value: Any, depth: int) -> Any:
    """Objects as dicts, the last of equal keys kept; every string and every depth looked at."""
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        bad("json")
    if isinstance(value, list) and depth > DEEPEST:
        bad("json")
    if isinstance(value, Pairs):
        return {plain(key, depth): plain(item, depth + 1) for key, item in value}
    if isinstance(value, list):
        return [plain(item, depth + 1) for item in value]
    return value


def is_json(data: bytes) -> bool:
    try:
        parse(data)
    except Undecodable:
        return False
    return True
