//! Arrays of numbers, sent as JSON lists or base64, parsed into typed buffers.

use std::borrow::Cow;

use base64_simd::STANDARD;
use bytemuck::Pod;
use bytemuck::allocation::try_zeroed_slice_box;

use crate::error::{ErrorKind, EventError};
use crate::json::{Cursor, Peek, Result as JsonResult};
use crate::span::{RawStr, Span};
use crate::text::unescape;

#[cfg(not(target_endian = "little"))]
compile_error!("engines send little-endian arrays, and they are copied as they are");

/// This many characters of base64 are decoded at once.
const BLOCK: usize = 64 << 10;

/// Marks a list element that is not a token id. The checks report it before the ids are applied.
pub(crate) const NO_TOKEN: i32 = -1;

/// The largest token id: ids are int32.
pub(crate) const MAX_TOKEN: u64 = i32::MAX as u64;

/// Take one element of a list of token ids, inside `depth` containers.
#[inline]
pub(crate) fn next_token(cursor: &mut Cursor<'_>, depth: u32) -> JsonResult<i32> {
    if let Some(token) = cursor.next_plain_integer() {
        return Ok(i32::try_from(token).unwrap_or(NO_TOKEN));
    }
    if cursor.peek()? == Peek::Number {
        let value = cursor.next_number()?.as_integer(MAX_TOKEN);
        return Ok(value.and_then(|value| i32::try_from(value).ok()).unwrap_or(NO_TOKEN));
    }
    cursor.skip_value(depth)?;
    Ok(NO_TOKEN)
}

/// Take the rest of a list of token ids, inside `depth` containers. The cursor is at an element. Returns the offset
/// after the last element.
pub(crate) fn next_tokens(cursor: &mut Cursor<'_>, depth: u32, ids: &mut Vec<i32>) -> JsonResult<usize> {
    loop {
        ids.push(next_token(cursor, depth)?);
        let end = cursor.at;
        if !cursor.next_element()? {
            return Ok(end);
        }
    }
}

/// The offset of an element of the list whose first element is at `start`. It walks the list: for errors only.
pub(crate) fn element_at(data: &[u8], start: usize, index: usize) -> usize {
    let mut cursor = Cursor::new(data);
    cursor.at = start;
    for _ in 0..index {
        if cursor.skip_value(3).is_err() || !cursor.next_element().unwrap_or(false) {
            return start;
        }
    }
    cursor.peek().map_or(start, |_| cursor.at)
}

/// An array of non-negative int32, sent as base64 or as a JSON list.
pub(crate) fn int32_array(data: &[u8], value: Span, path: &'static str) -> Result<Vec<i32>, EventError> {
    let mut cursor = Cursor::over(data, value);
    let at = value.start();
    let ids = match cursor.peek().map_err(|_| metadata_error(at, path, "not an array"))? {
        Peek::String => {
            let text = cursor.next_string().map_err(|_| metadata_error(at, path, "not a string"))?;
            base64_array::<i32>(data, text, None, path, |_| {})?
        }
        Peek::Array => {
            let mut ids = Vec::new();
            let listed = if cursor.next_array() { next_tokens(&mut cursor, 3, &mut ids) } else { Ok(0) };
            listed.map_err(|_| metadata_error(at, path, "not a list"))?;
            ids
        }
        _ => return Err(metadata_error(at, path, "expected an array: base64 of int32, or a list")),
    };
    if let Some(index) = ids.iter().position(|&id| id < 0) {
        return Err(metadata_error(at, path, format!("entry {index} is not an integer in 0 … 2147483647")));
    }
    Ok(ids)
}

