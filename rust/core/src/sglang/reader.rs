//! Parses one SGLang event into its fields.

use crate::arrays::{NO_TOKEN, next_token, next_tokens};
use crate::field::{Field, List, Value};
use crate::generation::FinishReason;
use crate::json::{Cursor, NotJson, Peek, Result};
use crate::key_table::{LevelKey, Use};
use crate::meta::{Member, Members};
use crate::sglang::buffers::{EventBuffers, Level};
use crate::sglang::fields::{Fields, Finish, MetaFields};
use crate::sglang::keys::{EventKey, Key, MetaKey};
use crate::span::Span;
use crate::sse::Event;
use crate::text::name;

/// Parse one event to its last byte into `fields`, which have their defaults. Err: the offset where it is not JSON, and
/// why.
pub(super) fn read(
    event: &Event<'_>,
    buffers: &mut EventBuffers,
    fields: &mut Fields,
) -> std::result::Result<(), (usize, &'static str)> {
    let data = event.data;
    let mut reader = Reader { data, cursor: Cursor::with_plain(data, event.plain.clone()), buffers, fields };
    reader.read().map_err(|NotJson| (reader.cursor.at, reader.cursor.failure))
}

struct Reader<'a> {
    data: &'a [u8],
    cursor: Cursor<'a>,
    buffers: &'a mut EventBuffers,
    fields: &'a mut Fields,
}

