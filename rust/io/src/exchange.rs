//! One try of a request as a state machine without IO: `Exchange`.

#![forbid(unsafe_code)]

mod chunked;
mod event;
mod failure;
mod framing;
mod head;
mod headers;
mod outgoing;
mod part;
mod reply;
mod request;
mod state;
mod stream;

use streamfold_core::{Error, Generation};

pub use crate::exchange::event::{Event, Expected, Input};
pub use crate::exchange::failure::{Failure, ProtocolError};
use crate::exchange::framing::{Framing, keeps_alive};
pub use crate::exchange::head::Head;
use crate::exchange::head::HeadReader;
pub use crate::exchange::headers::Headers;
use crate::exchange::outgoing::Outgoing;
use crate::exchange::part::Part;
use crate::exchange::reply::Reply;
pub use crate::exchange::request::{Body, Method, Request, RequestError, RequestHead, check_field};
use crate::exchange::state::Signal;
pub use crate::exchange::state::State;
use crate::exchange::stream::{Folded, Stream, StreamEnd};

/// After the last event of a stream this much of its body is read.
const MAX_REST_BYTES: usize = 64 << 10;
/// This much is kept of a reply that is no stream although one was expected.
const MAX_REFUSAL_BYTES: usize = 64 << 10;

/// One request and its reply, on one connection.
///
/// See the [crate's documentation](crate) for what a driver does with it.
pub struct Exchange {
    state: State,
    outgoing: Outgoing,
    is_aborted: bool,
    /// Whether a byte of a reply was received.
    is_answered: bool,
    /// Whether the connection can carry another request if the reply ends by its own framing; the head shows it.
    keeps_connection: bool,
    head: HeadReader,
    framing: Framing,
    /// None if no stream is expected.
    stream: Option<Stream>,
    /// Replies that are expected after this one.
    more: usize,
    /// Replies before this one, all good.
    passed: usize,
    /// What is left of the body of a reply that is passed over.
    passing: Option<Framing>,
    reply: Reply,
    max_reply_bytes: usize,
    /// The bytes of the body behind the last event of the stream.
    rest_bytes: usize,
}

impl Exchange {
    /// An exchange that waits for its connection.
    #[must_use]
    pub fn new(request: Request, expected: Expected) -> Self {
        let (stream, max_reply_bytes, more) = match expected {
            Expected::Stream { dialect, options } => (Some(Stream::new(dialect, options)), MAX_REFUSAL_BYTES, 0),
            Expected::Body { max_bytes } => (None, max_bytes, 0),
            Expected::Bodies { count, max_bytes } => (None, max_bytes, count.saturating_sub(1)),
        };
        Self {
            state: State::Connecting,
            outgoing: Outgoing::new(request),
            is_aborted: false,
            is_answered: false,
            keeps_connection: false,
            head: HeadReader::default(),
            framing: Framing::UntilClose,
            stream,
            more,
            passed: 0,
            passing: None,
            reply: Reply::default(),
            max_reply_bytes,
            rest_bytes: 0,
        }
    }

