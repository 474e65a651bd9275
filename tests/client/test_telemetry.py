"""Telemetry: what OpenTelemetry and Prometheus are told of calls."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from streamfold import EngineError, Retries, telemetry
from streamfold.telemetry import OpenTelemetry, PrometheusCollector
from support.replay import ASKED, DONE, END, HANG, LAST_CHUNK, PROMPT, Step, answer_json, chunk, head, until
from support.tries import BUSY, SOON, in_turn

if TYPE_CHECKING:
    from support.speaking import Speech

ENDS = ["stop", "length"]


class Told:
    """A provider of each kind, and what they were told."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._meters = MeterProvider(metric_readers=[self._reader])
        self.observer = OpenTelemetry(tracer_provider=self.tracers, meter_provider=self._meters)

    @property
    def spans(self) -> Any:
        return self._spans.get_finished_spans()

    def metrics(self) -> dict[str, Any]:
        data: Any = self._reader.get_metrics_data()
        found = [metric for scope in data.resource_metrics[0].scope_metrics for metric in scope.metrics]
        return {metric.name: metric for metric in found}

    def close(self) -> None:
        self._meters.shutdown()
        self.tracers.shutdown()


@pytest.fixture
def told() -> Any:
    made = Told()
    yield made
    made.close()


async def test_a_call_is_a_span_and_in_the_metrics_of_the_conventions(speech: Speech, told: Told) -> None:
    async with speech.replay() as server, speech.client(server.url, observers=[told.observer], retries=SOON) as client:
        server.routes[speech.path] = in_turn(server, BUSY, speech.whole)
        with told.tracers.get_tracer("test").start_as_current_span("outer"):
            call = client.start(PROMPT, ASKED)
        generation = await call
    (span,) = [span for span in told.spans if span.name == "generate_content"]
    (outer,) = [span for span in told.spans if span.name == "outer"]
    assert span.kind is SpanKind.CLIENT
    assert span.parent.span_id == outer.context.span_id
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    common = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": client.engine,
        "server.address": host,
        "server.port": int(port),
    }
    assert generation.timings is not None
    assert dict(span.attributes) == {
        **common,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": call.rid,
        "gen_ai.response.finish_reasons": (generation.finish_reason,),
        "gen_ai.response.time_to_first_chunk": generation.timings.ttft,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        **({"gen_ai.usage.cache_read.input_tokens": n} if (n := generation.cached_tokens) is not None else {}),
        "gen_ai.usage.output_tokens": len(generation.token_ids),
        "streamfold.tries": 2,
        "streamfold.aborted": False,
    }
    assert (span.end_time - span.start_time) * 1e-9 == pytest.approx(call.age, abs=0.01)

    metrics = told.metrics()
    assert metrics["gen_ai.client.operation.duration"].unit == "s"
    assert metrics["gen_ai.client.token.usage"].unit == "{token}"
    for name, value in (("duration", call.age), ("time_to_first_chunk", generation.timings.ttft)):
        (point,) = metrics[f"gen_ai.client.operation.{name}"].data.data_points
        assert (point.count, point.sum, dict(point.attributes)) == (1, pytest.approx(value), common)
        assert point.explicit_bounds[0] == 0.01
    usage = metrics["gen_ai.client.token.usage"].data.data_points
    assert {point.attributes["gen_ai.token.type"]: point.sum for point in usage} == {
        "input": generation.prompt_tokens,
        "output": len(generation.token_ids),
    }
    each = metrics.get("gen_ai.client.operation.time_per_output_chunk")
    assert (each is not None) == (generation.timings.itl_mean is not None)


async def test_a_failed_call_has_its_error(speech: Speech, told: Told) -> None:
    once = Retries(tries=1)
    async with (
        speech.replay(answer_json({"error": "no"}, 400)) as server,
        speech.client(server.url, observers=[told.observer], retries=once) as client,
    ):
        with pytest.raises(EngineError):
            await client.generate(PROMPT, ASKED)
    (span,) = told.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "400"
    (point,) = told.metrics()["gen_ai.client.operation.duration"].data.data_points
    assert point.attributes["error.type"] == "400"


