"""ASGI middleware that puts the faults of a request between the application and the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from streamfold.loopback.faults.fault import FaultTarget
from streamfold.loopback.http.endpoint import MILESTONES
from streamfold.loopback.http.response_writer import ResponseWriter

if TYPE_CHECKING:
    import random

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.faults.fault import Fault
    from streamfold.loopback.faults.injector import Injector
    from streamfold.loopback.faults.script import Rule

__all__ = ["FaultMiddleware", "FaultyEngine"]


class FaultyEngine(FaultTarget, Protocol):
    """An engine with faults; they may be replaced at any time."""

    config: Config
    faults: Injector


class FaultMiddleware:
    """Passes each response of the application through the faults of its request."""

    def __init__(self, app: ASGIApp, engine: FaultyEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
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
        response = ResponseWriter(scope, send, body)
        watch = asyncio.create_task(response.watch(receive))
        try:
            await self._respond(response, self._make_faults(response, rules, injector), scope)
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def _respond(self, response: ResponseWriter, faults: list[Fault], scope: Scope) -> None:
        for fault in faults:
            if not await fault.begin():
                return
        first: Fault | ResponseWriter = faults[0] if faults else response

        async def send(message: Message) -> None:
            if response.over or response.gone.is_set():
                return
            if message["type"] == "http.response.start":
                await first.head(message)
                return
            if message.get("body"):
                await first.event(message["body"])
            if not message.get("more_body") and not response.over:
                await first.end()

        extensions = {**scope.get("extensions", {}), MILESTONES: response.milestones}
        await self._app({**scope, "extensions": extensions}, response.receive, send)

    def _make_faults(
        self, response: ResponseWriter, rules: list[tuple[Rule, random.Random]], injector: Injector
    ) -> list[Fault]:
        """Make the faults of a response, in the order of the script: each passes on to the one after it."""
        faults: list[Fault] = []
        for rule, chance in reversed(rules):
            following = faults[0] if faults else response
            faults.insert(0, rule.make(self._engine, response, following, chance, injector.note))
        return faults


async def _read(receive: Receive) -> bytes | None:
    """Read the body of a request; None if the client disconnected."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body
