//! Converts errors of the core to the Python exceptions of `streamfold.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use streamfold_core::Error;

const MODULE: &str = "streamfold.errors";

pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failure| failure)
}

/// The exception for a panic in the core: a bug, which ends one sample but not the trainer.
pub(crate) fn raise_bug(py: Python<'_>) -> PyErr {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let message = "the parser failed on this stream. This is a bug in streamfold: please report it with the stream \
                   (`streamfold record` saves one)";
    let exception = CLASS.import(py, MODULE, "StreamfoldError").and_then(|class| class.call1((message,)));
    exception.map_or_else(|failure| failure, PyErr::from_value)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    static DECODE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static ENGINE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static TRUNCATED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let attributes = PyDict::new(py);
    let (class, message) = match error {
        Error::Parse(error) => {
            attributes.set_item("kind", error.kind.name())?;
            attributes.set_item("offset", error.offset)?;
            attributes.set_item("path", &*error.path)?;
            (DECODE.import(py, MODULE, "DecodeError")?, error.to_string())
        }
        Error::Engine(error) => {
            attributes.set_item("status", error.status)?;
            attributes.set_item("code", error.code.as_deref())?;
            (ENGINE.import(py, MODULE, "EngineError")?, error.message.clone())
        }
        Error::Truncated { bytes, is_done, .. } => {
            attributes.set_item("received", bytes)?;
            attributes.set_item("done", is_done)?;
            (TRUNCATED.import(py, MODULE, "StreamTruncated")?, error.to_string())
        }
    };
    Ok(PyErr::from_value(class.call((message,), Some(&attributes))?))
}
