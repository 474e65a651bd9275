//! Decodes the events of vLLM's `/inference/v1/generate` and `/v1/completions` and applies them to the generation.
//!
//! Each event holds only the new tokens. The order of the checks does not depend on the order of the keys: the error
//! object, `choices` and the finish reason, index, id and types, counts, ids beside logprobs, ids, logprobs, side data.
//! An event is applied only after all checks have passed.

mod api;
mod buffers;
mod checks;
mod fields;
mod keys;
mod logprobs;
mod reader;
mod side;

use crate::builder::GenerationBuilder;
use crate::error::{ErrorKind, EventError, Rejection};
use crate::generation::{FinishReason, Matched};
use crate::options::Options;
use crate::prompt_ids::PromptIds;
use crate::side::{Progress, SideData, Version};
use crate::sse::Event;
use crate::text::{decode, name};
pub(crate) use crate::vllm::api::Api;
use crate::vllm::buffers::EventBuffers;
use crate::vllm::fields::Fields;
use crate::vllm::reader::read;

/// The decoder of one stream.
pub(crate) struct Vllm {
    api: Api,
    id: Option<String>,
    version: Version,
    /// Whether an event so far had token ids, even none, or the usage.
    has_counted: bool,
    buffers: EventBuffers,
}

impl Vllm {
    pub(crate) fn new(api: Api, options: &Options) -> Self {
        Self {
            api,
            id: None,
            version: Version::default(),
            has_counted: false,
            buffers: EventBuffers::new(options.logprobs),
        }
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
        read(event, self.api, &mut self.buffers, &mut fields)
            .map_err(|(at, why)| EventError::new(ErrorKind::Json, at, "", format!("not JSON: {why}")))?;
        if is_error || fields.errors.is_error(data, !fields.choices.is_absent()) {
            return Err(fields.errors.engine_error(data).into());
        }
        let reason = checks::finish(data, &fields)?;
        self.check_and_apply(data, &fields, reason, options, builder)?;
        Ok(())
    }

    /// Decode an event after the terminal one. Only the usage counts: it shows whether all tokens were received, and
    /// the number of prompt tokens. All other events are ignored.
    pub(crate) fn decode_late(
        &mut self,
        event: &Event<'_>,
        options: &Options,
        builder: &mut GenerationBuilder,
    ) -> Result<(), Rejection> {
        let (data, is_error) = (event.data, event.is_error);
        let mut fields = Fields::default();
        let is_read = read(event, self.api, &mut self.buffers, &mut fields).is_ok();
        if is_read && !is_error && !fields.errors.is_error(data, true) && fields.choices.get() == Some(0) {
            self.check_and_apply(data, &fields, None, options, builder)?;
        } else {
            self.buffers.key_cache.forget_values();
        }
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
        let (api, buffers) = (self.api, &self.buffers);
        checks::identity(data, fields, api, self.id.as_deref())?;
        checks::types(data, fields, api)?;
        checks::presence(data, fields, options, api)?;
        let has_counted = self.has_counted || fields.counts_tokens();
        if reason.is_some() && !has_counted {
            return Err(checks::uncounted(fields));
        }
        let (kept, new) = (builder.generation.token_ids.len(), buffers.ids.len());
        checks::counts(fields, kept, new, options, api)?;
        let prompt_ids = fields.prompt_ids(api);
        let prompt_tokens = (&fields.usage.prompt_tokens, checks::PROMPT);
        PromptIds::check_length(prompt_ids, prompt_tokens, &builder.generation, options)?;
        checks::mismatch(data, fields, buffers, api)?;
        buffers.prompt_ids.check(data, prompt_ids, &builder.generation)?;
        checks::ids(data, fields.choice.token_ids.get(), buffers)?;
        let clamped = checks::logprobs(data, fields, buffers, options, api)?;
        let progress = Progress { kept, new, is_last: reason.is_some() };
        let side = if fields.has_side_data() {
            Some(side::read(data, fields, progress, options, &builder.generation)?)
        } else {
            None
        };
        let text = fields.choice.text.get().map_or(0, |text| text.span.of(data).len());
        if !builder.generation.reserve(new, options.max_new_tokens) || !builder.text.reserve(text, false) {
            let message = format!("out of memory for {new} more tokens and {text} bytes of text");
            return Err(EventError::new(ErrorKind::TooLarge, 0, "", message));
        }

        // Nothing below can fail.
        self.has_counted = has_counted;
        self.apply(data, fields, side, builder);
        let generation = &mut builder.generation;
        generation.clamped_logprobs += clamped;
        generation.max_tokens_per_event = generation.max_tokens_per_event.max(new);
        if reason.is_some() {
            generation.finish_reason = reason;
            generation.matched = matched(data, fields);
        }
        Ok(())
    }

    fn apply(&mut self, data: &[u8], fields: &Fields, side: Option<SideData>, builder: &mut GenerationBuilder) {
        let new = self.buffers.ids.len();
        match fields.choice.text.get() {
            Some(raw) => builder.text.append(raw.span.of(data), raw.has_escapes),
            None if new > 0 => builder.text.mark_missing(),
            None => {}
        }
        let generation = &mut builder.generation;
        let kept = generation.token_ids.len();
        generation.token_ids.extend_from_slice(&self.buffers.ids);
        if let Some(logprobs) = &mut generation.logprobs {
            logprobs.extend_from_slice(&self.buffers.logprobs);
        }
        if let Some(label) = fields.weight_version() {
            generation.extend_version(self.version.decode(data, label), kept);
        }
        self.buffers.prompt_ids.apply(data, fields.prompt_ids(self.api).0, generation);
        generation.prompt_tokens = fields.usage.prompt_tokens.get().or(generation.prompt_tokens);
        generation.cached_tokens = fields.usage.cached_tokens.get().or(generation.cached_tokens);
        if let (None, Some(id)) = (&self.id, fields.id.get()) {
            self.id = Some(decode(data, id));
        }
        for (meta, members) in builder.meta.iter_mut().zip(&self.buffers.members) {
            meta.update(data, members);
        }
        match side {
            Some(side) => side.apply(new, builder),
            None => SideData::apply_none(new, builder),
        }
    }
}

/// The stop token or stop string of the terminal event.
fn matched(data: &[u8], fields: &Fields) -> Option<Matched> {
    let reported = fields.choice.matched.map(|matched| matched.decode(data));
    // vLLM's repetition detection ended it: there is no stop token or string.
    let is_repetition = fields.choice.finish.get().is_some_and(|raw| *name(data, raw) == *b"repetition");
    reported.or_else(|| is_repetition.then(|| Matched::Text("repetition".to_owned())))
}
