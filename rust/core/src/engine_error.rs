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

    /// The message, the status and the name that the event reports.
    pub(crate) fn engine_error(&self, data: &[u8]) -> EngineError {
        let error = self.error(data);
        let inner = error.filter(|error| data[error.start()] == b'{').map(|error| members(data, error, 2));
        let message = match (error, &inner, self.detail.get()) {
            (Some(_), Some(inner), _) => inner.message,
            (None, _, Some(value)) | (Some(value), None, _) => Some(value),
            (None, _, None) => self.message.get(),
        };
        let message = match message.or(error) {
            Some(value) => label(data, value),
            None => String::from_utf8_lossy(data).into_owned(),
        };
        let inner = inner.unwrap_or_default();
        let kind = members(data, Span::new(0, data.len()), 1).kind;
        let told = [inner.code, self.code.get(), inner.kind, kind].into_iter().flatten();
        let (numbers, names): (Vec<_>, Vec<_>) = told
            .filter(|value| matches!(data[value.start()], b'"' | b'0'..=b'9'))
            .map(|value| label(data, value))
            .partition(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
        let status = numbers.iter().find_map(|number| number.parse().ok());
        // vLLM's Rust frontend tells no number.
        let is_server_error = names.iter().any(|name| name == "server_error");
        EngineError { message, status: status.or(is_server_error.then_some(500)), code: names.into_iter().next() }
    }
}

/// What an error object tells, each as it stands there.
#[derive(Default)]
struct Members {
    message: Option<Span>,
    code: Option<Span>,
    kind: Option<Span>,
}

/// The members of an error object. Its values stand at this depth.
fn members(data: &[u8], object: Span, depth: u32) -> Members {
    let mut cursor = Cursor::over(data, object);
    let mut found = Members::default();
    let mut key = cursor.next_object();
    while let Ok(Some(raw)) = key {
        let Ok(value) = cursor.skip_value(depth) else { break };
        match decode(data, raw).as_str() {
            "message" => found.message = Some(value),
            "code" => found.code = Some(value),
            "type" => found.kind = Some(value),
            _ => {}
        }
        key = cursor.next_member();
    }
    found
}
