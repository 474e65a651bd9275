"""SGLang's ``/generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.request_params import MalformedBody
from streamfold.loopback.http.endpoint import Endpoint, Json
from streamfold.loopback.sglang.params import bad_request, check_body, read_asks
from streamfold.loopback.sglang.request import SglangRequest
from streamfold.loopback.sglang.wire import error_event, error_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from streamfold.loopback.core.request import Request
    from streamfold.loopback.core.request_params import InvalidRequest

__all__ = ["Generate"]


class Generate(Endpoint[dict[str, Any]]):
    """The ASGI application behind ``/generate``."""

    def _check(self, http: HttpRequest, body: bytes) -> dict[str, Any]:  # noqa: ARG002  # no header matters
        try:
            return check_body(orjson.loads(body), self._config)
        except orjson.JSONDecodeError as error:
            raise MalformedBody(bad_request(self._config, f"the body is not JSON: {error}")) from error

    def _streams(self, asked: dict[str, Any]) -> bool:
        return bool(asked.get("stream"))

    def _requests(self, asked: dict[str, Any], notify: Callable[[], None]) -> list[Request]:
        return [SglangRequest(ask, self._config, notify=notify) for ask in read_asks(asked, self._config)]

    def _error_event(self, error: InvalidRequest) -> bytes:
        return error_event(self._config.sglang, str(error))

    def _refused(self, error: InvalidRequest) -> Response:
        return Json(error_frame(self._config.sglang, str(error)), status_code=400)

    def _http_refusal(self, request: Request) -> Response | None:
        if request.refusal is None:
            return None
        status, message = request.refusal
        if status not in {500, 503} and self._config.sglang.release < (0, 5, 23):
            return None
        return Json(self._config.sglang.http_error(message, status), status_code=status)

    def _body(self, requests: list[Request]) -> object:
        answers = [request.body(self._scheduler.weight_version) for request in requests]
        return answers if requests[0].ask.index is not None else answers[0]
