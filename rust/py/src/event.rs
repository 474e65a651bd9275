//! Converts the events of an exchange to what Python is told: a kind and its payload.

use pyo3::exceptions::{PyConnectionError, PyOSError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;
use streamfold_core::Error;
use streamfold_io::{Event, Failure, Head, Shared};

use crate::errors::{raise, raise_bug};

/// Pass kind and payload of each event that concerns Python on to `add`.
///
/// `events` are consecutive events of `exchange`, with none of an input left out: a failure inside of a stream is the
/// cause of the error that follows it. Frees the body of the request when it is no longer needed.
///
/// | kind | payload |
/// | --- | --- |
/// | `"head"` | `(status, is_stream, [(name, value), ...])`, or None in place of the fields of a stream |
/// | `"first_token"`, `"tokens"`, `"finished"`, `"overrun"` | None |
/// | `"error"` | the exception, to be raised |
/// | `"failed"` | `(errno or None, message, is_unanswered)` |
/// | `"ended"` | whether the connection can carry another request |
pub(crate) fn convert<'py>(
    py: Python<'py>,
    exchange: &Shared,
    events: impl IntoIterator<Item = Event>,
    mut add: impl FnMut(&Bound<'py, PyString>, Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    let none = || py.None().into_bound(py);
    let mut events = events.into_iter().peekable();
    while let Some(event) = events.next() {
        match event {
            // Known from the driver's own calls, or told by the end that follows.
            Event::Connected | Event::Sent | Event::Refused => {}
            Event::Head(head) => {
                exchange.unpin();
                add(intern!(py, "head"), head_payload(py, &head, exchange.is_stream(&head))?)?;
            }
            Event::FirstToken => add(intern!(py, "first_token"), none())?,
            Event::Tokens => add(intern!(py, "tokens"), none())?,
            Event::Finished => add(intern!(py, "finished"), none())?,
            Event::Overrun => add(intern!(py, "overrun"), none())?,
            Event::DecodeError(error) => add(intern!(py, "error"), exception(py, &error, None))?,
            Event::Failed { failure, is_unanswered } => {
                if let Some(Event::DecodeError(error)) = events.next_if(|next| matches!(next, Event::DecodeError(_))) {
                    add(intern!(py, "error"), exception(py, &error, Some(&failure)))?;
                } else {
                    let payload = (errno(&failure), failure.to_string(), is_unanswered);
                    add(intern!(py, "failed"), payload.into_pyobject(py)?.into_any())?;
                }
            }
            Event::Panicked => add(intern!(py, "error"), raise_bug(py).into_value(py).into_bound(py).into_any())?,
            Event::Ended { reusable } => {
                exchange.unpin();
                add(intern!(py, "ended"), reusable.into_pyobject(py)?.to_owned().into_any())?;
            }
        }
    }
    Ok(())
}

fn head_payload<'py>(py: Python<'py>, head: &Head, is_stream: bool) -> PyResult<Bound<'py, PyAny>> {
    let fields = (!is_stream).then(|| head.headers.iter().collect::<Vec<_>>());
    Ok((head.status, is_stream, fields).into_pyobject(py)?.into_any())
}

fn errno(failure: &Failure) -> Option<i32> {
    match failure {
        Failure::Connect(errno) | Failure::Reset(errno) => Some(*errno),
        Failure::Closed | Failure::Tls(_) | Failure::Protocol(_) => None,
    }
}

fn exception<'py>(py: Python<'py>, error: &Error, failure: Option<&Failure>) -> Bound<'py, PyAny> {
    let raised = raise(py, error);
    if let Some(failure) = failure {
        // With an errno, Python makes its subclass of it, such as ConnectionResetError.
        let cause = errno(failure).map_or_else(
            || PyConnectionError::new_err(failure.to_string()),
            |errno| PyOSError::new_err((errno, failure.to_string())),
        );
        raised.set_cause(py, Some(cause));
    }
    raised.into_value(py).into_bound(py).into_any()
}
