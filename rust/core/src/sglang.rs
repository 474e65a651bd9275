//! Decodes the events of SGLang's `/generate` and applies them to the generation.
//!
//! The order of the checks does not depend on the order of the keys: the error object, `meta_info` and the finish type,
//! an abort with a status, types, counts, ids against pairs, tokens sent before, ids, logprobs, side data. An event is
//! applied only after all checks have passed.

mod buffers;
mod checks;
mod counts;
mod fields;
mod keys;
mod mode;
mod paths;
mod reader;
mod side;

use crate::builder::GenerationBuilder;
use crate::checks::prompt_tokens;
use crate::error::{EngineError, ErrorKind, EventError, Rejection};
use crate::field::{List, RawMatched};
use crate::generation::FinishReason;
use crate::options::Options;
use crate::prompt_ids::PromptIds;
use crate::sglang::buffers::{Elements, EventBuffers};
use crate::sglang::counts::{Counts, Shape, Step, reported_tokens};
use crate::sglang::fields::{Fields, Finish};
pub(crate) use crate::sglang::mode::Mode;
use crate::sglang::paths::{PROMPT_IDS, PROMPT_TOKENS};
use crate::sglang::reader::read;
use crate::side::{Progress, SideData, Version};
use crate::sse::Event;
use crate::text::decode;

/// The decoder of one stream.
pub(crate) struct Sglang {
    mode: Mode,
    id: Option<String>,
    version: Version,
    buffers: EventBuffers,
}

impl Sglang {
    pub(crate) fn new(mode: Mode, options: &Options) -> Self {
        Self { mode, id: None, version: Version::default(), buffers: EventBuffers::new(options.logprobs) }
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.buffers.held_bytes()
    }

    /// Decode one event and apply it completely, or not at all. Its data is UTF-8.
    pub(crate) fn decode(
        &mut self,
        event: &Event<'_>,
        options: &Options,
        builder: &mut GenerationBuilder,
    ) -> Result<(), Rejection> {
        let (data, is_error) = (event.data, event.is_error);
        let mut fields = Fields::default();
        read(event, &mut self.buffers, &mut fields)
            .map_err(|(at, why)| EventError::new(ErrorKind::Json, at, "", format!("not JSON: {why}")))?;
        if is_error || fields.errors.is_error(data, !fields.meta_info.is_absent()) {
            return Err(fields.errors.engine_error(data).into());
        }
        let finish = checks::finish(&fields)?;
        let failure = finish.and_then(|finish| finish_error(data, &finish));
        let reason = finish.and_then(|finish| finish.reason);
        match failure {
            None => self.check_and_apply(data, &fields, reason, options, builder)?,
            Some(failure) => {
                // The engine failed, but the tokens of this event are kept if they pass every check.
                if failure.status.is_some_and(|status| status >= 500)
                    && self.check_and_apply(data, &fields, reason, options, builder).is_ok()
                {
                    builder.generation.finish_reason = None;
                }
                return Err(failure.into());
            }
        }
        builder.generation.matched = finish.and_then(|finish| finish.matched).map(|matched| matched.decode(data));
        Ok(())
    }

    fn check_and_apply(
        &mut self,
        data: &[u8],
        fields: &Fields,
        reason: Option<FinishReason>,
        options: &Options,
        builder: &mut GenerationBuilder,
    ) -> Result<(), EventError> {
        checks::identity(data, fields, self.id.as_deref())?;
        checks::types(fields)?;
        let kept = &builder.generation;
        let counted = if options.logprobs { &fields.meta.pairs } else { &fields.output_ids };
        let list = counted.as_ref();
        let is_abort = reason == Some(FinishReason::Abort);
        let counts = Counts {
            fields,
            list: counted,
            elements: Elements::new(list, &self.buffers, kept),
            kept: kept.token_ids.len(),
            reported: reported_tokens(fields, options, kept.token_ids.len(), is_abort)?,
            mode: self.mode,
            logprobs: options.logprobs,
        };
        let step = if is_abort { counts.abort_step()? } else { counts.step()? };
        prompt_tokens(&fields.meta.prompt_tokens, options, PROMPT_TOKENS)?;
        let prompt_ids = (&fields.prompt_token_ids, PROMPT_IDS);
        PromptIds::check_length(prompt_ids, (&fields.meta.prompt_tokens, PROMPT_TOKENS), kept, options)?;
        if !is_abort {
            checks::ids_beside_pairs(data, fields, &self.buffers, kept)?;
        }
        checks::prefix(data, list, counts.elements, step, kept)?;
        self.buffers.prompt_ids.check(data, prompt_ids, kept)?;
        let start = if step.new > 0 { self.buffers.buffer_from(list, step.first, kept) } else { 0 };
        checks::ids(data, list, step, &self.buffers, start)?;
        let clamped = checks::logprobs(data, list, step, &self.buffers, start, options)?;
        let side = if step.shape == Shape::Marker || !fields.meta.has_side_data() {
            None
        } else {
            let progress = Progress { kept: kept.token_ids.len(), new: step.new, is_last: reason.is_some() };
            let len = list.map_or(0, List::len);
            Some(side::read(data, fields, progress, len, options, kept)?)
        };
        let text = fields.text.get().map_or(0, |text| text.span.of(data).len());
        if !builder.generation.reserve(step.new, options.max_new_tokens)
            || !builder.text.reserve(text, step.mode == Mode::Cumulative)
        {
            let message = format!("out of memory for {} more tokens and {text} bytes of text", step.new);
            return Err(EventError::new(ErrorKind::TooLarge, 0, "", message));
        }

        // Nothing below can fail.
        self.apply(data, fields, step, start, builder);
        builder.generation.clamped_logprobs += clamped;
        builder.generation.max_tokens_per_event = builder.generation.max_tokens_per_event.max(step.new);
        match side {
            Some(side) => side.apply(step.new, builder),
            None if step.shape == Shape::Marker => {}
            None => SideData::apply_none(step.new, builder),
        }
        builder.generation.finish_reason = reason;
        self.remember(data, fields, list, step);
        Ok(())
    }

