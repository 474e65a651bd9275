"""Telemetry of calls: OpenTelemetry (extra ``otel``) and Prometheus (extra ``prometheus``).

Both are observers of a client: ``Client(url, observers=[OpenTelemetry(), PrometheusCollector()])``. They are called at
the phases and the end of a call, never for an event or token; no port is opened and no thread started.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from streamfold.telemetry.otel import OpenTelemetry
    from streamfold.telemetry.prometheus import PrometheusCollector

__all__ = ["OpenTelemetry", "PrometheusCollector"]

_EXTRAS: Final = {"OpenTelemetry": "otel", "PrometheusCollector": "prometheus"}  # and the modules of the same names


def __getattr__(name: str) -> Any:  # noqa: ANN401  # any public name
    if name not in _EXTRAS:
        raise AttributeError(f"module 'streamfold.telemetry' has no attribute {name!r}")
    extra = _EXTRAS[name]
    try:
        return getattr(import_module(f"streamfold.telemetry.{extra}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs an extra: pip install 'streamfold[{extra}]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