    /// Take an input in; what changes is appended to `events`.
    ///
    /// An input that has no meaning in the present state is ignored: what a driver reports may be overtaken.
    pub fn handle(&mut self, input: Input<'_>, events: &mut Vec<Event>) {
        use State::{Connecting, Done, Head, Ready, Refused, Rest, Sending, Streaming, Waiting};
        match (self.state, input) {
            (_, Input::Received([])) => {}
            (_, Input::Close) => self.close(),

            (Connecting, Input::Connected) => {
                self.go(Signal::Connected);
                events.push(Event::Connected);
            }
            (Connecting, Input::ConnectFailed(errno)) => self.fail(Failure::Connect(errno), events),

            (Ready, Input::Send) => self.go(Signal::Send),
            (Ready, Input::Received(_)) => self.fail(ProtocolError::Unsolicited.into(), events),

            (Sending, Input::Sent(count)) => self.advance(count, events),
            (Sending, Input::SendFailed(errno)) => {
                self.outgoing.fail(errno);
                self.go(Signal::SendingOver);
            }
            (Sending | Head, Input::Received(bytes)) => self.read_head(bytes, events),

            (Connecting | Ready | Sending, Input::Abort) => {
                self.is_aborted = true;
                self.end(false, events);
            }
            (Head | Waiting | Streaming | Rest | Refused, Input::Abort) => self.is_aborted = true,

            (Ready | Sending | Head, Input::Eof) => self.fail(self.outgoing.failure(), events),
            (Ready | Sending | Head, Input::Reset(errno)) => self.fail(Failure::Reset(errno), events),
            (Ready | Sending | Head, Input::TlsFailed(words)) => self.fail(Failure::Tls(words.to_owned()), events),

            (Waiting | Streaming | Rest | Refused, Input::Received(bytes)) => self.read_body(bytes, events),
            (Waiting | Streaming | Rest | Refused, Input::Eof) if self.framing.ends_at_close() => {
                self.end_body(false, events);
            }
            (Waiting | Streaming | Rest | Refused, Input::Eof) => self.interrupt(Failure::Closed, events),
            (Waiting | Streaming | Rest | Refused, Input::Reset(errno)) => {
                self.interrupt(Failure::Reset(errno), events);
            }
            (Waiting | Streaming | Rest | Refused, Input::TlsFailed(words)) => {
                self.interrupt(Failure::Tls(words.to_owned()), events);
            }

            (Done { .. }, Input::Received(_) | Input::Eof | Input::Reset(_) | Input::TlsFailed(_)) => {
                self.go(Signal::Disturbed);
            }

            _ => {}
        }
    }

    /// Where the exchange is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The bytes to send next, in two parts: of the head, of the body. Both are empty unless the state is `Sending`.
    #[must_use]
    pub fn unsent(&self) -> [&[u8]; 2] {
        if self.state == State::Sending { self.outgoing.unsent() } else { [&[], &[]] }
    }

