"""SGLang's routes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from streamfold.loopback.http.endpoint import Json, worker_list
from streamfold.loopback.sglang.generate import Generate
from streamfold.loopback.sglang.params import bad_request

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from streamfold.loopback.core.engine import Engine

__all__ = ["EXCEPTION_HANDLERS", "guards", "routes"]

LOAD_SECTIONS = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
PAUSE_MODES = ("abort", "retract", "in_place")
EXCEPTION_HANDLERS: dict[Any, Any] = {}


def routes(engine: Engine) -> list[BaseRoute]:
    """Give the routes of an engine that speaks SGLang."""
    control = _Control(engine)
    both, get, post = ["GET", "POST"], ["GET"], ["POST"]
    found: list[BaseRoute] = [
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
        found += [Route(f"/{prefix}{name}", handler, methods=get) for prefix in ("", "get_")]
    found += [Route(path, control.health, methods=get) for path in ("/health", "/health_generate")]
    return found


def guards(path: str) -> bool:
    """Say whether a path needs the key: all but the health checks."""
    return "/health" not in path


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
        elif isinstance(rid := body.get("rid"), str):
            # With a request goes every other one whose id begins so. An id that is not live, or empty, means nothing.
            live = self._scheduler.live if self._scheduler.is_live(rid) else []
            self._scheduler.abort(rid, [request for request in live if request.rid.startswith(rid)])
        return Response()

    async def pause_generation(self, request: HttpRequest) -> Response:
        body = await _object(request)
        mode = "abort" if body is None else body.get("mode", "abort")
        if body is None or mode not in PAUSE_MODES:
            return self._malformed(f"mode must be one of {', '.join(PAUSE_MODES)}")
        scheduler = self._scheduler
        scheduler.shut()
        if mode == "abort":
            await scheduler.drain(abort=True)
        else:
            scheduler.freeze()
            if mode == "retract":
                scheduler.retract()
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
            "model_path": self._config.model_name,
            "tokenizer_path": self._config.model_name,
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
        if config.sglang.release >= (0, 5, 21):
            info["frontend"] = config.frontend
        return Json(info)

    async def model_info(self, _request: HttpRequest) -> Response:
        info = {
            "model_path": self._config.model_name,
            "tokenizer_path": self._config.model_name,
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
        """Answer as a router does."""
        return Json(worker_list(request, self._config, self._scheduler))

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
