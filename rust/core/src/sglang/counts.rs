//! Counts: how many new tokens an event has, and where they are in its list.
//!
//! `kept` tokens were received before, the event's list has `len` elements, and the engine reports `reported` tokens so
//! far. A delta has `kept + len == reported`, a whole list has `len == reported`. Anything else means that tokens were
//! lost or repeated. Abort events have rules of their own.

use crate::error::{ErrorKind, EventError};
use crate::field::{Field, List};
use crate::options::Options;
use crate::sglang::buffers::Elements;
use crate::sglang::fields::Fields;
use crate::sglang::mode::Mode;
use crate::sglang::paths::{COMPLETION, IDS, LENGTH, PAIRS};

/// How the event's list extends the tokens kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// An abort event without information about tokens.
    Marker,
    /// Only the new tokens.
    Delta,
    /// All tokens from the start.
    Whole,
    /// A delta, followed by all tokens from the start.
    DeltaThenWhole,
}

/// The new tokens of an event: elements `first..first + new` of its list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub shape: Shape,
    pub first: usize,
    pub new: usize,
    /// The mode of the stream, as known after this event.
    pub mode: Mode,
}

/// The counts of one event.
pub(super) struct Counts<'a> {
    pub fields: &'a Fields,
    pub list: &'a Field<List>,
    pub elements: Elements<'a>,
    pub kept: usize,
    pub reported: usize,
    pub mode: Mode,
    pub logprobs: bool,
}

impl Counts<'_> {
    fn is_listed(&self) -> bool {
        self.list.as_ref().is_some()
    }

    fn len(&self) -> usize {
        self.list.as_ref().map_or(0, List::len)
    }

    fn delta(&self) -> Step {
        Step { shape: Shape::Delta, first: 0, new: self.len(), mode: self.mode }
    }

    fn whole(&self) -> Step {
        Step { shape: Shape::Whole, first: self.kept, new: self.len().saturating_sub(self.kept), mode: self.mode }
    }

    /// The rule for all events but aborts.
    pub(super) fn step(&self) -> Result<Step, EventError> {
        let (kept, len, reported) = (self.kept, self.len(), self.reported);
        if self.logprobs && !self.is_listed() {
            // `reported_tokens` has checked that no tokens are missing.
            return Ok(self.delta());
        }
        let is_delta = kept + len == reported;
        let is_whole = len == reported && reported >= kept;
        match self.mode {
            Mode::Incremental if is_delta => Ok(self.delta()),
            Mode::Cumulative if is_whole => Ok(self.whole()),
            // The first event is the same in both modes, and an empty one does not show the mode.
            Mode::Unknown if is_delta && (kept == 0 || len == 0) => Ok(self.delta()),
            Mode::Unknown if is_delta => Ok(Step { mode: Mode::Incremental, ..self.delta() }),
            Mode::Unknown if is_whole && kept > 0 => Ok(Step { mode: Mode::Cumulative, ..self.whole() }),
            _ => Err(self.miscounted()),
        }
    }

    /// The rule for abort events, which do not follow the mode: the engine's queue writes them differently.
    pub(super) fn abort_step(&self) -> Result<Step, EventError> {
        let (kept, len, reported) = (self.kept, self.len(), self.reported);
        if (len == 0 && reported < kept) || (!self.is_listed() && reported <= kept) {
            return Ok(Step { shape: Shape::Marker, first: 0, new: 0, mode: self.mode });
        }
        let new = reported.saturating_sub(kept);
        if !self.logprobs {
            return if len == reported && (self.mode == Mode::Cumulative || self.elements.begin_with_kept()) {
                Ok(self.whole())
            } else if len >= new {
                Ok(Step { new, ..self.delta() })
            } else {
                Err(self.miscounted())
            };
        }
        if kept + len == reported {
            Ok(self.delta())
        } else if len == reported {
            Ok(self.whole())
        } else if reported >= kept && len == 2 * reported - kept && self.elements.begin_with_last(new) {
            Ok(Step { shape: Shape::DeltaThenWhole, first: len - new, new, mode: self.mode })
        } else {
            Err(self.miscounted())
        }
    }

    fn miscounted(&self) -> EventError {
        let (field, path) = match self.fields.meta.length.get() {
            Some(_) => (&self.fields.meta.length, LENGTH),
            None => (&self.fields.meta.completion_tokens, COMPLETION),
        };
        let (kept, len, reported) = (self.kept, self.len(), self.reported);
        let fits = match self.mode {
            Mode::Unknown => "this fits neither a cumulative nor an incremental stream",
            Mode::Cumulative => "this does not fit a cumulative stream",
            Mode::Incremental => "this does not fit an incremental stream",
        };
        let message = format!(
            "the engine reports {reported} tokens, {kept} were kept and the event has {len}: {fits}. Tokens were lost \
             or repeated on the way, or the stream has another mode; resume from the tokens kept"
        );
        EventError::new(ErrorKind::Length, field.at(), path, message)
    }
}

/// The number of tokens so far that the engine reports.
pub(super) fn reported_tokens(
    fields: &Fields,
    options: &Options,
    kept: usize,
    is_abort: bool,
) -> Result<usize, EventError> {
    let (length, completion) = (fields.meta.length.get(), fields.meta.completion_tokens.get());
    let Some(reported) = length.or(completion).and_then(|reported| usize::try_from(reported).ok()) else {
        let message = "missing: without a token count, lost events cannot be detected";
        return Err(EventError::new(ErrorKind::Schema, fields.meta_info.at(), COMPLETION, message));
    };
    let is_missing = if is_abort { reported > kept } else { reported != kept };
    if is_missing && options.logprobs && fields.meta.pairs.as_ref().is_none() {
        let message = format!(
            "missing, although the engine reports {reported} tokens, {kept} were kept, and logprobs were requested"
        );
        return Err(EventError::new(ErrorKind::Schema, fields.meta_info.at(), PAIRS, message));
    }
    if is_abort && is_missing && !options.logprobs && fields.output_ids.as_ref().is_none() {
        let message = format!("missing, although the engine reports {reported} tokens and {kept} were kept");
        return Err(EventError::new(ErrorKind::Schema, fields.meta_info.at(), IDS, message));
    }
    match (length, completion) {
        (Some(length), Some(completion)) if length != completion => {
            let message = format!("it is {completion}, but output_token_logprobs_length is {length}");
            Err(EventError::new(ErrorKind::Length, fields.meta.completion_tokens.at(), COMPLETION, message))
        }
        _ => Ok(reported),
    }
}
