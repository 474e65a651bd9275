//! Reads one vLLM event into its fields.

use crate::arrays::next_tokens;
use crate::field::{Field, List, Value};
use crate::json::{Cursor, NotJson, Peek, Result};
use crate::meta::Member;
use crate::span::Span;
use crate::text::name;
use crate::vllm::api::Api;
use crate::vllm::buffers::EventBuffers;
use crate::vllm::fields::{Choice, Fields, Logprobs, Usage};
use crate::vllm::keys::{Key, Level};
use crate::vllm::logprobs::{next_entries, next_logprobs, next_names};

/// Read one event, to its last byte; or where it is not JSON, and why.
pub(super) fn read(
    data: &[u8],
    api: Api,
    buffers: &mut EventBuffers,
    fields: &mut Fields,
) -> std::result::Result<(), (usize, &'static str)> {
    let mut reader = Reader { data, api, cursor: Cursor::new(data), buffers, fields };
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
        loop {
            let key = self.next_key(Level::Event, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::Choices => self.choices()?,
                Key::Usage => self.usage()?,
                Key::WeightVersions => self.fields.versions.weight_versions = self.cursor.next_any(1)?,
                Key::WeightVersion if self.next_same_value() => {
                    self.fields.versions.weight_version = self.label_since(from);
                }
                // What these said in the last event has been checked and applied, and it is still said.
                Key::Other | Key::RequestId | Key::Id if self.next_same_value() => {}
                other => {
                    let place = self.place(from);
                    match (other, self.api) {
                        (Key::RequestId, Api::Generate) | (Key::Id, Api::Completions) => {
                            self.fields.id = self.cursor.next_string_field(1)?;
                        }
                        (Key::OutputMode, _) => self.fields.output_mode = self.cursor.next_string_field(1)?,
                        (Key::WeightVersion, _) => self.fields.versions.weight_version = self.cursor.next_label(1)?,
                        (Key::Error, _) => self.fields.errors.error = self.cursor.next_any(1)?,
                        (Key::Object, _) => self.fields.errors.object = self.cursor.next_string_field(1)?,
                        (Key::Message, _) => self.fields.errors.message = self.cursor.next_any(1)?,
                        (Key::Detail, _) => self.fields.errors.detail = self.cursor.next_any(1)?,
                        (Key::Code, _) => self.fields.errors.code = self.cursor.next_any(1)?,
                        _ => {
                            self.cursor.skip_value(1)?;
                        }
                    }
                    let may_come_again = matches!(other, Key::Other | Key::RequestId | Key::Id)
                        || (other == Key::WeightVersion && self.fields.versions.weight_version.get().is_some());
                    self.push_member(Level::Event, place, from, may_come_again);
                }
            }
        }
    }

    fn choices(&mut self) -> Result<()> {
        if !self.fields.choices.is_absent() {
            self.fields.choice = Choice::EMPTY;
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
        loop {
            let key = self.next_key(Level::Choice, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::TokenIds => self.fields.choice.token_ids = next_ids(&mut self.cursor, self.buffers)?,
                Key::Logprobs if self.buffers.has_logprobs => self.logprobs()?,
                Key::Logprobs => {
                    self.cursor.skip_value(3)?;
                }
                Key::Text => self.fields.choice.text = self.cursor.next_string_field(3)?,
                Key::RoutedExperts => self.fields.choice.routed_experts = self.cursor.next_string_field(3)?,
                Key::SamplingMask => self.fields.choice.sampling_mask = self.cursor.next_any(3)?,
                Key::WeightVersions => self.fields.choice.versions.weight_versions = self.cursor.next_any(3)?,
                Key::WeightVersion if self.next_same_value() => {
                    self.fields.choice.versions.weight_version = self.label_since(from);
                }
                // As above. A finish reason that is one ends the stream, so here it is null.
                Key::Other | Key::Index | Key::FinishReason | Key::StopReason if self.next_same_value() => {}
                other => {
                    let place = self.place(from);
                    let choice = &mut self.fields.choice;
                    match other {
                        Key::Index => choice.index = self.cursor.next_count(3)?,
                        Key::FinishReason => choice.finish = self.cursor.next_string_field(3)?,
                        Key::StopReason => choice.matched = self.cursor.next_matched(3)?,
                        Key::WeightVersion => choice.versions.weight_version = self.cursor.next_label(3)?,
                        _ => {
                            self.cursor.skip_value(3)?;
                        }
                    }
                    let may_come_again = match other {
                        Key::Other | Key::Index | Key::FinishReason => true,
                        Key::StopReason => choice.matched.is_none(),
                        _ => choice.versions.weight_version.get().is_some(),
                    };
                    self.push_member(Level::Choice, place, from, may_come_again);
                }
            }
        }
    }

    fn logprobs(&mut self) -> Result<()> {
        self.buffers.clear_logprobs();
        let mut logprobs = Logprobs { object: self.cursor.look_for_object(3)?, ..Logprobs::ABSENT };
        if logprobs.object.get().is_some() {
            let mut key = self.cursor.next_object()?;
            while let Some(raw) = key {
                match (self.api, &*name(self.data, raw)) {
                    (Api::Generate, b"content") => logprobs.list = next_entries(&mut self.cursor, self.buffers)?,
                    (Api::Completions, b"token_logprobs") => {
                        logprobs.list = next_logprobs(&mut self.cursor, self.buffers)?;
                    }
                    (Api::Completions, b"tokens") => logprobs.tokens = next_names(&mut self.cursor, self.buffers)?,
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
            self.fields.usage = Usage::EMPTY;
            self.buffers.members[Level::Usage as usize].clear();
            self.buffers.key_cache.forget_values();
        }
        self.fields.usage.object = self.cursor.look_for_object(1)?;
        if self.fields.usage.object.get().is_none() {
            return Ok(());
        }
        let mut is_first = true;
        loop {
            let key = self.next_key(Level::Usage, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::PromptTokens => self.fields.usage.prompt_tokens = self.cursor.next_count(2)?,
                Key::Other | Key::PromptTokensDetails if self.next_same_value() => {}
                other => {
                    let place = self.place(from);
                    let usage = &mut self.fields.usage;
                    match other {
                        Key::CompletionTokens => usage.completion_tokens = self.cursor.next_count(2)?,
                        Key::PromptTokensDetails => {
                            (usage.details, usage.cached_tokens) = next_details(&mut self.cursor, self.data)?;
                        }
                        _ => {
                            self.cursor.skip_value(2)?;
                        }
                    }
                    self.push_member(Level::Usage, place, from, other != Key::CompletionTokens);
                }
            }
        }
    }

    #[inline]
    fn next_key(&mut self, level: Level, is_first: bool) -> Result<Key> {
        self.buffers.key_cache.next_key(&mut self.cursor, self.data, level, is_first)
    }

    #[inline]
    fn next_same_value(&mut self) -> bool {
        self.buffers.key_cache.next_same_value(&mut self.cursor, self.data)
    }

    /// A label that has just been taken as the same again.
    fn label_since(&self, from: usize) -> Field<Span> {
        Field::new(from, Value::Is(Span::new(from, self.cursor.at)))
    }

    /// The name of the key that has just been taken, and its place in the layout.
    #[inline]
    fn place(&self, from: usize) -> (Span, usize) {
        (self.buffers.key_cache.name(from), self.buffers.key_cache.last())
    }

    /// Note the member whose value has just been taken, for `meta` and for the next event.
    #[inline]
    fn push_member(&mut self, level: Level, (key, place): (Span, usize), from: usize, may_come_again: bool) {
        let value = self.cursor.value_since(from);
        self.buffers.key_cache.keep_value(place, if may_come_again { value.of(self.data) } else { &[] });
        let key_cache = &self.buffers.key_cache;
        self.buffers.members[level as usize].push(self.data, Member { key, value }, || key_cache.is_duplicate(place));
    }
}

fn next_ids(cursor: &mut Cursor<'_>, buffers: &mut EventBuffers) -> Result<Field<List>> {
    let ids = &mut buffers.ids;
    ids.clear();
    cursor.next_list(3, |cursor, list| {
        if list.len > 0 {
            list.end = next_tokens(cursor, 4, ids)?;
            list.len = ids.len();
        }
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
                b"cached_tokens" => cached_tokens = cursor.next_count(3)?,
                _ => {
                    cursor.skip_value(3)?;
                }
            }
            key = cursor.next_member()?;
        }
    }
    Ok((details, cached_tokens))
}
