//! `Parser`: the raw bytes of one streamed HTTP response in, one `Generation` out.

use crate::builder::GenerationBuilder;
use crate::error::{Error, ErrorKind, EventError, ParseError, Rejection};
use crate::generation::{FinishReason, Generation};
use crate::options::{Dialect, Options};
use crate::sglang::{Mode, Sglang};
use crate::sse::{Event, Framer, Next};
use crate::vllm::{Api, Vllm};

/// Parses the response body of one streamed generation.
///
/// ```
/// use streamfold_core::{Dialect, Options, Parser};
///
/// let mut parser = Parser::new(Dialect::Sglang, Options::default());
/// let event = br#"data: {"text":"Hi","meta_info":{"completion_tokens":1,"output_token_logprobs":[[-0.25,21,null]],
/// "finish_reason":{"type":"length"}}}"#;
/// parser.feed(&event.map(|byte| if byte == b'\n' { b' ' } else { byte }))?;
/// assert_eq!(parser.feed(b"\n\ndata: [DONE]\n\n")?, 1);
/// parser.close(false)?;
/// assert_eq!(parser.take().token_ids, [21]);
/// # Ok::<(), streamfold_core::Error>(())
/// ```
pub struct Parser {
    framer: Framer,
    decoder: EventDecoder,
    error: Option<Error>,
    is_closed: bool,
    /// The token count and `finished` at the time of `take`.
    taken: Option<(usize, bool)>,
}

/// Decodes the events of one stream and adds them to the generation.
struct EventDecoder {
    options: Options,
    dialect: DialectDecoder,
    builder: GenerationBuilder,
    is_done: bool,
    is_overrun: bool,
}

/// The decoder of the engine that writes the stream.
enum DialectDecoder {
    Sglang(Sglang),
    Vllm(Vllm),
}

impl DialectDecoder {
    fn new(dialect: Dialect, options: &Options) -> Self {
        match dialect {
            Dialect::Sglang => Self::Sglang(Sglang::new(Mode::Unknown, options)),
            Dialect::SglangCumulative => Self::Sglang(Sglang::new(Mode::Cumulative, options)),
            Dialect::SglangIncremental => Self::Sglang(Sglang::new(Mode::Incremental, options)),
            Dialect::Vllm => Self::Vllm(Vllm::new(Api::Generate, options)),
            Dialect::VllmCompletions => Self::Vllm(Vllm::new(Api::Completions, options)),
        }
    }

    fn held_bytes(&self) -> usize {
        match self {
            Self::Sglang(sglang) => sglang.held_bytes(),
            Self::Vllm(vllm) => vllm.held_bytes(),
        }
    }
}

impl Parser {
    /// A parser for one response.
    #[must_use]
    pub fn new(dialect: Dialect, options: Options) -> Self {
        let decoder = EventDecoder {
            options,
            dialect: DialectDecoder::new(dialect, &options),
            builder: GenerationBuilder::new(options.logprobs),
            is_done: false,
            is_overrun: false,
        };
        Self { framer: Framer::new(options.max_event_bytes), decoder, error: None, is_closed: false, taken: None }
    }

