//! Reads one SGLang event into its fields.

use crate::arrays::{NO_TOKEN, next_token, next_tokens};
use crate::field::{Field, List, Value};
use crate::generation::FinishReason;
use crate::json::{Cursor, NotJson, Peek, Result};
use crate::meta::Member;
use crate::sglang::buffers::EventBuffers;
use crate::sglang::fields::{Fields, Finish};
use crate::sglang::keys::{Key, Level};
use crate::span::Span;
use crate::text::name;

/// Read one event, to its last byte; or where it is not JSON, and why.
pub(super) fn read(
    data: &[u8],
    buffers: &mut EventBuffers,
    fields: &mut Fields,
) -> std::result::Result<(), (usize, &'static str)> {
    *fields = Fields::EMPTY;
    let mut reader = Reader { data, cursor: Cursor::new(data), buffers, fields };
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
        self.buffers.top_members.clear();
        self.buffers.meta_members.clear();
        self.buffers.key_cache.start_event();
        if self.cursor.peek()? == Peek::Object {
            self.fields.is_object = true;
            self.event()?;
        } else {
            self.cursor.skip_value(0)?;
        }
        self.cursor.finish()?;
        self.buffers.top_members.finish(self.data);
        self.buffers.meta_members.finish(self.data);
        Ok(())
    }

    fn event(&mut self) -> Result<()> {
        let mut is_first = true;
        loop {
            let key = self.next_key(Level::Top, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::Text => self.fields.text = self.cursor.next_string_field(1)?,
                Key::OutputIds => self.fields.output_ids = self.output_ids()?,
                Key::MetaInfo => self.meta_info()?,
                other => {
                    let (key, place) = (self.buffers.key_cache.name(from), self.buffers.key_cache.last());
                    match other {
                        Key::Index => self.fields.index = self.cursor.next_count(1)?,
                        Key::Error => self.fields.errors.error = self.cursor.next_any(1)?,
                        Key::Object => self.fields.errors.object = self.cursor.next_string_field(1)?,
                        Key::Message => self.fields.errors.message = self.cursor.next_any(1)?,
                        Key::Detail => self.fields.errors.detail = self.cursor.next_any(1)?,
                        Key::Code => self.fields.errors.code = self.cursor.next_any(1)?,
                        _ => {
                            self.cursor.skip_value(1)?;
                        }
                    }
                    let value = self.cursor.value_since(from);
                    let member = Member { key, value };
                    self.buffers.top_members.push(self.data, member, || self.buffers.key_cache.is_duplicate(place));
                }
            }
        }
    }

    fn meta_info(&mut self) -> Result<()> {
        if !self.fields.meta_info.is_absent() {
            self.fields.clear_meta();
            self.buffers.meta_members.clear();
            self.buffers.key_cache.forget_values();
        }
        self.fields.meta_info = self.cursor.look_for_object(1)?;
        if self.fields.meta_info.get().is_none() {
            return Ok(());
        }
        let mut is_first = true;
        loop {
            let key = self.next_key(Level::MetaInfo, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::Pairs if self.buffers.has_pairs => self.fields.pairs = self.pairs()?,
                Key::PromptTokens => self.fields.prompt_tokens = self.cursor.next_count(2)?,
                Key::RoutedExperts => self.fields.routed_experts = self.cursor.next_string_field(2)?,
                Key::TopPIds => self.fields.top_p_ids = self.cursor.next_any(2)?,
                Key::TopPOffsets => self.fields.top_p_offsets = self.cursor.next_any(2)?,
                Key::TopPKeptIds => self.fields.top_p_kept_ids = self.cursor.next_any(2)?,
                Key::TopPKeptOffsets => self.fields.top_p_kept_offsets = self.cursor.next_any(2)?,
                // What these said in the last event has been checked and applied, and it is still said.
                Key::Other | Key::Id | Key::FinishReason | Key::CachedTokens if self.next_same_value() => {}
                Key::WeightVersion if self.next_same_value() => {
                    self.fields.weight_version = Field::new(from, Value::Is(Span::new(from, self.cursor.at)));
                }
                other => {
                    let (key, place) = (self.buffers.key_cache.name(from), self.buffers.key_cache.last());
                    match other {
                        Key::Id => self.fields.id = self.cursor.next_string_field(2)?,
                        Key::FinishReason => self.fields.finish = self.finish()?,
                        Key::CachedTokens => self.fields.cached_tokens = self.cursor.next_count(2)?,
                        Key::CompletionTokens => self.fields.completion_tokens = self.cursor.next_count(2)?,
                        Key::Length => self.fields.length = self.cursor.next_count(2)?,
                        Key::WeightVersion => self.fields.weight_version = self.cursor.next_label(2)?,
                        Key::WeightVersions => self.fields.weight_versions = self.cursor.next_any(2)?,
                        Key::RoutedExpertsDtype => {
                            self.fields.routed_experts_dtype = self.cursor.next_string_field(2)?;
                        }
                        Key::SamplingMask => self.fields.sampling_mask = self.cursor.next_any(2)?,
                        _ => {
                            self.cursor.skip_value(2)?;
                        }
                    }
                    let value = self.cursor.value_since(from);
                    let is_label = other != Key::WeightVersion || self.fields.weight_version.get().is_some();
                    let kept = if is_label { value.of(self.data) } else { &[] };
                    if matches!(
                        other,
                        Key::Other | Key::Id | Key::FinishReason | Key::CachedTokens | Key::WeightVersion
                    ) {
                        self.buffers.key_cache.keep_value(place, kept);
                    }
                    if other != Key::CachedTokens {
                        let member = Member { key, value };
                        self.buffers
                            .meta_members
                            .push(self.data, member, || self.buffers.key_cache.is_duplicate(place));
                    }
                }
            }
        }
    }

    #[inline]
    fn next_same_value(&mut self) -> bool {
        self.buffers.key_cache.next_same_value(&mut self.cursor, self.data)
    }

    #[inline]
    fn next_key(&mut self, level: Level, is_first: bool) -> Result<Key> {
        self.buffers.key_cache.next_key(&mut self.cursor, self.data, level, is_first)
    }

    fn finish(&mut self) -> Result<Field<Finish>> {
        let data = self.data;
        self.cursor.next_field(2, Peek::Object, |cursor| {
            let mut finish = Finish { reason: None, matched: None, status: Field::ABSENT, message: None };
            let mut key = cursor.next_object()?;
            while let Some(raw) = key {
                match &*name(data, raw) {
                    b"type" => finish.reason = finish_type(cursor, data)?,
                    b"matched" => finish.matched = cursor.next_matched(3)?,
                    b"status_code" => finish.status = cursor.next_integer(3)?,
                    b"message" => finish.message = cursor.next_string_field(3)?.get(),
                    _ => {
                        cursor.skip_value(3)?;
                    }
                }
                key = cursor.next_member()?;
            }
            Ok(Value::Is(finish))
        })
    }

    fn output_ids(&mut self) -> Result<Field<List>> {
        let Self { data, cursor, buffers, .. } = self;
        let ids = if buffers.has_pairs { &mut buffers.output_ids } else { &mut buffers.ids };
        cursor.next_list(1, |cursor, list| {
            ids.clear();
            if list.len == 0 {
                return Ok(());
            }
            if let Some((known, end)) = buffers.ids_prefix.matches(data, list.start) {
                (list.known, list.end) = (known, end);
                cursor.at = end;
                if !cursor.next_element()? {
                    list.len = known;
                    return Ok(());
                }
            }
            list.end = next_tokens(cursor, 2, ids)?;
            list.len = list.known + ids.len();
            Ok(())
        })
    }

    fn pairs(&mut self) -> Result<Field<List>> {
        let Self { data, cursor, buffers, .. } = self;
        cursor.next_list(2, |cursor, list| {
            buffers.ids.clear();
            buffers.logprobs.clear();
            if list.len == 0 {
                return Ok(());
            }
            if let Some((known, end)) = buffers.pairs_prefix.matches(data, list.start) {
                (list.known, list.end) = (known, end);
                cursor.at = end;
                if !cursor.next_element()? {
                    list.len = known;
                    return Ok(());
                }
            }
            loop {
                if let Some(at) = pair(cursor, data, buffers)? {
                    list.malformed = list.malformed.or(Some((list.known + buffers.ids.len() - 1, at)));
                }
                list.end = cursor.at;
                if !cursor.next_element()? {
                    break;
                }
            }
            list.len = list.known + buffers.ids.len();
            Ok(())
        })
    }
}

fn finish_type(cursor: &mut Cursor<'_>, data: &[u8]) -> Result<Option<FinishReason>> {
    let Some(raw) = cursor.next_string_field(3)?.get() else { return Ok(None) };
    Ok(match &*name(data, raw) {
        b"stop" => Some(FinishReason::Stop),
        b"length" => Some(FinishReason::Length),
        b"abort" => Some(FinishReason::Abort),
        _ => None,
    })
}

/// Stage one `[logprob, id, …]`; its place, if it is nothing of the kind.
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
