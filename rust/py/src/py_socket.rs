//! What a non-blocking `socket.socket` of Python, or the transport above it, is asked for.

use pyo3::exceptions::{PyBlockingIOError, PyOSError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;

/// End both directions. A forked child may still hold the socket: only this tells the server.
pub(crate) fn shut_down(socket: &Bound<'_, PyAny>) -> PyResult<()> {
    const SHUT_RDWR: i32 = 2;
    let py = socket.py();
    match socket.call_method1(intern!(py, "shutdown"), (SHUT_RDWR,)) {
        Err(error) if error.is_instance_of::<PyOSError>(py) => Ok(()), // the server was faster
        result => result.map(drop),
    }
}

/// Whether the server has closed the connection, or has sent a byte that was not read yet.
pub(crate) fn shows_anything(socket: &Bound<'_, PyAny>) -> PyResult<bool> {
    const MSG_PEEK: i32 = 2;
    let py = socket.py();
    match socket.call_method1(intern!(py, "recv"), (1, MSG_PEEK)) {
        Err(error) if error.is_instance_of::<PyBlockingIOError>(py) => Ok(false),
        Err(error) if !error.is_instance_of::<PyOSError>(py) => Err(error),
        _ => Ok(true),
    }
}

/// The next bytes that have arrived, at most `size`; None if there are none.
pub(crate) fn receive<'py>(socket: &Bound<'py, PyAny>, size: usize) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let py = socket.py();
    match socket.call_method1(intern!(py, "recv"), (size,)) {
        Err(error) if error.is_instance_of::<PyOSError>(py) => Ok(None),
        Err(error) => Err(error),
        Ok(part) => {
            let part = part.cast_into::<PyBytes>()?;
            Ok((!part.as_bytes().is_empty()).then_some(part))
        }
    }
}

/// The errno of an error that a transport reports. Those of TLS have numbers of their own.
pub(crate) fn errno(error: &Bound<'_, PyAny>) -> PyResult<i32> {
    static TLS_ERROR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = error.py();
    let by_name = |name| py.import(intern!(py, "errno"))?.getattr(name)?.extract();
    if error.is_instance(TLS_ERROR.import(py, "ssl", "SSLError")?)? {
        return by_name("EPROTO");
    }
    let number = error.getattr_opt(intern!(py, "errno"))?.and_then(|number| number.extract().ok());
    number.map_or_else(|| by_name("ECONNRESET"), Ok)
}
