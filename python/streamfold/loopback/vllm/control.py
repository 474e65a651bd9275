"""vLLM's routes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from streamfold.loopback.http.endpoint import Json, worker_list
from streamfold.loopback.vllm.generate import Completions, Generate
from streamfold.loopback.vllm.params import bad_request

if TYPE_CHECKING:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.engine import Engine
    from streamfold.loopback.core.request import Request

__all__ = ["EXCEPTION_HANDLERS", "guards", "routes"]

PAUSE_MODES = ("abort", "wait", "keep")
GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def routes(engine: Engine) -> list[BaseRoute]:
    """Give the routes of an engine that speaks vLLM."""
    config, control = engine.config, _Control(engine)
    release, get, post = config.vllm.release, ["GET"], ["POST"]
    found: list[BaseRoute] = [
        Route("/v1/completions", Completions(engine.scheduler), methods=post),
        Route("/v1/models", control.models, methods=get),
        Route("/workers", control.workers, methods=get),
        Route("/health", control.health, methods=get),
        Route("/version", control.version, methods=get),
        Route("/load", control.load, methods=get),
        Route("/metrics", control.metrics, methods=get),
    ]
    if _tokens_are_served(config):
        found.append(Route("/inference/v1/generate", Generate(engine.scheduler), methods=post))
        if release >= (0, 32):
            found.append(Route("/inference/v1/abort_requests", control.abort_listed, methods=post))
    elif release >= (0, 30):
        paths = ["/inference/v1/generate", *(["/inference/v1/abort_requests"] if release >= (0, 32) else [])]
        found += [Route(path, control.disabled, methods=post, include_in_schema=False) for path in paths]
    if config.dev_mode:
        found += [
            Route("/pause", control.pause, methods=post),
            Route("/resume", control.resume, methods=post),
            Route("/is_paused", control.is_paused, methods=get),
            Route("/update_weight_version", control.update_weight_version, methods=post),
            Route("/weight_info", control.weight_info, methods=get),
        ]
    if config.dev_mode and release >= (0, 26):
        found.append(Route("/abort_requests", control.abort_requests, methods=post))
    elif config.skip_tokenizer_init:
        found.append(Route("/abort_requests", control.abort_listed, methods=post))
    paths_told = [route.path for route in found if isinstance(route, Route) and route.include_in_schema]
    found.append(Route("/openapi.json", _openapi(config, paths_told), methods=get))
    return found


def guards(path: str) -> bool:
    """Say whether a path needs the key."""
    return path.startswith(GUARDED)


async def _http_exception(_request: HttpRequest, error: HTTPException) -> Response:
    return Json({"detail": error.detail}, status_code=error.status_code)


EXCEPTION_HANDLERS: dict[Any, Any] = {404: _http_exception, 405: _http_exception}


def _tokens_are_served(config: Config) -> bool:
    return config.enable_scale_out or config.skip_tokenizer_init


class _Control:
    """Every route that does not generate."""

    def __init__(self, engine: Engine) -> None:
        self._config = engine.config
        self._scheduler = engine.scheduler

    async def disabled(self, _request: HttpRequest) -> Response:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return Json(self._config.vllm.error(message, 403), status_code=403)

    async def abort_listed(self, request: HttpRequest) -> Response:
        """Abort the requests that are named; nobody is told what came of it."""
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        if body.get("request_ids") is None:
            return self._malformed("Missing 'request_ids' in request body")
        self._abort(body["request_ids"])
        return Response()

    async def abort_requests(self, request: HttpRequest) -> Response:
        """Abort the requests that are named, or else all."""
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        named = body.get("request_ids")
        count = len(named) if named else len(self._scheduler.live)
        if named:
            self._abort(named)
        else:
            self._scheduler.abort_all(at_once=True)
        return Json({"status": "aborted", "aborted": count})

    def _abort(self, named: list[str]) -> None:
        shown: dict[str, list[Request]] = {}
        for request in self._scheduler.live:
            shown.setdefault(request.reply.rid, []).append(request)
        for rid in named:
            self._scheduler.abort(rid, shown.get(rid, []), at_once=True)

    async def pause(self, request: HttpRequest) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            told = f"1 validation error:\n  Input should be {', '.join(map(repr, PAUSE_MODES))}: {mode!r}"
            return self._malformed(told, "query.mode")
        if mode == "keep":
            self._scheduler.freeze()
        else:
            await self._scheduler.drain(abort=mode == "abort")
        return Json({"status": "paused"})

    async def resume(self, _request: HttpRequest) -> Response:
        self._scheduler.resume()
        return Json({"status": "resumed"})

    async def is_paused(self, _request: HttpRequest) -> Response:
        return Json({"is_paused": self._scheduler.paused})

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        version = body.get("new_version")
        if not isinstance(version, str):
            return self._malformed("1 validation error:\n  Input should be a valid string", "body.new_version")
        self._scheduler.weight_version = version
        return Json({"success": True, "new_version": version})

    async def weight_info(self, _request: HttpRequest) -> Response:
        return Json({"weight_version": self._scheduler.weight_version})

    async def load(self, _request: HttpRequest) -> Response:
        """Tell how many requests there are, if that is counted."""
        count = self._scheduler.running + self._scheduler.waiting
        return Json({"server_load": count if self._config.track_load else 0})

    async def metrics(self, _request: HttpRequest) -> Response:
        lines = []
        for name, help_text, value in (
            ("running", "Number of requests in model execution batches.", self._scheduler.running),
            ("waiting", "Number of requests waiting to be processed.", self._scheduler.waiting),
        ):
            metric = f"vllm:num_requests_{name}"
            lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge"]
            lines.append(f'{metric}{{engine="0",model_name="{self._config.model_name}"}} {float(value)}')
        media_type = "text/plain; version=0.0.4"
        return PlainTextResponse("\n".join(lines) + "\n", media_type=media_type)

    async def models(self, _request: HttpRequest) -> Response:
        name = self._config.model_name
        model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": name,
            "parent": None,
            "max_model_len": self._config.context_length,
            "permission": [],
        }
        return Json({"object": "list", "data": [model]})

    async def version(self, _request: HttpRequest) -> Response:
        return Json({"version": self._config.version})

    async def health(self, _request: HttpRequest) -> Response:
        return Response()

    async def workers(self, request: HttpRequest) -> Response:
        """Answer as a router does."""
        return Json(worker_list(request, self._config, self._scheduler))

    async def _object(self, request: HttpRequest) -> dict[str, Any] | Response:
        """Read a body that is a JSON object, or give its refusal; ``request_ids`` are a list of strings, if told."""
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            return self._malformed("Invalid JSON format")
        if not isinstance(body, dict):
            return self._malformed("the body must be a JSON object")
        named = body.get("request_ids")
        if named is not None and not (isinstance(named, list) and all(isinstance(rid, str) for rid in named)):
            return self._malformed("request_ids must be a list of strings")
        return body

    def _malformed(self, message: str, param: str | None = None) -> Response:
        return Json(bad_request(self._config, message, param), status_code=400)


def _openapi(config: Config, paths: list[str]) -> Any:  # noqa: ANN401  # an endpoint
    """Make the route that tells which others there are, and nothing of what they take."""
    told = {"title": "vLLM in a box", "version": config.version}

    async def openapi(_request: HttpRequest) -> Response:
        return Json({"openapi": "3.1.0", "info": told, "paths": {config.base_path + path: {} for path in paths}})

    return openapi
