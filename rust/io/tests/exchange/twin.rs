//! The slow, obvious reader that the exchange must agree with: it has the whole reply before it, decodes it in passes,
//! and feeds the parser byte by byte.

mod http;

use streamfold_core::{Dialect, Error, FinishReason, Options, Parser};
use streamfold_io::{Event, Expected, Failure, ProtocolError, State};

use crate::drive::{ALERT, Outcome, Tail};
use http::{BodyEnd, Framing};

const MAX_BYTES: usize = 65_536;

/// What follows the bytes that there are of a body.
enum Next {
    More,
    End,
    Failure(Failure),
}

/// Everything that must come of a reply that was received whole.
pub fn read(bytes: &[u8], tail: Tail, expected: Expected) -> Outcome {
    let Expected::Stream { dialect, options } = expected else { panic!("the twin reads streams") };
    let lost = match tail {
        Tail::Open => None,
        Tail::Eof => Some(Failure::Closed),
        Tail::Reset => Some(Failure::Reset(104)),
        Tail::TlsFailed => Some(Failure::Tls(ALERT.to_owned())),
    };
    let found = http::head(bytes);
    let found = found.and_then(|found| found.map(|(head, rest)| Ok((http::framing(&head)?, head, rest))).transpose());
    let mut twin = Twin::new(dialect, options);
    match (found, lost) {
        (Err(error), _) => twin.fail(error.into(), bytes.is_empty()),
        (Ok(None), Some(failure)) => twin.fail(failure, bytes.is_empty()),
        (Ok(None), None) => {}
        (Ok(Some((framing, head, rest))), lost) => {
            let (body, end) = http::body(framing, rest);
            let is_clean = http::is_kept(&head) && tail == Tail::Open;
            let is_reusable = matches!(end, BodyEnd::Framing(behind) if is_clean && behind.is_empty());
            let next = match (end, lost) {
                (BodyEnd::Framing(_), _) => Next::End,
                (BodyEnd::Broken(error), _) => Next::Failure(error.into()),
                (BodyEnd::Missing, None) => Next::More,
                // Without a length the end of the connection is the end of the body.
                (BodyEnd::Missing, Some(Failure::Closed)) if matches!(framing, Framing::UntilClose) => Next::End,
                (BodyEnd::Missing, Some(failure)) => Next::Failure(failure),
            };
            let is_stream = http::is_stream(&head);
            twin.events.push(Event::Head(head));
            if is_stream {
                twin.read_stream(&body, next, is_reusable);
            } else {
                twin.read_other(body, &next, is_reusable);
            }
        }
    }
    twin.outcome()
}

struct Twin {
    parser: Parser,
    limit: usize,
    state: State,
    events: Vec<Event>,
    body: Vec<u8>,
}

impl Twin {
    fn new(dialect: Dialect, options: Options) -> Self {
        let limit = options.max_new_tokens.map_or(usize::MAX, |count| count + 256);
        let parser = Parser::new(dialect, options);
        Self { parser, limit, state: State::Head, events: Vec::new(), body: Vec::new() }
    }

    fn outcome(mut self) -> Outcome {
        let token_count = self.parser.token_count();
        if let State::Waiting | State::Streaming = self.state {
            self.parser.close(true).ok(); // an open stream is closed before its generation is taken
        }
        let mut generation = self.parser.take();
        if self.events.contains(&Event::Overrun) {
            generation.finish_reason = Some(FinishReason::Length);
        }
        Outcome { events: self.events, state: self.state, generation, token_count, body: self.body }
    }

    fn fail(&mut self, failure: Failure, is_unanswered: bool) {
        self.events.extend([Event::Failed { failure, is_unanswered }, Event::Ended { reusable: false }]);
        self.state = State::Failed;
    }

    fn end(&mut self, reusable: bool) {
        self.events.push(Event::Ended { reusable });
        self.state = State::Done { reusable };
    }

    fn read_other(&mut self, mut body: Vec<u8>, next: &Next, is_reusable: bool) {
        self.state = State::Refused;
        let is_too_long = body.len() > MAX_BYTES;
        body.truncate(MAX_BYTES);
        self.body = body;
        if is_too_long || !matches!(next, Next::More) {
            self.events.push(Event::Refused);
            self.end(is_reusable && !is_too_long);
        }
    }

    fn read_stream(&mut self, body: &[u8], next: Next, is_reusable: bool) {
        self.state = State::Waiting;
        let mut last_event = None;
        let mut is_too_long = false;
        for (index, byte) in body.iter().enumerate() {
            is_too_long = last_event.is_some_and(|end| index - end == MAX_BYTES);
            if is_too_long {
                break;
            }
            if self.has_error() {
                continue;
            }
            let result = self.step(|parser| parser.feed(&[*byte]).map(drop));
            if self.state.is_over() {
                return;
            }
            match result {
                Err(Error::Engine(error)) => {
                    self.state = State::Rest;
                    self.events.push(Event::DecodeError(Error::Engine(error)));
                }
                Err(error) => {
                    self.state = State::Failed;
                    self.events.extend([Event::DecodeError(error), Event::Ended { reusable: false }]);
                    return;
                }
                Ok(()) => {}
            }
            if self.state == State::Rest && last_event.is_none() {
                last_event = Some(index + 1);
            }
        }
        if let (Next::More, false) = (&next, is_too_long) {
            return;
        }
        let result = if self.has_error() { Ok(()) } else { self.step(|parser| parser.close(false)) };
        let has_engine_error = self.events.iter().any(|event| matches!(event, Event::DecodeError(Error::Engine(_))));
        match (result, next) {
            _ if self.state.is_over() => {}
            (Ok(()), _) if has_engine_error && is_too_long => {
                self.fail(ProtocolError::RestTooLarge(MAX_BYTES).into(), false);
            }
            (Ok(()), Next::Failure(failure)) if has_engine_error => self.fail(failure, false),
            (Err(error), Next::Failure(failure)) if !is_too_long => {
                self.state = State::Failed;
                self.events.push(Event::Failed { failure, is_unanswered: false });
                self.events.extend([Event::DecodeError(error), Event::Ended { reusable: false }]);
            }
            (result, _) => {
                self.events.extend(result.err().map(Event::DecodeError));
                self.end(is_reusable && !is_too_long);
            }
        }
    }

    fn has_error(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::DecodeError(_)))
    }

    /// Move the parser on; note the first token, the terminal event and an overrun.
    fn step(&mut self, work: impl FnOnce(&mut Parser) -> Result<(), Error>) -> Result<(), Error> {
        let (had_tokens, was_finished) = (self.parser.token_count() > 0, self.parser.finished());
        let result = work(&mut self.parser);
        if self.parser.token_count() > 0 && !had_tokens {
            self.state = State::Streaming;
            self.events.push(Event::FirstToken);
        }
        let is_damaged = matches!(result, Err(Error::Engine(_) | Error::Parse(_)));
        if self.parser.finished() && !was_finished {
            self.state = State::Rest;
            self.events.push(Event::Finished);
        } else if !self.parser.finished() && self.parser.token_count() > self.limit && !is_damaged {
            self.events.push(Event::Overrun);
            self.end(false);
        }
        result
    }
}
