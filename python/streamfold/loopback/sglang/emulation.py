"""SGLang as one of the engines that can be emulated."""

from __future__ import annotations

from streamfold.loopback.http.emulation import Emulation
from streamfold.loopback.sglang.control import needs_api_key, routes
from streamfold.loopback.sglang.request import undisturbed
from streamfold.loopback.sglang.wire import SglangFormat

__all__ = ["SGLANG"]

SGLANG = Emulation(SglangFormat.of, routes, needs_api_key, undisturbed)
