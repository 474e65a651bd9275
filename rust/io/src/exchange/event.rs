//! What a driver puts into an exchange, and what it gets out: `Input`, `Event`.

use streamfold_core::{Dialect, Error, Options};

use crate::exchange::failure::Failure;
use crate::exchange::head::Head;

/// The reply that a request should get.
#[derive(Clone, Copy, Debug)]
pub enum Expected {
    /// A stream of tokens. Any other reply ends in [`Event::Refused`]; of its body 64 KiB are kept.
    Stream {
        /// How the engine writes it.
        dialect: Dialect,
        /// What was asked of the engine, and the limits.
        options: Options,
    },
    /// Any reply, as to an abort or a load query: its body is kept, and it ends in [`Event::Refused`] as well. If its
    /// body is not complete it is a [`Event::Failed`].
    Body {
        /// The most bytes; a longer body is not complete.
        max_bytes: usize,
    },
    /// The replies to requests that are sent in one go, see [`Request::pipelined`](crate::Request::pipelined). Good ones
    /// are passed over and counted by [`passed`](crate::Exchange::passed), up to the one that is reported as with
    /// [`Expected::Body`]: the last, or the first that has a status of 300 or more or that ends the connection.
    Bodies {
        /// How many.
        count: usize,
        /// Of the one that is reported.
        max_bytes: usize,
    },
}

/// Something that happened to the connection, or that the caller wants.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// The connection stands.
    Connected,
    /// There is no connection; holds the errno.
    ConnectFailed(i32),
    /// The caller wants the request to be sent.
    Send,
    /// This many more bytes of [`unsent`](crate::Exchange::unsent) have been handed to the connection.
    Sent(usize),
    /// Sending failed; holds the errno. The connection may still hold a reply, so it must still be read.
    SendFailed(i32),
    /// The next bytes, split at any byte.
    Received(&'a [u8]),
    /// The server has closed its side: no byte follows.
    Eof,
    /// Reading failed; holds the errno.
    Reset(i32),
    /// TLS failed, in its own words: no byte follows that could be trusted.
    TlsFailed(&'a str),
    /// The caller has no use for the rest: nothing that goes wrong from now on is reported, and what still arrives is
    /// kept. A request that is not wholly sent ends at once.
    Abort,
    /// End now: nothing is sent or read afterwards, and no event follows.
    Close,
}

/// A change that the driver reports to the caller. There is none for an event of the stream, unless it was asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The connection stands, and the exchange waits for [`Input::Send`].
    Connected,
    /// The request is wholly sent.
    Sent,
    /// The head of the final reply.
    Head(Head),
    /// The first token.
    FirstToken,
    /// As many tokens as [`notify_at`](crate::Exchange::notify_at) asked for.
    Tokens,
    /// The terminal event, the one with a finish reason: the engine works on the request no more.
    Finished,
    /// The stream went too far past `max_new_tokens`: the generation ends here with the finish reason `length`. The
    /// engine still works on the request and has to be told to abort it.
    Overrun,
    /// The stream holds damage or an error that the engine reports, or ended before its terminal event. What was good
    /// is kept.
    DecodeError(Error),
    /// The reply is no stream, and its body is complete, has reached its limit, or was interrupted.
    Refused,
    /// The connection or the reply broke. After the terminal event of a stream this is of no interest and not reported;
    /// after an error that the engine reports it is: the engine may still work on the request.
    Failed {
        /// Why.
        failure: Failure,
        /// Whether no byte of a reply had been received: a kept connection may have been closed before the request
        /// reached the server.
        is_unanswered: bool,
    },
    /// The exchange itself failed: a bug. Only [`Shared`](crate::Shared) reports it; [`Event::Ended`] follows.
    Panicked,
    /// The last event: nothing more is sent or read. If the connection is not reusable it has to be closed.
    Ended {
        /// Whether the connection can carry another request.
        reusable: bool,
    },
}
