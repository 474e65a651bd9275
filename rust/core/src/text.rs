//! JSON strings: finds their end, and decodes their escapes.

use std::borrow::Cow;
use std::ops::Range;

use crate::span::{RawStr, Span};

/// The offset of the next quote, backslash or control character, or the end. There is none in `plain`.
#[inline]
pub(crate) fn plain_end(data: &[u8], mut at: usize, plain: &Range<usize>) -> usize {
    let long = at + LONG;
    while let Some(eight) = data.get(at..at + 8) {
        let special = special_bytes(u64::from_le_bytes(eight.try_into().unwrap_or_default()));
        if special != 0 {
            return at + special.trailing_zeros() as usize / 8;
        }
        at += 8;
        if at >= long {
            if plain.contains(&at) {
                at = plain.end;
            }
            let stop = if plain.start > at { plain.start } else { data.len() };
            at += data[at..stop].as_chunks().0.iter().take_while(|chunk| is_plain_chunk(chunk)).count() * CHUNK;
        }
    }
    while at < data.len() && !matches!(data[at], b'"' | b'\\' | ..0x20) {
        at += 1;
    }
    at
}

/// From this many bytes on a string is searched in chunks.
const LONG: usize = 256;

const CHUNK: usize = 64;

/// Whether there is no quote, backslash or control character.
pub(crate) fn is_plain(data: &[u8]) -> bool {
    let (chunks, rest) = data.as_chunks();
    chunks.iter().all(is_plain_chunk) && rest.iter().all(|byte| !matches!(byte, b'"' | b'\\' | ..0x20))
}

/// As [`is_plain`], without a branch for each byte.
#[inline]
fn is_plain_chunk(chunk: &[u8; CHUNK]) -> bool {
    let special = |byte: u8| u8::from(byte < 0x20) | u8::from(byte == b'"') | u8::from(byte == b'\\');
    chunk.iter().fold(0, |found, &byte| found | special(byte)) == 0
}

/// Whether all bytes are ASCII.
#[inline]
pub(crate) fn is_ascii(data: &[u8]) -> bool {
    let Some(last) = data.last_chunk::<32>() else { return data.is_ascii() };
    let words = |chunk: &[u8; 32]| {
        let (words, _) = chunk.as_chunks::<8>();
        [0, 1, 2, 3].map(|index| u64::from_ne_bytes(words[index]))
    };
    // Without a branch for each chunk; the last one overlaps.
    let mut joined = words(last);
    for chunk in data.as_chunks::<32>().0 {
        let new = words(chunk);
        (0..4).for_each(|index| joined[index] |= new[index]);
    }
    (joined[0] | joined[1] | joined[2] | joined[3]) & 0x8080_8080_8080_8080 == 0
}

/// Whether `data` begins with `prefix`: without a call, if that has the length of most keys.
#[inline]
pub(crate) fn starts_with(data: &[u8], prefix: &[u8]) -> bool {
    let Some(head) = data.get(..prefix.len()) else { return false };
    if (8..=16).contains(&prefix.len()) {
        head.first_chunk::<8>() == prefix.first_chunk() && head.last_chunk::<8>() == prefix.last_chunk()
    } else {
        head == prefix
    }
}

/// The high bit of each quote, backslash or control character. Bits above the lowest one set may be wrong.
#[inline]
fn special_bytes(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word;
    let quotes = word ^ (ONES * 0x22);
    let slashes = word ^ (ONES * 0x5C);
    (below(word, 0x20) | below(quotes, 1) | below(slashes, 1)) & HIGHS
}

pub(crate) fn hex4(data: &[u8], at: usize) -> Option<u32> {
    data.get(at..at + 4)?.iter().try_fold(0, |value, &byte| Some(value << 4 | char::from(byte).to_digit(16)?))
}

/// The characters of a validated string. Escapes are rare.
#[inline]
pub(crate) fn plain(raw: &[u8]) -> Cow<'_, [u8]> {
    if !raw.contains(&b'\\') {
        return Cow::Borrowed(raw);
    }
    let mut text = Vec::new();
    unescape(raw, &mut text);
    Cow::Owned(text)
}

/// The characters of a key.
#[inline]
pub(crate) fn name(data: &[u8], raw: RawStr) -> Cow<'_, [u8]> {
    if raw.has_escapes { plain(raw.span.of(data)) } else { Cow::Borrowed(raw.span.of(data)) }
}

