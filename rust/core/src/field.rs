//! Fields of an event: for each key the value of the expected type, or what is there instead.
//!
//! Parsing and checking are separate. An event must be valid JSON before any other rule applies, so a value of a wrong
//! type is only recorded here. The checks report it later, in their order.

use crate::error::{ErrorKind, EventError};
use crate::generation::Matched;
use crate::json::{Cursor, Peek, Result};
use crate::span::{RawStr, Span};
use crate::text::decode;

/// The value of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<T> {
    Absent,
    Null,
    /// It has a wrong type or is out of range.
    Wrong,
    Is(T),
}

/// What a value of this type must be, for errors.
pub(crate) trait Expected {
    const EXPECTED: &'static str;
}

impl Expected for RawStr {
    const EXPECTED: &'static str = "expected a string or null";
}

impl Expected for u64 {
    const EXPECTED: &'static str = "expected a count (an integer in 0 … 4294967295) or null";
}

impl Expected for List {
    const EXPECTED: &'static str = "expected a list or null";
}

impl Expected for () {
    const EXPECTED: &'static str = "expected an object or null";
}

/// A label. Other fields that are kept as a [`Span`] may have any type and are never `Wrong`.
impl Expected for Span {
    const EXPECTED: &'static str = "expected a string, a number or null";
}

/// The value of a key and its offset in the event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field<T> {
    at: u32,
    pub value: Value<T>,
}

impl<T: Copy> Default for Field<T> {
    fn default() -> Self {
        Self::ABSENT
    }
}

impl<T: Copy + Expected> Field<T> {
    /// A value of a wrong type is an error.
    #[inline]
    pub(crate) fn check_type(&self, path: &'static str) -> std::result::Result<(), EventError> {
        if self.is_wrong() {
            return Err(EventError::new(ErrorKind::Schema, self.at(), path, T::EXPECTED));
        }
        Ok(())
    }
}

impl<T: Copy> Field<T> {
    pub(crate) const ABSENT: Self = Self { at: 0, value: Value::Absent };

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "no event is larger than MAX_EVENT")]
    pub(crate) fn new(at: usize, value: Value<T>) -> Self {
        Self { at: at as u32, value }
    }

    pub(crate) fn at(&self) -> usize {
        self.at as usize
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<T> {
        match self.value {
            Value::Is(value) => Some(value),
            _ => None,
        }
    }

    /// Whether it is there and not null.
    #[inline]
    pub(crate) fn has_value(&self) -> bool {
        !matches!(self.value, Value::Absent | Value::Null)
    }

    #[inline]
    pub(crate) fn as_ref(&self) -> Option<&T> {
        match &self.value {
            Value::Is(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn is_wrong(&self) -> bool {
        matches!(self.value, Value::Wrong)
    }

    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.value, Value::Absent)
    }
}

impl Field<Span> {
    /// A label that repeats one that was read and checked.
    #[inline]
    pub(crate) fn repeated_label(data: &[u8], value: Span) -> Self {
        let is_null = data[value.start()] == b'n';
        Self::new(value.start(), if is_null { Value::Null } else { Value::Is(value) })
    }
}

/// A stop token or stop string, not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RawMatched {
    Token(i64),
    Text(RawStr),
}

impl RawMatched {
    pub(crate) fn decode(self, data: &[u8]) -> Matched {
        match self {
            Self::Token(id) => Matched::Token(id),
            Self::Text(raw) => Matched::Text(decode(data, raw)),
        }
    }
}

/// A list with one element for each token. The elements are in the event's buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    start: u32,
    end: u32,
    len: u32,
    known: u32,
    malformed: Option<(u32, u32)>,
}

/// An event has fewer than 2^32 bytes, and an element takes more than one.
#[allow(clippy::cast_possible_truncation, reason = "no event is larger than MAX_EVENT")]
impl List {
    /// A list whose first element, if it has one, is at `start`.
    pub(crate) fn new(start: usize) -> Self {
        Self { start: start as u32, end: start as u32, len: 0, known: 0, malformed: None }
    }

    /// The offset after the opening bracket.
    pub(crate) fn start(&self) -> usize {
        self.start as usize
    }

    /// The offset after the last element.
    pub(crate) fn end(&self) -> usize {
        self.end as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// The number of leading elements recognized by their fingerprint. They are not in the buffers.
    pub(crate) fn known(&self) -> usize {
        self.known as usize
    }

    /// The first element of a wrong shape: its index and its offset.
    pub(crate) fn malformed(&self) -> Option<(usize, usize)> {
        self.malformed.map(|(index, at)| (index as usize, at as usize))
    }

    /// The list has `len` elements, the first `known` of which were recognized, and ends at `end`.
    #[inline]
    pub(crate) fn set(&mut self, len: usize, known: usize, end: usize) {
        (self.len, self.known, self.end) = (len as u32, known as u32, end as u32);
    }

    /// The element at this index and offset has a wrong shape.
    #[cold]
    pub(crate) fn mark_malformed(&mut self, index: usize, at: usize) {
        self.malformed = self.malformed.or(Some((index as u32, at as u32)));
    }
}

/// Each method takes the next value, of any kind, inside `depth` containers.
impl Cursor<'_> {
    /// A value of the `wanted` kind, which `take` takes. Other kinds are `Wrong`, except null.
    #[inline]
    pub(crate) fn next_field<T: Copy>(
        &mut self,
        depth: u32,
        wanted: Peek,
        take: impl FnOnce(&mut Self) -> Result<Value<T>>,
    ) -> Result<Field<T>> {
        let peek = self.peek()?;
        let at = self.at;
        let value = if peek == wanted {
            take(self)?
        } else if peek == Peek::Null {
            self.skip_word(peek)?;
            Value::Null
        } else {
            self.skip_value(depth)?;
            Value::Wrong
        };
        Ok(Field::new(at, value))
    }

