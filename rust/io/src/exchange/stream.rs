//! The body of a reply that is a stream, on its way to the parser: `Stream`.

use memchr::memchr2_iter;
use streamfold_core::{Dialect, Error, FinishReason, Generation, Options, Parser};

/// A stream ends this many tokens past its `max_new_tokens`.
pub(crate) const MAX_OVERRUN: usize = 256;

/// What a part of the body brought.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Folded {
    /// The first token.
    pub first_token: bool,
    /// What ended the stream, if it ended.
    pub end: Option<StreamEnd>,
}

/// What ended a stream.
#[derive(Debug, PartialEq)]
pub(crate) enum StreamEnd {
    /// Its terminal event.
    Finished,
    /// It went too far past `max_new_tokens`.
    Overrun,
    /// An error, of the bytes or of the engine.
    Error(Error),
}

/// A stream of tokens: a parser from its first byte on, and where the stream is.
pub(crate) struct Stream {
    dialect: Dialect,
    /// Without `max_new_tokens`, for which a new parser reserves its arrays: most streams wait long for a token.
    options: Options,
    /// The most tokens.
    limit: usize,
    parser: Option<Box<Parser>>,
    /// What `take` found.
    taken_tokens: usize,
    is_finished: bool,
    is_overrun: bool,
    /// No byte is folded any more: after an error, after an overrun, after `take`.
    is_ended: bool,
}

impl Stream {
    pub(crate) fn new(dialect: Dialect, options: Options) -> Self {
        Self {
            dialect,
            options: Options { max_new_tokens: None, ..options },
            limit: options.max_new_tokens.map_or(usize::MAX, |count| count.saturating_add(MAX_OVERRUN)),
            parser: None,
            taken_tokens: 0,
            is_finished: false,
            is_overrun: false,
            is_ended: false,
        }
    }

    /// Fold a part that holds the end of one event at most, see [`split_after_event`].
    pub(crate) fn fold(&mut self, part: &[u8]) -> Folded {
        self.run(|parser| parser.feed(part).err())
    }

    /// The body has ended: fold the event that lacks only its blank line.
    pub(crate) fn close(&mut self, is_aborted: bool) -> Folded {
        let folded = self.run(|parser| parser.close(is_aborted).err());
        self.is_ended = true;
        folded
    }

    /// Hand the generation out. Nothing is folded afterwards.
    pub(crate) fn take(&mut self) -> Generation {
        let mut parser = self.parser.take().unwrap_or_else(|| Box::new(Parser::new(self.dialect, self.options)));
        self.taken_tokens = self.taken_tokens.max(parser.token_count());
        self.is_ended = true;
        let mut generation = parser.take();
        if self.is_overrun {
            generation.finish_reason = Some(FinishReason::Length);
        }
        generation
    }

    /// Tokens received so far.
    pub(crate) fn token_count(&self) -> usize {
        self.parser.as_ref().map_or(self.taken_tokens, |parser| parser.token_count())
    }

    /// Bytes of memory held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.parser.as_ref().map_or(0, |parser| parser.held_bytes())
    }

    fn run(&mut self, work: impl FnOnce(&mut Parser) -> Option<Error>) -> Folded {
        if self.is_ended {
            return Folded::default();
        }
        let parser = self.parser.get_or_insert_with(|| Box::new(Parser::new(self.dialect, self.options)));
        let before = parser.token_count();
        let error = work(parser);
        let after = parser.token_count();
        let is_finished = !self.is_finished && parser.finished();
        self.is_finished |= is_finished;
        self.is_overrun = !self.is_finished && after > self.limit;
        let end = match error {
            // Too many tokens are not too few.
            None | Some(Error::Truncated { .. }) if self.is_overrun => Some(StreamEnd::Overrun),
            Some(error) => Some(StreamEnd::Error(error)),
            None => is_finished.then_some(StreamEnd::Finished),
        };
        self.is_ended = matches!(end, Some(StreamEnd::Overrun | StreamEnd::Error(_)));
        Folded { first_token: before == 0 && after > 0, end }
    }
}

/// Split behind the first event that ends in `body`, so that what happens at an event does not depend on how the body
/// was split into reads: a line end behind a line end, or at the start. CR and LF both end a line.
pub(crate) fn split_after_event(body: &[u8]) -> (&[u8], &[u8]) {
    let mut line = 0;
    for end in memchr2_iter(b'\n', b'\r', body) {
        let is_crlf = end > 0 && end == line && body[end - 1] == b'\r' && body[end] == b'\n';
        if end == line && !is_crlf {
            return body.split_at(end + 1);
        }
        line = end + 1;
    }
    (body, &[])
}
