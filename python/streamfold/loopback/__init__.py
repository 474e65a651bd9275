"""Loopback engine: emulates an SGLang or vLLM server over real HTTP, with a deterministic mock model or a real one.

For tests and demos, without GPU, and with fault injection. It does not depend on the rest of streamfold: it can test
any client. ::

    from streamfold.loopback import Loopback

    with Loopback(token_rate=100) as engine:
        ...  # any client, with the URL engine.url
        engine.stats()

``Loopback(engine="vllm")`` emulates vLLM. ``Loopback(model="hf:PATH")`` runs a causal language model of a directory on
the CPU, with the extra ``hf``. :func:`serve` runs an engine in the foreground, as ``streamfold serve`` does.
``sglang.wire`` and ``vllm.wire`` write the engines' events without a server. ``python -m pydoc
streamfold.loopback.faults`` lists all faults.
"""

try:
    from streamfold.loopback.app import create_app
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.tokenizer import MockTokenizer
    from streamfold.loopback.engine import Engine, SeenRequest, undisturbed
    from streamfold.loopback.faults.script import Faults
    from streamfold.loopback.router.router import Router
    from streamfold.loopback.server import Loopback, Stats, serve
except ModuleNotFoundError as _error:
    _missing = (_error.name or "").partition(".")[0]
    if _missing not in {"starlette", "uvicorn", "h11"}:
        raise
    _message = f"the loopback engine needs {_missing}: pip install 'streamfold[loopback]'"
    raise ImportError(_message, name=_missing) from _error

__all__ = [
    "Config",
    "Engine",
    "Faults",
    "Loopback",
    "MockTokenizer",
    "Router",
    "SeenRequest",
    "Stats",
    "create_app",
    "serve",
    "undisturbed",
]
