"""Replies that are no stream: what they amount to, in the server's own words."""

from __future__ import annotations

import re
import time
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import orjson

from streamfold.errors import EngineError, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

__all__ = ["error_message", "is_stream", "refusal", "retry_after"]

_LONGEST_MESSAGE = 2000


def is_stream(response: httpx.Response) -> bool:
    """Whether the body may go to the parser: status 200, plain ``text/event-stream``."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = response.headers.get("content-encoding", "").strip().lower()
    return response.status_code == 200 and kind == "text/event-stream" and encoding in ("", "identity")


def refusal(response: httpx.Response, body: bytes, hint: str = "") -> EngineError:
    """What a reply that is no stream amounts to; ``hint`` says what to do about it."""
    status = response.status_code
    if status >= 400:
        message = error_message(body) + (f" ({hint})" if hint else "")
        return EngineError(message, status=status, retry_after=retry_after(response.headers))
    if status >= 300:
        there = response.headers.get("location", "somewhere else")
        return EngineError(f"redirected to {there}, which is not followed: give the final URL", status=status)
    kind = ", ".join(response.headers.get(name, "") for name in ("content-type", "content-encoding")).strip(", ")
    return EngineError(f"no plain text/event-stream but {kind or 'of no type'}: {quote(body)}", status=status)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to be asked again: ``Retry-After`` holds them, or a date."""
    told = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", told):
        return float(told)
    date = _seconds_of(told)
    if date is None:
        return None
    now = _seconds_of(headers.get("date", ""))  # by the server's own clock, which may be wrong
    return max(0.0, date - (time.time() if now is None else now))


def _seconds_of(date: str) -> float | None:
    """Seconds since the epoch of an HTTP date; None if it is none."""
    try:
        when = parsedate_to_datetime(date)
        return when.replace(tzinfo=when.tzinfo or timezone.utc).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):  # its parser gives up in many ways
        return None


def error_message(body: bytes) -> str:
    """The server's own words out of an error reply: any of the shapes that engines and routers use, or its text."""
    try:
        found = _message(orjson.loads(body))
    except orjson.JSONDecodeError:
        found = None
    return found[:_LONGEST_MESSAGE] if found else quote(body)


def _message(reply: object) -> str | None:
    if isinstance(reply, str):
        return reply
    if isinstance(reply, dict):
        for key in ("message", "error", "detail"):
            if found := _message(reply.get(key)):
                return found
    if isinstance(reply, list):  # FastAPI's list of what is wrong, one object for each field
        told = [item for item in reply if isinstance(item, dict) and "msg" in item]
        return "; ".join(f"{item['msg']} ({item.get('loc')!r:.200})" for item in told)
    return None