    /// Stop at the opening brace of an object. Anything else is taken.
    #[inline]
    pub(crate) fn look_for_object(&mut self, depth: u32) -> Result<Field<()>> {
        self.next_field(depth, Peek::Object, |_| Ok(Value::Is(())))
    }

    /// A string, into `field`: a field that is returned is written and read in parts of other sizes, which stalls.
    #[inline]
    pub(crate) fn next_string_field(&mut self, depth: u32, field: &mut Field<RawStr>) -> Result<()> {
        if self.data.get(self.at) == Some(&b'"') {
            *field = Field::new(self.at, Value::Absent);
            field.value = Value::Is(self.next_string()?);
            return Ok(());
        }
        self.next_other_string(depth, field)
    }

    #[cold]
    fn next_other_string(&mut self, depth: u32, field: &mut Field<RawStr>) -> Result<()> {
        *field = self.next_field(depth, Peek::String, |cursor| Ok(Value::Is(cursor.next_string()?)))?;
        Ok(())
    }

    /// A count, into `field`.
    #[inline]
    pub(crate) fn next_count(&mut self, depth: u32, field: &mut Field<u64>) -> Result<()> {
        let at = self.at;
        if let Some(value) = self.next_plain_integer() {
            *field = Field::new(at, Value::Is(value));
            return Ok(());
        }
        self.next_other_count(depth, field)
    }

    #[cold]
    fn next_other_count(&mut self, depth: u32, field: &mut Field<u64>) -> Result<()> {
        *field = self.next_field(depth, Peek::Number, |cursor| {
            let value = cursor.next_number()?.as_integer(u64::from(u32::MAX));
            Ok(value.map_or(Value::Wrong, Value::Is))
        })?;
        Ok(())
    }

    pub(crate) fn next_integer(&mut self, depth: u32) -> Result<Field<i64>> {
        self.next_field(depth, Peek::Number, |cursor| {
            let number = cursor.next_number()?;
            // An integer that needs more than 64 bits has no meaning here.
            let value = number.as_i64(cursor.data).or(number.is_integer.then_some(i64::MAX));
            Ok(value.map_or(Value::Wrong, Value::Is))
        })
    }

    /// A string, with its quotes, or a number.
    pub(crate) fn next_label(&mut self, depth: u32) -> Result<Field<Span>> {
        let peek = self.peek()?;
        self.next_field(depth, peek, |cursor| {
            let span = cursor.skip_value(depth)?;
            Ok(match peek {
                Peek::String | Peek::Number => Value::Is(span),
                Peek::Null => Value::Null,
                _ => Value::Wrong,
            })
        })
    }

    /// A value whose type is checked later.
    #[inline]
    pub(crate) fn next_any(&mut self, depth: u32) -> Result<Field<Span>> {
        let peek = self.peek()?;
        self.next_field(depth, peek, |cursor| {
            let span = cursor.skip_value(depth)?;
            Ok(if peek == Peek::Null { Value::Null } else { Value::Is(span) })
        })
    }

    /// A token id or a string. Anything else is None.
    pub(crate) fn next_matched(&mut self, depth: u32) -> Result<Option<RawMatched>> {
        Ok(match self.peek()? {
            Peek::String => Some(RawMatched::Text(self.next_string()?)),
            Peek::Number => self.next_number()?.as_i64(self.data).map(RawMatched::Token),
            _ => {
                self.skip_value(depth)?;
                None
            }
        })
    }

    /// An array, into `field`. `take` takes its elements, of which there is at least one, and the closing bracket.
    #[inline]
    pub(crate) fn next_list(
        &mut self,
        depth: u32,
        field: &mut Field<List>,
        take: impl FnOnce(&mut Self, &mut List) -> Result<()>,
    ) -> Result<()> {
        if self.peek()? != Peek::Array {
            *field = self.next_field(depth, Peek::Array, |_| Ok(Value::Wrong))?;
            return Ok(());
        }
        *field = Field::new(self.at, Value::Is(List::new(self.at + 1)));
        match &mut field.value {
            Value::Is(list) if self.next_array() => take(self, list),
            _ => Ok(()),
        }
    }

    /// The span of the value just taken. The colon of its key is before `from`.
    #[inline]
    pub(crate) fn value_since(&self, from: usize) -> Span {
        let blanks = self.data[from..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        Span::new(from + blanks, self.at)
    }
}
