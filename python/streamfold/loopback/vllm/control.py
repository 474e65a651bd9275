"""vLLM's control endpoints: abort, pause, weight versions, load, metrics, models, OpenAPI paths."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from streamfold.loopback.http.endpoint import connection_of
from streamfold.loopback.http.responses import OrjsonResponse, worker_list
from streamfold.loopback.vllm.generate import CompletionEndpoint, TokenEndpoint
from streamfold.loopback.vllm.params import bad_request
from streamfold.loopback.vllm.wire import error_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import EngineRequest
    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["EXCEPTION_HANDLERS", "needs_api_key", "routes"]

PAUSE_MODES = ("abort", "wait", "keep")
GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def routes(scheduler: Scheduler) -> list[BaseRoute]:
    """Return vLLM's routes; they depend on the version and on the flags."""
    config, control = scheduler.config, _VllmControl(scheduler)
    table = [
        Route("/v1/completions", CompletionEndpoint(scheduler), methods=["POST"]),
        Route("/v1/models", control.models, methods=["GET"]),
        Route("/workers", control.workers, methods=["GET"]),
        Route("/health", control.health, methods=["GET"]),
        Route("/version", control.version, methods=["GET"]),
        Route("/load", control.load, methods=["GET"]),
        Route("/metrics", control.metrics, methods=["GET"]),
        *_token_routes(scheduler, control),
        *(_dev_routes(control) if config.dev_mode else []),
        *_abort_routes(config, control),
    ]
    shown_paths = [route.path for route in table if route.include_in_schema]
    return [*table, Route("/openapi.json", _openapi(config, shown_paths), methods=["GET"])]


def _token_routes(scheduler: Scheduler, control: _VllmControl) -> list[Route]:
    """Return the scale-out endpoints; disabled ones exist as from 0.30, but are not shown."""
    config, generate, abort = scheduler.config, "/inference/v1/generate", "/inference/v1/abort_requests"
    paths = [generate, abort] if config.release >= (0, 32) else [generate]
    if config.enable_scale_out or config.skip_tokenizer_init:
        endpoints: dict[str, Callable[..., Any]] = {generate: TokenEndpoint(scheduler), abort: control.abort_listed}
        return [Route(path, endpoints[path], methods=["POST"]) for path in paths]
    if config.release < (0, 30):
        return []
    return [Route(path, control.disabled, methods=["POST"], include_in_schema=False) for path in paths]


def _dev_routes(control: _VllmControl) -> list[Route]:
    return [
        Route("/pause", control.pause, methods=["POST"]),
        Route("/resume", control.resume, methods=["POST"]),
        Route("/is_paused", control.is_paused, methods=["GET"]),
        Route("/update_weight_version", control.update_weight_version, methods=["POST"]),
        Route("/weight_info", control.weight_info, methods=["GET"]),
    ]


def _abort_routes(config: Config, control: _VllmControl) -> list[Route]:
    if config.dev_mode and config.release >= (0, 26):
        return [Route("/abort_requests", control.abort_requests, methods=["POST"])]
    if config.skip_tokenizer_init:
        return [Route("/abort_requests", control.abort_listed, methods=["POST"])]
    return []


def needs_api_key(path: str) -> bool:
    """Return whether a path needs the API key."""
    return path.startswith(GUARDED)


async def _http_exception(_request: HttpRequest, error: HTTPException) -> Response:
    return OrjsonResponse({"detail": error.detail}, status_code=error.status_code)


EXCEPTION_HANDLERS: dict[Any, Any] = {404: _http_exception, 405: _http_exception}


