//! Reads one SGLang event into its fields.
//!
//! Reading and judging are apart: the whole event must be JSON before anything else about it matters, so a value of
//! a wrong type is noted here and reported later, when its turn comes.

use std::borrow::Cow;

use crate::arrays::{NO_TOKEN, next_token, next_tokens};
use crate::generation::{FinishReason, Member};
use crate::json::{Cursor, NotJson, Peek, RawStr, Result, Span};
use crate::sglang::fields::{Field, Fields, Finish, RawMatched, Value};
use crate::sglang::layout::{Key, Level};
use crate::sglang::staged::{List, Staged};
use crate::text::unescape;

/// Read one event, to its last byte; or where it is not JSON, and why.
pub(super) fn read(
    data: &[u8],
    staged: &mut Staged,
    fields: &mut Fields,
) -> std::result::Result<(), (usize, &'static str)> {
    *fields = Fields::EMPTY;
    let mut reader = Reader { data, cursor: Cursor::new(data), staged, fields };
    reader.read().map_err(|NotJson| (reader.cursor.at, reader.cursor.failure))
}

/// Note what `meta` is to hold of a member: nothing of an array, nor of what stood under its key before.
#[inline]
fn push_member(data: &[u8], members: &mut Vec<Member>, member: Member, is_twin: impl FnOnce() -> bool) {
    if data[member.value.start()] != b'[' {
        members.push(member);
    } else if is_twin() {
        members.retain(|other| other.key.of(data) != member.key.of(data));
    }
}

struct Reader<'a> {
    data: &'a [u8],
    cursor: Cursor<'a>,
    staged: &'a mut Staged,
    fields: &'a mut Fields,
}

impl<'a> Reader<'a> {
    fn read(&mut self) -> Result<()> {
        self.staged.top_members.clear();
        self.staged.meta_members.clear();
        self.staged.layout.restart();
        if self.cursor.peek()? == Peek::Object {
            self.fields.is_object = true;
            self.event()?;
        } else {
            self.cursor.skip_value(0)?;
        }
        self.cursor.finish()
    }

    fn event(&mut self) -> Result<()> {
        let mut is_first = true;
        loop {
            let key = self.next_key(Level::Top, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::Text => self.fields.text = self.string(1)?,
                Key::OutputIds => self.fields.output_ids = self.output_ids()?,
                Key::MetaInfo => self.meta_info()?,
                other => {
                    let (name, place) = (self.staged.layout.name(from), self.staged.layout.last());
                    match other {
                        Key::Index => self.fields.index = self.count(1)?,
                        Key::Error => self.fields.error = self.any(1)?,
                        Key::Object => self.fields.object = self.string(1)?,
                        Key::Message => self.fields.message = self.any(1)?,
                        Key::Detail => self.fields.detail = self.any(1)?,
                        Key::Code => self.fields.code = self.any(1)?,
                        _ => {
                            self.cursor.skip_value(1)?;
                        }
                    }
                    let value = self.value_since(from);
                    push_member(self.data, &mut self.staged.top_members, Member { key: name, value }, || {
                        self.staged.layout.is_twin(place)
                    });
                }
            }
        }
    }

    fn meta_info(&mut self) -> Result<()> {
        if !matches!(self.fields.meta_info.value, Value::Absent) {
            self.fields.clear_meta();
            self.staged.meta_members.clear();
            self.staged.layout.forget_values();
        }
        let peek = self.cursor.peek()?;
        let at = self.cursor.at;
        if peek != Peek::Object {
            let is_null = peek == Peek::Null;
            self.cursor.skip_value(1)?;
            self.fields.meta_info = Field::new(at, if is_null { Value::Null } else { Value::Wrong });
            return Ok(());
        }
        self.fields.meta_info = Field::new(at, Value::Is(()));
        let mut is_first = true;
        loop {
            let key = self.next_key(Level::MetaInfo, is_first)?;
            is_first = false;
            let from = self.cursor.at;
            match key {
                Key::End => return Ok(()),
                Key::Pairs if self.staged.has_pairs => self.fields.pairs = self.pairs()?,
                Key::PromptTokens => self.fields.prompt_tokens = self.count(2)?,
                Key::RoutedExperts => self.fields.routed_experts = self.string(2)?,
                Key::TopPIds => self.fields.top_p_ids = self.any(2)?,
                Key::TopPOffsets => self.fields.top_p_offsets = self.any(2)?,
                Key::TopPKeptIds => self.fields.top_p_kept_ids = self.any(2)?,
                Key::TopPKeptOffsets => self.fields.top_p_kept_offsets = self.any(2)?,
                // What these said in the last event has been checked and applied, and it is still said.
                Key::Other | Key::Id | Key::FinishReason | Key::CachedTokens if self.next_same_value() => {}
                Key::WeightVersion if self.next_same_value() => {
                    self.fields.weight_version = Field::new(from, Value::Is(Span::new(from, self.cursor.at)));
                }
                other => {
                    let (name, place) = (self.staged.layout.name(from), self.staged.layout.last());
                    match other {
                        Key::Id => self.fields.id = self.string(2)?,
                        Key::FinishReason => self.fields.finish = self.finish()?,
                        Key::CachedTokens => self.fields.cached_tokens = self.count(2)?,
                        Key::CompletionTokens => self.fields.completion_tokens = self.count(2)?,
                        Key::Length => self.fields.length = self.count(2)?,
                        Key::WeightVersion => self.fields.weight_version = self.label(2)?,
                        Key::WeightVersions => self.fields.weight_versions = self.any(2)?,
                        Key::RoutedExpertsDtype => self.fields.routed_experts_dtype = self.string(2)?,
                        Key::SamplingMask => self.fields.sampling_mask = self.any(2)?,
                        _ => {
                            self.cursor.skip_value(2)?;
                        }
                    }
                    let value = self.value_since(from);
                    let is_label = other != Key::WeightVersion || self.fields.weight_version.get().is_some();
                    let kept = if is_label { value.of(self.data) } else { &[] };
                    if matches!(
                        other,
                        Key::Other | Key::Id | Key::FinishReason | Key::CachedTokens | Key::WeightVersion
                    ) {
                        self.staged.layout.keep_value(place, kept);
                    }
                    if other != Key::CachedTokens {
                        push_member(self.data, &mut self.staged.meta_members, Member { key: name, value }, || {
                            self.staged.layout.is_twin(place)
                        });
                    }
                }
            }
        }
    }

