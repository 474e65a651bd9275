//! One event of vLLM's `/inference/v1/generate`, or of its `/v1/completions`, -> the generation.
//!
//! Each event holds what is new. The checks come in one order, whatever the order of the keys: the error object,
//! `choices` and the finish reason, index, id and types, counts, ids beside logprobs, ids, logprobs, side data. Only
//! when all have passed is anything changed.

mod api;
mod checks;
mod fields;
mod keys;
mod logprobs;
mod reader;
mod side;
mod staged;

use crate::error::{ErrorKind, Flaw, Refusal};
use crate::generation::{FinishReason, Growing, Matched};
use crate::options::Options;
use crate::side::{Arrivals, SideData, Version};
use crate::text::{decode, name};
pub(crate) use crate::vllm::api::Api;
use crate::vllm::fields::Fields;
use crate::vllm::reader::read;
use crate::vllm::staged::Staged;

/// The state of one stream.
pub(crate) struct Vllm {
    api: Api,
    id: Option<String>,
    version: Version,
    staged: Staged,
}

impl Vllm {
    pub(crate) fn new(api: Api, options: &Options) -> Self {
        Self { api, id: None, version: Version::default(), staged: Staged::new(options.logprobs) }
    }

    pub(crate) fn held(&self) -> usize {
        self.staged.held()
    }

    /// Fold one event; all or nothing. Its data is UTF-8.
    pub(crate) fn event(
        &mut self,
        data: &[u8],
        is_error: bool,
        options: &Options,
        growing: &mut Growing,
    ) -> Result<(), Refusal> {
        let mut fields = Fields::EMPTY;
        read(data, self.api, &mut self.staged, &mut fields)
            .map_err(|(at, why)| Flaw::new(ErrorKind::Json, at, "", format!("not JSON: {why}")))?;
        if is_error || fields.errors.tell_error(data, !fields.choices.is_absent()) {
            return Err(fields.errors.fault(data).into());
        }
        let reason = checks::finish(data, &fields)?;
        self.fold(data, &fields, reason, options, growing)?;
        Ok(())
    }

    /// Fold an event that comes after the terminal one: the usage tells whether all tokens have come, and of what
    /// prompt. Whatever else comes is no part of the generation.
    pub(crate) fn late_event(
        &mut self,
        data: &[u8],
        is_error: bool,
        options: &Options,
        growing: &mut Growing,
    ) -> Result<(), Refusal> {
        let mut fields = Fields::EMPTY;
        let is_read = read(data, self.api, &mut self.staged, &mut fields).is_ok();
        if is_read && !is_error && !fields.errors.tell_error(data, true) && fields.choices.get() == Some(0) {
            self.fold(data, &fields, None, options, growing)?;
        } else {
            self.staged.layout.forget_values();
        }
        Ok(())
    }

    fn fold(
        &mut self,
        data: &[u8],
        fields: &Fields,
        reason: Option<FinishReason>,
        options: &Options,
        growing: &mut Growing,
    ) -> Result<(), Flaw> {
        let (api, staged) = (self.api, &self.staged);
        checks::identity(data, fields, api, self.id.as_deref())?;
        checks::types(data, fields, api)?;
        checks::presence(data, fields, options, api)?;
        let (kept, new) = (growing.generation.token_ids.len(), staged.ids.len());
        checks::counts(fields, kept, new, options, api)?;
        checks::mismatch(data, fields, staged, api)?;
        checks::ids(data, fields.choice.token_ids.get(), staged)?;
        let clamped = checks::logprobs(data, fields, staged, options, api)?;
        let arrivals = Arrivals { kept, new, is_last: reason.is_some() };
        let side = side::read(data, fields, arrivals, options, &growing.generation)?;
        let text = fields.choice.text.get().map_or(0, |text| text.span.of(data).len());
        if !growing.generation.reserve(new) || !growing.text.reserve(text, false) {
            let message = format!("no memory for {new} more tokens and {text} bytes of text");
            return Err(Flaw::new(ErrorKind::TooLarge, 0, "", message));
        }

        // Nothing below can fail.
        self.apply(data, fields, side, growing);
        let generation = &mut growing.generation;
        generation.clamped_logprobs += clamped;
        if reason.is_some() {
            generation.finish_reason = reason;
            generation.matched = matched(data, fields);
        }
        Ok(())
    }

    fn apply(&mut self, data: &[u8], fields: &Fields, side: SideData, growing: &mut Growing) {
        let new = self.staged.ids.len();
        match fields.choice.text.get() {
            Some(raw) => growing.text.append(raw.span.of(data), raw.has_escapes),
            None if new > 0 => growing.text.miss(),
            None => {}
        }
        let generation = &mut growing.generation;
        let kept = generation.token_ids.len();
        generation.token_ids.extend_from_slice(&self.staged.ids);
        if let Some(logprobs) = &mut generation.logprobs {
            logprobs.extend_from_slice(&self.staged.logprobs);
        }
        if let Some(label) = fields.weight_version() {
            generation.extend_version(self.version.decode(data, label), kept);
        }
        generation.prompt_tokens = fields.usage.prompt_tokens.get().or(generation.prompt_tokens);
        generation.cached_tokens = fields.usage.cached_tokens.get().or(generation.cached_tokens);
        if let (None, Some(id)) = (&self.id, fields.id.get()) {
            self.id = Some(decode(data, id));
        }
        for (meta, members) in growing.meta.iter_mut().zip(&self.staged.members) {
            meta.update(data, members);
        }
        side.apply(new, growing);
    }
}

/// What a terminal event says that it stopped at.
fn matched(data: &[u8], fields: &Fields) -> Option<Matched> {
    let told = fields.choice.matched.map(|matched| matched.decode(data));
    // A generation that ran in circles has stopped at nothing but that.
    let is_repetition = fields.choice.finish.get().is_some_and(|raw| *name(data, raw) == *b"repetition");
    told.or_else(|| is_repetition.then(|| Matched::Text("repetition".to_owned())))
}
