//! Errors that the engine or a router sends inside a stream, in all the shapes they use.

use crate::error::EngineError;
use crate::field::Field;
use crate::json::Cursor;
use crate::span::{RawStr, Span};
use crate::text::{decode, label};

/// The fields at the top of an event that report an error.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ErrorFields {
    pub error: Field<Span>,
    pub object: Field<RawStr>,
    pub message: Field<Span>,
    pub detail: Field<Span>,
    pub code: Field<Span>,
}

impl ErrorFields {
    /// Whether the event reports an error. If it `is_event`, with the key that every event of a generation has, only
    /// `error` makes it one.
    pub(crate) fn is_error(&self, data: &[u8], is_event: bool) -> bool {
        let is_error_object = self.object.get().is_some_and(|object| decode(data, object) == "error");
        self.error(data).is_some() || (!is_event && (self.detail.get().is_some() || is_error_object))
    }

    /// The value of `error`, if it is an object or a string.
    fn error(&self, data: &[u8]) -> Option<Span> {
        self.error.get().filter(|value| matches!(data[value.start()], b'{' | b'"'))
    }

    /// The message and the status that the event reports.
    pub(crate) fn engine_error(&self, data: &[u8]) -> EngineError {
        let outer = (self.message.get(), self.code.get());
        let (message, code) = match (self.error(data), self.detail.get()) {
            (Some(error), _) if data[error.start()] == b'{' => {
                let (message, code) = members(data, error);
                (message, code.or(outer.1))
            }
            (Some(error), _) => (Some(error), outer.1),
            (None, Some(detail)) => (Some(detail), outer.1),
            (None, None) => outer,
        };
        let message = match message.or(self.error(data)) {
            Some(value) => label(data, value),
            None => String::from_utf8_lossy(data).into_owned(),
        };
        let digits = code.map(|code| label(data, code)).filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()));
        let status = digits.and_then(|code| code.parse().ok());
        EngineError { message, status }
    }
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
