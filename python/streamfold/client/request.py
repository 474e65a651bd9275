"""CallRequest: what the tries of one call send, under a new request id each, and the parser of their replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import httpx

from streamfold._core import Parser

if TYPE_CHECKING:
    from streamfold.engines.base import EngineSpec, RequestOptions

__all__ = ["CallRequest"]


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """One call's request.

    Attributes:
        engine: how the request is written and its reply read.
        url: where it goes.
        headers: of all tries, without those that hold the request id.
        body: the JSON object, written for the request id of ``options``.
        options: what was requested.
        prompt_len: tokens in the prompt; None if ``body`` holds it as text or images.
        budget: ``max_new_tokens``; None if it is not limited.
        drain: seconds that an abort reads on for side data.
        connect_timeout: seconds; None for no limit. The other phases are timed by ``Attempt``.
        clamped: what to do with clamped logprobs, as of :class:`~streamfold.Client`.
        max_event_bytes: the longest event that is parsed.
    """

    engine: EngineSpec
    url: str
    headers: httpx.Headers
    body: bytes
    options: RequestOptions
    prompt_len: int | None
    budget: int | None
    drain: float
    connect_timeout: float | None
    clamped: Literal["raise", "keep"]
    max_event_bytes: int

    def parser(self) -> Parser:
        """A new parser for one reply."""
        return Parser(
            self.engine.dialect,
            logprobs=self.options.logprobs,
            experts=self.options.experts,
            prompt_len=self.prompt_len,
            experts_start=self.options.experts_start,
            clamped=self.clamped,
            max_new_tokens=self.budget,
            max_event_bytes=self.max_event_bytes,
        )

    def with_rid(self, rid: str) -> httpx.Request:
        """The HTTP request with this request id."""
        headers = self.headers.copy()
        headers.update(self.engine.headers(rid))  # replaces a caller's: of two of a name servers take the first
        first = self.options.rid
        return httpx.Request(
            "POST",
            self.url,
            headers=headers,
            content=self.body if rid == first else self.engine.rename(self.body, first, rid),
            extensions={"timeout": {"connect": self.connect_timeout}},
        )
