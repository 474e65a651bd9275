//! Why an exchange failed.

use std::fmt;
use std::io;

/// Why an exchange failed before its reply was complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The connection could not be established; holds the errno.
    Connect(i32),
    /// The server closed the connection before its reply was complete.
    Closed,
    /// The connection broke; holds the errno.
    Reset(i32),
    /// TLS failed; holds its own words.
    Tls(String),
    /// The server broke a rule of HTTP/1.1, or exceeded a limit.
    Protocol(ProtocolError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(errno) => write!(f, "no connection: {}", io::Error::from_raw_os_error(*errno)),
            Self::Closed => f.write_str("the server closed the connection before its reply was complete"),
            Self::Reset(errno) => write!(f, "the connection broke: {}", io::Error::from_raw_os_error(*errno)),
            Self::Tls(words) => write!(f, "the connection broke: {words}"),
            Self::Protocol(error) => write!(f, "the reply is not valid HTTP/1.1: {error}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<ProtocolError> for Failure {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

/// The rule of HTTP/1.1 that a server broke, or the limit that it exceeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// Bytes arrived before the request was sent.
    Unsolicited,
    /// The head is malformed: what is wrong with it.
    HeadSyntax(&'static str),
    /// The head is larger than this many bytes.
    HeadTooLarge(usize),
    /// The head has more than this many fields.
    TooManyFields(usize),
    /// The status is below 100.
    Status(u16),
    /// Status 101: the server left HTTP, unasked.
    SwitchingProtocols,
    /// More than this many interim replies (1xx).
    TooManyInterim(usize),
    /// Both Transfer-Encoding and Content-Length.
    LengthWithEncoding,
    /// A Content-Length that is no number, or several that differ.
    ContentLength(String),
    /// A Transfer-Encoding other than `chunked`.
    TransferEncoding(String),
    /// A malformed chunk size.
    ChunkSize,
    /// A line feed in a chunk extension.
    ChunkExtension,
    /// The chunk extensions of the reply are larger than this many bytes.
    ChunkExtensionsTooLarge(usize),
    /// A chunk longer than its size.
    ChunkEnd,
    /// A malformed trailer.
    Trailer,
    /// The trailers are larger than this many bytes.
    TrailersTooLarge(usize),
    /// More than this many bytes follow the last event of a stream.
    RestTooLarge(usize),
    /// The body of a reply is larger than this many bytes.
    ReplyTooLarge(usize),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsolicited => f.write_str("bytes arrived before the request was sent"),
            Self::HeadSyntax(what) => write!(f, "the head is malformed: {what}"),
            Self::HeadTooLarge(limit) => write!(f, "the head is larger than {limit} bytes"),
            Self::TooManyFields(limit) => write!(f, "the head has more than {limit} fields"),
            Self::Status(status) => write!(f, "{status} is no status"),
            Self::SwitchingProtocols => f.write_str("status 101, although no upgrade was requested"),
            Self::TooManyInterim(limit) => write!(f, "more than {limit} interim replies (1xx)"),
            Self::LengthWithEncoding => f.write_str("both Transfer-Encoding and Content-Length"),
            Self::ContentLength(value) => write!(f, "Content-Length is {value:?}, and not one number"),
            Self::TransferEncoding(value) => write!(f, "Transfer-Encoding is {value:?}; only chunked is supported"),
            Self::ChunkSize => f.write_str("malformed chunk size"),
            Self::ChunkExtension => f.write_str("a line feed in a chunk extension"),
            Self::ChunkExtensionsTooLarge(limit) => write!(f, "the chunk extensions are larger than {limit} bytes"),
            Self::ChunkEnd => f.write_str("a chunk is longer than its size"),
            Self::Trailer => f.write_str("malformed trailer"),
            Self::TrailersTooLarge(limit) => write!(f, "the trailers are larger than {limit} bytes"),
            Self::ReplyTooLarge(limit) => write!(f, "the body is larger than {limit} bytes"),
            Self::RestTooLarge(limit) => write!(f, "more than {limit} bytes follow the last event of the stream"),
        }
    }
}

impl std::error::Error for ProtocolError {}
