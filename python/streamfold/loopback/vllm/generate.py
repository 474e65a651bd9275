"""vLLM's endpoints that generate: ``/inference/v1/generate`` and ``/v1/completions``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.request_params import MalformedBody
from streamfold.loopback.http.endpoint import Endpoint
from streamfold.loopback.http.responses import OrjsonResponse
from streamfold.loopback.vllm.params import VllmRequestParams, read_completion, read_generate, read_json, verify
from streamfold.loopback.vllm.request import VllmRequest
from streamfold.loopback.vllm.wire import VllmFormat, error_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import EngineRequest
    from streamfold.loopback.core.request_params import InvalidRequest
    from streamfold.loopback.core.scheduler import Scheduler

    Read = Callable[[Mapping[str, Any], Config, str | None], VllmRequestParams]

__all__ = ["CompletionEndpoint", "TokenEndpoint"]


class _VllmEndpoint(Endpoint[VllmRequestParams]):
    """An endpoint that generates as vLLM does; ``read`` parses its bodies."""

    def __init__(self, scheduler: Scheduler, read: Read) -> None:
        super().__init__(scheduler)
        self._read = read
        self._format = VllmFormat.of(self._config)

    def _parse(self, http: HttpRequest, body: bytes) -> VllmRequestParams:
        given = read_json(http.headers.get("content-type", ""), body)
        params = self._read(given, self._config, http.headers.get("x-request-id"))
        rank = http.headers.get("x-data-parallel-rank", "")
        if self._config.release >= (0, 22) and re.fullmatch(r"-?\d+", rank):  # it ignores anything else
            params = replace(params, dp_rank=int(rank))
        if self._scheduler.full:
            raise MalformedBody(error_object("The server is overloaded.", 503, kind="Service Unavailable"), 503)
        return params

    def _is_streamed(self, parsed: VllmRequestParams) -> bool:
        return parsed.stream

    def _make_requests(self, parsed: VllmRequestParams, notify: Callable[[], None]) -> list[EngineRequest]:
        verify(parsed, self._config)
        scheduler = self._scheduler
        return [VllmRequest(scheduler.seeded(parsed), self._config, scheduler.model, notify=notify)]

    def _error_event(self, error: InvalidRequest) -> bytes:
        return self._format.error_event(str(error), 400, error.param)

    def _error_response(self, error: InvalidRequest) -> Response:
        return OrjsonResponse(error_object(str(error), 400, param=error.param), status_code=400)

    def _failure_response(self, request: EngineRequest) -> Response | None:
        if request.http_failure is not None:
            status, message = request.http_failure
            return OrjsonResponse(self._format.http_error(message, status), status_code=status)
        if self._config.release < (0, 32) and None in (request.reply.logprobs or []):
            # JSON cannot encode the NaN.
            message = "Out of range float values are not JSON compliant"
            return OrjsonResponse(self._format.http_error(message, 400), status_code=400)
        return None

    def _body(self, requests: list[EngineRequest]) -> object:
        (request,) = requests
        return request.body(self._scheduler.weight_version)


class TokenEndpoint(_VllmEndpoint):
    """The ASGI application of ``/inference/v1/generate``: token ids in, token ids out."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, read_generate)


class CompletionEndpoint(_VllmEndpoint):
    """The ASGI application of ``/v1/completions``, for one prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, read_completion)
