//! vLLM's logprobs: `/inference/v1/generate` sends an object for each token, `/v1/completions` sends parallel lists.
//!
//! The id beside a logprob is `"token_id": 5`, or `"token": "token_id:5"`, or absent.

use crate::arrays::{NO_TOKEN, next_token};
use crate::field::{Field, List};
use crate::json::{Cursor, Peek, Result};
use crate::text::name;
use crate::vllm::buffers::{EventBuffers, NO_ID};

/// The prefix of a token's name if it holds the id instead of the text.
const PLACEHOLDER: &[u8] = b"token_id:";

/// Take `content`: `[{"token_id": 5, "logprob": -0.5, …}, …]`.
pub(super) fn next_entries(cursor: &mut Cursor<'_>, buffers: &mut EventBuffers, field: &mut Field<List>) -> Result<()> {
    buffers.clear_logprobs();
    next_elements(cursor, buffers, field, next_entry)
}

/// Take `token_logprobs`: `[-0.5, …]`.
pub(super) fn next_logprobs(
    cursor: &mut Cursor<'_>,
    buffers: &mut EventBuffers,
    field: &mut Field<List>,
) -> Result<()> {
    buffers.logprobs.clear();
    next_elements(cursor, buffers, field, |cursor, buffers| {
        let (logprob, malformed) = next_logprob(cursor, 5)?;
        buffers.logprobs.push(logprob);
        Ok(malformed)
    })
}

/// Take `tokens`: `["token_id:5", …]`, or texts, which hold no ids.
pub(super) fn next_names(cursor: &mut Cursor<'_>, buffers: &mut EventBuffers, field: &mut Field<List>) -> Result<()> {
    buffers.named_ids.clear();
    next_elements(cursor, buffers, field, |cursor, buffers| {
        buffers.named_ids.push(next_name(cursor, 5)?);
        Ok(None)
    })
}

/// Take the elements of a list. `take` returns the offset of an element of a wrong shape.
#[inline]
fn next_elements(
    cursor: &mut Cursor<'_>,
    buffers: &mut EventBuffers,
    field: &mut Field<List>,
    mut take: impl FnMut(&mut Cursor<'_>, &mut EventBuffers) -> Result<Option<usize>>,
) -> Result<()> {
    cursor.next_list(4, field, |cursor, list| {
        let mut len = 0;
        loop {
            if let Some(at) = take(cursor, buffers)? {
                list.mark_malformed(len, at);
            }
            len += 1;
            let end = cursor.at;
            if !cursor.next_element()? {
                list.set(len, 0, end);
                return Ok(());
            }
        }
    })
}

/// Take one entry into the buffers. Returns its offset, if it has another shape.
#[inline]
fn next_entry(cursor: &mut Cursor<'_>, buffers: &mut EventBuffers) -> Result<Option<usize>> {
    if let Some((id, logprob)) = next_plain_entry(cursor) {
        buffers.named_ids.push(id);
        buffers.logprobs.push(logprob);
        return Ok(None);
    }
    let object = cursor.look_for_object(5)?;
    let (mut id, mut name_id) = (NO_ID, NO_ID);
    let mut logprob = f64::NAN;
    let mut malformed = object.get().is_none().then_some(object.at());
    if malformed.is_none() {
        let data = cursor.data;
        let mut key = cursor.next_object()?;
        while let Some(raw) = key {
            match &*name(data, raw) {
                b"logprob" => (logprob, malformed) = next_logprob(cursor, 6)?,
                b"token_id" if cursor.peek()? == Peek::Null => {
                    cursor.skip_word(Peek::Null)?;
                    id = NO_ID;
                }
                b"token_id" => id = next_token(cursor, 6)?,
                b"token" => name_id = next_name(cursor, 6)?,
                _ => {
                    cursor.skip_value(6)?;
                }
            }
            key = cursor.next_member()?;
        }
    }
    buffers.named_ids.push(if id == NO_ID { name_id } else { id });
    buffers.logprobs.push(logprob);
    Ok(malformed)
}

/// Take an entry in one of the two forms that vLLM writes, without blanks. None, with nothing taken: anything else.
#[inline]
fn next_plain_entry(cursor: &mut Cursor<'_>) -> Option<(i32, f64)> {
    let start = cursor.at;
    let entry = plain_entry(cursor, start);
    if entry.is_none() {
        cursor.at = start;
    }
    entry
}

#[inline]
fn plain_entry(cursor: &mut Cursor<'_>, start: usize) -> Option<(i32, f64)> {
    let has_number = cursor.next_exact(br#"{"token_id":"#).is_some();
    if !has_number {
        cursor.next_exact(br#"{"token":"token_id:"#)?;
    }
    let id = if has_number {
        cursor.next_plain_integer()?
    } else {
        let id = cursor.next_plain_digits(|end| end == b'"')?;
        cursor.next_exact(b"\"")?;
        id
    };
    cursor.next_exact(br#","logprob":"#)?;
    // Converted at once: a Number that is written to memory and read back costs a stall.
    let logprob = cursor.next_number().ok()?.as_f64(cursor.data);
    if has_number {
        cursor.next_exact(br#","rank":"#)?;
        cursor.next_plain_integer()?;
    } else {
        cursor.next_exact(br#","bytes":null"#)?;
    }
    let end = cursor.at;
    cursor.next_exact(br#","top_logprobs":["#)?;
    // The sampled token is the first of the top logprobs, with the same bytes as before.
    cursor.next_again(start, end)?;
    cursor.next_exact(b"}")?;
    while cursor.next_exact(b"]}").is_none() {
        cursor.next_exact(b",")?;
        cursor.skip_value(7).ok()?;
    }
    Some((i32::try_from(id).ok()?, logprob))
}

/// Take a logprob. NaN: it is null, or not a number, whose offset is returned.
#[inline]
fn next_logprob(cursor: &mut Cursor<'_>, depth: u32) -> Result<(f64, Option<usize>)> {
    match cursor.peek()? {
        Peek::Number => Ok((cursor.next_number()?.as_f64(cursor.data), None)),
        Peek::Null => {
            cursor.skip_word(Peek::Null)?;
            Ok((f64::NAN, None))
        }
        _ => Ok((f64::NAN, Some(cursor.skip_value(depth)?.start()))),
    }
}

/// Take the name of a token. Returns the id in it, if it has one.
fn next_name(cursor: &mut Cursor<'_>, depth: u32) -> Result<i32> {
    if cursor.peek()? != Peek::String {
        cursor.skip_value(depth)?;
        return Ok(NO_ID);
    }
    let data = cursor.data;
    let raw = cursor.next_string()?;
    let text = name(data, raw);
    let digits = text.strip_prefix(PLACEHOLDER).filter(|digits| digits.iter().all(u8::is_ascii_digit));
    let Some(digits) = digits.filter(|digits| !digits.is_empty()) else { return Ok(NO_ID) };
    Ok(std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).unwrap_or(NO_TOKEN))
}
