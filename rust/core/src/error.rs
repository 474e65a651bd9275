//! Errors of a stream: their kind, their position in the body, and a message.

use std::borrow::Cow;
use std::fmt;

/// The kind of a [`ParseError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Not JSON: bad syntax, bare NaN or Infinity, lone surrogate escapes, nested too deep.
    Json,
    /// Not UTF-8.
    Utf8,
    /// A field is missing, or has a wrong type or value.
    Schema,
    /// Two counts differ, such as the number of tokens received and the number that the engine reports.
    Length,
    /// The token ids of one event differ from the ids beside its logprobs.
    Mismatch,
    /// A token id is not an integer in 0 … 2³¹−1.
    Token,
    /// A logprob is null, beyond the range of a double, or the engine's substitute for minus infinity.
    Logprob,
    /// An event changed what an earlier event had sent.
    Prefix,
    /// Side data is invalid: base64, dtype, shape, offsets, spans.
    Metadata,
    /// An event is larger than the limit, or memory ran out.
    TooLarge,
}

impl ErrorKind {
    /// The name in Python's `DecodeError.kind`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Utf8 => "utf8",
            Self::Schema => "schema",
            Self::Length => "length",
            Self::Mismatch => "mismatch",
            Self::Token => "token",
            Self::Logprob => "logprob",
            Self::Prefix => "prefix",
            Self::Metadata => "metadata",
            Self::TooLarge => "too_large",
        }
    }
}

/// The bytes break a rule of the dialect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The byte offset in the response body.
    pub offset: u64,
    /// The field, such as `meta_info.output_token_logprobs[3][0]`; empty if the error concerns no single field.
    pub path: Cow<'static, str>,
    /// What was found, what was expected, what to do.
    pub message: Cow<'static, str>,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        write!(f, "{} ({}, at byte {} of the body)", self.message, self.kind.name(), self.offset)
    }
}

/// An error that the engine or a router reported inside the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    /// The engine's message.
    pub message: String,
    /// The HTTP status in the error, if it has one.
    pub status: Option<u16>,
    /// The engine's name of the error, such as `server_error`, if it has one.
    pub code: Option<String>,
}

/// All errors of [`Parser`](crate::Parser).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The bytes break a rule of the dialect.
    Parse(ParseError),
    /// The engine reported an error.
    Engine(EngineError),
    /// The body ended without a finish reason.
    Truncated {
        /// The length of the body.
        bytes: u64,
        /// The number of tokens received.
        tokens: usize,
        /// Whether the engine ended the stream itself, with `[DONE]`.
        is_done: bool,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parse(error) => error.fmt(f),
            Self::Engine(error) => f.write_str(&error.message),
            Self::Truncated { bytes, tokens, .. } => write!(
                f,
                "the stream ended after {bytes} bytes without a finish reason; {tokens} tokens are kept, resume from them"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// An error in one event. Its position in the body is added later.
#[derive(Debug)]
pub(crate) struct EventError {
    pub kind: ErrorKind,
    /// The byte offset in the event's data.
    pub at: usize,
    pub path: Cow<'static, str>,
    pub message: Cow<'static, str>,
}

impl EventError {
    pub(crate) fn new(
        kind: ErrorKind,
        at: usize,
        path: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { kind, at, path: path.into(), message: message.into() }
    }
}

/// Why an event was not applied.
pub(crate) enum Rejection {
    /// The event breaks a rule of the dialect.
    Invalid(EventError),
    /// The engine reports an error.
    Engine(EngineError),
}

impl From<EventError> for Rejection {
    fn from(error: EventError) -> Self {
        Self::Invalid(error)
    }
}

impl From<EngineError> for Rejection {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}
