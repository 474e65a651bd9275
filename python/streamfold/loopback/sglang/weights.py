"""SGLang's endpoints that replace the weights of a running model: from a directory, or tensor by tensor."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from streamfold.loopback.core.causal_lm import WeightsError
from streamfold.loopback.http.responses import OrjsonResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["weight_routes"]

# The one format of tensors; SGLang's own ones are pickled, and this engine unpickles nothing.
LOAD_FORMAT = "safetensors"


def weight_routes(scheduler: Scheduler) -> list[Route]:
    """Return the routes that replace weights."""
    weights = _SglangWeights(scheduler)
    return [
        Route("/update_weights_from_disk", weights.from_disk, methods=["POST"]),
        Route("/update_weights_from_tensor", weights.from_tensor, methods=["POST"]),
    ]


class _SglangWeights:
    """Handlers of the endpoints that replace weights.

    While the engine is paused they act at once, otherwise when all streams have ended. ``flush_cache`` (true unless the
    body says false) is refused while requests keep their KV cache, as after a pause in place.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def from_disk(self, request: HttpRequest) -> Response:
        """Replace all weights by those of the directory ``model_path``."""
        body = await _read(request)
        path = body.get("model_path")
        if not isinstance(path, str):
            return _refused("model_path must be a string")
        paused = self._scheduler.running + self._scheduler.waiting
        return await self._write(
            body,
            partial(self._scheduler.model.load_weights, path),
            "Succeeded to update model weights.",
            num_paused_requests=paused,
        )

    async def from_tensor(self, request: HttpRequest) -> Response:
        """Replace the weights of one bucket: ``serialized_named_tensors``, one safetensors file in base64."""
        body = await _read(request)
        if body.get("load_format") not in {None, LOAD_FORMAT}:
            return _refused(f"load_format must be {LOAD_FORMAT!r}: this engine unpickles nothing")
        try:
            (bucket,) = body.get("serialized_named_tensors", ())
            data = base64.b64decode(bucket, validate=True)
        except (TypeError, ValueError):
            return _refused("serialized_named_tensors must hold one safetensors file in base64")
        return await self._write(body, partial(self._scheduler.model.load_bucket, data), "Success")

    async def _write(self, body: dict[str, Any], write: Callable[[], None], message: str, **report: object) -> Response:
        scheduler = self._scheduler
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            return _refused("weight_version must be a string")
        if body.get("flush_cache", True) and scheduler.paused and scheduler.running:
            return _refused("Cache flush failed: requests are running. Send flush_cache=false to keep their KV cache.")
        abort = bool(body.get("abort_all_requests", False))
        try:
            await scheduler.write_weights(write, version, abort=abort)
        except (OSError, WeightsError) as error:
            return _refused(str(error))
        if version is not None:
            message += f" Weight version updated to {version}."
        return OrjsonResponse({"success": True, "message": message, **report})


async def _read(request: HttpRequest) -> dict[str, Any]:
    """Parse a body; empty if it is no JSON object, so that the fields that it needs are missing."""
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _refused(message: str) -> Response:
    return OrjsonResponse({"success": False, "message": message}, status_code=400)
