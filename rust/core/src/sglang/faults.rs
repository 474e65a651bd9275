//! The engine's own errors, in every shape that it and the routers before it use.

use crate::error::EngineFault;
use crate::generation::FinishReason;
use crate::json::{Cursor, Span};
use crate::sglang::decode;
use crate::sglang::fields::{Fields, Finish, RawMatched, Value};
use crate::sglang::side::label;

/// Whether an event is an error instead of a part of the generation.
pub(super) fn is_error_object(data: &[u8], fields: &Fields) -> bool {
    let is_event = !matches!(fields.meta_info.value, Value::Absent);
    let says_error = fields.object.get().is_some_and(|object| decode(data, object) == "error");
    error(data, fields).is_some() || (!is_event && (fields.detail.get().is_some() || says_error))
}

/// The value of `error`, if it can be one: an object or a text.
fn error(data: &[u8], fields: &Fields) -> Option<Span> {
    fields.error.get().filter(|value| matches!(data[value.start()], b'{' | b'"'))
}

/// A finish reason that is a failure of the engine.
pub(super) fn finish_fault(data: &[u8], finish: &Finish) -> Option<EngineFault> {
    if let Some(RawMatched::Text(raw)) = finish.matched
        && decode(data, raw) == "NaN happened"
    {
        let message = "the engine sampled from NaN and put a stop token in place of the result".to_owned();
        return Some(EngineFault { message, status: None });
    }
    let status = finish.status.get().and_then(|status| u16::try_from(status).ok());
    let status = status.filter(|status| (400..600).contains(status) && finish.reason == Some(FinishReason::Abort))?;
    let message = finish.message.map_or_else(|| "the engine aborted the request".to_owned(), |raw| decode(data, raw));
    Some(EngineFault { message, status: Some(status) })
}

/// What an error event says, in any of the shapes that engines and routers use.
pub(super) fn error_object(data: &[u8], fields: &Fields) -> EngineFault {
    let outer = (fields.message.get(), fields.code.get());
    let (message, code) = match (error(data, fields), fields.detail.get()) {
        (Some(error), _) if data[error.start()] == b'{' => {
            let (message, code) = members(data, error);
            (message, code.or(outer.1))
        }
        (Some(error), _) => (Some(error), outer.1),
        (None, Some(detail)) => (Some(detail), outer.1),
        (None, None) => outer,
    };
    let message = match message.or(error(data, fields)) {
        Some(value) => label(data, value),
        None => String::from_utf8_lossy(data).into_owned(),
    };
    let digits = code.map(|code| label(data, code)).filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()));
    let status = digits.and_then(|code| code.parse().ok());
    EngineFault { message, status }
}

/// `message` and `code` of an error object.
fn members(data: &[u8], object: Span) -> (Option<Span>, Option<Span>) {
    let mut cursor = Cursor::over(data, object);
    let (mut message, mut code) = (None, None);
    let mut key = cursor.next_object();
    while let Ok(Some(raw)) = key {
        let Ok(value) = cursor.skip_value(2) else { break };
        match decode(data, raw).as_str() {
            "message" => message = Some(value),
            "code" => code = Some(value),
            _ => {}
        }
        key = cursor.next_member();
    }
    (message, code)
}
