"""The client side of LLM rollouts: folds streamed generations into training samples, losing nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamfold._core import Experts, Generation, Parser, __version__
from streamfold.client.call import Call
from streamfold.client.client import Client, Running
from streamfold.client.limits import Limits, Retries, Timeouts
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated

if TYPE_CHECKING:
    from streamfold.rollout.buffer import Buffer
    from streamfold.rollout.config import RolloutConfig
    from streamfold.rollout.pool import Pool
    from streamfold.rollout.rollout import Rollout, RolloutResult
    from streamfold.samples.completion import complete
    from streamfold.samples.merging import merge
    from streamfold.samples.sample import Sample

__all__ = [
    "Buffer",
    "Call",
    "Client",
    "DecodeError",
    "EngineError",
    "EngineTimeout",
    "Experts",
    "Generation",
    "Limits",
    "Parser",
    "Pool",
    "Retries",
    "Rollout",
    "RolloutConfig",
    "RolloutResult",
    "Running",
    "Sample",
    "StreamTruncated",
    "StreamfoldError",
    "Timeouts",
    "__version__",
    "complete",
    "merge",
]

# The loop's parts are loaded when they are asked for: a parser or a client needs none of them, and starts sooner.
_LATER = {
    "Buffer": "rollout.buffer",
    "Pool": "rollout.pool",
    "Rollout": "rollout.rollout",
    "RolloutConfig": "rollout.config",
    "RolloutResult": "rollout.rollout",
    "Sample": "samples.sample",
    "complete": "samples.completion",
    "merge": "samples.merging",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # whatever is asked for
    if name not in _LATER:
        raise AttributeError(f"module 'streamfold' has no attribute {name!r}")
    return getattr(import_module(f"streamfold.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
