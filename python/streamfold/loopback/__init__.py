"""An engine in a box: SGLang's or vLLM's wire over real HTTP, with a deterministic model, for demos and tests.

It needs neither a GPU nor weights, and knows nothing of the rest of this package: it tests any client. ::

    from streamfold.loopback import Loopback

    with Loopback(token_rate=100) as engine:
        ...  # any client, against engine.url
        engine.stats()

``Loopback(engine="vllm")`` speaks vLLM. :func:`serve` runs either in the foreground. ``wire`` and ``vllm.wire`` have
the writers alone, without a server. ``faults`` lists how it can misbehave.
"""

try:
    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.engine import Engine, SeenRequest
    from streamfold.loopback.core.tokenizer import Tokenizer
    from streamfold.loopback.core.undisturbed import undisturbed
    from streamfold.loopback.faults.script import Faults
    from streamfold.loopback.http.app import create_app
    from streamfold.loopback.http.server import Loopback, Stats, serve
    from streamfold.loopback.router.router import Router
except ModuleNotFoundError as error:
    _missing = (error.name or "").partition(".")[0]
    if _missing not in {"starlette", "uvicorn", "h11"}:
        raise
    _message = f"the loopback engine needs {_missing}: pip install 'streamfold[loopback]'"
    raise ImportError(_message, name=_missing) from error

__all__ = [
    "Config",
    "Engine",
    "Faults",
    "Loopback",
    "Router",
    "SeenRequest",
    "Stats",
    "Tokenizer",
    "create_app",
    "serve",
    "undisturbed",
]