/// The characters of a string.
pub(crate) fn decode(data: &[u8], raw: RawStr) -> String {
    let mut text = Vec::new();
    unescape(raw.span.of(data), &mut text);
    string(text)
}

/// The characters of a string with its quotes, or a number as it is written.
pub(crate) fn label(data: &[u8], value: Span) -> String {
    let raw = value.of(data);
    let mut text = Vec::new();
    match raw {
        [b'"', inner @ .., b'"'] => unescape(inner, &mut text),
        _ => text.extend_from_slice(raw),
    }
    string(text)
}

/// Append the characters of a validated string, as UTF-8.
pub(crate) fn unescape(raw: &[u8], text: &mut Vec<u8>) {
    let mut rest = raw;
    while let Some(slash) = memchr::memchr(b'\\', rest) {
        text.extend_from_slice(&rest[..slash]);
        let (character, length) = match rest[slash + 1] {
            b'u' => {
                let high = hex4(rest, slash + 2).unwrap_or_default();
                if (0xD800..0xDC00).contains(&high) {
                    let low = hex4(rest, slash + 8).unwrap_or_default();
                    (0x1_0000 + ((high & 0x3FF) << 10 | low & 0x3FF), 12)
                } else {
                    (high, 6)
                }
            }
            b'b' => (0x08, 2),
            b'f' => (0x0C, 2),
            b'n' => (0x0A, 2),
            b'r' => (0x0D, 2),
            b't' => (0x09, 2),
            other => (u32::from(other), 2),
        };
        let character = char::from_u32(character).unwrap_or(char::REPLACEMENT_CHARACTER);
        text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        rest = &rest[slash + length..];
    }
    text.extend_from_slice(rest);
}

/// The text of unescaped characters. The whole event is valid UTF-8, and parts of it are split only at ASCII bytes.
pub(crate) fn string(text: Vec<u8>) -> String {
    String::from_utf8(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_ends_at_its_first_special_byte_however_long_it_is() {
        for length in [0, 1, 7, 8, 9, 255, 256, 257, 300, 500] {
            let mut data = vec![b'a'; length];
            assert_eq!(plain_end(&data, 0, &(0..0)), length);
            for (place, special) in (0..length).flat_map(|place| [b'"', b'\\', 0x1F, 0].map(|special| (place, special)))
            {
                data[place] = special;
                assert_eq!(plain_end(&data, 0, &(0..0)), place, "{special} in {length}");
                assert_eq!(plain_end(&data, place / 2, &(0..0)), place, "{special} in {length}");
                data[place] = 0xFF; // no character of a text, and not special
                assert_eq!(plain_end(&data, 0, &(0..0)), length);
                data[place] = b'a';
            }
        }
    }

    #[test]
    fn a_part_that_is_known_to_be_plain_is_passed_over() {
        let mut data = vec![b'a'; 1000];
        data[900] = b'"';
        for (start, end) in [(0, 0), (0, 900), (300, 900), (400, 500), (890, 900), (901, 1000)] {
            for at in [0, 1, 250, 450, 700] {
                assert_eq!(plain_end(&data, at, &(start..end)), 900, "from {at} over {start}..{end}");
            }
            assert!(is_plain(&data[start..end]));
        }
        assert!(!is_plain(&data) && !is_plain(&data[890..901]));
    }

    #[test]
    fn one_byte_that_is_not_ascii_is_found_anywhere() {
        for length in 0..130 {
            let mut data = vec![0x7F; length];
            assert!(is_ascii(&data));
            for place in 0..length {
                data[place] = 0x80;
                assert!(!is_ascii(&data), "{place} of {length}");
                data[place] = 0;
            }
        }
    }

    #[test]
    fn a_beginning_is_compared_to_its_last_byte() {
        let data: Vec<u8> = (0..40).collect();
        for length in 0..40 {
            let mut prefix = data[..length].to_vec();
            assert!(starts_with(&data, &prefix));
            assert!(length == 0 || !starts_with(&data[..length - 1], &prefix));
            for place in 0..length {
                prefix[place] ^= 1;
                assert!(!starts_with(&data, &prefix), "{place} of {length}");
                prefix[place] ^= 1;
            }
        }
    }
}
