use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use streamfold_io::{Method, RequestError, check_field};

/// The head of an HTTP/1.1 request, checked and written once: method, path, ``Host`` and header fields.
///
/// - ``method``: ``"GET"`` or ``"POST"``. The body of a GET is not sent.
/// - ``target``: the path with its query, percent-encoded.
/// - ``host``: what the ``Host`` field holds: a name or an address, in brackets if it is IPv6 and without its zone, and
///   a port unless it is the default one.
/// - ``fields``: names and values, in their order. Values are sent in latin-1.
///
/// Raises ``ValueError`` that names the part that can't be sent; see :meth:`check_field`.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct RequestHead(pub(crate) streamfold_io::RequestHead);

#[pymethods]
impl RequestHead {
    #[new]
    #[pyo3(signature = (method, target, host, fields=Vec::new()))]
    #[allow(clippy::needless_pass_by_value, reason = "converted from a sequence")]
    fn new(method: &str, target: &str, host: &str, fields: Vec<(String, String)>) -> PyResult<Self> {
        let method = match method {
            "GET" => Method::Get,
            "POST" => Method::Post,
            _ => return Err(PyValueError::new_err(format!("method must be \"GET\" or \"POST\", not {method:?}"))),
        };
        let mut head = streamfold_io::RequestHead::new(method, target, host).map_err(refuse)?;
        for (name, value) in &fields {
            head = head.field(name, value).map_err(refuse)?;
        }
        Ok(Self(head))
    }

    /// Check a header field that a user wants to send.
    ///
    /// Raises ``ValueError`` if the name is no token or is one that the client writes itself (``Content-Length``,
    /// ``Transfer-Encoding``, ``Connection``, ``Host``, ``Expect``, ``Upgrade``, ``TE``, ``Trailer``), or if the value
    /// holds a control character or a character beyond latin-1.
    #[staticmethod]
    #[pyo3(name = "check_field")]
    fn check(name: &str, value: &str) -> PyResult<()> {
        check_field(name, value).map_err(refuse)
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn refuse(error: RequestError) -> PyErr {
    PyValueError::new_err(error.to_string())
}