    fn apply(&mut self, data: &[u8], fields: &Fields, step: Step, start: usize, builder: &mut GenerationBuilder) {
        if self.mode == Mode::Unknown && step.mode == Mode::Cumulative {
            builder.text.keep_last();
        }
        self.mode = step.mode;
        self.apply_text(data, fields, step, builder);
        let generation = &mut builder.generation;
        let kept = generation.token_ids.len();
        generation.token_ids.extend_from_slice(&self.buffers.ids[start..][..step.new]);
        if let Some(logprobs) = &mut generation.logprobs {
            logprobs.extend_from_slice(&self.buffers.logprobs[start..][..step.new]);
        }
        if let Some(label) = fields.meta.weight_version.get() {
            generation.extend_version(self.version.decode(data, label), kept);
        }
        self.buffers.prompt_ids.apply(data, &fields.prompt_token_ids, generation);
        generation.prompt_tokens = fields.meta.prompt_tokens.get().or(generation.prompt_tokens);
        generation.cached_tokens = fields.meta.cached_tokens.get().or(generation.cached_tokens);
        if let (None, Some(id)) = (&self.id, fields.meta.id.get()) {
            self.id = Some(decode(data, id));
        }
        for (meta, members) in builder.meta.iter_mut().zip(&self.buffers.members) {
            meta.update(data, members);
        }
    }

    fn apply_text(&self, data: &[u8], fields: &Fields, step: Step, builder: &mut GenerationBuilder) {
        let text = &mut builder.text;
        let Some(raw) = fields.text.get() else {
            if step.new > 0 {
                text.mark_missing();
            }
            return;
        };
        let is_abort = fields.meta.finish.get().is_some_and(|finish| finish.reason == Some(FinishReason::Abort));
        let is_from_queue = is_abort && fields.meta.prompt_tokens.get().is_none();
        match step.shape {
            Shape::Marker => {}
            Shape::DeltaThenWhole => {
                let sent = decode(data, raw);
                let whole = after_delta(&sent, text.plain()).to_owned();
                text.set(whole);
            }
            _ if self.mode == Mode::Cumulative => text.replace(raw.span.of(data)),
            _ if is_from_queue => {
                let sent = decode(data, raw);
                let kept = text.plain();
                let whole = if sent.starts_with(kept) { &sent } else { after_delta(&sent, kept) };
                let whole = whole.to_owned();
                text.set(whole);
            }
            Shape::Whole => text.replace(raw.span.of(data)),
            Shape::Delta => text.append(raw.span.of(data), raw.has_escapes),
        }
    }

    /// Remember complete lists by their fingerprints, to recognize them in the next event.
    fn remember(&mut self, data: &[u8], fields: &Fields, list: Option<&List>, step: Step) {
        let buffers = &mut self.buffers;
        let is_all = step.first + step.new == list.map_or(0, List::len)
            && (step.shape == Shape::Whole
                || (step.shape == Shape::Delta && self.mode == Mode::Unknown && step.new > 0));
        if self.mode == Mode::Incremental {
            buffers.pairs_prefix.clear();
            buffers.ids_prefix.clear();
        } else if is_all {
            if let Some(list) = fields.meta.pairs.as_ref() {
                buffers.pairs_prefix.remember(data, list.start(), list.end(), list.len(), list.known());
            }
            match fields.output_ids.as_ref() {
                Some(list) => buffers.ids_prefix.remember(data, list.start(), list.end(), list.len(), list.known()),
                None => buffers.ids_prefix.clear(),
            }
        }
    }
}

/// Of a text D + A + D, where A was kept: the A + D at its end, counted in characters.
fn after_delta<'a>(text: &'a str, kept: &str) -> &'a str {
    let length = text.chars().count();
    let whole = usize::midpoint(length, kept.chars().count());
    let skip = length.saturating_sub(whole);
    text.char_indices().nth(skip).map_or("", |(start, _)| &text[start..])
}

/// A finish reason that reports an error of the engine.
fn finish_error(data: &[u8], finish: &Finish) -> Option<EngineError> {
    if let Some(RawMatched::Text(raw)) = finish.matched
        && decode(data, raw) == "NaN happened"
    {
        let message = "the engine computed NaN logits and sampled a stop token instead".to_owned();
        return Some(EngineError { message, status: None, code: None });
    }
    let status = finish.status.get().and_then(|status| u16::try_from(status).ok());
    let status = status.filter(|status| (400..600).contains(status) && finish.reason == Some(FinishReason::Abort))?;
    let message = finish.message.map_or_else(|| "the engine aborted the request".to_owned(), |raw| decode(data, raw));
    Some(EngineError { message, status: Some(status), code: None })
}
