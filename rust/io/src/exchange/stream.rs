//! The body of a reply that is a stream, on its way to the parser: `Stream`.

use streamfold_core::{Dialect, Error, Generation, Options, Parser};

/// A stream ends this many tokens past its `max_new_tokens`.
pub(crate) const MAX_OVERRUN: usize = 256;

/// What a part of the body changed, beside the number of tokens.
#[derive(Debug, PartialEq)]
pub(crate) struct Folded {
    /// The first token.
    pub first_token: bool,
    /// As many tokens as were asked for.
    pub tokens: bool,
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
    options: Options,
    parser: Option<Box<Parser>>,
    /// What `take` found.
    taken_tokens: usize,
    /// With how many tokens to tell of them, once.
    notify_at: Option<usize>,
    is_finished: bool,
    /// No byte is folded any more: after an error, after an overrun, after `take`.
    is_ended: bool,
    /// The engine reported an error.
    has_engine_error: bool,
}

impl Stream {
    pub(crate) fn new(dialect: Dialect, options: Options) -> Self {
        let limits = [options.token_limit, options.max_new_tokens.map(|count| count.saturating_add(MAX_OVERRUN))];
        Self {
            dialect,
            options: Options { token_limit: limits.into_iter().flatten().min(), ..options },
            parser: None,
            taken_tokens: 0,
            notify_at: None,
            is_finished: false,
            is_ended: false,
            has_engine_error: false,
        }
    }

    /// Fold the next part of the body. Returns how many of its bytes were folded: all of them, or those up to the event
    /// that ends the stream.
    pub(crate) fn fold(&mut self, part: &[u8]) -> (usize, Option<Folded>) {
        let mut taken = part.len();
        let folded = self.run(|parser| {
            let (count, result) = parser.feed_until_finished(part);
            taken = count;
            result.err()
        });
        (taken, folded)
    }

    /// The body has ended: fold the event that lacks only its blank line.
    pub(crate) fn close(&mut self, is_aborted: bool) -> Option<Folded> {
        let folded = self.run(|parser| parser.close(is_aborted).err());
        self.is_ended = true;
        folded
    }

    /// Hand the generation out. Nothing is folded afterwards.
    pub(crate) fn take(&mut self) -> Generation {
        let mut parser = self.parser.take().unwrap_or_else(|| Box::new(Parser::new(self.dialect, self.options)));
        self.taken_tokens = self.taken_tokens.max(parser.token_count());
        self.is_ended = true;
        parser.take()
    }

    /// A copy of the generation so far; an empty one after `take`.
    pub(crate) fn snapshot(&self) -> Generation {
        match &self.parser {
            Some(parser) => parser.snapshot(),
            None => Parser::new(self.dialect, self.options).take(),
        }
    }

    /// Tokens received so far.
    pub(crate) fn token_count(&self) -> usize {
        self.parser.as_ref().map_or(self.taken_tokens, |parser| parser.token_count())
    }

    /// The tokens so far; none after `take`.
    pub(crate) fn token_ids(&self) -> &[i32] {
        self.parser.as_ref().map_or(&[], |parser| parser.token_ids())
    }

    /// Tell when there are so many tokens, once; not if there are already, which is returned.
    pub(crate) fn notify_at(&mut self, count: usize) -> bool {
        let is_there = self.token_count() >= count;
        self.notify_at = (!is_there).then_some(count);
        is_there
    }

    /// Bytes of memory held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.parser.as_ref().map_or(0, |parser| parser.held_bytes())
    }

    /// Whether it ended with an error that the engine reports.
    pub(crate) fn has_engine_error(&self) -> bool {
        self.has_engine_error
    }

    /// None if nothing changed but the number of tokens, as at most events.
    fn run(&mut self, work: impl FnOnce(&mut Parser) -> Option<Error>) -> Option<Folded> {
        if self.is_ended {
            return None;
        }
        let parser = self.parser.get_or_insert_with(|| Box::new(Parser::new(self.dialect, self.options)));
        let had_tokens = parser.token_count() > 0;
        let error = work(parser);
        let first_token = !had_tokens && parser.token_count() > 0;
        let is_finished = !self.is_finished && parser.finished();
        let tokens = self.notify_at.take_if(|count| *count <= parser.token_count()).is_some();
        if error.is_none() && !first_token && !tokens && !is_finished {
            return None;
        }
        self.is_finished |= is_finished;
        let end = match error {
            Some(error) => Some(StreamEnd::Error(error)),
            None if is_finished && parser.overrun() => Some(StreamEnd::Overrun),
            None => is_finished.then_some(StreamEnd::Finished),
        };
        self.is_ended = matches!(end, Some(StreamEnd::Overrun | StreamEnd::Error(_)));
        self.has_engine_error = matches!(end, Some(StreamEnd::Error(Error::Engine(_))));
        Some(Folded { first_token, tokens, end })
    }
}
