"""The engine's HTTP side: an ASGI application that speaks the wire of SGLang or of vLLM."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from streamfold.loopback.core.engine import Engine, SeenRequest
from streamfold.loopback.faults.injector import Injection
from streamfold.loopback.http.endpoint import Json
from streamfold.loopback.sglang import control
from streamfold.loopback.vllm import control as vllm_control

if TYPE_CHECKING:
    from collections import deque

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamfold.loopback.core.config import Config

__all__ = ["create_app"]


def create_app(config: Config | Engine) -> Starlette:
    """Build the application of one engine; its scheduler runs for the application's lifespan."""
    engine = config if isinstance(config, Engine) else Engine(config)
    config = engine.config
    speaker = vllm_control if config.engine == "vllm" else control
    routes = speaker.routes(engine)
    if config.base_path:
        routes = [Mount(config.base_path, routes=routes)]
    middleware = [Middleware(_Recorder, seen=engine.seen)]
    if config.api_key is not None:
        middleware.append(Middleware(_ApiKey, config=config, key=config.api_key))
    middleware.append(Middleware(Injection, engine=engine))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=speaker.EXCEPTION_HANDLERS,
        lifespan=engine.scheduler.lifespan,
    )


class _Recorder:
    """Remembers the last requests for :meth:`streamfold.loopback.Loopback.seen`."""

    def __init__(self, app: ASGIApp, seen: deque[SeenRequest]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        request = SeenRequest(scope["method"], scope["path"], query, headers)
        self._seen.append(request)

        async def listen() -> Message:
            message = await receive()
            if message.get("body"):
                request.parts.append(message["body"])
            return message

        await self._app(scope, listen, send)


class _ApiKey:
    """Lets in who knows the key, and asks nobody for it on paths that go without."""

    def __init__(self, app: ASGIApp, config: Config, key: str) -> None:
        self._app = app
        self._guards = vllm_control.guards if config.engine == "vllm" else control.guards
        self._base_path = config.base_path
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        free = scope["type"] != "http" or not self._guards(scope["path"].removeprefix(self._base_path))
        if free or secrets.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        else:
            await Json({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
