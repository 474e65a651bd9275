"""The names that users import. Everything else is internal and may move."""

from __future__ import annotations

import importlib

import pytest

EXPORTED = {
    "streamfold": """
        Batch Buffer Call Client CompletionOptions DecodeError EngineError EngineTimeout Experts Generation Group Limits
        Opaque Parser Pool Retries Rollout RolloutConfig RolloutResult Running Sample SampleLike Source
        StreamTruncated StreamfoldError Timeouts Timings Tokenizer Trace __version__ append_observation collate complete
        merge prompt_groups
    """,
    "streamfold.slime": """
        SLIME append_observation close_rollout generate_rollout generate_rollout_async generate_streaming turn
    """,
    "streamfold.vime": """
        VIME append_observation close_rollout generate_rollout generate_rollout_async generate_streaming turn
    """,
    "streamfold.miles": "MILES append_observation generate_streaming generate_streaming_legacy turn",
    "streamfold.ray": "RolloutWorkers",
    "streamfold.telemetry": "OpenTelemetry PrometheusCollector",
    "streamfold.loopback": """
        Config Engine Faults Loopback MockTokenizer Router SeenRequest Stats create_app serve undisturbed
    """,
}


# Those that need a package that few have.
MARKS = {"streamfold.ray": pytest.mark.ray}


@pytest.mark.parametrize("module", [pytest.param(name, marks=MARKS.get(name, ())) for name in EXPORTED])
def test_the_exported_names_are_exactly_these(module: str) -> None:
    exports = importlib.import_module(module)
    assert sorted(exports.__all__) == sorted(EXPORTED[module].split())
    assert [name for name in exports.__all__ if not hasattr(exports, name)] == []
