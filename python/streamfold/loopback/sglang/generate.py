"""SGLang's ``/generate`` endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.request_params import MalformedBody
from streamfold.loopback.http.endpoint import Endpoint
from streamfold.loopback.http.responses import OrjsonResponse
from streamfold.loopback.sglang.params import bad_request, check_body, read_generate
from streamfold.loopback.sglang.request import SglangRequest
from streamfold.loopback.sglang.wire import SglangFormat, error_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from streamfold.loopback.core.request import EngineRequest
    from streamfold.loopback.core.request_params import InvalidRequest
    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["GenerateEndpoint"]


class GenerateEndpoint(Endpoint[dict[str, Any]]):
    """The ASGI application of ``/generate``."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._format = SglangFormat.of(self._config)

    def _parse(self, http: HttpRequest, body: bytes) -> dict[str, Any]:  # noqa: ARG002  # no header matters
        try:
            return check_body(orjson.loads(body), self._config)
        except orjson.JSONDecodeError as error:
            raise MalformedBody(bad_request(self._config, f"the body is not JSON: {error}")) from error

    def _is_streamed(self, parsed: dict[str, Any]) -> bool:
        return bool(parsed.get("stream"))

    def _make_requests(self, parsed: dict[str, Any], notify: Callable[[], None]) -> list[EngineRequest]:
        found = [self._scheduler.seeded(params) for params in read_generate(parsed, self._config)]
        return [SglangRequest(params, self._config, self._scheduler.model, notify=notify) for params in found]

    def _error_event(self, error: InvalidRequest) -> bytes:
        return self._format.error_event(str(error))

    def _error_response(self, error: InvalidRequest) -> Response:
        return OrjsonResponse(error_frame(self._format, str(error)), status_code=400)

    def _failure_response(self, request: EngineRequest) -> Response | None:
        if request.http_failure is None:
            return None
        status, message = request.http_failure
        if status not in {500, 503} and self._config.release < (0, 5, 23):
            return None
        return OrjsonResponse(self._format.http_error(message, status), status_code=status)

    def _body(self, requests: list[EngineRequest]) -> object:
        bodies = [request.body(self._scheduler.weight_version) for request in requests]
        return bodies if requests[0].params.index is not None else bodies[0]