    /// Tokens received so far.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.stream.as_ref().map_or(0, Stream::token_count)
    }

    /// The tokens received so far; none after [`Exchange::take`].
    #[must_use]
    pub fn token_ids(&self) -> &[i32] {
        self.stream.as_ref().map_or(&[], Stream::token_ids)
    }

    /// A copy of what the stream has brought so far, in any state; an empty generation after [`Exchange::take`].
    #[must_use]
    pub fn snapshot(&self) -> Generation {
        self.stream.as_ref().map_or_else(Generation::default, Stream::snapshot)
    }

    /// Report [`Event::Tokens`] once, when the stream has brought so many tokens; it replaces what was asked for before.
    ///
    /// Returns whether they have come already: then no event follows.
    pub fn notify_at(&mut self, count: usize) -> bool {
        self.stream.as_mut().map_or(count == 0, |stream| stream.notify_at(count))
    }

    /// Whole good replies before the one that is being read or was reported.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.passed
    }

    /// Hand out what the stream has brought, in any state. Before the last event of the stream this closes the
    /// exchange. The second call gives an empty generation.
    pub fn take(&mut self) -> Generation {
        use State::{Connecting, Head, Ready, Sending, Streaming, Waiting};
        if let Connecting | Ready | Sending | Head | Waiting | Streaming = self.state {
            self.close();
        }
        self.stream.as_mut().map_or_else(Generation::default, Stream::take)
    }

    /// Hand out what was kept of the body of a reply that is no stream, in any state.
    pub fn take_body(&mut self) -> Vec<u8> {
        self.reply.take()
    }

    /// Bytes of memory held, the request's apart.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let stream = self.stream.as_ref().map_or(0, Stream::held_bytes);
        size_of::<Self>() + self.head.held_bytes() + stream + self.reply.held_bytes()
    }

    fn go(&mut self, signal: Signal) {
        let next = self.state.next(signal);
        debug_assert!(next.is_some(), "{signal:?} is impossible in {:?}", self.state);
        self.state = next.unwrap_or(self.state);
    }

    fn advance(&mut self, count: usize, events: &mut Vec<Event>) {
        if self.outgoing.advance(count) {
            self.go(Signal::SendingOver);
            events.push(Event::Sent);
        }
    }

    // Reading.

    fn read_head(&mut self, mut bytes: &[u8], events: &mut Vec<Event>) {
        self.is_answered = true;
        let (head, framing) = match self.pass(&mut bytes) {
            Ok(Some(reported)) => reported,
            Ok(None) => return,
            Err(error) => return self.fail(error.into(), events),
        };
        self.framing = framing;
        self.keeps_connection = self.outgoing.end() && keeps_alive(&head) && self.more == 0;
        let is_stream = self.stream.is_some() && head.is_event_stream();
        self.go(if is_stream { Signal::StreamHead } else { Signal::PlainHead });
        events.push(Event::Head(head));
        self.read_body(bytes, events);
    }

    /// Take replies off the front of `input` up to the head of the one to report: the last, or the first that is not
    /// good or after which none follows. None if more is needed.
    fn pass(&mut self, input: &mut &[u8]) -> Result<Option<(Head, Framing)>, ProtocolError> {
        loop {
            while let Some(framing) = &mut self.passing {
                match framing.next(input)? {
                    Part::Data(_) => {}
                    Part::Pending => return Ok(None),
                    Part::End => {
                        self.passing = None;
                        self.passed += 1;
                        self.more -= 1;
                        self.head = HeadReader::default();
                    }
                }
            }
            let Some(head) = self.head.read(input)? else { return Ok(None) };
            let framing = Framing::new(&head)?;
            let is_good = head.status < 300 && keeps_alive(&head) && !framing.ends_at_close();
            if self.more == 0 || !is_good {
                return Ok(Some((head, framing)));
            }
            self.passing = Some(framing);
        }
    }

    fn read_body(&mut self, mut bytes: &[u8], events: &mut Vec<Event>) {
        while !self.state.is_over() {
            match self.framing.next(&mut bytes) {
                Ok(Part::Data(data)) if self.state == State::Refused => self.keep(data, events),
                Ok(Part::Data(data)) => self.fold_all(data, events),
                Ok(Part::Pending) => return,
                Ok(Part::End) => {
                    let reusable = self.keeps_connection && !self.is_aborted && bytes.is_empty();
                    return self.end_body(reusable, events);
                }
                Err(error) => return self.interrupt(error.into(), events),
            }
        }
    }

    /// The next part of the body of a reply that is no stream.
    fn keep(&mut self, data: &[u8], events: &mut Vec<Event>) {
        if !self.reply.keep(data, self.max_reply_bytes) {
            self.interrupt(ProtocolError::ReplyTooLarge(self.max_reply_bytes).into(), events);
        }
    }

    /// The next part of the body of a stream.
    fn fold_all(&mut self, data: &[u8], events: &mut Vec<Event>) {
        let rest = if self.state == State::Rest { data } else { &data[self.fold(data, events)..] };
        if !rest.is_empty() && !self.state.is_over() {
            self.fold_rest(rest, events);
        }
    }

    /// Fold up to the event that ends the stream. Returns the number of bytes folded.
    fn fold(&mut self, part: &[u8], events: &mut Vec<Event>) -> usize {
        let Some(stream) = &mut self.stream else { return part.len() };
        let (taken, folded) = stream.fold(part);
        let Some(folded) = folded else { return taken };
        match self.report(folded, events) {
            None => {}
            Some(error @ Error::Engine(_)) => {
                // Its last word: the server should now end the body.
                if self.state != State::Rest {
                    self.go(Signal::LastEvent);
                }
                events.push(Event::DecodeError(error));
            }
            Some(error) => {
                self.go(Signal::Fail);
                events.extend([Event::DecodeError(error), Event::Ended { reusable: false }]);
                self.release();
            }
        }
        taken
    }

    fn fold_rest(&mut self, part: &[u8], events: &mut Vec<Event>) {
        let room = MAX_REST_BYTES - self.rest_bytes;
        self.rest_bytes += part.len().min(room);
        self.fold(&part[..part.len().min(room)], events);
        if part.len() <= room || self.state.is_over() {
            return;
        }
        if self.has_engine_error() {
            self.interrupt(ProtocolError::RestTooLarge(MAX_REST_BYTES).into(), events);
        } else {
            self.end_body(false, events);
        }
    }

    /// Report what a part of a stream brought; an error is returned, unless the request was aborted: then it ends here.
    fn report(&mut self, folded: Folded, events: &mut Vec<Event>) -> Option<Error> {
        if folded.first_token {
            self.go(Signal::FirstToken);
            events.push(Event::FirstToken);
        }
        if folded.tokens {
            events.push(Event::Tokens);
        }
        match folded.end {
            None => {}
            Some(StreamEnd::Finished) => {
                self.go(Signal::LastEvent);
                events.push(Event::Finished);
            }
            Some(StreamEnd::Overrun) => {
                events.push(Event::Overrun);
                self.end(false, events);
            }
            Some(StreamEnd::Error(_)) if self.is_aborted => self.end(false, events),
            Some(StreamEnd::Error(error)) => return Some(error),
        }
        None
    }

    // Ending.

    /// The body has ended, or no more of it is wanted.
    fn end_body(&mut self, reusable: bool, events: &mut Vec<Event>) {
        if let Some(error) = self.close_body(events) {
            events.push(Event::DecodeError(error));
        }
        if !self.state.is_over() {
            self.end(reusable, events);
        }
    }

    /// The body broke off, or goes on too long.
    fn interrupt(&mut self, failure: Failure, events: &mut Vec<Event>) {
        if self.stream.is_none() {
            // What there is of it may look like a whole reply.
            return self.fail(failure, events);
        }
        if let Some(error) = self.close_body(events) {
            self.go(Signal::Fail);
            events.push(Event::Failed { failure, is_unanswered: false });
            events.extend([Event::DecodeError(error), Event::Ended { reusable: false }]);
            self.release();
        } else if self.has_engine_error() && !self.is_aborted && !self.state.is_over() {
            self.go(Signal::Fail);
            events.push(Event::Failed { failure, is_unanswered: false });
            events.push(Event::Ended { reusable: false });
            self.release();
        } else if !self.state.is_over() {
            self.end(false, events);
        }
    }

    /// Whether the last event is an error that the engine reports. Then only the end of the body says that the engine
    /// works on the request no more.
    fn has_engine_error(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::has_engine_error)
    }

    /// Nothing more comes of the body: report what that makes of it; an error is returned.
    fn close_body(&mut self, events: &mut Vec<Event>) -> Option<Error> {
        if self.state == State::Refused {
            events.push(Event::Refused);
            return None;
        }
        let folded = self.stream.as_mut()?.close(self.is_aborted)?;
        self.report(folded, events)
    }

    fn fail(&mut self, failure: Failure, events: &mut Vec<Event>) {
        if self.is_aborted {
            return self.end(false, events);
        }
        self.go(Signal::Fail);
        events.push(Event::Failed { failure, is_unanswered: !self.is_answered });
        events.push(Event::Ended { reusable: false });
        self.release();
    }

    fn end(&mut self, reusable: bool, events: &mut Vec<Event>) {
        self.go(Signal::End { reusable });
        events.push(Event::Ended { reusable });
        self.release();
    }

    fn close(&mut self) {
        if self.state == State::Closed {
            return;
        }
        if let (Some(stream), State::Waiting | State::Streaming | State::Rest) = (&mut self.stream, self.state) {
            stream.close(true);
        }
        self.go(Signal::Close);
        self.release();
    }

    /// Free what only an exchange that is under way needs.
    fn release(&mut self) {
        self.outgoing.end();
        self.head = HeadReader::default();
    }
}
