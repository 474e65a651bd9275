"""vLLM as one of the engines that can be emulated."""

from __future__ import annotations

from streamfold.loopback.http.emulation import Emulation
from streamfold.loopback.vllm.control import EXCEPTION_HANDLERS, needs_api_key, routes
from streamfold.loopback.vllm.request import undisturbed
from streamfold.loopback.vllm.wire import VllmFormat

__all__ = ["VLLM"]

VLLM = Emulation(VllmFormat.of, routes, needs_api_key, undisturbed, EXCEPTION_HANDLERS)