async def test_a_scrape_shows_what_calls_do_and_have_done(speech: Speech) -> None:
    collector, registry = PrometheusCollector(), prometheus_client.CollectorRegistry()
    registry.register(collector)
    go_on = asyncio.Event()
    waiting: list[Step] = [head(), chunk(speech.event([1, 2], 2)), go_on, HANG]
    threads = threading.active_count()

    async with speech.replay() as server:
        labels = {"engine": "", "server": server.url}

        def value(name: str, **more: str) -> float | None:
            return registry.get_sample_value(name, {**labels, **more})

        async with speech.client(server.url, observers=[collector], retries=SOON) as client:
            labels["engine"] = client.engine
            server.routes[speech.path] = in_turn(server, BUSY, speech.whole, waiting)
            first = client.start(PROMPT, ASKED)
            generation = await first
            second = client.start(PROMPT, ASKED)
            await second.wait_tokens(2)
            assert value("streamfold_calls_running", phase="tokens") == 1
            assert value("streamfold_calls_total", outcome="stop") == 1
            await second.abort(drain=0.0)
            await until(lambda: not client.running)
    assert threading.active_count() <= threads
    assert value("streamfold_calls_running", phase="tokens") == 0
    assert value("streamfold_calls_total", outcome="abort") == 1
    assert value("streamfold_retries_total") == 1
    assert value("streamfold_tokens_total") == len(generation.token_ids) + 2
    assert value("streamfold_call_seconds_count") == 2
    assert value("streamfold_call_seconds_sum") == pytest.approx(first.age + second.age, abs=0.01)
    assert value("streamfold_time_to_first_token_seconds_bucket", le="1024") == 2
    assert value("streamfold_time_to_first_token_seconds_bucket", le="+Inf") == 2
    text = prometheus_client.generate_latest(registry).decode()
    assert "# TYPE streamfold_inter_token_seconds histogram" in text


FIRST_READS = (1, 3, 4)


def _in_two_reads(speech: Speech, first: int, is_seen: asyncio.Event) -> list[Step]:
    """A reply of four tokens: so many in the first read, the others when that was seen."""
    ids = [1, 2, 3, 4]
    rest = [speech.event(ids[first:], 4, "stop"), *speech.after(4), DONE]
    return [head(), chunk(speech.event(ids[:first], first)), is_seen, *map(chunk, rest), LAST_CHUNK, END]


async def test_times_between_tokens_are_counted_for_all_but_those_of_each_calls_first_read(speech: Speech) -> None:
    collector, registry = PrometheusCollector(), prometheus_client.CollectorRegistry()
    registry.register(collector)
    async with speech.replay() as server, speech.client(server.url, observers=[collector], retries=SOON) as client:
        labels = {"engine": client.engine, "server": server.url}
        seen = [asyncio.Event() for _ in FIRST_READS]
        replies = [_in_two_reads(speech, first, event) for first, event in zip(FIRST_READS, seen, strict=True)]
        server.routes[speech.path] = in_turn(server, BUSY, *replies)
        for first, event in zip(FIRST_READS, seen, strict=True):
            call = client.start(PROMPT, ASKED)
            await call.wait_tokens(first)
            event.set()
            assert len((await call).token_ids) == 4
    tokens = registry.get_sample_value("streamfold_tokens_total", labels)
    assert (tokens, registry.get_sample_value("streamfold_retries_total", labels)) == (12, 1)
    assert registry.get_sample_value("streamfold_inter_token_seconds_count", labels) == 12 - sum(FIRST_READS)


def test_one_registry_takes_one_collector() -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(PrometheusCollector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(PrometheusCollector())


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("OpenTelemetry", "opentelemetry", "otel"), ("PrometheusCollector", "prometheus_client", "prometheus")],
)
def test_without_its_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"streamfold.telemetry.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"streamfold\[{extra}\]"):
        getattr(importlib.import_module("streamfold.telemetry"), name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        telemetry.Nothing  # noqa: B018
