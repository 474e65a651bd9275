//! What a driver does, in a few lines: requests, inputs, and everything that comes of them.

use std::sync::Arc;

use streamfold_core::{Dialect, Generation, Options};
use streamfold_io::{Body, Event, Exchange, Expected, Input, Method, Request, RequestHead, State};

/// What a stream is expected to be in these tests.
pub fn stream(max_new_tokens: Option<usize>) -> Expected {
    let options = Options { max_new_tokens, max_event_bytes: 1 << 20, ..Options::default() };
    Expected::Stream { dialect: Dialect::SglangIncremental, options }
}

/// A request with a small body.
pub fn request(body: Body) -> Request {
    Request::new(RequestHead::new(Method::Post, "/generate", "engine").expect("sound"), body)
}

/// An exchange that waits for its connection.
pub fn new(expected: Expected) -> Exchange {
    Exchange::new(request(Arc::new(*b"{}")), expected)
}

/// The events of one input.
pub fn put(exchange: &mut Exchange, input: Input<'_>) -> Vec<Event> {
    let mut events = Vec::new();
    exchange.handle(input, &mut events);
    events
}

/// An exchange whose request has been sent.
pub fn sent(expected: Expected) -> Exchange {
    let mut exchange = new(expected);
    assert_eq!(put(&mut exchange, Input::Connected), [Event::Connected]);
    assert_eq!(put(&mut exchange, Input::Send), []);
    let size = exchange.unsent().concat().len();
    assert_eq!(put(&mut exchange, Input::Sent(size)), [Event::Sent]);
    assert_eq!(exchange.state(), State::Head);
    exchange
}

/// What follows the bytes of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// Nothing: the connection stays open.
    Open,
    /// The server closes the connection.
    Eof,
    /// The connection breaks.
    Reset,
    /// TLS fails: damaged ciphertext, an alert, a connection that is closed without `close_notify`.
    TlsFailed,
}

/// How TLS says it.
pub const ALERT: &str = "an alert";

/// Everything that comes of a reply.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub events: Vec<Event>,
    pub state: State,
    pub generation: Generation,
    pub token_count: usize,
    pub body: Vec<u8>,
}

/// Read a reply given in parts.
pub fn read<'a>(
    parts: impl IntoIterator<Item = &'a [u8]>,
    tail: Tail,
    expected: Expected,
    is_aborted: bool,
) -> Outcome {
    let mut exchange = sent(expected);
    let mut events = Vec::new();
    if is_aborted {
        exchange.handle(Input::Abort, &mut events);
    }
    for part in parts {
        exchange.handle(Input::Received(part), &mut events);
    }
    match tail {
        Tail::Open => {}
        Tail::Eof => exchange.handle(Input::Eof, &mut events),
        Tail::Reset => exchange.handle(Input::Reset(104), &mut events),
        Tail::TlsFailed => exchange.handle(Input::TlsFailed(ALERT), &mut events),
    }
    let ends = events.iter().filter(|event| matches!(event, Event::Ended { .. })).count();
    assert_eq!(ends, usize::from(exchange.state().is_over()), "one end: {events:?}");
    assert!(ends == 0 || matches!(events.last(), Some(Event::Ended { .. })), "the end is the last event: {events:?}");
    // Whether something lies behind the reply is seen at its end only if it came in the same read.
    if let (Some(Event::Ended { reusable }), State::Done { reusable: later }) = (events.last_mut(), exchange.state()) {
        assert!(*reusable || !later);
        *reusable = later;
    }
    let (state, token_count) = (exchange.state(), exchange.token_count());
    let (generation, body) = (exchange.take(), exchange.take_body());
    let taken = generation.token_ids.len();
    // Taking closes an open stream, which may fold a last event without its blank line.
    assert!(taken == token_count || (taken > token_count && exchange.state() == State::Closed));
    assert_eq!(exchange.token_count(), taken);
    Outcome { events, state, generation, token_count, body }
}

/// A chunked reply with that body, in one chunk.
pub fn chunked(body: &[u8]) -> Vec<u8> {
    let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    [&head[..], format!("{:x}\r\n", body.len()).as_bytes(), body, b"\r\n0\r\n\r\n"].concat()
}

/// The events, with their payload left out.
pub fn names(events: &[Event]) -> Vec<&'static str> {
    let name = |event: &Event| match event {
        Event::Connected => "connected",
        Event::Sent => "sent",
        Event::Head(_) => "head",
        Event::FirstToken => "first_token",
        Event::Tokens => "tokens",
        Event::Finished => "finished",
        Event::Overrun => "overrun",
        Event::DecodeError(_) => "decode_error",
        Event::Refused => "refused",
        Event::Failed { .. } => "failed",
        Event::Panicked => "panicked",
        Event::Ended { reusable: true } => "reusable",
        Event::Ended { reusable: false } => "ended",
    };
    events.iter().map(name).collect()
}
