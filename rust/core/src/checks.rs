//! Checks of an event that all dialects share.

use crate::arrays::NO_TOKEN;
use crate::error::{ErrorKind, EventError};
use crate::field::Field;
use crate::options::{Clamped, Options};
use crate::span::RawStr;
use crate::text::decode;

/// What engines send instead of minus infinity: the lowest float32, and vLLM's own value.
const CLAMPED: [f64; 2] = [-3.402_823_466_385_288_6e38, -9999.0];

/// `index` is absent or 0: one stream is one generation.
pub(crate) fn index(index: &Field<u64>, path: &'static str) -> Result<(), EventError> {
    if index.is_wrong() || index.get().is_some_and(|index| index != 0) {
        let message =
            "the stream has several generations; request n = 1 with one prompt, and use one parser for each stream";
        return Err(EventError::new(ErrorKind::Schema, index.at(), path, message));
    }
    Ok(())
}

/// The request id does not change: one stream is one request.
pub(crate) fn id(data: &[u8], id: &Field<RawStr>, known: Option<&str>, path: &'static str) -> Result<(), EventError> {
    if id.is_wrong() {
        return Err(EventError::new(ErrorKind::Schema, id.at(), path, "expected a string"));
    }
    let (Some(now), Some(before)) = (id.get(), known) else { return Ok(()) };
    if !now.has_escapes && now.span.of(data) == before.as_bytes() {
        return Ok(());
    }
    let now = decode(data, now);
    if now == before {
        return Ok(());
    }
    let message =
        format!("the request id was {before:?} and is now {now:?}: events of two requests are mixed in this stream");
    Err(EventError::new(ErrorKind::Schema, id.at(), path, message))
}

/// The engine reports as many prompt tokens as were sent.
pub(crate) fn prompt_tokens(reported: &Field<u64>, options: &Options, path: &'static str) -> Result<(), EventError> {
    match (reported.get(), options.prompt_len) {
        (Some(count), Some(sent)) if count != sent => {
            let message = format!("the engine reports a prompt of {count} tokens, but {sent} were sent");
            Err(EventError::new(ErrorKind::Length, reported.at(), path, message))
        }
        _ => Ok(()),
    }
}

/// New token ids are in range. `place` gives the offset and the path of an element.
pub(crate) fn ids(data: &[u8], ids: &[i32], place: impl FnOnce(usize) -> (usize, String)) -> Result<(), EventError> {
    let Some(bad) = ids.iter().position(|&id| id == NO_TOKEN) else { return Ok(()) };
    let (at, path) = place(bad);
    let message = format!("{} is not an integer in 0 … 2147483647", excerpt(data, at));
    Err(EventError::new(ErrorKind::Token, at, path, message))
}

/// New logprobs are valid. Returns how many are the substitute for minus infinity, if `clamped` keeps those.
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
            format!(
                "{what} is the engine's substitute for minus infinity: the sampled token had probability 0; \
                 clamped=\"keep\" keeps it"
            )
        } else if logprob.is_nan() {
            format!("{what} is not a logprob: the engine computed NaN or infinity for a sampled token")
        } else {
            format!("{what} exceeds the range of a double")
        };
        return Err(EventError::new(ErrorKind::Logprob, at, path, message));
    }
    Ok(count)
}

/// The first bytes of a value, for a message.
pub(crate) fn excerpt(data: &[u8], at: usize) -> String {
    let rest = &data[at.min(data.len())..];
    let end = rest.iter().position(|byte| matches!(byte, b',' | b']' | b'}')).unwrap_or(rest.len()).min(40);
    String::from_utf8_lossy(&rest[..end]).into_owned()
}
