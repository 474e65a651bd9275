"""The client side of LLM rollouts: folds streamed generations into training samples, losing nothing."""

from streamfold._core import Experts, Generation, Parser, __version__
from streamfold.call import Call
from streamfold.client import Client, Running
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.limits import Limits, Timeouts

__all__ = [
    "Call",
    "Client",
    "DecodeError",
    "EngineError",
    "EngineTimeout",
    "Experts",
    "Generation",
    "Limits",
    "Parser",
    "Running",
    "StreamTruncated",
    "StreamfoldError",
    "Timeouts",
    "__version__",
]