    #[inline]
    fn next_same_value(&mut self) -> bool {
        self.staged.layout.next_same_value(&mut self.cursor, self.data)
    }

    #[inline]
    fn next_key(&mut self, level: Level, is_first: bool) -> Result<Key> {
        self.staged.layout.next_key(&mut self.cursor, self.data, level, is_first)
    }

    /// The value that has just been read, its key's colon being before `from`.
    #[inline]
    fn value_since(&self, from: usize) -> Span {
        let blanks = self.data[from..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        Span::new(from + blanks, self.cursor.at)
    }

    /// The key's name; escapes in it are rare, and legal.
    #[inline]
    fn name(&self, raw: RawStr) -> Cow<'a, [u8]> {
        if !raw.has_escapes {
            return Cow::Borrowed(raw.span.of(self.data));
        }
        let mut name = String::new();
        unescape(raw.span.of(self.data), &mut name);
        Cow::Owned(name.into_bytes())
    }

    /// A value that is worth something only if `wanted` comes; `take` takes it.
    fn field<T: Copy>(
        &mut self,
        depth: u32,
        wanted: Peek,
        take: impl FnOnce(&mut Self) -> Result<Value<T>>,
    ) -> Result<Field<T>> {
        let peek = self.cursor.peek()?;
        let at = self.cursor.at;
        let value = if peek == wanted {
            take(self)?
        } else {
            self.cursor.skip_value(depth)?;
            if peek == Peek::Null { Value::Null } else { Value::Wrong }
        };
        Ok(Field::new(at, value))
    }

    fn string(&mut self, depth: u32) -> Result<Field<RawStr>> {
        self.field(depth, Peek::String, |reader| Ok(Value::Is(reader.cursor.next_string()?)))
    }

    fn count(&mut self, depth: u32) -> Result<Field<u64>> {
        let at = self.cursor.at;
        if let Some(value) = self.cursor.next_plain_integer() {
            return Ok(Field::new(at, Value::Is(value)));
        }
        self.field(depth, Peek::Number, |reader| {
            let value = reader.cursor.next_number()?.as_integer(u64::from(u32::MAX));
            Ok(value.map_or(Value::Wrong, Value::Is))
        })
    }

    fn integer(&mut self, depth: u32) -> Result<Field<i64>> {
        self.field(depth, Peek::Number, |reader| {
            let number = reader.cursor.next_number()?;
            // One that is too large for 64 bits means nothing to anybody.
            let value = number.as_i64(reader.data).or(number.is_integer.then_some(i64::MAX));
            Ok(value.map_or(Value::Wrong, Value::Is))
        })
    }

    /// A string or a number, quotes included.
    fn label(&mut self, depth: u32) -> Result<Field<Span>> {
        let peek = self.cursor.peek()?;
        self.field(depth, peek, |reader| {
            let span = reader.cursor.skip_value(depth)?;
            Ok(match peek {
                Peek::String | Peek::Number => Value::Is(span),
                Peek::Null => Value::Null,
                _ => Value::Wrong,
            })
        })
    }

    /// A value whose type is looked at later.
    fn any(&mut self, depth: u32) -> Result<Field<Span>> {
        let peek = self.cursor.peek()?;
        self.field(depth, peek, |reader| {
            let span = reader.cursor.skip_value(depth)?;
            Ok(if peek == Peek::Null { Value::Null } else { Value::Is(span) })
        })
    }

