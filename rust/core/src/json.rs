//! A pull parser (cursor) for the JSON of one event.
//!
//! It builds no tree. `next_*` parses the next value and returns it, `skip_*` validates the next value and returns
//! nothing of it. Skipped values are validated too: an event that is not JSON to its last byte is not used at all.
//!
//! It is not an existing crate because most of the time is spent here: fields arrive in any order, so values are kept
//! until the whole event is valid, and lists of logprobs must be parsed without intermediate values. The input is
//! UTF-8, which is checked once for the whole event.

use std::ops::Range;

use crate::number::{Number, WHOLE_POWERS_OF_TEN, leading_digits};
use crate::span::{RawStr, Span};
use crate::text::{hex4, plain_end};

/// The largest depth of nested containers, the root included.
pub(crate) const MAX_DEPTH: u32 = 128;

/// Python's `json` rejects integers with more digits.
const MAX_INTEGER_DIGITS: usize = 4300;

/// Not JSON. The cursor holds the position and the reason, so that results stay small and fit in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotJson;

pub(crate) type Result<T> = std::result::Result<T, NotJson>;

/// The kind of the next value, by its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peek {
    Null,
    True,
    False,
    Number,
    String,
    Array,
    Object,
}

/// A position in JSON text.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    pub data: &'a [u8],
    pub at: usize,
    /// The reason of a failure, which is at `at`.
    pub failure: &'static str,
    /// A range without quotes, backslashes and control characters.
    plain: Range<usize>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, failure: "", plain: 0..0 }
    }

    /// A cursor that need not look at a range without quotes, backslashes and control characters.
    pub(crate) fn with_plain(data: &'a [u8], plain: Range<usize>) -> Self {
        Self { plain, ..Self::new(data) }
    }

    /// A cursor at a value that was validated before.
    pub(crate) fn at(data: &'a [u8], value: Span) -> Self {
        Self { at: value.start(), ..Self::new(data) }
    }

    /// A cursor over a value that was validated before.
    pub(crate) fn over(data: &'a [u8], span: Span) -> Self {
        Self { at: span.start(), ..Self::new(&data[..span.end()]) }
    }

    fn byte(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    #[cold]
    fn fail<T>(&mut self, why: &'static str) -> Result<T> {
        self.failure = why;
        Err(NotJson)
    }

    fn skip_blanks(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.byte() {
            self.at += 1;
        }
    }

    /// Look at the next value.
    pub(crate) fn peek(&mut self) -> Result<Peek> {
        self.skip_blanks();
        Ok(match self.byte() {
            Some(b'"') => Peek::String,
            Some(b'-' | b'0'..=b'9') => Peek::Number,
            Some(b'[') => Peek::Array,
            Some(b'{') => Peek::Object,
            Some(b'n') => Peek::Null,
            Some(b't') => Peek::True,
            Some(b'f') => Peek::False,
            Some(_) => return self.fail("expected a value; NaN and Infinity are not JSON"),
            None => return self.fail("the event ends where a value is expected"),
        })
    }

    /// Only blanks may follow.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.skip_blanks();
        if self.at == self.data.len() { Ok(()) } else { self.fail("unexpected characters after the value") }
    }

    /// Take `byte`, if it comes next.
    fn next_if(&mut self, byte: u8) -> bool {
        if self.byte() != Some(byte) {
            self.skip_blanks();
            if self.byte() != Some(byte) {
                return false;
            }
        }
        self.at += 1;
        true
    }

    /// Take the opening bracket of an array. Returns whether it has an element.
    pub(crate) fn next_array(&mut self) -> bool {
        self.at += 1;
        !self.next_if(b']')
    }

    /// After an element: take the comma or the closing bracket. Returns whether another element follows.
    pub(crate) fn next_element(&mut self) -> Result<bool> {
        if self.next_if(b',') {
            return Ok(true);
        }
        if self.next_if(b']') { Ok(false) } else { self.fail("expected ',' or ']'") }
    }

    /// Take the opening brace of an object and its first key, if it has one.
    pub(crate) fn next_object(&mut self) -> Result<Option<RawStr>> {
        self.at += 1;
        if self.next_if(b'}') { Ok(None) } else { self.next_key().map(Some) }
    }

    /// After a member: take the comma and the next key, or the closing brace.
    pub(crate) fn next_member(&mut self) -> Result<Option<RawStr>> {
        if self.next_if(b',') {
            return self.next_key().map(Some);
        }
        if self.next_if(b'}') { Ok(None) } else { self.fail("expected ',' or '}'") }
    }

    fn next_key(&mut self) -> Result<RawStr> {
        self.skip_blanks();
        if self.byte() != Some(b'"') {
            return self.fail("expected a key");
        }
        let key = self.next_string()?;
        if self.next_if(b':') { Ok(key) } else { self.fail("expected ':'") }
    }

    /// Take a string. The cursor is at its opening quote.
    pub(crate) fn next_string(&mut self) -> Result<RawStr> {
        let opening = self.at;
        self.at += 1;
        let start = self.at;
        let mut has_escapes = false;
        loop {
            self.at = plain_end(self.data, self.at, &self.plain);
            match self.byte() {
                Some(b'"') => {
                    let span = Span::new(start, self.at);
                    self.at += 1;
                    return Ok(RawStr { span, has_escapes });
                }
                Some(b'\\') => {
                    has_escapes = true;
                    self.skip_escape()?;
                }
                Some(_) => return self.fail("an unescaped control character in a string"),
                None => {
                    self.at = opening;
                    return self.fail("a string without a closing quote");
                }
            }
        }
    }

    fn skip_escape(&mut self) -> Result<()> {
        match self.data.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => match hex4(self.data, self.at + 2) {
                None => return self.fail("four hex digits must follow \\u"),
                Some(0xDC00..=0xDFFF) => return self.fail("half of a surrogate pair"),
                Some(0xD800..=0xDBFF) => {
                    let low = match self.data.get(self.at + 6..self.at + 8) {
                        Some(b"\\u") => hex4(self.data, self.at + 8),
                        _ => None,
                    };
                    if !matches!(low, Some(0xDC00..=0xDFFF)) {
                        return self.fail("half of a surrogate pair");
                    }
                    self.at += 12;
                }
                Some(_) => self.at += 6,
            },
            _ => return self.fail("an unknown escape"),
        }
        Ok(())
    }

    /// Take a number. The cursor is at its first byte.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a fifth of the time of an incremental stream, measured")]
    pub(crate) fn next_number(&mut self) -> Result<Number> {
        let start = self.at;
        let is_negative = self.byte() == Some(b'-');
        self.at += usize::from(is_negative);
        let mut mantissa = 0;
        let mut digits = 0;
        match self.byte() {
            Some(b'0') => {
                self.at += 1;
                if let Some(b'0'..=b'9') = self.byte() {
                    return self.fail("a number with a leading zero");
                }
            }
            Some(b'1'..=b'9') => self.digits(&mut mantissa, &mut digits),
            Some(b'I') => return self.fail("NaN and Infinity are not JSON"),
            _ => return self.fail("expected a digit"),
        }
        let mut is_integer = true;
        let mut exponent = 0_i32;
        if self.byte() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            let first = self.at;
            self.digits(&mut mantissa, &mut digits);
            if self.at == first {
                return self.fail("expected a digit");
            }
            exponent = i32::try_from(self.at - first).map_or(i32::MIN, |places| -places);
        }
        if let Some(b'e' | b'E') = self.byte() {
            is_integer = false;
            self.at += 1;
            exponent = exponent.saturating_add(self.exponent()?);
        }
        if is_integer && self.at - start - usize::from(is_negative) > MAX_INTEGER_DIGITS {
            self.at = start;
            return self.fail("an integer of more than 4300 digits");
        }
        Ok(Number { span: Span::new(start, self.at), is_integer, is_negative, mantissa, digits, exponent })
    }

    /// Take digits, up to eight at a time. Leading zeros are not counted in `digits`.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a fifth of the time of an incremental stream, measured")]
    fn digits(&mut self, mantissa: &mut u64, digits: &mut u32) {
        while let Some(eight) = self.data.get(self.at..self.at + 8) {
            let (count, value) = leading_digits(u64::from_le_bytes(eight.try_into().unwrap_or_default()));
            if count == 0 {
                return;
            }
            let is_padded = *digits == 0 && eight[0] == b'0';
            *digits = if is_padded { value.checked_ilog10().map_or(0, |log| log + 1) } else { *digits + count };
            *mantissa = mantissa.wrapping_mul(WHOLE_POWERS_OF_TEN[count as usize]).wrapping_add(value);
            self.at += count as usize;
            if count < 8 {
                return;
            }
        }
        while let Some(digit @ b'0'..=b'9') = self.byte() {
            *mantissa = mantissa.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            *digits += u32::from(*digits > 0 || digit > b'0');
            self.at += 1;
        }
    }

    #[cold]
    fn exponent(&mut self) -> Result<i32> {
        let is_negative = match self.byte() {
            Some(sign @ (b'+' | b'-')) => {
                self.at += 1;
                sign == b'-'
            }
            _ => false,
        };
        let first = self.at;
        let mut value = 0_i32;
        while let Some(digit @ b'0'..=b'9') = self.byte() {
            value = value.saturating_mul(10).saturating_add(i32::from(digit - b'0'));
            self.at += 1;
        }
        if self.at == first {
            return self.fail("expected a digit");
        }
        Ok(if is_negative { -value } else { value })
    }

    /// Take `null`, `true` or `false`.
    pub(crate) fn skip_word(&mut self, peek: Peek) -> Result<()> {
        let word: &[u8] = match peek {
            Peek::Null => b"null",
            Peek::True => b"true",
            _ => b"false",
        };
        if self.data[self.at..].starts_with(word) {
            self.at += word.len();
            return Ok(());
        }
        self.fail("expected a value")
    }

    /// Take an integer of up to seven digits before a comma or bracket. None, with nothing taken: it is anything else.
    #[inline]
    pub(crate) fn next_plain_integer(&mut self) -> Option<u64> {
        self.next_plain_digits(|end| matches!(end, b',' | b']' | b'}'))
    }

    /// Take one to seven digits without a leading zero, if `ends` accepts the byte after them.
    #[inline]
    pub(crate) fn next_plain_digits(&mut self, ends: impl FnOnce(u8) -> bool) -> Option<u64> {
        let eight = self.data.get(self.at..self.at + 8)?;
        let (count, value) = leading_digits(u64::from_le_bytes(eight.try_into().unwrap_or_default()));
        let is_plain = count > 0 && eight.get(count as usize).is_some_and(|&end| ends(end));
        if !is_plain || (eight[0] == b'0' && count > 1) {
            return None;
        }
        self.at += count as usize;
        Some(value)
    }

    /// Take `[number,number,null]` without blanks, as engines write a pair. None, with nothing taken: anything else.
    #[inline]
    pub(crate) fn next_plain_pair(&mut self) -> Option<(f64, u64)> {
        let start = self.at;
        let pair = self.plain_pair();
        if pair.is_none() {
            self.at = start;
        }
        pair
    }

    #[inline]
    fn plain_pair(&mut self) -> Option<(f64, u64)> {
        self.next_exact(b"[")?;
        // Converted at once: a Number that is written to memory and read back costs a stall.
        let first = self.next_number().ok()?.as_f64(self.data);
        self.next_exact(b",")?;
        let second = self.next_plain_integer()?;
        self.next_exact(b",null]")?;
        Some((first, second))
    }

    /// Take these bytes, if they come next.
    #[inline]
    pub(crate) fn next_exact(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.at + bytes.len();
        if self.data.get(self.at..end)? != bytes {
            return None;
        }
        self.at = end;
        Some(())
    }

    /// Take a repetition of the bytes in `start..end`, if it comes next.
    #[inline]
    pub(crate) fn next_again(&mut self, start: usize, end: usize) -> Option<()> {
        self.next_exact(&self.data[start..end])
    }

    /// Take the next value of any kind, inside `depth` containers.
    pub(crate) fn skip_value(&mut self, depth: u32) -> Result<Span> {
        let peek = self.peek()?;
        let start = self.at;
        match peek {
            Peek::String => {
                self.next_string()?;
            }
            Peek::Number => {
                self.next_number()?;
            }
            Peek::Null | Peek::True | Peek::False => self.skip_word(peek)?,
            Peek::Array | Peek::Object => self.skip_container(peek, depth)?,
        }
        Ok(Span::new(start, self.at))
    }

    /// Take a container inside `outer` others. The cursor is at its opening bracket or brace.
    fn skip_container(&mut self, peek: Peek, outer: u32) -> Result<()> {
        // One bit for each open container, the innermost in the lowest bit: 1 for an object, 0 for an array.
        let mut open = 0_u128;
        let mut inner = 0;
        let mut peek = peek;
        loop {
            // `peek` is the kind of the value at the cursor.
            let mut more = match peek {
                Peek::Array | Peek::Object => {
                    inner += 1;
                    if outer + inner > MAX_DEPTH {
                        return self.fail("nested deeper than 128");
                    }
                    let is_object = peek == Peek::Object;
                    open = open << 1 | u128::from(is_object);
                    if is_object { self.next_object()?.is_some() } else { self.next_array() }
                }
                Peek::String => {
                    self.next_string()?;
                    self.has_more(open)?
                }
                Peek::Number => {
                    self.next_number()?;
                    self.has_more(open)?
                }
                Peek::Null | Peek::True | Peek::False => {
                    self.skip_word(peek)?;
                    self.has_more(open)?
                }
            };
            while !more {
                open >>= 1;
                inner -= 1;
                if inner == 0 {
                    return Ok(());
                }
                more = self.has_more(open)?;
            }
            peek = self.peek()?;
        }
    }

    /// Whether the innermost open container has another value. The key of an object is taken.
    fn has_more(&mut self, open: u128) -> Result<bool> {
        if open & 1 == 1 { Ok(self.next_member()?.is_some()) } else { self.next_element() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_counted_with_the_root() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(Cursor::new(nested(128).as_bytes()).skip_value(0).is_ok());
        assert!(Cursor::new(nested(129).as_bytes()).skip_value(0).is_err());
    }
}
