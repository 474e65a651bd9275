//! What can go wrong with a stream, told once: a kind, a place, a sentence.

use std::borrow::Cow;
use std::fmt;

/// What is wrong with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Not JSON: bad syntax, bare NaN or Infinity, lone surrogate escapes, nested too deep.
    Json,
    /// Not UTF-8.
    Utf8,
    /// A field is missing, or of a wrong type or value.
    Schema,
    /// Counts disagree.
    Length,
    /// The ids and the pairs of one event disagree.
    Mismatch,
    /// A token id is no integer in 0 … 2³¹−1.
    Token,
    /// A logprob is null, beyond double range, or the engine's stand-in for minus infinity.
    Logprob,
    /// An event changed what had been sent.
    Prefix,
    /// Side data is damaged: base64, dtype, shape, offsets, spans.
    Metadata,
    /// An event is larger than the limit, or memory ran out.
    TooLarge,
}

impl ErrorKind {
    /// The name that Python sees in `DecodeError.kind`.
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

/// The bytes are not what the dialect says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// What is wrong.
    pub kind: ErrorKind,
    /// Where: the absolute byte offset in the body.
    pub offset: u64,
    /// The field, as in `meta_info.output_token_logprobs[3][0]`; empty if no field is to blame.
    pub path: Cow<'static, str>,
    /// One sentence: what was found, what was expected, what to do.
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

/// The engine itself reported an error inside the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    /// The engine's own words.
    pub message: String,
    /// The HTTP-like status it told, if it told one.
    pub status: Option<u16>,
}

/// Everything that [`Parser`](crate::Parser) can report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The bytes are not what the dialect says.
    Parse(ParseError),
    /// The engine reported an error.
    Engine(EngineError),
    /// The body ended before a finish reason; holds the length of the body and the tokens kept.
    Truncated {
        /// Bytes received.
        bytes: u64,
        /// Tokens kept.
        tokens: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parse(error) => error.fmt(f),
            Self::Engine(error) => f.write_str(&error.message),
            Self::Truncated { bytes, tokens } => write!(
                f,
                "the stream ended after {bytes} bytes without a finish reason; {tokens} tokens are kept, resume from them"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// An error inside one event, before its place in the body is known.
#[derive(Debug)]
pub(crate) struct EventError {
    pub kind: ErrorKind,
    /// Index into the event's data.
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

/// Why an event was refused.
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
