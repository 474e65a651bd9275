"""Servers whose replies differ from try to try, and policies that suit a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfold import Retries
from support.replay import Replay, Route, Steps, answer_json

if TYPE_CHECKING:
    from support.replay import Request

SOON = Retries(tries=4, first=0.001, longest=0.01)
LATER = Retries(first=60.0, longest=60.0)  # nobody waits that long here
BUSY = answer_json({"error": "busy"}, 503)


def in_turn(server: Replay, *replies: Steps, path: str = "") -> Route:
    """The replies to that path, or to requests for tokens, one after the other, the last one ever after."""

    def route(_: Request) -> Steps:
        return replies[min(len(server.at(path or server.path)), len(replies)) - 1]

    return route


def rids(server: Replay) -> list[str]:
    """The ids of all tries, in the order in which they came."""
    return [request.rid for request in server.generates]
