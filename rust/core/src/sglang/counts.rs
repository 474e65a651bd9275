//! The rules of counts: how many tokens an event brings, and where in its list they stand.
//!
//! `kept` tokens are there already, the event's list has `len` elements, and the engine has told that there are `told`
//! tokens by now. A delta has `kept + len == told`, a whole list `len == told`. Whatever fits neither was damaged on
//! the way, or by the engine; only abort events may be odd, in ways of their own.

use crate::error::{ErrorKind, Flaw};
use crate::field::{Field, List};
use crate::options::Options;
use crate::sglang::fields::Fields;
use crate::sglang::mode::Mode;
use crate::sglang::paths::{COMPLETION, IDS, LENGTH, PAIRS};
use crate::sglang::staged::Elements;

/// How the event's list extends the tokens kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// An abort event that says nothing about tokens.
    Bare,
    /// Only what is new.
    Delta,
    /// Everything from the start.
    Whole,
    /// A delta, glued before everything from the start.
    Glued,
}

/// What an event brings: elements `first..first + new` of its list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub shape: Shape,
    pub first: usize,
    pub new: usize,
    /// The mode that this event proves.
    pub mode: Mode,
}

/// What the counts of one event are judged by.
pub(super) struct Counts<'a> {
    pub fields: &'a Fields,
    pub list: &'a Field<List>,
    pub elements: Elements<'a>,
    pub kept: usize,
    pub told: usize,
    pub mode: Mode,
    pub logprobs: bool,
}

impl Counts<'_> {
    fn is_listed(&self) -> bool {
        self.list.get().is_some()
    }

    fn len(&self) -> usize {
        self.list.get().map_or(0, |list| list.len)
    }

    fn delta(&self) -> Step {
        Step { shape: Shape::Delta, first: 0, new: self.len(), mode: self.mode }
    }

    fn whole(&self) -> Step {
        Step { shape: Shape::Whole, first: self.kept, new: self.len().saturating_sub(self.kept), mode: self.mode }
    }

    /// The rule for every event but an abort.
    pub(super) fn step(&self) -> Result<Step, Flaw> {
        let (kept, len, told) = (self.kept, self.len(), self.told);
        if self.logprobs && !self.is_listed() {
            // `told` has seen to it that nothing is missing.
            return Ok(self.delta());
        }
        let is_delta = kept + len == told;
        let is_whole = len == told && told >= kept;
        match self.mode {
            Mode::Incremental if is_delta => Ok(self.delta()),
            Mode::Cumulative if is_whole => Ok(self.whole()),
            // The first event means the same in both modes, and an empty one proves nothing.
            Mode::Unknown if is_delta && (kept == 0 || len == 0) => Ok(self.delta()),
            Mode::Unknown if is_delta => Ok(Step { mode: Mode::Incremental, ..self.delta() }),
            Mode::Unknown if is_whole && kept > 0 => Ok(Step { mode: Mode::Cumulative, ..self.whole() }),
            _ => Err(self.miscounted()),
        }
    }

    /// The rule for an abort event, which obeys no mode: the engine's queue writes it in its own way.
    pub(super) fn abort_step(&self) -> Result<Step, Flaw> {
        let (kept, len, told) = (self.kept, self.len(), self.told);
        if (len == 0 && told < kept) || (!self.is_listed() && told <= kept) {
            return Ok(Step { shape: Shape::Bare, first: 0, new: 0, mode: self.mode });
        }
        let new = told.saturating_sub(kept);
        if !self.logprobs {
            return if len == told && (self.mode == Mode::Cumulative || self.elements.begin_with_kept()) {
                Ok(self.whole())
            } else if len >= new {
                Ok(Step { new, ..self.delta() })
            } else {
                Err(self.miscounted())
            };
        }
        if kept + len == told {
            Ok(self.delta())
        } else if len == told {
            Ok(self.whole())
        } else if told >= kept && len == 2 * told - kept && self.elements.begin_with_last(new) {
            Ok(Step { shape: Shape::Glued, first: len - new, new, mode: self.mode })
        } else {
            Err(self.miscounted())
        }
    }

    fn miscounted(&self) -> Flaw {
        let (field, path) = match self.fields.length.get() {
            Some(_) => (&self.fields.length, LENGTH),
            None => (&self.fields.completion_tokens, COMPLETION),
        };
        let (kept, len, told) = (self.kept, self.len(), self.told);
        let fits = match self.mode {
            Mode::Unknown => "that fits neither a cumulative nor an incremental stream",
            Mode::Cumulative => "that fits no cumulative stream",
            Mode::Incremental => "that fits no incremental stream",
        };
        let message = format!(
            "{told} tokens are told, {kept} were kept and the event holds {len}: {fits}. Tokens were lost or doubled on \
             the way, or the stream is of another mode; resume from the tokens kept"
        );
        Flaw::new(ErrorKind::Length, field.at(), path, message)
    }
}

/// The engine's own count of the tokens so far.
pub(super) fn told(fields: &Fields, options: &Options, kept: usize, is_abort: bool) -> Result<usize, Flaw> {
    let (length, completion) = (fields.length.get(), fields.completion_tokens.get());
    let Some(told) = length.or(completion).and_then(|told| usize::try_from(told).ok()) else {
        let message = "no count of tokens: without it a lost event would go unnoticed";
        return Err(Flaw::new(ErrorKind::Schema, fields.meta_info.at(), COMPLETION, message));
    };
    let is_missing = if is_abort { told > kept } else { told != kept };
    if is_missing && options.logprobs && fields.pairs.get().is_none() {
        let message = format!("missing, though {told} tokens are told, {kept} were kept, and logprobs were asked for");
        return Err(Flaw::new(ErrorKind::Schema, fields.meta_info.at(), PAIRS, message));
    }
    if is_abort && is_missing && !options.logprobs && fields.output_ids.get().is_none() {
        let message = format!("missing, though {told} tokens are told and {kept} were kept");
        return Err(Flaw::new(ErrorKind::Schema, fields.meta_info.at(), IDS, message));
    }
    match (length, completion) {
        (Some(length), Some(completion)) if length != completion => {
            let message = format!("it is {completion}, but output_token_logprobs_length is {length}");
            Err(Flaw::new(ErrorKind::Length, fields.completion_tokens.at(), COMPLETION, message))
        }
        _ => Ok(told),
    }
}
