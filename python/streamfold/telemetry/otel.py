"""OpenTelemetry: a span and metrics for each call, by the conventions for clients of generative AI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace

from streamfold._core import __version__
from streamfold.client.observer import Observer
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, Meter, MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from streamfold._core import Generation
    from streamfold.client.observer import ObservedCall, Phase, Subject

__all__ = ["OpenTelemetry"]

_OPERATION: Final = "generate_content"
_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_CHUNK_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS: Final = tuple(4**power for power in range(14))


class OpenTelemetry(Observer):
    """Reports each call of a client as a span and in metrics: ``Client(url, observers=[OpenTelemetry()])``.

    The names are those of OpenTelemetry's conventions for clients of generative AI, whose stability is "development":
    they may change, and this with them.

    - span ``generate_content``, of kind CLIENT, from the start of the call to its end, its wait for a slot and its
      retries included; a child of the span in which the call was started
    - ``gen_ai.client.operation.duration``: the same time
    - ``gen_ai.client.operation.time_to_first_chunk``: from sending the last try's request to its first token
    - ``gen_ai.client.operation.time_per_output_chunk``: the mean of a call, once for each call: a value for each chunk
      would cost more than reading it. All of them are in :class:`~streamfold.telemetry.PrometheusCollector`.
    - ``gen_ai.client.token.usage``: tokens of the prompt, where the engine tells them, and of the response

    Args:
        tracer_provider: None: the global one.
        meter_provider: None: the global one.
    """

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer("streamfold", __version__, tracer_provider)
        meter = metrics.get_meter("streamfold", __version__, meter_provider)
        prefix = "gen_ai.client.operation"
        self._duration = _histogram(meter, f"{prefix}.duration", "s", "GenAI operation duration.", _SECONDS)
        self._first = _histogram(meter, f"{prefix}.time_to_first_chunk", "s", "Time to first chunk.", _SECONDS)
        self._each = _histogram(meter, f"{prefix}.time_per_output_chunk", "s", "Time per chunk.", _CHUNK_SECONDS)
        self._usage = _histogram(meter, "gen_ai.client.token.usage", "{token}", "Tokens used.", _TOKENS)
        self._spans: dict[int, Span] = {}  # of the calls that have not ended

    def on_phase(self, call: ObservedCall, subject: Subject | None, phase: Phase, at: float) -> None:  # noqa: ARG002
        """Begin the span of a call at its first phase, in the context in which it was started."""
        if id(call) in self._spans:
            return
        attributes = {**_attributes(call), "gen_ai.request.stream": True}
        if subject is not None:
            attributes["streamfold.sample"] = subject.label
        kind = trace.SpanKind.CLIENT
        span = self._tracer.start_span(
            _OPERATION, kind=kind, attributes=attributes, start_time=_wall_clock(call.started_at)
        )
        self._spans[id(call)] = span

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:  # noqa: ARG002
        """End the span, and record the metrics."""
        generation, attributes = call.generation(), _attributes(call)
        if call.error is not None:
            attributes["error.type"] = _error_type(call.error)
        self._duration.record(at - call.started_at, attributes)
        if (timings := generation.timings) is not None and timings.ttft is not None:
            self._first.record(timings.ttft, attributes)
            if timings.itl_mean is not None:
                self._each.record(timings.itl_mean, attributes)
        if generation.prompt_tokens is not None:
            self._usage.record(generation.prompt_tokens, {**attributes, "gen_ai.token.type": "input"})
        self._usage.record(len(generation.token_ids), {**attributes, "gen_ai.token.type": "output"})
        span = self._spans.pop(id(call), None)
        if span is not None:
            span.set_attributes({**attributes, **_results(call, generation)})
            if call.error is not None:
                span.set_status(trace.StatusCode.ERROR, str(call.error))
            span.end(_wall_clock(at))


def _histogram(meter: Meter, name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Histogram:
    return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)


def _attributes(call: ObservedCall) -> dict[str, Any]:
    address, port = call.server
    return {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": call.engine_name,
        "server.address": address,
        "server.port": port,
    }


def _results(call: ObservedCall, generation: Generation) -> dict[str, Any]:
    results: dict[str, Any] = {
        "gen_ai.response.id": call.rid,
        "gen_ai.usage.output_tokens": len(generation.token_ids),
        "streamfold.tries": call.tries,
        "streamfold.aborted": call.aborting,
    }
    if generation.finish_reason is not None:
        results["gen_ai.response.finish_reasons"] = [generation.finish_reason]
    if generation.prompt_tokens is not None:
        results["gen_ai.usage.input_tokens"] = generation.prompt_tokens
    if generation.cached_tokens is not None:
        results["gen_ai.usage.cache_read.input_tokens"] = generation.cached_tokens
    if generation.timings is not None and generation.timings.ttft is not None:
        results["gen_ai.response.time_to_first_chunk"] = generation.timings.ttft
    return results


def _error_type(error: BaseException) -> str:
    """The status that the engine has given, or else the name of the exception."""
    status = error.status if isinstance(error, EngineError) else None
    return type(error).__name__ if status is None else str(status)


def _wall_clock(at: float) -> int:
    """A time of ``time.monotonic()`` in nanoseconds of the wall clock."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
