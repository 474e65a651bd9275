//! A cursor over the JSON of one event.
//!
//! It looks, takes or skips; it builds no tree. `next_*` looks at what comes and takes it, `skip_*` checks it and
//! takes nothing from it. Whatever is passed over is checked too: an event is JSON to its last byte, or it is not
//! used at all.
//!
//! Our own, since this is where the time goes: fields arrive in the order that the engine likes, so each value has to
//! be put aside until the whole event is known to be sound, and the list of logprobs must be read without a detour
//! by way of values. The input is UTF-8 already, checked once for the whole event.

use crate::number::{Number, WHOLE_POWERS_OF_TEN, leading_digits};
use crate::span::{RawStr, Span};
use crate::text::{hex4, plain_end};

/// Root value included.
pub(crate) const MAX_DEPTH: u32 = 128;

/// Python reads no integer literal with more digits than this.
const MAX_INTEGER_DIGITS: usize = 4300;

/// Not JSON; the cursor knows where, and why. Results stay small that way, and are passed in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotJson;

pub(crate) type Result<T> = std::result::Result<T, NotJson>;

/// What the next value is, by its first byte.
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

/// Walks over JSON text.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    pub data: &'a [u8],
    pub at: usize,
    /// Why it failed, if it failed; `at` is then where.
    pub failure: &'static str,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, failure: "" }
    }

    /// A cursor over a part that an earlier one has passed.
    pub(crate) fn over(data: &'a [u8], span: Span) -> Self {
        Self { data: &data[..span.end()], at: span.start(), failure: "" }
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
            Some(_) => return self.fail("a value was expected; NaN and Infinity are none"),
            None => return self.fail("the event ends where a value was expected"),
        })
    }

    /// Nothing but blanks may follow.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.skip_blanks();
        if self.at == self.data.len() { Ok(()) } else { self.fail("there is more after the value") }
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

    /// Take the bracket of an array; whether it has an element.
    pub(crate) fn next_array(&mut self) -> bool {
        self.at += 1;
        !self.next_if(b']')
    }

    /// After an element: whether another one follows.
    pub(crate) fn next_element(&mut self) -> Result<bool> {
        if self.next_if(b',') {
            return Ok(true);
        }
        if self.next_if(b']') { Ok(false) } else { self.fail("',' or ']' was expected") }
    }

    /// Take the brace of an object; its first key, if it has one.
    pub(crate) fn next_object(&mut self) -> Result<Option<RawStr>> {
        self.at += 1;
        if self.next_if(b'}') { Ok(None) } else { self.next_key().map(Some) }
    }

    /// After a member: the next key, if another one follows.
    pub(crate) fn next_member(&mut self) -> Result<Option<RawStr>> {
        if self.next_if(b',') {
            return self.next_key().map(Some);
        }
        if self.next_if(b'}') { Ok(None) } else { self.fail("',' or '}' was expected") }
    }

    fn next_key(&mut self) -> Result<RawStr> {
        self.skip_blanks();
        if self.byte() != Some(b'"') {
            return self.fail("a key was expected");
        }
        let key = self.next_string()?;
        if self.next_if(b':') { Ok(key) } else { self.fail("':' was expected") }
    }

    /// Take a string; the cursor stands at its quote.
    pub(crate) fn next_string(&mut self) -> Result<RawStr> {
        let opening = self.at;
        self.at += 1;
        let start = self.at;
        let mut has_escapes = false;
        loop {
            self.at = plain_end(self.data, self.at);
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
                Some(_) => return self.fail("a raw control character in a string"),
                None => {
                    self.at = opening;
                    return self.fail("a string without an end");
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

    /// Take a number; the cursor stands at its first byte.
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
            _ => return self.fail("a digit was expected"),
        }
        let mut is_integer = true;
        let mut exponent = 0_i32;
        if self.byte() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            let first = self.at;
            self.digits(&mut mantissa, &mut digits);
            if self.at == first {
                return self.fail("a digit was expected");
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

    /// Take digits, up to eight at a time. Leading zeros do not count.
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
            return self.fail("a digit was expected");
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
        self.fail("a value was expected")
    }

    /// Take a number of up to seven digits that a comma or bracket follows; if it is anything else, nothing.
    #[inline]
    pub(crate) fn next_plain_integer(&mut self) -> Option<u64> {
        self.next_plain_digits(|end| matches!(end, b',' | b']' | b'}'))
    }

    /// Take one to seven digits, the first no idle zero, behind which something stands that `ends` them.
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

    /// Take `[number,number,null]` without a blank, as engines write a pair; if it is anything else, nothing.
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
        // Taken apart at once: a Number that goes through memory costs a stall.
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

    /// Take what stands at `start..end`, if it comes again.
    #[inline]
    pub(crate) fn next_again(&mut self, start: usize, end: usize) -> Option<()> {
        self.next_exact(&self.data[start..end])
    }

    /// Take the next value, whatever it is, inside `depth` containers.
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

    /// The cursor stands at the bracket of a container that lies inside `outer` others.
    fn skip_container(&mut self, peek: Peek, outer: u32) -> Result<()> {
        // One bit for each open container, the innermost lowest: 1 for an object.
        let mut open = 0_u128;
        let mut inner = 0;
        let mut peek = peek;
        loop {
            // `peek` is what stands at the cursor.
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

    /// Whether the innermost open container goes on; if it is an object, its next key is taken.
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
