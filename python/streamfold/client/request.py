"""CallRequest: what the tries of one call send, under a new request id each, and how their replies are parsed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from streamfold._core import Generation, Parser
from streamfold.client.drivers.base import HttpRequest

if TYPE_CHECKING:
    from streamfold.client.drivers.base import Fields
    from streamfold.client.limits import Timeouts
    from streamfold.client.urls import BaseUrl
    from streamfold.engines.base import EngineSpec, RequestOptions

__all__ = ["CallRequest", "new_rid", "replaced"]

_MAX_OVERRUN = 256  # tokens past max_new_tokens, after which an engine floods


def new_rid() -> str:
    """A request id that no other call has: 32 random hex digits."""
    return os.urandom(16).hex()


def replaced(generation: Generation, **fields: Any) -> Generation:  # noqa: ANN401  # the fields of a generation
    """A copy of a generation with other values of some fields. Its arrays are the same."""
    args, kwargs = generation.__getnewargs_ex__()  # all that makes a generation, as for a pickle
    return Generation(*args, **{**kwargs, **fields})


@dataclass(kw_only=True)
class CallRequest:
    """One call's request.

    Attributes:
        engine: how the request is written and its reply read.
        base_url: of the server.
        fields: the headers of all tries, without those that hold the request id.
        body: the JSON object, written for the request id of ``options``; empty once a token was received.
        options: what was requested.
        side_data: what the terminal event must bring beside the tokens, by the names of a generation's fields.
        prompt_len: tokens in the prompt; None if ``body`` holds it as text or images.
        budget: ``max_new_tokens``; None if it is not limited.
        drain: seconds that an abort reads on for what only the terminal event carries.
        timeouts: of the phases of a try.
        clamped: what to do with clamped logprobs, as of :class:`~streamfold.Client`.
        max_event_bytes: the longest event that is parsed.
        given_rid: the request id that the caller gave for the first try; None: all are the client's own.
    """

    engine: EngineSpec
    base_url: BaseUrl
    fields: Fields
    body: bytes
    options: RequestOptions
    side_data: tuple[str, ...]
    prompt_len: int | None
    budget: int | None
    drain: float
    timeouts: Timeouts
    clamped: Literal["raise", "keep"]
    max_event_bytes: int
    given_rid: str | None = None

    def __post_init__(self) -> None:
        options = self.options
        self._stream: dict[str, Any] = {
            "dialect": self.engine.dialect,
            "logprobs": options.logprobs,
            "experts": options.experts,
            "prompt_len": self.prompt_len,
            "experts_start": options.experts_start,
            "clamped": self.clamped,
            "max_new_tokens": self.budget,
            "token_limit": None if self.budget is None else self.budget + _MAX_OVERRUN,
            "max_event_bytes": self.max_event_bytes,
        }

    @property
    def url(self) -> str:
        """The address, for messages."""
        return f"{self.base_url}{self.engine.path}"

    def nothing(self) -> Generation:
        """The generation of a call that has received nothing."""
        return Parser(**self._stream).take()

    def drop_body(self) -> None:
        """Free the body: the request is not sent again."""
        self.body = b""

    def with_rid(self, rid: str, *, fresh: bool = False) -> HttpRequest:
        """The HTTP request with this request id.

        Args:
            rid: the request id.
            fresh: whether to use a new connection only.
        """
        first = self.options.rid
        fields = self.fields
        if own := self.engine.headers(rid):  # they replace a caller's: of two of a name servers take the first
            names = {name.lower() for name in own}
            fields = (*(field for field in fields if field[0].lower() not in names), *own.items())
        return HttpRequest(
            origin=self.base_url.origin,
            method="POST",
            target=self.base_url.prefix + self.engine.path,
            fields=fields,
            body=self.body if rid == first else self.engine.rename(self.body, first, rid),
            stream=self._stream,
            connect_timeout=self.timeouts.connect,
            fresh=fresh,
        )