class _VllmControl:
    """Handlers of all endpoints that do not generate."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._config = scheduler.config
        self._scheduler = scheduler

    async def disabled(self, _request: HttpRequest) -> Response:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return OrjsonResponse(error_object(message, 403), status_code=403)

    async def abort_listed(self, request: HttpRequest) -> Response:
        """Abort the listed requests; the response does not report the result."""
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        if body.get("request_ids") is None:
            return self._malformed("Missing 'request_ids' in request body")
        self._abort(body["request_ids"], self._held(request))
        return Response()

    async def abort_requests(self, request: HttpRequest) -> Response:
        """Abort the listed requests, or all if there is no list; only those of the API process that is asked."""
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        listed = body.get("request_ids")
        held = self._held(request)
        count = len(listed) if listed else len(held)
        if listed:
            self._abort(listed, held)
        else:
            self._scheduler.abort_all(held, at_once=True)
        return OrjsonResponse({"status": "aborted", "aborted": count})

    def _held(self, http: HttpRequest) -> list[EngineRequest]:
        """The unfinished requests of the API process that a connection belongs to."""
        count = self._config.api_servers
        process = connection_of(http.scope) % count
        return [request for request in self._scheduler.live if request.connection % count == process]

    def _abort(self, listed: list[str], held: list[EngineRequest]) -> None:
        shown: dict[str, list[EngineRequest]] = {}
        for request in held:
            shown.setdefault(request.reply.rid, []).append(request)
        for rid in listed:
            self._scheduler.abort(rid, shown.get(rid, []), at_once=True)

    async def pause(self, request: HttpRequest) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            message = f"1 validation error:\n  Input should be {', '.join(map(repr, PAUSE_MODES))}: {mode!r}"
            return self._malformed(message, "query.mode")
        if mode == "keep":
            await self._scheduler.freeze()
        else:
            await self._scheduler.drain(abort=mode == "abort")
        return OrjsonResponse({"status": "paused"})

    async def resume(self, _request: HttpRequest) -> Response:
        self._scheduler.resume()
        return OrjsonResponse({"status": "resumed"})

    async def is_paused(self, _request: HttpRequest) -> Response:
        return OrjsonResponse({"is_paused": self._scheduler.paused})

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await self._object(request)
        if isinstance(body, Response):
            return body
        version = body.get("new_version")
        if not isinstance(version, str):
            return self._malformed("1 validation error:\n  Input should be a valid string", "body.new_version")
        self._scheduler.weight_version = version
        return OrjsonResponse({"success": True, "new_version": version})

    async def weight_info(self, _request: HttpRequest) -> Response:
        return OrjsonResponse({"weight_version": self._scheduler.weight_version})

    async def load(self, request: HttpRequest) -> Response:
        """Report the number of requests of the API process that is asked; 0 without ``track_load``."""
        return OrjsonResponse({"server_load": len(self._held(request)) if self._config.track_load else 0})

    async def metrics(self, _request: HttpRequest) -> Response:
        """Report the gauges; without ``log_stats`` only what the process itself reports."""
        lines = ["# TYPE process_open_fds gauge", "process_open_fds 42.0"]
        for name, help_text, value in (
            ("running", "Number of requests in model execution batches.", self._scheduler.running),
            ("waiting", "Number of requests waiting to be processed.", self._scheduler.waiting),
        ):
            if not self._config.log_stats:
                break
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
        return OrjsonResponse({"object": "list", "data": [model]})

    async def version(self, _request: HttpRequest) -> Response:
        return OrjsonResponse({"version": self._config.version})

    async def health(self, _request: HttpRequest) -> Response:
        return Response()

    async def workers(self, request: HttpRequest) -> Response:
        """Respond as a router does."""
        return OrjsonResponse(worker_list(request, self._config, self._scheduler))

    async def _object(self, request: HttpRequest) -> dict[str, Any] | Response:
        """Parse a body that is a JSON object, or return the error; ``request_ids``, if given, is a list of strings."""
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            return self._malformed("Invalid JSON format")
        if not isinstance(body, dict):
            return self._malformed("the body must be a JSON object")
        listed = body.get("request_ids")
        if listed is not None and not (isinstance(listed, list) and all(isinstance(rid, str) for rid in listed)):
            return self._malformed("request_ids must be a list of strings")
        return body

    def _malformed(self, message: str, param: str | None = None) -> Response:
        return OrjsonResponse(bad_request(message, param), status_code=400)


def _openapi(config: Config, paths: list[str]) -> Any:  # noqa: ANN401  # an endpoint
    """Return the endpoint that lists the paths, without their parameters."""
    info = {"title": "vLLM (loopback engine)", "version": config.version}

    async def openapi(_request: HttpRequest) -> Response:
        return OrjsonResponse(
            {"openapi": "3.1.0", "info": info, "paths": {config.base_path + path: {} for path in paths}}
        )

    return openapi
