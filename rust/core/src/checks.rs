//! What is checked of an event in every dialect.

use crate::arrays::NO_TOKEN;
use crate::error::{ErrorKind, EventError};
use crate::field::Field;
use crate::options::{Clamped, Options};
use crate::span::RawStr;
use crate::text::decode;

/// What engines write for minus infinity: the smallest float32, and vLLM's own.
const CLAMPED: [f64; 2] = [-3.402_823_466_385_288_6e38, -9999.0];

/// One stream is one generation.
pub(crate) fn index(index: &Field<u64>, path: &'static str) -> Result<(), EventError> {
    if index.is_wrong() || index.get().is_some_and(|index| index != 0) {
        let message =
            "this stream holds several requests; ask for n = 1 and one prompt, and read each stream by itself";
        return Err(EventError::new(ErrorKind::Schema, index.at(), path, message));
    }
    Ok(())
}

/// One stream is one request.
pub(crate) fn id(data: &[u8], id: &Field<RawStr>, known: Option<&str>, path: &'static str) -> Result<(), EventError> {
    if id.is_wrong() {
        return Err(EventError::new(ErrorKind::Schema, id.at(), path, "a string was expected"));
    }
    let (Some(now), Some(before)) = (id.get(), known) else { return Ok(()) };
    if !now.has_escapes && now.span.of(data) == before.as_bytes() {
        return Ok(());
    }
    let now = decode(data, now);
    if now == before {
        return Ok(());
    }
    let message = format!("it was {before:?} and is {now:?}: the events of two requests are mixed");
    Err(EventError::new(ErrorKind::Schema, id.at(), path, message))
}

/// The prompt has as many tokens as were sent.
pub(crate) fn prompt_tokens(reported: &Field<u64>, options: &Options, path: &'static str) -> Result<(), EventError> {
    match (reported.get(), options.prompt_len) {
        (Some(count), Some(sent)) if count != sent => {
            let message = format!("the engine reports a prompt of {count} tokens, but {sent} were sent");
            Err(EventError::new(ErrorKind::Length, reported.at(), path, message))
        }
        _ => Ok(()),
    }
}

/// New ids; `place` tells where one stands, and its path.
pub(crate) fn ids(data: &[u8], ids: &[i32], place: impl FnOnce(usize) -> (usize, String)) -> Result<(), EventError> {
    let Some(bad) = ids.iter().position(|&id| id == NO_TOKEN) else { return Ok(()) };
    let (at, path) = place(bad);
    let message = format!("{} is no integer in 0 … 2147483647", excerpt(data, at));
    Err(EventError::new(ErrorKind::Token, at, path, message))
}

/// New logprobs: how many are stand-ins for minus infinity, if those are to be kept.
pub(crate) fn logprobs(
    data: &[u8],
    logprobs: &[f64],
    clamped: Clamped,
    place: impl FnOnce(usize) -> (usize, String),
) -> Result<usize, EventError> {
    let mut count = 0;
    for (index, &logprob) in logprobs.iter().enumerate() {
        let is_clamped = CLAMPED.contains(&logprob);
        if logprob.is_finite() && (!is_clamped || clamped == Clamped::Keep) {
            count += usize::from(is_clamped);
            continue;
        }
        let (at, path) = place(index);
        let what = excerpt(data, at);
        let message = if is_clamped {
            format!("{what} stands for minus infinity: the sampled token had no probability; clamped=\"keep\" keeps it")
        } else if logprob.is_nan() {
            format!("{what} is no logprob: the engine computed NaN or infinity for a token that it sampled")
        } else {
            format!("{what} is beyond the range of a double")
        };
        return Err(EventError::new(ErrorKind::Logprob, at, path, message));
    }
    Ok(count)
}

/// A few bytes of a value, for a message.
pub(crate) fn excerpt(data: &[u8], at: usize) -> String {
    let rest = &data[at.min(data.len())..];
    let end = rest.iter().position(|byte| matches!(byte, b',' | b']' | b'}')).unwrap_or(rest.len()).min(40);
    String::from_utf8_lossy(&rest[..end]).into_owned()
}
