//! The body of a reply that is a stream, on its way to the parser: `Stream`.

use memchr::memchr2;
use streamfold_core::{Dialect, Error, FinishReason, Generation, Options, Parser};

/// A stream ends this many tokens past its `max_new_tokens`.
pub(crate) const MAX_OVERRUN: usize = 256;

/// What a part of the body changed, beside the number of tokens.
#[derive(Debug, PartialEq)]
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
    pub(crate) fn fold(&mut self, part: &[u8]) -> Option<Folded> {
        self.run(|parser| parser.feed(part).err())
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

    /// None if nothing changed but the number of tokens, as at most events.
    fn run(&mut self, work: impl FnOnce(&mut Parser) -> Option<Error>) -> Option<Folded> {
        if self.is_ended {
            return None;
        }
        let parser = self.parser.get_or_insert_with(|| Box::new(Parser::new(self.dialect, self.options)));
        let before = parser.token_count();
        let error = work(parser);
        let after = parser.token_count();
        let first_token = before == 0 && after > 0;
        let is_finished = !self.is_finished && parser.finished();
        let is_too_long = after > self.limit;
        if error.is_none() && !first_token && !is_finished && !is_too_long {
            return None;
        }
        self.is_finished |= is_finished;
        self.is_overrun = !self.is_finished && is_too_long;
        let end = match error {
            // Too many tokens are not too few.
            None | Some(Error::Truncated { .. }) if self.is_overrun => Some(StreamEnd::Overrun),
            Some(error) => Some(StreamEnd::Error(error)),
            None => is_finished.then_some(StreamEnd::Finished),
        };
        self.is_ended = matches!(end, Some(StreamEnd::Overrun | StreamEnd::Error(_)));
        Some(Folded { first_token, end })
    }
}

/// Split behind the first event that ends in `body`, so that what happens at an event does not depend on how the body
/// was split into reads. An event ends at a line end that follows another one, or stands at the start.
pub(crate) fn split_after_event(body: &[u8]) -> (&[u8], &[u8]) {
    let mut line = 0;
    while let Some(length) = memchr2(b'\n', b'\r', &body[line..]) {
        let end = line + length;
        // CRLF is one line end.
        let is_rest_of_crlf = length == 0 && end > 0 && body[end - 1..=end] == *b"\r\n";
        if length == 0 && !is_rest_of_crlf {
            return body.split_at(end + 1);
        }
        line = end + 1;
        if body[end..].starts_with(b"\n\n") {
            return body.split_at(line + 1);
        }
    }
    (body, &[])
}

#[cfg(test)]
mod tests {
    use super::split_after_event;

    #[test]
    fn a_part_ends_with_its_event() {
        let parts = |mut body: &'static str| {
            let mut parts = Vec::new();
            while !body.is_empty() {
                let (part, rest) = split_after_event(body.as_bytes());
                parts.push(&body[..part.len()]);
                body = &body[body.len() - rest.len()..];
            }
            parts
        };
        assert_eq!(parts("a\nb\n\nc\n\nd"), ["a\nb\n\n", "c\n\n", "d"]);
        assert_eq!(parts("a\r\nb\r\n\r\nc"), ["a\r\nb\r\n\r", "\n", "c"]);
        assert_eq!(parts("a\rb\r\rc"), ["a\rb\r\r", "c"]);
        assert_eq!(parts("a\n\rb\r\n\nc"), ["a\n\r", "b\r\n\n", "c"]);
        assert_eq!(parts("a\n\n\n\nb\n"), ["a\n\n", "\n", "\n", "b\n"]);
        // The line before it may have ended in an earlier part.
        assert_eq!(parts("\na"), ["\n", "a"]);
        assert_eq!(parts("\r\na"), ["\r", "\n", "a"]);
        assert_eq!(parts("no line end"), ["no line end"]);
    }
}
