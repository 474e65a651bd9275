//! Parses one vLLM event into its fields.

use crate::arrays::next_tokens;
use crate::field::{Field, List, Value};
use crate::json::{Cursor, NotJson, Peek, Result};
use crate::key_table::{LevelKey, Use};
use crate::meta::Member;
use crate::span::Span;
use crate::sse::Event;
use crate::text::name;
use crate::vllm::api::Api;
use crate::vllm::buffers::{EventBuffers, Level};
use crate::vllm::fields::{Choice, Fields, Logprobs, Usage};
use crate::vllm::keys::{ChoiceKey, EventKey, Key, UsageKey};
use crate::vllm::logprobs::{next_entries, next_logprobs, next_names};

/// Parse one event to its last byte into `fields`, which have their defaults. Err: the offset where it is not JSON, and
/// why.
pub(super) fn read(
    event: &Event<'_>,
    api: Api,
    buffers: &mut EventBuffers,
    fields: &mut Fields,
) -> std::result::Result<(), (usize, &'static str)> {
    let data = event.data;
    let mut reader = Reader { data, api, cursor: Cursor::with_plain(data, event.plain.clone()), buffers, fields };
    reader.read().map_err(|NotJson| (reader.cursor.at, reader.cursor.failure))
}

struct Reader<'a> {
    data: &'a [u8],
    api: Api,
    cursor: Cursor<'a>,
    buffers: &'a mut EventBuffers,
    fields: &'a mut Fields,
}