impl Reader<'_> {
    fn read(&mut self) -> Result<()> {
        self.buffers.members.iter_mut().for_each(Members::clear);
        self.buffers.key_cache.start_event();
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
        while let Some(key) = self.next_key::<EventKey>(is_first, |_, _, _, _| {})? {
            is_first = false;
            if key.usage().repeats() && self.next_same_value() {
                continue;
            }
            let from = self.cursor.at;
            let Self { cursor, fields, .. } = self;
            match key {
                EventKey::Text => cursor.next_string_field(1, &mut fields.text)?,
                EventKey::OutputIds => next_output_ids(cursor, self.data, self.buffers, &mut fields.output_ids)?,
                EventKey::MetaInfo => self.meta_info()?,
                EventKey::PromptTokenIds => self.buffers.prompt_ids.next(cursor, 1, &mut fields.prompt_token_ids)?,
                EventKey::Index => cursor.next_count(1, &mut fields.index)?,
                EventKey::Error => fields.errors.error = cursor.next_any(1)?,
                EventKey::Object => cursor.next_string_field(1, &mut fields.errors.object)?,
                EventKey::Message => fields.errors.message = cursor.next_any(1)?,
                EventKey::Detail => fields.errors.detail = cursor.next_any(1)?,
                EventKey::Code => fields.errors.code = cursor.next_any(1)?,
                EventKey::Other => {
                    cursor.skip_value(1)?;
                }
            }
            self.keep(Level::Event, key.usage(), from);
        }
        Ok(())
    }

    fn meta_info(&mut self) -> Result<()> {
        if !self.fields.meta_info.is_absent() {
            // The key comes twice, and the last one counts.
            self.fields.meta = MetaFields::default();
            self.buffers.members[Level::Meta as usize].clear();
            self.buffers.key_cache.forget_values();
        }
        self.fields.meta_info = self.cursor.look_for_object(1)?;
        if self.fields.meta_info.get().is_none() {
            return Ok(());
        }
        let mut is_first = true;
        while let Some(key) = self.next_key::<MetaKey>(is_first, repeat)? {
            is_first = false;
            let usage = match key {
                // Logprobs were not requested: the key is treated like an unknown one.
                MetaKey::Pairs if !self.buffers.has_pairs => Use::Meta,
                key => key.usage(),
            };
            let from = self.cursor.at;
            if usage.repeats() && self.next_same_value() {
                // The value was checked and applied with the last event.
                if usage.is_needed() {
                    repeat(key, self.data, Span::new(from, self.cursor.at), self.fields);
                }
                continue;
            }
            let Self { cursor, fields: Fields { meta, .. }, .. } = self;
            match key {
                MetaKey::Id => cursor.next_string_field(2, &mut meta.id)?,
                MetaKey::FinishReason => meta.finish = next_finish(cursor, self.data)?,
                MetaKey::PromptTokens => cursor.next_count(2, &mut meta.prompt_tokens)?,
                MetaKey::CompletionTokens => cursor.next_count(2, &mut meta.completion_tokens)?,
                MetaKey::CachedTokens => cursor.next_count(2, &mut meta.cached_tokens)?,
                MetaKey::Pairs if self.buffers.has_pairs => {
                    next_pairs(cursor, self.data, self.buffers, &mut meta.pairs)?;
                }
                MetaKey::Length => cursor.next_count(2, &mut meta.length)?,
                MetaKey::WeightVersion => meta.weight_version = cursor.next_label(2)?,
                MetaKey::WeightVersions => meta.weight_versions = cursor.next_any(2)?,
                MetaKey::RoutedExperts => cursor.next_string_field(2, &mut meta.routed_experts)?,
                MetaKey::RoutedExpertsDtype => cursor.next_string_field(2, &mut meta.routed_experts_dtype)?,
                MetaKey::RoutedExpertsStart => cursor.next_count(2, &mut meta.routed_experts_start)?,
                MetaKey::TopPIds => meta.top_p_ids = cursor.next_any(2)?,
                MetaKey::TopPOffsets => meta.top_p_offsets = cursor.next_any(2)?,
                MetaKey::TopPKeptIds => meta.top_p_kept_ids = cursor.next_any(2)?,
                MetaKey::TopPKeptOffsets => meta.top_p_kept_offsets = cursor.next_any(2)?,
                MetaKey::SamplingMask => meta.sampling_mask = cursor.next_any(2)?,
                MetaKey::Pairs | MetaKey::Other => {
                    cursor.skip_value(2)?;
                }
            }
            self.keep(Level::Meta, usage, from);
        }
        Ok(())
    }

    #[inline]
    fn next_same_value(&mut self) -> bool {
        self.buffers.key_cache.next_same_value(&mut self.cursor, self.data)
    }

    #[inline]
    fn next_key<L: LevelKey<Key = Key>>(
        &mut self,
        is_first: bool,
        repeat: impl Fn(L, &[u8], Span, &mut Fields),
    ) -> Result<Option<L>> {
        let Self { data, cursor, buffers, fields } = self;
        let on_needed = |key, value| repeat(key, data, value, fields);
        buffers.key_cache.next_key(cursor, data, is_first, on_needed)
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

/// Take a value of `meta_info` that repeats the last one, and that every event needs: a version is that of the new
/// tokens, and whether the prompt's tokens are counted tells where an abort was written.
#[inline]
fn repeat(key: MetaKey, data: &[u8], value: Span, Fields { meta, .. }: &mut Fields) {
    match key {
        // It was read before.
        MetaKey::PromptTokens => Cursor::at(data, value).next_count(2, &mut meta.prompt_tokens).unwrap_or_default(),
        MetaKey::WeightVersion => meta.weight_version = Field::repeated_label(data, value),
        _ => {}
    }
}

fn next_finish(cursor: &mut Cursor<'_>, data: &[u8]) -> Result<Field<Finish>> {
    cursor.next_field(2, Peek::Object, |cursor| {
        let mut finish = Finish { reason: None, matched: None, status: Field::ABSENT, message: None };
        let mut key = cursor.next_object()?;
        while let Some(raw) = key {
            match &*name(data, raw) {
                b"type" => finish.reason = finish_type(cursor, data)?,
                b"matched" => finish.matched = cursor.next_matched(3)?,
                b"status_code" => finish.status = cursor.next_integer(3)?,
                b"message" => {
                    let mut message = Field::ABSENT;
                    cursor.next_string_field(3, &mut message)?;
                    finish.message = message.get();
                }
                _ => {
                    cursor.skip_value(3)?;
                }
            }
            key = cursor.next_member()?;
        }
        Ok(Value::Is(finish))
    })
}

fn next_output_ids(
    cursor: &mut Cursor<'_>,
    data: &[u8],
    buffers: &mut EventBuffers,
    field: &mut Field<List>,
) -> Result<()> {
    let ids = if buffers.has_pairs { &mut buffers.output_ids } else { &mut buffers.ids };
    ids.clear();
    cursor.next_list(1, field, |cursor, list| {
        let mut known = 0;
        if let Some((count, end)) = buffers.ids_prefix.matches(data, list.start()) {
            list.set(count, count, end);
            cursor.at = end;
            if !cursor.next_element()? {
                return Ok(());
            }
            known = count;
        }
        let end = next_tokens(cursor, 2, ids)?;
        list.set(known + ids.len(), known, end);
        Ok(())
    })
}

fn next_pairs(cursor: &mut Cursor<'_>, data: &[u8], buffers: &mut EventBuffers, field: &mut Field<List>) -> Result<()> {
    buffers.ids.clear();
    buffers.logprobs.clear();
    cursor.next_list(2, field, |cursor, list| {
        let mut known = 0;
        if let Some((count, end)) = buffers.pairs_prefix.matches(data, list.start()) {
            list.set(count, count, end);
            cursor.at = end;
            if !cursor.next_element()? {
                return Ok(());
            }
            known = count;
        }
        loop {
            if let Some(at) = pair(cursor, data, buffers)? {
                list.mark_malformed(known + buffers.ids.len() - 1, at);
            }
            let end = cursor.at;
            if !cursor.next_element()? {
                list.set(known + buffers.ids.len(), known, end);
                return Ok(());
            }
        }
    })
}

fn finish_type(cursor: &mut Cursor<'_>, data: &[u8]) -> Result<Option<FinishReason>> {
    let mut kind = Field::ABSENT;
    cursor.next_string_field(3, &mut kind)?;
    let Some(raw) = kind.get() else { return Ok(None) };
    Ok(match &*name(data, raw) {
        b"stop" => Some(FinishReason::Stop),
        b"length" => Some(FinishReason::Length),
        b"abort" => Some(FinishReason::Abort),
        _ => None,
    })
}

/// Take one `[logprob, id, …]` into the buffers. Returns its offset, if it has another shape.
#[inline]
fn pair(cursor: &mut Cursor<'_>, data: &[u8], buffers: &mut EventBuffers) -> Result<Option<usize>> {
    if let Some((logprob, id)) = cursor.next_plain_pair() {
        buffers.ids.push(i32::try_from(id).unwrap_or(NO_TOKEN));
        buffers.logprobs.push(logprob);
        return Ok(None);
    }
    let mut logprob = f64::NAN;
    let mut id = NO_TOKEN;
    let mut malformed = None;
    let is_array = cursor.peek()? == Peek::Array;
    let at = cursor.at;
    if !is_array {
        cursor.skip_value(3)?;
        malformed = Some(at);
    } else if !cursor.next_array() {
        malformed = Some(at);
    } else {
        match cursor.peek()? {
            Peek::Number => logprob = cursor.next_number()?.as_f64(data),
            Peek::Null => cursor.skip_word(Peek::Null)?,
            _ => malformed = Some(cursor.skip_value(4)?.start()),
        }
        if cursor.next_element()? {
            id = next_token(cursor, 4)?;
            while cursor.next_element()? {
                cursor.skip_value(4)?;
            }
        } else {
            malformed = malformed.or(Some(at));
        }
    }
    buffers.ids.push(id);
    buffers.logprobs.push(logprob);
    Ok(malformed)
}
