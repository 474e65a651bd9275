//! Carries generations from sockets to the parser.
//!
//! [`Exchange`] is an HTTP/1.1 client as a state machine, one for each try of a request: it writes the request, reads
//! the head and the framing of the reply, and feeds a stream to [`streamfold_core::Parser`]. It does no IO and has no
//! clock. A driver moves the bytes. [`Shared`] is an exchange that a driver and its caller use from different threads. The module
//! `reactor`, for Linux, is what a driver over plain sockets is made of.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use streamfold_core::{Dialect, Options};
//! use streamfold_io::{Event, Exchange, Expected, Input, Method, Request, RequestHead};
//!
//! let head = RequestHead::new(Method::Post, "/generate", "127.0.0.1:30000")?.field("Content-Type", "application/json")?;
//! let request = Request::new(head, Arc::new(br#"{"input_ids":[1],"stream":true}"#));
//! let expected = Expected::Stream { dialect: Dialect::Sglang, options: Options::default() };
//! let mut exchange = Exchange::new(request, expected);
//! let mut events = Vec::new();
//! exchange.handle(Input::Connected, &mut events);
//! exchange.handle(Input::Send, &mut events);
//! let size = exchange.unsent().concat().len(); // a driver writes these bytes
//! exchange.handle(Input::Sent(size), &mut events);
//! assert_eq!(events, [Event::Connected, Event::Sent]);
//! events.clear();
//! let reply = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy";
//! exchange.handle(Input::Received(reply), &mut events);
//! assert!(matches!(events[..], [Event::Head(_), Event::Refused, Event::Ended { reusable: true }]));
//! assert_eq!(exchange.take_body(), b"busy");
//! # Ok::<(), streamfold_io::RequestError>(())
//! ```
//!
//! # What a driver does
//!
//! 1. **Start.** Make an [`Exchange`] and open a connection, or take a kept one. Report [`Input::Connected`] (at once
//!    for a kept connection) or [`Input::ConnectFailed`].
//! 2. **Send.** When the caller says so, report [`Input::Send`]. While the state is [`State::Sending`], write
//!    [`Exchange::unsent`], in parts of any size, and report each with [`Input::Sent`]. Read meanwhile: a reply that
//!    comes early ends the sending, and [`Exchange::unsent`] is then empty. If a write fails, report
//!    [`Input::SendFailed`] and continue to read: the server may have replied before it closed.
//! 3. **Read.** Report what each read gives: [`Input::Received`], [`Input::Eof`] or [`Input::Reset`]. Report bytes before
//!    the end that follows them. Bytes may be split anywhere; the result is the same.
//! 4. **Events.** Pass the events of each input on in their order. After each input [`Exchange::token_count`] is current;
//!    no event tells of tokens but the first, and the one that [`Exchange::notify_at`] asks for.
//! 5. **End early.** [`Input::Abort`] when the caller has no use for the rest: what still arrives is kept, for as long
//!    as the driver continues to read. [`Input::Close`] ends the exchange at once, without an event: close the connection.
//! 6. **Take.** [`Exchange::take`] gives the generation so far, and [`Exchange::take_body`] the body of a reply that is
//!    no stream. Both work in any state.
//!
//! The exchange knows no time: the driver, or its caller, ends an exchange that takes too long.
//!
//! | event | what it asks of the driver |
//! | --- | --- |
//! | [`Event::Connected`] | report [`Input::Send`] if the request is still wanted, else [`Input::Close`] |
//! | [`Event::Sent`] | stop waiting for the connection to become writable |
//! | [`Event::Head`] | pass it on; stop waiting for the connection to become writable |
//! | [`Event::FirstToken`], [`Event::Tokens`], [`Event::Finished`] | pass it on, and continue to read until [`Event::Ended`] |
//! | [`Event::Overrun`] | pass it on; the engine has to be told to abort the request |
//! | [`Event::DecodeError`], [`Event::Failed`] | pass it on; [`Event::Ended`] follows, for an error that the engine reports after the rest of the body |
//! | [`Event::Refused`] | pass it on with [`Exchange::take_body`] |
//! | [`Event::Ended`] | stop reading; keep the connection if it is reusable, else close it |
//!
//! [`Event::Ended`] is the last event of every exchange, and the only one for which a connection is kept or closed; after
//! [`Input::Close`] no event comes. A kept connection that shows a byte or its end before its next use is no longer
//! usable; reporting that to the exchange, if it still exists, turns [`State::Done`] into one that is not reusable.
//!
//! When [`Event::Failed`] says `is_unanswered` for a kept connection, the server may have closed it before the request
//! arrived: the request may be sent once more, on a new connection, by a new exchange.
//!
//! An exchange can carry several requests in one go, see [`Request::pipelined`] and [`Expected::Bodies`].
//!
//! # Limits
//!
//! | what | limit | beyond it |
//! | --- | --- | --- |
//! | head of a reply | 64 KiB, 256 fields | [`Event::Failed`] |
//! | interim replies (1xx) | 16; 101 none | [`Event::Failed`] |
//! | chunk extensions, trailers | 16 KiB each | [`Event::Failed`] |
//! | body behind the last event of a stream | 64 KiB | [`Event::Ended`], not reusable; before it [`Event::Failed`] if that event is an error |
//! | body of a reply that is no stream | 64 KiB, or [`Expected::Body`]'s | [`Event::Refused`], or [`Event::Failed`] with [`Expected::Body`]; [`Event::Ended`], not reusable |
//! | tokens of a stream | 256 more than `max_new_tokens`, or [`streamfold_core::Options::token_limit`] | [`Event::Overrun`], [`Event::Ended`], not reusable |
//! | one event of a stream | [`streamfold_core::Options::max_event_bytes`] | [`Event::DecodeError`] |

#[cfg(windows)]
compile_error!("streamfold does not support Windows: build it on Linux or macOS, or in WSL");

mod durations;
mod exchange;
mod gaps;
#[cfg(target_os = "linux")]
pub mod reactor;
mod shared;

pub use durations::Durations;
pub use exchange::{
    Body, Event, Exchange, Expected, Failure, Head, Headers, Input, Method, ProtocolError, Request, RequestError,
    RequestHead, State, check_field,
};
pub use gaps::Gaps;
pub use shared::Shared;
