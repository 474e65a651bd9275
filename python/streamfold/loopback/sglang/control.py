"""SGLang's control endpoints: abort, pause, weight versions, load, server and model info."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from streamfold.loopback.http.responses import OrjsonResponse, worker_list
from streamfold.loopback.sglang.generate import GenerateEndpoint
from streamfold.loopback.sglang.params import bad_request
from streamfold.loopback.sglang.weights import weight_routes

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["needs_api_key", "routes"]

LOAD_SECTIONS = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
PAUSE_MODES = ("abort", "retract", "in_place")


def routes(scheduler: Scheduler) -> list[BaseRoute]:
    """Return SGLang's routes."""
    control = _SglangControl(scheduler)
    both, get, post = ["GET", "POST"], ["GET"], ["POST"]
    table: list[BaseRoute] = [
        Route("/generate", GenerateEndpoint(scheduler), methods=["POST", "PUT"]),
        Route("/abort_request", control.abort_request, methods=post),
        Route("/pause_generation", control.pause_generation, methods=post),
        Route("/continue_generation", control.continue_generation, methods=post),
        Route("/update_weight_version", control.update_weight_version, methods=post),
        Route("/flush_cache", control.flush_cache, methods=both),
        *weight_routes(scheduler),
        Route("/v1/loads", control.loads, methods=get),
        Route("/workers", control.workers, methods=get),
    ]
    for name, handler in (("server_info", control.server_info), ("model_info", control.model_info)):
        table += [Route(f"/{prefix}{name}", handler, methods=get) for prefix in ("", "get_")]
    table += [Route(path, control.health, methods=get) for path in ("/health", "/health_generate")]
    return table


def needs_api_key(path: str) -> bool:
    """Return whether a path needs the API key: all but the health checks."""
    return "/health" not in path


class _SglangControl:
    """Handlers of all endpoints but ``/generate``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._config = scheduler.config
        self._scheduler = scheduler

    async def abort_request(self, request: HttpRequest) -> Response:
        body = await _object(request)
        if body is None:
            return self._malformed()
        if body.get("abort_all"):
            self._scheduler.abort_all()
        elif isinstance(rid := body.get("rid"), str):
            # Aborts all requests whose ids begin with that of a live request; unknown and empty ids are ignored.
            live = self._scheduler.live if self._scheduler.is_live(rid) else []
            self._scheduler.abort(rid, [request for request in live if request.rid.startswith(rid)])
        return Response()

    async def pause_generation(self, request: HttpRequest) -> Response:
        body = await _object(request)
        mode = "abort" if body is None else body.get("mode", "abort")
        if body is None or mode not in PAUSE_MODES:
            return self._malformed(f"mode must be one of {', '.join(PAUSE_MODES)}")
        scheduler = self._scheduler
        scheduler.close()
        if mode == "abort":
            await scheduler.drain(abort=True)
        else:
            await scheduler.freeze()
            if mode == "retract":
                scheduler.retract()
        return OrjsonResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _request: HttpRequest) -> Response:
        self._scheduler.resume()
        return OrjsonResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await _object(request)
        version = None if body is None else body.get("new_version")
        if body is None or not isinstance(version, str):
            return self._malformed("new_version must be a string")
        # The engine's own default: unless the body says false, all requests in flight are aborted.
        if body.get("abort_all_requests", True):
            self._scheduler.abort_all()
        self._scheduler.weight_version = version
        return OrjsonResponse(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        )

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
        head = {"timestamp": time.time(), "version": config.version, "dp_rank_count": 1}
        return OrjsonResponse(head | {"loads": [load], "aggregate": aggregate})

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
            "dp_size": config.dp_size,
            "internal_states": [{"effective_max_running_requests_per_dp": config.max_running_requests}],
            "version": config.version,
        }
        if config.release >= (0, 5, 21):
            info["frontend"] = config.frontend
        return OrjsonResponse(info)

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
        return OrjsonResponse(info)

    async def workers(self, request: HttpRequest) -> Response:
        """Respond as a router does."""
        return OrjsonResponse(worker_list(request, self._config, self._scheduler))

    async def health(self, _request: HttpRequest) -> Response:
        return Response()

    def _malformed(self, message: str = "the body must be a JSON object") -> Response:
        return OrjsonResponse(bad_request(self._config, message), status_code=400)


async def _object(request: HttpRequest) -> dict[str, Any] | None:
    """Parse a body that is a JSON object or empty; None for anything else."""
    raw = await request.body()
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None
