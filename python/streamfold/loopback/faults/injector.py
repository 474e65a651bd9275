"""Runs a script of faults inside an engine: decides for each request, and puts the faults between it and the client."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import orjson

from streamfold.loopback.faults.script import PATHS, Faults
from streamfold.loopback.http.answer import Answer
from streamfold.loopback.http.endpoint import MILESTONES

if TYPE_CHECKING:
    import random

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamfold.loopback.core.engine import Engine
    from streamfold.loopback.faults.response import Fault
    from streamfold.loopback.faults.script import Rule

__all__ = ["Injection", "Injector"]


class Injector:
    """A script at work in one engine: what it has decided, and what came of it."""

    def __init__(self, faults: Faults | None, engine: Literal["sglang", "vllm"] = "sglang") -> None:
        self.faults = faults or Faults()
        self._generates = PATHS[engine][0]
        self._requests: Counter[str] = Counter()  # by path
        self._chosen: Counter[int] = Counter()  # by the place of the rule
        self._done: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def done(self) -> Counter[str]:
        """How many answers each kind of fault has disturbed up to now; may be asked from any thread."""
        with self._lock:
            return self._done.copy()

    def note(self, kind: str) -> None:
        """Count a fault that happened."""
        with self._lock:
            self._done[kind] += 1

    def choose(
        self, path: str, body: bytes, since_abort_all: float, header_rid: str = ""
    ) -> list[tuple[Rule, random.Random]]:
        """Decide about the next request to a path: the rules that it falls under, and their chance."""
        number = self._requests[path]
        self._requests[path] += 1
        rids, stream = _asked(body, header_rid)
        found: list[tuple[Rule, random.Random]] = []
        for rule in self.faults.rules:
            conditions, chance = rule.conditions, self.faults.chance(rule, number)
            if (
                path == (conditions.path or self._generates)
                and (conditions.after_abort_all is None or since_abort_all <= conditions.after_abort_all)
                and (conditions.times is None or self._chosen[rule.place] < conditions.times)
                and rule.holds(number, rids, chance, stream=stream)
            ):
                self._chosen[rule.place] += 1
                found.append((rule, chance))
        return found


class Injection:
    """The middleware: whatever the application answers goes through the faults of its request."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        injector = self._engine.faults
        if scope["type"] != "http" or not injector.faults.rules:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return
        path = scope["path"].removeprefix(self._engine.config.base_path)
        header_rid = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        rules = injector.choose(path, body, self._engine.scheduler.since_abort_all, header_rid)
        answer = Answer(self._engine, scope, send, body)
        watch = asyncio.create_task(answer.watch(receive))
        try:
            await self._answer(answer, _faults(answer, rules, injector), scope)
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def _answer(self, answer: Answer, faults: list[Fault], scope: Scope) -> None:
        for fault in faults:
            if not await fault.begin():
                return
        first: Fault | Answer = faults[0] if faults else answer

        async def send(message: Message) -> None:
            if answer.over or answer.gone.is_set():
                return
            if message["type"] == "http.response.start":
                await first.head(message)
                return
            if message.get("body"):
                await first.event(message["body"])
            if not message.get("more_body") and not answer.over:
                await first.end()

        extensions = {**scope.get("extensions", {}), MILESTONES: answer.milestones}
        await self._app({**scope, "extensions": extensions}, answer.receive, send)


def _faults(answer: Answer, rules: list[tuple[Rule, random.Random]], injector: Injector) -> list[Fault]:
    """Make the faults of an answer, in the order of the script: each lets through to the one after it."""
    made: list[Fault] = []
    for rule, chance in reversed(rules):
        made.insert(0, rule.make(answer, made[0] if made else answer, chance, injector.note))
    return made


def _asked(body: bytes, header_rid: str) -> tuple[list[str], bool]:
    """Read the ids of a request, and whether a stream is asked for, in the words of any wire."""
    try:
        told: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        return [], False
    rid = header_rid or told.get("request_id") or told.get("rid")
    rids = rid if isinstance(rid, list) else [rid]
    return [rid for rid in rids if isinstance(rid, str)], bool(told.get("stream"))


async def _read(receive: Receive) -> bytes | None:
    """Read the body of a request; None if the client has left."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body
