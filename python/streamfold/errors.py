"""All exceptions of streamfold.

::

    StreamfoldError                  .partial: the Generation received so far, or None
    ├── DecodeError (ValueError)     the stream breaks a rule of its dialect: .kind .offset .path (of the field)
    ├── StreamTruncated              the body ended without a finish reason, and the client had not aborted:
    │                                .received .done
    ├── EngineError                  the engine refused, failed or could not be reached:
    │                                .status .code .message .retryable .retry_after
    └── EngineTimeout                no connection or no token in time: .phase

All can be pickled, with their attributes. An abort is a result, never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from streamfold._core import Generation

__all__ = [
    "DecodeError",
    "DecodeErrorKind",
    "EngineError",
    "EngineTimeout",
    "StreamTruncated",
    "StreamfoldError",
    "quote",
]

DecodeErrorKind = Literal[
    "json", "utf8", "schema", "length", "mismatch", "token", "logprob", "prefix", "metadata", "too_large"
]

_MAX_QUOTE_BYTES = 200

# The server was busy. Any other 4xx would only be repeated.
_RETRYABLE_4XX = (408, 429)


class StreamfoldError(Exception):
    """Base class of all errors of this package.

    Attributes:
        partial: what was received before the error, up to the last valid event; None outside a call.
    """

    partial: Generation | None = None

    def __init__(self, message: str, *, partial: Generation | None = None) -> None:
        super().__init__(message)
        self.partial = partial

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args), self.__dict__


def _restore(cls: type[StreamfoldError], args: tuple[Any, ...]) -> StreamfoldError:
    # Not cls(*args): the constructors take keywords, and the attributes are restored as state.
    return cls.__new__(cls, *args)


class DecodeError(StreamfoldError, ValueError):
    """The stream breaks a rule of its dialect: a malformed event, or fields that contradict each other.

    Attributes:
        kind: the rule, one of :data:`DecodeErrorKind`.
        offset: byte offset in the body where the error was found, from 0.
        path: the field, as in ``meta_info.output_token_logprobs[3][0]``; empty if no single field is wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: DecodeErrorKind,
        offset: int,
        path: str = "",
        partial: Generation | None = None,
    ) -> None:
        super().__init__(message, partial=partial)
        self.kind: DecodeErrorKind = kind
        self.offset = offset
        self.path = path


class StreamTruncated(StreamfoldError):
    """The body ended, cleanly or by a reset, before a finish reason, and the call was not aborted.

    Attributes:
        received: length of the body, in bytes.
        done: whether the engine ended the stream itself, with ``[DONE]``.
    """

    def __init__(
        self, message: str, *, received: int = 0, done: bool = False, partial: Generation | None = None
    ) -> None:
        super().__init__(message, partial=partial)
        self.received = received
        self.done = done


class EngineError(StreamfoldError):
    """The engine refused or failed, by an HTTP status or an error event, or it could not be reached.

    Attributes:
        status: the HTTP status, or the error event's code; None if there is none. 500 for ``server_error``.
        code: the name of the error in an error event, such as ``server_error``; None if it has none.
        message: the engine's error message.
        retryable: whether the same request may succeed later: 408, 429, 5xx, or no connection.
        retry_after: seconds to wait before a retry, as the engine demands (``Retry-After``); None if it does not.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
        partial: Generation | None = None,
    ) -> None:
        super().__init__(message if status is None else f"{message} (status {status})", partial=partial)
        self.message = message
        self.status = status
        self.code = code
        self.retryable: bool = _is_retryable(status) if retryable is None else retryable
        self.retry_after = retry_after


def _is_retryable(status: int | None) -> bool:
    return status is not None and (status in _RETRYABLE_4XX or 500 <= status <= 599)


class EngineTimeout(StreamfoldError):
    """A phase took longer than its timeout: see :class:`~streamfold.Timeouts`.

    Attributes:
        phase: ``"connect"``, ``"first_token"`` (headers included) or ``"next_token"``.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: Literal["connect", "first_token", "next_token"],
        partial: Generation | None = None,
    ) -> None:
        super().__init__(message, partial=partial)
        self.phase: Literal["connect", "first_token", "next_token"] = phase


def quote(body: bytes) -> str:
    """The first bytes of an unexpected response, for an error message."""
    text = body[:_MAX_QUOTE_BYTES].decode(errors="replace")
    return " ".join(text.split()) or "an empty reply"