    fn finish(&mut self) -> Result<Field<Finish>> {
        self.field(2, Peek::Object, |reader| {
            let mut finish = Finish { reason: None, matched: None, status: Field::ABSENT, message: None };
            let mut key = reader.cursor.next_object()?;
            while let Some(raw) = key {
                match &*reader.name(raw) {
                    b"type" => finish.reason = reader.finish_type()?,
                    b"matched" => finish.matched = reader.matched()?,
                    b"status_code" => finish.status = reader.integer(3)?,
                    b"message" => finish.message = reader.string(3)?.get(),
                    _ => {
                        reader.cursor.skip_value(3)?;
                    }
                }
                key = reader.cursor.next_member()?;
            }
            Ok(Value::Is(finish))
        })
    }

    fn finish_type(&mut self) -> Result<Option<FinishReason>> {
        let Some(raw) = self.string(3)?.get() else { return Ok(None) };
        Ok(match &*self.name(raw) {
            b"stop" => Some(FinishReason::Stop),
            b"length" => Some(FinishReason::Length),
            b"abort" => Some(FinishReason::Abort),
            _ => None,
        })
    }

    fn matched(&mut self) -> Result<Option<RawMatched>> {
        Ok(match self.cursor.peek()? {
            Peek::String => Some(RawMatched::Text(self.cursor.next_string()?)),
            Peek::Number => self.cursor.next_number()?.as_i64(self.data).map(RawMatched::Token),
            _ => {
                self.cursor.skip_value(3)?;
                None
            }
        })
    }

    fn output_ids(&mut self) -> Result<Field<List>> {
        self.list(1, |reader, list| {
            let staged = &mut *reader.staged;
            let ids = if staged.has_pairs { &mut staged.output_ids } else { &mut staged.ids };
            ids.clear();
            if list.len == 0 {
                return Ok(());
            }
            if let Some((known, end)) = staged.ids_prefix.matches(reader.data, list.start) {
                (list.known, list.end) = (known, end);
                reader.cursor.at = end;
                if !reader.cursor.next_element()? {
                    list.len = known;
                    return Ok(());
                }
            }
            list.end = next_tokens(&mut reader.cursor, 2, ids)?;
            list.len = list.known + ids.len();
            Ok(())
        })
    }

    fn pairs(&mut self) -> Result<Field<List>> {
        self.list(2, |reader, list| {
            reader.staged.ids.clear();
            reader.staged.logprobs.clear();
            if list.len == 0 {
                return Ok(());
            }
            if let Some((known, end)) = reader.staged.pairs_prefix.matches(reader.data, list.start) {
                (list.known, list.end) = (known, end);
                reader.cursor.at = end;
                if !reader.cursor.next_element()? {
                    list.len = known;
                    return Ok(());
                }
            }
            loop {
                if let Some(at) = reader.pair()? {
                    list.misshapen = list.misshapen.or(Some((list.known + reader.staged.ids.len() - 1, at)));
                }
                list.end = reader.cursor.at;
                if !reader.cursor.next_element()? {
                    break;
                }
            }
            list.len = list.known + reader.staged.ids.len();
            Ok(())
        })
    }

    /// An array; `take` takes its elements and the closing bracket. Before it, `len` is 0 for an empty one.
    fn list(&mut self, depth: u32, take: impl FnOnce(&mut Self, &mut List) -> Result<()>) -> Result<Field<List>> {
        self.field(depth, Peek::Array, |reader| {
            let start = reader.cursor.at + 1;
            let len = usize::from(reader.cursor.next_array());
            let mut list = List { start, end: start, len, known: 0, misshapen: None };
            take(reader, &mut list)?;
            Ok(Value::Is(list))
        })
    }

    /// Stage one `[logprob, id, …]`; its place, if it is nothing of the kind.
    #[inline]
    fn pair(&mut self) -> Result<Option<usize>> {
        if let Some((logprob, id)) = self.cursor.next_plain_pair() {
            self.staged.ids.push(i32::try_from(id).unwrap_or(NO_TOKEN));
            self.staged.logprobs.push(logprob);
            return Ok(None);
        }
        let mut logprob = f64::NAN;
        let mut id = NO_TOKEN;
        let mut misshapen = None;
        let is_array = self.cursor.peek()? == Peek::Array;
        let at = self.cursor.at;
        if !is_array {
            self.cursor.skip_value(3)?;
            misshapen = Some(at);
        } else if !self.cursor.next_array() {
            misshapen = Some(at);
        } else {
            match self.cursor.peek()? {
                Peek::Number => logprob = self.cursor.next_number()?.as_f64(self.data),
                Peek::Null => self.cursor.skip_word(Peek::Null)?,
                _ => misshapen = Some(self.cursor.skip_value(4)?.start()),
            }
            if self.cursor.next_element()? {
                id = next_token(&mut self.cursor, 4)?;
                while self.cursor.next_element()? {
                    self.cursor.skip_value(4)?;
                }
            } else {
                misshapen = misshapen.or(Some(at));
            }
        }
        self.staged.ids.push(id);
        self.staged.logprobs.push(logprob);
        Ok(misshapen)
    }
}