impl Reader<'_> {
    fn read(&mut self) -> Result<()> {
        self.buffers.clear();
        if self.cursor.peek()? == Peek::Object {
            self.fields.is_object = true;
            self.event()?;
        } else {
            self.cursor.skip_value(0)?;
        }
        self.cursor.finish()?;
        self.buffers.members.iter_mut().for_each(|members| members.finish(self.data));
        Ok(())
    }

    fn event(&mut self) -> Result<()> {
        let mut is_first = true;
        while let Some(key) = self.next_key::<EventKey>(is_first, repeat)? {
            is_first = false;
            let key = match (key, self.api) {
                (EventKey::RequestId, Api::Completions) | (EventKey::Id, Api::Generate) => EventKey::Other,
                (key, _) => key,
            };
            let from = self.cursor.at;
            if key.usage().repeats() && self.next_same_value() {
                // The value was checked and applied with the last event.
                if key.usage().is_needed() {
                    repeat(key, self.data, Span::new(from, self.cursor.at), self.fields);
                }
                continue;
            }
            let Self { cursor, fields, .. } = self;
            match key {
                EventKey::RequestId | EventKey::Id => cursor.next_string_field(1, &mut fields.id)?,
                EventKey::OutputMode => cursor.next_string_field(1, &mut fields.output_mode)?,
                EventKey::PromptTokenIds if self.api == Api::Generate => {
                    self.buffers.prompt_ids.next(cursor, 1, &mut fields.prompt_token_ids)?;
                }
                EventKey::Choices => self.choices()?,
                EventKey::Usage => self.usage()?,
                EventKey::Error => fields.errors.error = cursor.next_any(1)?,
                EventKey::Object => cursor.next_string_field(1, &mut fields.errors.object)?,
                EventKey::Message => fields.errors.message = cursor.next_any(1)?,
                EventKey::Detail => fields.errors.detail = cursor.next_any(1)?,
                EventKey::Code => fields.errors.code = cursor.next_any(1)?,
                EventKey::WeightVersion => fields.versions.weight_version = cursor.next_label(1)?,
                EventKey::WeightVersions => fields.versions.weight_versions = cursor.next_any(1)?,
                EventKey::PromptTokenIds | EventKey::Other => {
                    cursor.skip_value(1)?;
                }
            }
            self.keep(Level::Event, key.usage(), from);
        }
        Ok(())
    }

    fn choices(&mut self) -> Result<()> {
        if !self.fields.choices.is_absent() {
            self.fields.choice = Choice::default();
            self.buffers.clear_choice();
            self.buffers.key_cache.forget_values();
        }
        let peek = self.cursor.peek()?;
        let at = self.cursor.at;
        if peek != Peek::Array {
            self.cursor.skip_value(1)?;
            self.fields.choices = Field::new(at, if peek == Peek::Null { Value::Null } else { Value::Wrong });
            return Ok(());
        }
        let mut count = 0;
        let mut more = self.cursor.next_array();
        while more {
            if count == 0 {
                self.choice()?;
            } else {
                self.cursor.skip_value(2)?;
            }
            count += 1;
            more = self.cursor.next_element()?;
        }
        self.fields.choices = Field::new(at, Value::Is(count));
        Ok(())
    }

    fn choice(&mut self) -> Result<()> {
        self.fields.choice.object = self.cursor.look_for_object(2)?;
        if self.fields.choice.object.get().is_none() {
            return Ok(());
        }
        let mut is_first = true;
        while let Some(key) = self.next_key::<ChoiceKey>(is_first, repeat_choice)? {
            is_first = false;
            let from = self.cursor.at;
            if key.usage().repeats() && self.next_same_value() {
                // As above. A finish reason ends the stream, so a repeated one is null.
                if key.usage().is_needed() {
                    repeat_choice(key, self.data, Span::new(from, self.cursor.at), self.fields);
                }
                continue;
            }
            let Self { cursor, fields: Fields { choice, .. }, .. } = self;
            match key {
                ChoiceKey::Index => cursor.next_count(3, &mut choice.index)?,
                ChoiceKey::FinishReason => cursor.next_string_field(3, &mut choice.finish)?,
                ChoiceKey::StopReason => choice.matched = cursor.next_matched(3)?,
                ChoiceKey::TokenIds => next_ids(cursor, self.buffers, &mut choice.token_ids)?,
                ChoiceKey::PromptTokenIds if self.api == Api::Completions => {
                    self.buffers.prompt_ids.next(cursor, 3, &mut choice.prompt_token_ids)?;
                }
                ChoiceKey::Logprobs if self.buffers.has_logprobs => self.logprobs()?,
                ChoiceKey::Text => cursor.next_string_field(3, &mut choice.text)?,
                ChoiceKey::RoutedExperts => cursor.next_string_field(3, &mut choice.routed_experts)?,
                ChoiceKey::SamplingMask => choice.sampling_mask = cursor.next_any(3)?,
                ChoiceKey::WeightVersion => choice.versions.weight_version = cursor.next_label(3)?,
                ChoiceKey::WeightVersions => choice.versions.weight_versions = cursor.next_any(3)?,
                ChoiceKey::PromptTokenIds | ChoiceKey::Logprobs | ChoiceKey::Other => {
                    cursor.skip_value(3)?;
                }
            }
            self.keep(Level::Choice, key.usage(), from);
        }
        Ok(())
    }

    fn logprobs(&mut self) -> Result<()> {
        self.buffers.clear_logprobs();
        let mut logprobs = Logprobs { object: self.cursor.look_for_object(3)?, ..Logprobs::default() };
        if logprobs.object.get().is_some() {
            let mut key = self.cursor.next_object()?;
            while let Some(raw) = key {
                match (self.api, &*name(self.data, raw)) {
                    (Api::Generate, b"content") => next_entries(&mut self.cursor, self.buffers, &mut logprobs.list)?,
                    (Api::Completions, b"token_logprobs") => {
                        next_logprobs(&mut self.cursor, self.buffers, &mut logprobs.list)?;
                    }
                    (Api::Completions, b"tokens") => next_names(&mut self.cursor, self.buffers, &mut logprobs.tokens)?,
                    _ => {
                        self.cursor.skip_value(4)?;
                    }
                }
                key = self.cursor.next_member()?;
            }
        }
        self.fields.choice.logprobs = logprobs;
        Ok(())
    }

    fn usage(&mut self) -> Result<()> {
        if !self.fields.usage.object.is_absent() {
            self.fields.usage = Usage::default();
            self.buffers.members[Level::Usage as usize].clear();
            self.buffers.key_cache.forget_values();
        }
        self.fields.usage.object = self.cursor.look_for_object(1)?;
        if self.fields.usage.object.get().is_none() {
            return Ok(());
        }
        let mut is_first = true;
        while let Some(key) = self.next_key::<UsageKey>(is_first, repeat_usage)? {
            is_first = false;
            let from = self.cursor.at;
            if key.usage().repeats() && self.next_same_value() {
                if key.usage().is_needed() {
                    repeat_usage(key, self.data, Span::new(from, self.cursor.at), self.fields);
                }
                continue;
            }
            let Self { cursor, fields: Fields { usage, .. }, .. } = self;
            match key {
                UsageKey::PromptTokens => cursor.next_count(2, &mut usage.prompt_tokens)?,
                UsageKey::CompletionTokens => cursor.next_count(2, &mut usage.completion_tokens)?,
                UsageKey::PromptTokensDetails => {
                    (usage.details, usage.cached_tokens) = next_details(cursor, self.data)?;
                }
                UsageKey::Other => {
                    cursor.skip_value(2)?;
                }
            }
            self.keep(Level::Usage, key.usage(), from);
        }
        Ok(())
    }

    #[inline]
    fn next_key<L: LevelKey<Key = Key>>(
        &mut self,
        is_first: bool,
        repeat: impl Fn(L, &[u8], Span, &mut Fields),
    ) -> Result<Option<L>> {
        let Self { data, cursor, buffers, fields, .. } = self;
        let on_needed = |key, value| repeat(key, data, value, fields);
        buffers.key_cache.next_key(cursor, data, is_first, on_needed)
    }

    #[inline]
    fn next_same_value(&mut self) -> bool {
        self.buffers.key_cache.next_same_value(&mut self.cursor, self.data)
    }

    /// Keep the value just taken, which begins at `from`: for `Generation.meta`, and to skip it if it is repeated.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "called for each key; a call costs 2 % of an incremental stream")]
    fn keep(&mut self, level: Level, usage: Use, from: usize) {
        if usage == Use::Field {
            return;
        }
        let Self { cursor, data, buffers, .. } = self;
        let EventBuffers { key_cache, members, .. } = &mut **buffers;
        let value = cursor.value_since(from);
        if usage.repeats() {
            key_cache.keep_value(usage.repeated(value.of(data)));
        }
        if usage.is_meta() {
            let member = Member { key: key_cache.name(from), value };
            members[level as usize].push(data, member, || key_cache.may_be_duplicate());
        }
    }
}

