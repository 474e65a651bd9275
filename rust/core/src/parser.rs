//! Raw bytes of one streamed reply in, one generation out.

use crate::error::{Error, ErrorKind, Flaw, ParseError, Refusal};
use crate::generation::{Generation, Growing};
use crate::options::{Dialect, Options};
use crate::sglang::{Mode, Sglang};
use crate::sse::{Event, Framer};
use crate::vllm::{Api, Vllm};

/// Room for so many tokens is reserved at once, if as many were asked for.
const FIRST_RESERVE: usize = 4096;

/// Folds the bytes of one reply.
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
    folder: Folder,
    error: Option<Error>,
    is_closed: bool,
    /// What the counters said when the generation was taken.
    taken: Option<(usize, bool)>,
}

/// What events are folded into.
struct Folder {
    options: Options,
    reader: Reader,
    growing: Growing,
    is_done: bool,
}

/// What reads one event of a dialect.
enum Reader {
    Sglang(Sglang),
    Vllm(Vllm),
}

impl Reader {
    fn new(dialect: Dialect, options: &Options) -> Self {
        match dialect {
            Dialect::Sglang => Self::Sglang(Sglang::new(Mode::Unknown, options)),
            Dialect::SglangCumulative => Self::Sglang(Sglang::new(Mode::Cumulative, options)),
            Dialect::SglangIncremental => Self::Sglang(Sglang::new(Mode::Incremental, options)),
            Dialect::Vllm => Self::Vllm(Vllm::new(Api::Generate, options)),
            Dialect::VllmCompletions => Self::Vllm(Vllm::new(Api::Completions, options)),
        }
    }

    fn held(&self) -> usize {
        match self {
            Self::Sglang(reader) => reader.held(),
            Self::Vllm(reader) => reader.held(),
        }
    }
}

impl Parser {
    /// A parser for one reply.
    #[must_use]
    pub fn new(dialect: Dialect, options: Options) -> Self {
        let mut growing = Growing::new(options.logprobs);
        // A failure here comes back with the first tokens, where it can be told.
        growing.generation.reserve(options.max_new_tokens.unwrap_or(0).min(FIRST_RESERVE));
        let folder = Folder { options, reader: Reader::new(dialect, &options), growing, is_done: false };
        Self { framer: Framer::new(options.max_event_bytes), folder, error: None, is_closed: false, taken: None }
    }

    /// Read the next bytes, cut anywhere; the number of tokens that became available.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the first event that is wrong; from then on the same again.
    pub fn feed(&mut self, data: &[u8]) -> Result<usize, Error> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let before = self.token_count();
        let folder = &mut self.folder;
        let result = self.framer.feed(data, |event| folder.event(event));
        self.keep_error(result)?;
        Ok(self.token_count() - before)
    }

    /// Tell that the body has ended; nothing is fed afterwards. An event that is pending is read if it is whole, once.
    ///
    /// # Errors
    ///
    /// [`Error::Truncated`] if no finish reason was seen, unless the call was aborted; and whatever is wrong with the
    /// pending event, or was wrong before.
    pub fn close(&mut self, aborted: bool) -> Result<(), Error> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let result = self.finish();
        self.keep_error(result)?;
        if self.finished() || aborted {
            return Ok(());
        }
        self.keep_error(Err(Error::Truncated { bytes: self.framer.position(), tokens: self.token_count() }))
    }

    fn finish(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Ok(());
        }
        let Some(event) = self.framer.finish()? else { return Ok(()) };
        match self.folder.event(&event) {
            // Cut in the middle: nothing was taken from it.
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

    /// Give what is there; the parser is spent.
    pub fn take(&mut self) -> Generation {
        self.taken = Some((self.token_count(), self.finished()));
        self.framer.release();
        self.folder.growing.take()
    }

    /// Tokens so far.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.taken.map_or_else(|| self.folder.growing.generation.token_ids.len(), |(count, _)| count)
    }

    /// Whether the terminal event was seen.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.taken.map_or_else(|| self.folder.is_finished(), |(_, finished)| finished)
    }

    /// Whether `[DONE]` was seen.
    #[must_use]
    pub fn done(&self) -> bool {
        self.folder.is_done
    }

    /// Bytes of memory held.
    #[must_use]
    pub fn held(&self) -> usize {
        size_of::<Self>() + self.framer.held() + self.folder.growing.held() + self.folder.reader.held()
    }
}

impl Folder {
    fn is_finished(&self) -> bool {
        self.growing.generation.finish_reason.is_some()
    }

    /// Whether events that come now may be dropped unread.
    fn is_deaf(&self) -> bool {
        // vLLM tells the usage after the terminal event.
        self.is_done || (self.is_finished() && matches!(self.reader, Reader::Sglang(_)))
    }

    /// Fold one event; whether only `[DONE]` is of interest from now on.
    fn event(&mut self, event: &Event<'_>) -> Result<bool, Error> {
        if event.data == b"[DONE]" {
            self.is_done = true;
            return Ok(true);
        }
        if self.is_deaf() {
            return Ok(true);
        }
        // Most events are ASCII, which is seen ten times faster.
        let valid = if event.data.is_ascii() { Ok(()) } else { std::str::from_utf8(event.data).map(|_| ()) };
        let is_late = self.is_finished();
        let Self { options, reader, growing, .. } = self;
        let folded = match (valid, reader) {
            (Err(_), _) if is_late => Ok(()),
            (Err(error), _) => Err(Flaw::new(ErrorKind::Utf8, error.valid_up_to(), "", "not UTF-8").into()),
            (Ok(()), Reader::Sglang(reader)) => reader.event(event.data, event.is_error, options, growing),
            (Ok(()), Reader::Vllm(reader)) if is_late => {
                reader.late_event(event.data, event.is_error, options, growing)
            }
            (Ok(()), Reader::Vllm(reader)) => reader.event(event.data, event.is_error, options, growing),
        };
        folded.map_err(|refusal| match refusal {
            Refusal::Flaw(flaw) => place(flaw, event),
            Refusal::Fault(fault) => Error::Engine(fault),
        })?;
        Ok(self.is_deaf())
    }
}

fn place(flaw: Flaw, event: &Event<'_>) -> Error {
    let Flaw { kind, at, path, message } = flaw;
    Error::Parse(ParseError { kind, offset: event.offset(at), path, message })
}