    /// Parse the next bytes, split at any byte. Returns the number of tokens that became available.
    ///
    /// # Errors
    ///
    /// What is wrong with the first event that is wrong. Every later call returns the same error.
    pub fn feed(&mut self, data: &[u8]) -> Result<usize, Error> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let before = self.token_count();
        let decoder = &mut self.decoder;
        let result = self.framer.feed(data, |event| Ok(Next { skips: decoder.decode(event)?, pauses: false }));
        self.keep_error(result)?;
        Ok(self.token_count() - before)
    }

    /// As [`Parser::feed`], but stop behind the event that finishes the generation. Returns the number of bytes taken:
    /// all of them, or those up to the end of that event or of the event with the error. When the generation is
    /// finished, all bytes are taken.
    ///
    /// # Errors
    ///
    /// As [`Parser::feed`].
    pub fn feed_until_finished(&mut self, data: &[u8]) -> (usize, Result<(), Error>) {
        if let Some(error) = &self.error {
            return (0, Err(error.clone()));
        }
        let start = self.framer.position();
        let was_finished = self.finished();
        let decoder = &mut self.decoder;
        let result = self.framer.feed(data, |event| {
            let skips = decoder.decode(event)?;
            Ok(Next { skips, pauses: decoder.is_finished() && !was_finished })
        });
        let taken = usize::try_from(self.framer.position() - start).unwrap_or(data.len());
        (taken, self.keep_error(result))
    }

    /// End the stream: the body is complete, and nothing is fed afterwards. A pending event without its blank line is
    /// parsed if it is complete JSON.
    ///
    /// # Errors
    ///
    /// [`Error::Truncated`] if there was no finish reason and the call was not aborted; an error of the pending event;
    /// an earlier error.
    pub fn close(&mut self, aborted: bool) -> Result<(), Error> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let result = self.finish();
        self.keep_error(result)?;
        if self.finished() || aborted {
            return Ok(());
        }
        let (bytes, tokens, is_done) = (self.framer.position(), self.token_count(), self.done());
        self.keep_error(Err(Error::Truncated { bytes, tokens, is_done }))
    }

    fn finish(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Ok(());
        }
        let Some(event) = self.framer.finish()? else { return Ok(()) };
        match self.decoder.decode(&event) {
            // The connection ended inside the event: nothing of it was applied.
            Err(Error::Parse(ParseError { kind: ErrorKind::Json | ErrorKind::Utf8, .. })) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    fn keep_error(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &result {
            self.error = Some(error.clone());
            self.framer.release();
        }
        result
    }

    /// Return the generation so far. The parser must not be fed afterwards.
    pub fn take(&mut self) -> Generation {
        self.taken = Some((self.token_count(), self.finished()));
        self.framer.release();
        self.decoder.builder.take()
    }

    /// A copy of the generation so far: what [`Parser::take`] would return now. The parser goes on.
    #[must_use]
    pub fn snapshot(&self) -> Generation {
        self.decoder.builder.snapshot()
    }

    /// The number of tokens so far.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.taken.map_or_else(|| self.decoder.builder.generation.token_ids.len(), |(count, _)| count)
    }

    /// The tokens so far; none after [`Parser::take`].
    #[must_use]
    pub fn token_ids(&self) -> &[i32] {
        &self.decoder.builder.generation.token_ids
    }

    /// Whether the generation has its finish reason: from the terminal event, or because of [`Options::token_limit`].
    #[must_use]
    pub fn finished(&self) -> bool {
        self.taken.map_or_else(|| self.decoder.is_finished(), |(_, finished)| finished)
    }

    /// Whether the generation ended because it has more tokens than [`Options::token_limit`]. The engine does not know
    /// that.
    #[must_use]
    pub fn overrun(&self) -> bool {
        self.decoder.is_overrun
    }

    /// Whether `[DONE]` was received.
    #[must_use]
    pub fn done(&self) -> bool {
        self.decoder.is_done
    }

    /// Bytes of memory that the parser holds.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let decoder = &self.decoder;
        size_of::<Self>() + self.framer.held_bytes() + decoder.builder.held_bytes() + decoder.dialect.held_bytes()
    }
}

impl EventDecoder {
    fn is_finished(&self) -> bool {
        self.builder.generation.finish_reason.is_some()
    }

    /// Whether all further events but `[DONE]` are skipped.
    fn ignores_events(&self) -> bool {
        // vLLM sends the usage after the terminal event.
        self.is_done || self.is_overrun || (self.is_finished() && matches!(self.dialect, DialectDecoder::Sglang(_)))
    }

    /// End the generation if it has too many tokens. Those of the last event are kept: an event counts as a whole.
    #[inline]
    fn check_limit(&mut self) {
        let generation = &mut self.builder.generation;
        let limit = self.options.token_limit.unwrap_or(usize::MAX);
        if generation.token_ids.len() > limit && generation.finish_reason.is_none() {
            generation.finish_reason = Some(FinishReason::Length);
            self.is_overrun = true;
        }
    }

    /// Decode one event. Returns whether all further events but `[DONE]` can be skipped.
    fn decode(&mut self, event: &Event<'_>) -> Result<bool, Error> {
        if event.data == b"[DONE]" {
            self.is_done = true;
            return Ok(true);
        }
        if self.ignores_events() {
            return Ok(true);
        }
        // Most events are ASCII, and the check for ASCII is ten times faster.
        let valid = if event.is_ascii { Ok(()) } else { std::str::from_utf8(event.data).map(|_| ()) };
        let is_late = self.is_finished();
        let Self { options, dialect, builder, .. } = self;
        let result = match (valid, dialect) {
            (Err(_), _) if is_late => Ok(()),
            (Err(error), _) => Err(EventError::new(ErrorKind::Utf8, error.valid_up_to(), "", "not UTF-8").into()),
            (Ok(()), DialectDecoder::Sglang(sglang)) => sglang.decode(event, options, builder),
            (Ok(()), DialectDecoder::Vllm(vllm)) if is_late => vllm.decode_late(event, options, builder),
            (Ok(()), DialectDecoder::Vllm(vllm)) => vllm.decode(event, options, builder),
        };
        result.map_err(|rejection| match rejection {
            Rejection::Invalid(error) => locate(error, event),
            Rejection::Engine(error) => Error::Engine(error),
        })?;
        self.check_limit();
        Ok(self.ignores_events())
    }
}

/// The error with its place in the body instead of its place in the event.
fn locate(error: EventError, event: &Event<'_>) -> Error {
    let EventError { kind, at, path, message } = error;
    Error::Parse(ParseError { kind, offset: event.offset(at), path, message })
}
