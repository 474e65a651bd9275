//! Arrays of numbers, sent as JSON lists or base64, parsed into typed buffers.

use std::borrow::Cow;

use base64_simd::STANDARD;
use bytemuck::Pod;

use crate::error::{ErrorKind, EventError};
use crate::json::{Cursor, Peek, Result as JsonResult};
use crate::span::{RawStr, Span};
use crate::text::unescape;

#[cfg(not(target_endian = "little"))]
compile_error!("engines send little-endian arrays, and they are copied as they are");

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
            base64_array::<i32>(data, text, None, path)?
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
/// `expected` is the required number of elements and the reason.
pub(crate) fn base64_array<T: Pod>(
    data: &[u8],
    text: RawStr,
    expected: Option<(usize, &str)>,
    path: &'static str,
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
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(bytes / size).map_err(|_| {
        EventError::new(ErrorKind::TooLarge, at, path, format!("out of memory for an array of {bytes} bytes"))
    })?;
    numbers.resize(bytes / size, T::zeroed());
    let target = base64_simd::Out::from_slice(bytemuck::cast_slice_mut(&mut numbers));
    STANDARD
        .decode(&encoded, target)
        .map_err(|_| metadata_error(at, path, "not valid base64 (standard alphabet, padded, no blanks)"))?;
    Ok(numbers)
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