/// Decode base64 (standard alphabet, padded, no blanks) of little-endian numbers.
///
/// `expected` is the required number of elements and the reason. `on_block` is given the numbers so far, while the
/// last of them are in the processor's cache.
pub(crate) fn base64_array<T: Pod>(
    data: &[u8],
    text: RawStr,
    expected: Option<(usize, &str)>,
    path: &'static str,
    on_block: impl FnMut(&[T]),
) -> Result<Vec<T>, EventError> {
    let at = text.span.start();
    let encoded = plain(data, text);
    let bytes = STANDARD
        .decoded_length(&encoded)
        .map_err(|_| metadata_error(at, path, "not valid base64 (standard alphabet, padded, no blanks)"))?;
    let size = size_of::<T>();
    if let Some((count, why)) = expected
        && count.checked_mul(size) != Some(bytes)
    {
        return Err(metadata_error(
            at,
            path,
            format!("found {bytes} bytes, expected {count} numbers of {size} bytes: {why}"),
        ));
    }
    if !bytes.is_multiple_of(size) {
        return Err(metadata_error(
            at,
            path,
            format!("{bytes} bytes are not a multiple of {size}, the size of one number"),
        ));
    }
    // The allocator's memory is zero already: zeroing it once more would take a fifth of the time of a large array.
    let mut numbers = try_zeroed_slice_box(bytes / size).map_err(|()| {
        EventError::new(ErrorKind::TooLarge, at, path, format!("out of memory for an array of {bytes} bytes"))
    })?;
    if !decode_blocks(&encoded, &mut numbers, on_block) {
        return Err(metadata_error(at, path, "not valid base64 (standard alphabet, padded, no blanks)"));
    }
    Ok(numbers.into_vec())
}

/// Decode base64 block by block. False: it is not valid.
fn decode_blocks<T: Pod>(encoded: &[u8], numbers: &mut [T], mut on_block: impl FnMut(&[T])) -> bool {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(numbers);
    let mut start = 0;
    encoded.chunks(BLOCK).all(|block| {
        let end = bytes.len().min(start + BLOCK / 4 * 3);
        let target = &mut bytes[start..end];
        // Padding inside the text would leave a block short.
        let is_valid = STANDARD
            .decode(block, base64_simd::Out::from_slice(target))
            .is_ok_and(|decoded| decoded.len() == end - start);
        on_block(bytemuck::try_cast_slice(&bytes[..end]).unwrap_or_default());
        start = end;
        is_valid
    })
}

/// The number of bytes that a base64 text decodes to, if it is valid.
pub(crate) fn base64_length(data: &[u8], text: RawStr) -> Option<usize> {
    STANDARD.decoded_length(&plain(data, text)).ok()
}

fn plain(data: &[u8], text: RawStr) -> Cow<'_, [u8]> {
    if text.has_escapes {
        let mut plain = Vec::new();
        unescape(text.span.of(data), &mut plain);
        Cow::Owned(plain)
    } else {
        Cow::Borrowed(text.span.of(data))
    }
}

pub(crate) fn metadata_error(at: usize, path: &'static str, message: impl Into<Cow<'static, str>>) -> EventError {
    EventError::new(ErrorKind::Metadata, at, path, message)
}

#[cfg(test)]
mod tests {
    use base64_simd::STANDARD;

    use super::{BLOCK, base64_array};
    use crate::error::EventError;
    use crate::span::{RawStr, Span};

    /// The array, and how many numbers `on_block` was given.
    fn decode(text: &str) -> Result<(Vec<u16>, usize), EventError> {
        let raw = RawStr { span: Span::new(0, text.len()), has_escapes: text.contains('\\') };
        let mut seen = Vec::new();
        let array = base64_array(text.as_bytes(), raw, None, "", |so_far: &[u16]| {
            assert!(so_far.starts_with(&seen), "the numbers of the block before are the first");
            seen = so_far.to_vec();
        })?;
        assert_eq!(array, seen, "after the last block all were given");
        Ok((array, seen.len()))
    }

    #[test]
    fn arrays_of_any_size_are_decoded_as_they_were_sent() {
        let block = BLOCK / 4 * 3 / 2;
        for length in [0, 1, 2, 3, block - 1, block, block + 1, 2 * block, 2 * block + 5] {
            let numbers: Vec<u16> = (0..=u16::MAX).cycle().take(length).collect();
            let text = STANDARD.encode_to_string(bytemuck::cast_slice(&numbers));
            assert_eq!(decode(&text).expect("sound"), (numbers.clone(), length));
            assert_eq!(decode(&text.replace('/', "\\/")).expect("sound"), (numbers, length));
        }
    }

    #[test]
    fn a_bad_character_is_an_error_in_any_block() {
        let text = "AAAA".repeat(BLOCK / 2);
        for place in [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, text.len() - 3] {
            for bad in ["=", "-", " ", "\n", "é"] {
                let mut text = text.clone();
                text.replace_range(place..=place, bad);
                assert!(decode(&text).is_err(), "{bad:?} at {place}");
            }
        }
        for block in ["AA==", "AAA="] {
            let padded = format!("{}{block}{}", &text[..BLOCK - 4], &text[BLOCK..]);
            assert!(decode(&padded).is_err(), "padding at the end of a block");
        }
    }
}
