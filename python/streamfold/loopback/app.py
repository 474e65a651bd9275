"""The loopback engine as an ASGI application, with the API of SGLang or vLLM; middleware for API key and faults."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from streamfold.loopback.engine import Engine, SeenRequest
from streamfold.loopback.faults.middleware import FaultMiddleware
from streamfold.loopback.http.responses import OrjsonResponse

if TYPE_CHECKING:
    from collections import deque

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamfold.loopback.core.config import Config

__all__ = ["create_app"]


def create_app(config: Config | Engine) -> Starlette:
    """Return the ASGI application of one engine; its scheduler runs during the application's lifespan."""
    engine = config if isinstance(config, Engine) else Engine(config)
    config = engine.config
    routes = engine.emulation.routes(engine.scheduler)
    if config.base_path:
        routes = [Mount(config.base_path, routes=routes)]
    middleware = [Middleware(_RequestRecorder, seen=engine.seen)]
    if config.api_key is not None:
        middleware.append(Middleware(_ApiKeyCheck, engine=engine, key=config.api_key))
    middleware.append(Middleware(FaultMiddleware, engine=engine))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=engine.emulation.exception_handlers,
        lifespan=engine.scheduler.lifespan,
    )


class _RequestRecorder:
    """Keeps the last requests for :meth:`streamfold.loopback.Loopback.seen`."""

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


class _ApiKeyCheck:
    """Rejects requests without the API key, on the paths that need it."""

    def __init__(self, app: ASGIApp, engine: Engine, key: str) -> None:
        self._app = app
        self._needs_api_key = engine.emulation.needs_api_key
        self._base_path = engine.config.base_path
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        free = scope["type"] != "http" or not self._needs_api_key(scope["path"].removeprefix(self._base_path))
        if free or secrets.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        else:
            await OrjsonResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
