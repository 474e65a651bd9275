"""What the clients under measurement have in common: the load, and what each must have read in the end."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from benches.server import TLS

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

PATHS: Final = {"sglang": "/generate", "vllm": "/inference/v1/generate"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go, and how.

    Attributes:
        url: the server's base URL.
        engine: what it speaks.
        cumulative: whether SGLang's events repeat the whole response.
        keep_alive: whether connections are used again. Every client opens one for each stream otherwise.
        prompt_tokens: length of each prompt.
    """

    url: str
    engine: Literal["sglang", "vllm"] = "sglang"
    cumulative: bool = False
    keep_alive: bool = False
    prompt_tokens: int = 512

    @cached_property
    def prompt(self) -> list[int]:
        """The prompt of every request."""
        return list(range(self.prompt_tokens))

    @property
    def endpoint(self) -> str:
        """The URL that generates."""
        return self.url + PATHS[self.engine]

    def params(self, tokens: int) -> dict[str, Any]:
        """Sampling parameters, under SGLang's names."""
        return {"max_new_tokens": tokens, "temperature": 1.0}

    def payload(self, rid: str, tokens: int) -> dict[str, Any]:
        """The request that this package sends, as an object."""
        if self.engine == "sglang":
            asked = {"sampling_params": self.params(tokens), "stream": True, "return_logprob": True}
            return {"rid": rid, "input_ids": self.prompt, **asked}
        return {
            "request_id": rid,
            "token_ids": self.prompt,
            "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "logprobs": 1, "n": 1},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def tls(self) -> ssl.SSLContext | None:
        """A context that trusts the tests' certificate; None for plain HTTP."""
        if self.url.startswith("http:"):
            return None
        return ssl.create_default_context(cafile=str(TLS / "cert.pem"))


@dataclass(frozen=True)
class Reading:
    """A response: token ids int32 ``[n]``, logprobs float64 ``[n]``; None for a client that drops the bytes.

    ``size`` is the number of bytes that such a client has dropped, head and framing included.
    """

    token_ids: npt.NDArray[np.int32] | None
    logprobs: npt.NDArray[np.float64] | None
    size: int = 0


class StreamClient(ABC):
    """Reads responses, many at once. Entered on a running event loop."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @abstractmethod
    async def read(self, rid: str, tokens: int) -> Reading:
        """Ask for that many tokens, and read the response to its end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None