/// Take a value at the top that repeats the last one, and that every event needs.
#[inline]
fn repeat(key: EventKey, data: &[u8], value: Span, fields: &mut Fields) {
    match key {
        // It was read before.
        EventKey::OutputMode => {
            Cursor::at(data, value).next_string_field(1, &mut fields.output_mode).unwrap_or_default();
        }
        EventKey::WeightVersion => fields.versions.weight_version = Field::repeated_label(data, value),
        _ => {}
    }
}

/// As [`repeat`], of the choice.
#[inline]
fn repeat_choice(key: ChoiceKey, data: &[u8], value: Span, Fields { choice, .. }: &mut Fields) {
    if key == ChoiceKey::WeightVersion {
        choice.versions.weight_version = Field::repeated_label(data, value);
    }
}

/// As [`repeat`], of the usage.
#[inline]
fn repeat_usage(key: UsageKey, data: &[u8], value: Span, Fields { usage, .. }: &mut Fields) {
    if key == UsageKey::PromptTokens {
        // It was read before.
        Cursor::at(data, value).next_count(2, &mut usage.prompt_tokens).unwrap_or_default();
    }
}

fn next_ids(cursor: &mut Cursor<'_>, buffers: &mut EventBuffers, field: &mut Field<List>) -> Result<()> {
    let ids = &mut buffers.ids;
    ids.clear();
    cursor.next_list(3, field, |cursor, list| {
        let end = next_tokens(cursor, 4, ids)?;
        list.set(ids.len(), 0, end);
        Ok(())
    })
}

/// `prompt_tokens_details`, and the `cached_tokens` in it.
fn next_details(cursor: &mut Cursor<'_>, data: &[u8]) -> Result<(Field<()>, Field<u64>)> {
    let details = cursor.look_for_object(2)?;
    let mut cached_tokens = Field::ABSENT;
    if details.get().is_some() {
        let mut key = cursor.next_object()?;
        while let Some(raw) = key {
            match &*name(data, raw) {
                b"cached_tokens" => cursor.next_count(3, &mut cached_tokens)?,
                _ => {
                    cursor.skip_value(3)?;
                }
            }
            key = cursor.next_member()?;
        }
    }
    Ok((details, cached_tokens))
}
