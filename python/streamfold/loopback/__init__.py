"""An engine in a box: SGLang's wire over real HTTP, with a deterministic model, for demos and tests.

It needs neither a GPU nor weights, and knows nothing of the rest of this package: it tests any client. ::

    from streamfold.loopback import Loopback

    with Loopback(token_rate=100) as engine:
        ...  # any client, against engine.url
        engine.stats()

:func:`serve` runs it in the foreground. ``wire`` has the writer of the dialect alone, without a server.
"""

try:
    from streamfold.loopback.app import Engine, SeenRequest, create_app
    from streamfold.loopback.config import Config
    from streamfold.loopback.request import undisturbed
    from streamfold.loopback.server import Loopback, Stats, serve
    from streamfold.loopback.tokenizer import Tokenizer
except ModuleNotFoundError as error:
    _missing = (error.name or "").partition(".")[0]
    if _missing not in {"starlette", "uvicorn", "h11"}:
        raise
    _message = f"the loopback engine needs {_missing}: pip install 'streamfold[loopback]'"
    raise ImportError(_message, name=_missing) from error

__all__ = ["Config", "Engine", "Loopback", "SeenRequest", "Stats", "Tokenizer", "create_app", "serve", "undisturbed"]
