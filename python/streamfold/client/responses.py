"""Replies that are no event stream, and those that never come: the errors that they mean."""

from __future__ import annotations

import re
import time
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import orjson

from streamfold.errors import EngineError, EngineTimeout, StreamfoldError, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.client.drivers.base import Failure, Head

__all__ = ["error_from_failure", "error_from_response", "error_message", "is_duplicate_rid", "retry_after"]

_MAX_MESSAGE_CHARS = 2000
# SGLang; vLLM; vLLM's Rust frontend.
_DUPLICATE = re.compile(
    r"duplicate request id|request id \S+ (is )?already running|request `\S+` is already in flight", re.IGNORECASE
)


def error_from_response(head: Head, body: bytes, hint: str = "") -> EngineError:
    """The error that a response means which is no event stream; ``hint`` says what to do about it."""
    status, headers = head.status, head.headers
    if status >= 400:
        message = error_message(body) + (f" ({hint})" if hint else "")
        return EngineError(message, status=status, retry_after=retry_after(headers))
    if status >= 300:
        location = headers.get("location", "an unnamed location")
        message = f"redirected to {location}; redirects are not followed: give the final URL"
        return EngineError(message, status=status)
    kind = ", ".join(headers.get(name, "") for name in ("content-type", "content-encoding")).strip(", ")
    message = f"expected an uncompressed text/event-stream, got {kind or 'no content type'}: {quote(body)}"
    return EngineError(message, status=status)


def error_from_failure(failure: Failure, url: str, connect_seconds: float | None) -> StreamfoldError:
    """The error that a failed exchange means; ``connect_seconds`` is the limit for the connection."""
    if failure.timed_out:
        limit = f"within {connect_seconds} s (Timeouts.connect)"
        reason = f": {failure.message}" if failure.message else ""
        error: StreamfoldError = EngineTimeout(f"no connection to {url} {limit}{reason}", phase="connect")
    else:
        error = EngineError(f"no reply from {url}: {failure.message}", retryable=failure.retryable)
    error.__cause__ = failure.cause
    return error


def is_duplicate_rid(error: BaseException | None) -> bool:
    """Whether the engine refused a request because another one with its id runs."""
    return isinstance(error, EngineError) and _DUPLICATE.search(error.message) is not None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before a retry, from ``Retry-After`` as seconds or a date; None if there is none."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", value):
        return float(value)
    date = _timestamp(value)
    if date is None:
        return None
    now = _timestamp(headers.get("date", ""))  # by the server's own clock, which may be wrong
    return max(0.0, date - (time.time() if now is None else now))


def _timestamp(date: str) -> float | None:
    """An HTTP date as seconds since the epoch; None if it is invalid."""
    try:
        when = parsedate_to_datetime(date)
        return when.replace(tzinfo=when.tzinfo or timezone.utc).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):  # all that its parser raises
        return None


def error_message(body: bytes) -> str:
    """The server's message from an error body, in any shape that engines and routers use; otherwise its text."""
    try:
        found = _message(orjson.loads(body))
    except orjson.JSONDecodeError:
        found = None
    return found[:_MAX_MESSAGE_CHARS] if found else quote(body)


def _message(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("message", "error", "detail"):
            if found := _message(value.get(key)):
                return found
    if isinstance(value, list):  # FastAPI's validation errors, one object for each field
        problems = [item for item in value if isinstance(item, dict) and "msg" in item]
        return "; ".join(f"{item['msg']} ({item.get('loc')!r:.200})" for item in problems)
    return None
