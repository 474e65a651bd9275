"""Every exception that streamfold raises on purpose.

::

    StreamfoldError                  .partial: the Generation received so far, or None
    ├── DecodeError (ValueError)     the bytes are not what the dialect says: .kind .offset .path
    ├── StreamTruncated              the body ended before a finish reason, and nobody aborted
    ├── EngineError                  the engine said no, or could not be reached:
    │                                .status .message .retryable .retry_after
    └── EngineTimeout                the engine kept silent for too long: .phase

All of them survive pickling with their attributes. An abort is a result, never an exception.
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

_LONGEST_QUOTE = 200  # bytes of a reply that is not what was expected

# Worth another try: the server was busy or broke. Every other refusal would only be repeated.
_RETRYABLE_4XX = (408, 429)


class StreamfoldError(Exception):
    """The root of all errors of this package.

    Attributes:
        partial: what had been received when the error came, never more than the last good event; None if the
            error arose outside a call.
    """

    partial: Generation | None = None

    def __init__(self, message: str, *, partial: Generation | None = None) -> None:
        super().__init__(message)
        self.partial = partial

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args), self.__dict__


def _restore(cls: type[StreamfoldError], args: tuple[Any, ...]) -> StreamfoldError:
    # Not cls(*args): the constructors take keywords, and the attributes come back as state.
    return cls.__new__(cls, *args)


class DecodeError(StreamfoldError, ValueError):
    """The bytes are not what the dialect says.

    Attributes:
        kind: what is wrong, one of :data:`DecodeErrorKind`.
        offset: the absolute byte offset in the body where it was found, counted from 0.
        path: the field, as in ``meta_info.output_token_logprobs[3][0]``; empty if no field is to blame.
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
    """The body ended, cleanly or by a reset, before a finish reason, and nobody had aborted the call."""


class EngineError(StreamfoldError):
    """The engine said no, inside the stream or as an HTTP status, or it could not be reached.

    Attributes:
        status: the HTTP status, or the code that the error event told; None if none was told.
        message: the engine's own words.
        retryable: whether the same request may succeed later: 408, 429, 5xx, or no connection.
        retry_after: seconds from then on during which the engine does not want to be asked again (``Retry-After``);
            None if it did not say.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
        partial: Generation | None = None,
    ) -> None:
        super().__init__(message if status is None else f"{message} (status {status})", partial=partial)
        self.message = message
        self.status = status
        self.retryable = _is_retryable(status) if retryable is None else retryable
        self.retry_after = retry_after


def _is_retryable(status: int | None) -> bool:
    return status is not None and (status in _RETRYABLE_4XX or 500 <= status <= 599)


class EngineTimeout(StreamfoldError):
    """The engine kept silent for longer than the phase allows.

    Attributes:
        phase: what was waited for: the connection, the first token (headers included), or the next one.
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
    """The first bytes of a reply that is something else than expected, for an error message."""
    cut = body[:_LONGEST_QUOTE].decode(errors="replace")
    return " ".join(cut.split()) or "an empty reply"
