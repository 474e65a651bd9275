"""vLLM's ``/inference/v1/generate`` and ``/v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.request_params import MalformedBody
from streamfold.loopback.http.endpoint import Endpoint, Json
from streamfold.loopback.vllm.params import VllmAsk, read_completion, read_generate, read_json, verify
from streamfold.loopback.vllm.request import VllmRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.request import Request
    from streamfold.loopback.core.request_params import InvalidRequest
    from streamfold.loopback.core.scheduler import Scheduler

    Read = Callable[[Mapping[str, Any], Config, str | None], VllmAsk]

__all__ = ["Completions", "Generate"]


class _Endpoint(Endpoint[VllmAsk]):
    """An application that generates as vLLM does; ``read`` reads its bodies."""

    def __init__(self, scheduler: Scheduler, read: Read) -> None:
        super().__init__(scheduler)
        self._read = read

    def _check(self, http: HttpRequest, body: bytes) -> VllmAsk:
        given = read_json(self._config, http.headers.get("content-type", ""), body)
        ask = self._read(given, self._config, http.headers.get("x-request-id"))
        if self._scheduler.full:
            raise MalformedBody(
                self._config.vllm.error("The server is overloaded.", 503, kind="Service Unavailable"), 503
            )
        return ask

    def _streams(self, asked: VllmAsk) -> bool:
        return asked.stream

    def _requests(self, asked: VllmAsk, notify: Callable[[], None]) -> list[Request]:
        verify(asked, self._config)
        return [VllmRequest(asked, self._config, notify=notify)]

    def _error_event(self, error: InvalidRequest) -> bytes:
        return self._config.vllm.error_event(str(error), 400, error.param)

    def _refused(self, error: InvalidRequest) -> Response:
        return Json(self._config.vllm.error(str(error), 400, param=error.param), status_code=400)

    def _http_refusal(self, request: Request) -> Response | None:
        if request.refusal is not None:
            status, message = request.refusal
            return Json(self._config.vllm.http_error(message, status), status_code=status)
        if self._config.vllm.release < (0, 32) and None in (request.reply.logprobs or []):
            # Its JSON knows no NaN.
            message = "Out of range float values are not JSON compliant"
            return Json(self._config.vllm.http_error(message, 400), status_code=400)
        return None

    def _body(self, requests: list[Request]) -> object:
        (request,) = requests
        return request.body(self._scheduler.weight_version)


class Generate(_Endpoint):
    """The ASGI application behind ``/inference/v1/generate``."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, read_generate)


class Completions(_Endpoint):
    """The ASGI application behind ``/v1/completions``, for one prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, read_completion)
