"""The client side of LLM rollouts: streams generations from SGLang and vLLM into training samples."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("streamfold does not support Windows: it runs on Linux and macOS, and in WSL")

from streamfold._core import Experts, Generation, Parser, __version__
from streamfold.client.call import Call
from streamfold.client.client import Client
from streamfold.client.limits import Limits, Retries, Timeouts
from streamfold.client.session import Running
from streamfold.client.timings import Timings
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from streamfold._types import SampleLike, Tokenizer
    from streamfold.client.trace import Trace
    from streamfold.rollout.buffer import Buffer
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.groups import Group, Source, prompt_groups
    from streamfold.rollout.opaque import Opaque
    from streamfold.rollout.pool import Pool
    from streamfold.rollout.rollout import Rollout, RolloutResult
    from streamfold.samples.batch import Batch, collate
    from streamfold.samples.completion import complete
    from streamfold.samples.merging import merge
    from streamfold.samples.observation import append_observation
    from streamfold.samples.options import CompletionOptions
    from streamfold.samples.sample import Sample

__all__ = [
    "Batch",
    "Buffer",
    "Call",
    "Client",
    "CompletionOptions",
    "DecodeError",
    "EngineError",
    "EngineTimeout",
    "Experts",
    "Generation",
    "Group",
    "Limits",
    "Opaque",
    "Parser",
    "Pool",
    "Retries",
    "Rollout",
    "RolloutConfig",
    "RolloutResult",
    "Running",
    "Sample",
    "SampleLike",
    "Source",
    "StreamTruncated",
    "StreamfoldError",
    "Timeouts",
    "Timings",
    "Tokenizer",
    "Trace",
    "__version__",
    "append_observation",
    "collate",
    "complete",
    "merge",
    "prompt_groups",
]

# Loaded on first access: a program that needs only a parser or a client starts sooner.
_LATER = {
    "Batch": "samples.batch",
    "Buffer": "rollout.buffer",
    "CompletionOptions": "samples.options",
    "Group": "rollout.groups",
    "Opaque": "rollout.opaque",
    "Pool": "rollout.pool",
    "Rollout": "rollout.rollout",
    "RolloutConfig": "rollout.config",
    "RolloutResult": "rollout.rollout",
    "Sample": "samples.sample",
    "SampleLike": "_types",
    "Source": "rollout.groups",
    "Tokenizer": "_types",
    "Trace": "client.trace",
    "append_observation": "samples.observation",
    "collate": "samples.batch",
    "complete": "samples.completion",
    "merge": "samples.merging",
    "prompt_groups": "rollout.groups",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # any public name
    if name not in _LATER:
        raise AttributeError(f"module 'streamfold' has no attribute {name!r}")
    return getattr(import_module(f"streamfold.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
