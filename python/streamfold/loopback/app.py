"""The engine's HTTP side: an ASGI application that speaks SGLang's wire."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from streamfold.loopback.generate import Generate, Json
from streamfold.loopback.params import bad_request
from streamfold.loopback.scheduler import PAUSE_MODES, Scheduler

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamfold.loopback.config import Config

__all__ = ["Engine", "SeenRequest", "create_app"]

LOAD_SECTIONS = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
MODEL = "streamfold-loopback"


@dataclass
class SeenRequest:
    """One HTTP request as it arrived. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """What was read of the body up to now."""
        return b"".join(self.parts)

    def json(self) -> Any:  # noqa: ANN401  # whatever was sent
        """Read the body as JSON; None if there is none."""
        body = self.body
        return orjson.loads(body) if body else None


@dataclass
class Engine:
    """What stands behind one application."""

    config: Config
    scheduler: Scheduler = field(init=False)
    seen: deque[SeenRequest] = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.seen = deque(maxlen=self.config.keep_requests)


def create_app(config: Config | Engine) -> Starlette:
    """Build the application of one engine; its scheduler runs for the application's lifespan."""
    engine = config if isinstance(config, Engine) else Engine(config)
    control = _Control(engine)
    both, get, post = ["GET", "POST"], ["GET"], ["POST"]
    routes: list[BaseRoute] = [
        Route("/generate", Generate(engine.scheduler), methods=["POST", "PUT"]),
        Route("/abort_request", control.abort_request, methods=post),
        Route("/pause_generation", control.pause_generation, methods=post),
        Route("/continue_generation", control.continue_generation, methods=post),
        Route("/update_weight_version", control.update_weight_version, methods=post),
        Route("/flush_cache", control.flush_cache, methods=both),
        Route("/v1/loads", control.loads, methods=get),
        Route("/workers", control.workers, methods=get),
    ]
    for name, handler in (("server_info", control.server_info), ("model_info", control.model_info)):
        routes += [Route(f"/{prefix}{name}", handler, methods=get) for prefix in ("", "get_")]
    routes += [Route(path, control.health, methods=get) for path in ("/health", "/health_generate")]
    if engine.config.base_path:
        routes = [Mount(engine.config.base_path, routes=routes)]
    middleware = [Middleware(_Recorder, seen=engine.seen)]
    if engine.config.api_key is not None:
        middleware.append(Middleware(_ApiKey, key=engine.config.api_key))
    return Starlette(routes=routes, middleware=middleware, lifespan=engine.scheduler.lifespan)


class _Control:
    """Every route but ``/generate``."""

    def __init__(self, engine: Engine) -> None:
        self._config = engine.config
        self._scheduler = engine.scheduler

    async def abort_request(self, request: HttpRequest) -> Response:
        body = await _object(request)
        if body is None:
            return self._malformed()
        if body.get("abort_all"):
            self._scheduler.abort_all()
        elif isinstance(body.get("rid"), str):
            self._scheduler.abort(body["rid"])
        return Response()

    async def pause_generation(self, request: HttpRequest) -> Response:
        body = await _object(request)
        mode = "abort" if body is None else body.get("mode", "abort")
        if body is None or mode not in PAUSE_MODES:
            return self._malformed(f"mode must be one of {', '.join(PAUSE_MODES)}")
        await self._scheduler.pause(mode)
        return Json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _request: HttpRequest) -> Response:
        self._scheduler.resume()
        return Json({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await _object(request)
        version = None if body is None else body.get("new_version")
        if body is None or not isinstance(version, str):
            return self._malformed("new_version must be a string")
        # Yes, the engine's default: whoever does not say false loses everything in flight.
        if body.get("abort_all_requests", True):
            self._scheduler.abort_all()
        self._scheduler.weight_version = version
        return Json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def flush_cache(self, _request: HttpRequest) -> Response:
        if self._scheduler.running or self._scheduler.waiting:
            return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", status_code=400)
        return PlainTextResponse("Cache flushed.\n")

    async def loads(self, request: HttpRequest) -> Response:
        unknown = set(request.query_params.get("include", "all").split(",")) - LOAD_SECTIONS
        if unknown:
            return self._malformed(f"include must be among {', '.join(sorted(LOAD_SECTIONS))}")
        scheduler, config = self._scheduler, self._config
        capacity = config.max_running_requests * config.context_length
        load = {
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": scheduler.waiting,
            "num_used_tokens": scheduler.used_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": scheduler.used_tokens / capacity,
            "max_running_requests": config.max_running_requests,
        }
        aggregate = {
            "total_running_reqs": scheduler.running,
            "total_waiting_reqs": scheduler.waiting,
            "total_reqs": scheduler.running + scheduler.waiting,
        }
        told = {"timestamp": time.time(), "version": config.version, "dp_rank_count": 1}
        return Json(told | {"loads": [load], "aggregate": aggregate})

    async def server_info(self, _request: HttpRequest) -> Response:
        config, scheduler = self._config, self._scheduler
        info: dict[str, Any] = {
            "model_path": MODEL,
            "tokenizer_path": MODEL,
            "skip_tokenizer_init": config.skip_tokenizer_init,
            "context_length": config.context_length,
            "stream_interval": config.stream_interval,
            "incremental_streaming_output": config.incremental,
            "max_running_requests": config.max_running_requests,
            "max_queued_requests": config.max_queued_requests,
            "enable_return_routed_experts": config.num_layers > 0,
            "weight_version": scheduler.weight_version,
            "dp_size": 1,
            "internal_states": [{"effective_max_running_requests_per_dp": config.max_running_requests}],
            "version": config.version,
        }
        if config.dialect.release >= (0, 5, 21):
            info["frontend"] = config.frontend
        return Json(info)

    async def model_info(self, _request: HttpRequest) -> Response:
        info = {
            "model_path": MODEL,
            "tokenizer_path": MODEL,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._scheduler.weight_version,
            "model_type": "loopback",
            "vocab_size": self._config.vocab_size,
            "num_hidden_layers": self._config.num_layers,
            "num_experts": self._config.num_experts,
            "num_experts_per_tok": self._config.top_k,
        }
        return Json(info)

    async def workers(self, request: HttpRequest) -> Response:
        """Answer as a router in front of this engine alone, or of the engines that were configured."""
        itself = str(request.base_url).rstrip("/") + self._config.base_path
        urls = (itself,) if self._config.workers is None else self._config.workers
        workers = [
            {
                "id": f"worker-{i}",
                "url": url,
                "model_id": MODEL,
                "worker_type": "regular",
                "is_healthy": True,
                "load": self._scheduler.running + self._scheduler.waiting if url == itself else 0,
                "connection_mode": "http",
            }
            for i, url in enumerate(urls)
        ]
        return Json({"workers": workers, "total": len(workers), "stats": {"regular_count": len(workers)}})

    async def health(self, _request: HttpRequest) -> Response:
        return Response()

    def _malformed(self, message: str = "the body must be a JSON object") -> Response:
        return Json(bad_request(self._config, message), status_code=400)


async def _object(request: HttpRequest) -> dict[str, Any] | None:
    """Read a body that is a JSON object or empty; None if it is anything else."""
    raw = await request.body()
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None


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
    """Lets in who knows the key; health checks go without."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        free = scope["type"] != "http" or "/health" in scope["path"]
        if free or secrets.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        else:
            await Json({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
