use std::sync::Arc;

use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use streamfold_io::{Body, Expected, Shared};

use crate::durations::Durations;
use crate::experts::Experts;
use crate::generation::Generation;
use crate::options::{StreamOptions, natural};
use crate::request_head::RequestHead;

/// One request and its reply, on one connection: a socket layer drives it, and its caller takes the result.
///
/// Made by :meth:`stream`, :meth:`reply` or :meth:`replies`. Can be used from any thread.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct Exchange {
    pub(crate) shared: Arc<Shared>,
    experts: Option<streamfold_core::Experts>,
}

// The lock of the exchange may be waited for while attached: who holds it never waits for the interpreter.
#[pymethods]
impl Exchange {
    /// A request whose reply should be a stream of tokens. The keywords are those of :class:`Parser`.
    ///
    /// The stream ends 256 tokens past ``max_new_tokens``, with the finish reason ``"length"``. Of a reply that is no
    /// stream, 64 KiB of the body are kept. ``body`` is held without a copy until the head of the reply has come.
    ///
    /// Raises ``ValueError`` if a keyword has no valid value.
    #[staticmethod]
    #[pyo3(signature = (head, body, dialect, *, logprobs=true, experts=None, prompt_len=None, experts_start=0,
                        clamped="raise", max_new_tokens=None, token_limit=None, max_event_bytes=1_073_741_824))]
    #[allow(clippy::too_many_arguments, reason = "the contract's keywords")]
    fn stream(
        head: &RequestHead,
        body: &Bound<'_, PyBytes>,
        dialect: &str,
        logprobs: bool,
        experts: Option<&Bound<'_, Experts>>,
        prompt_len: Option<i64>,
        experts_start: i64,
        clamped: &str,
        max_new_tokens: Option<i64>,
        token_limit: Option<i64>,
        max_event_bytes: i64,
    ) -> PyResult<Self> {
        let StreamOptions { dialect, options, .. } = StreamOptions::new(
            dialect,
            logprobs,
            experts,
            prompt_len,
            experts_start,
            clamped,
            max_new_tokens,
            token_limit,
            max_event_bytes,
        )?;
        Ok(Self::new(head, body, Expected::Stream { dialect, options }, options.experts))
    }

    /// A request whose reply may be any: of its body ``max_bytes``, 0 or more, are kept, for :meth:`take_body`.
    #[staticmethod]
    #[pyo3(signature = (head, body, *, max_bytes))]
    fn reply(head: &RequestHead, body: &Bound<'_, PyBytes>, max_bytes: i64) -> PyResult<Self> {
        Ok(Self::new(head, body, Expected::Body { max_bytes: natural("max_bytes", max_bytes)? }, None))
    }

    /// As many requests as there are bodies, at least one, sent in one go (HTTP/1.1 pipelining), and their replies.
    ///
    /// Replies with a status below 300 are passed over and counted in :attr:`passed`, up to the one that is reported as
    /// with :meth:`reply`: the last, or the first other one, or one after which the connection ends.
    #[staticmethod]
    #[pyo3(signature = (head, bodies, *, max_bytes))]
    #[allow(clippy::needless_pass_by_value, reason = "converted from a sequence")]
    fn replies(head: &RequestHead, bodies: Vec<PyBackedBytes>, max_bytes: i64) -> PyResult<Self> {
        if bodies.is_empty() {
            return Err(PyValueError::new_err("bodies must hold one body at least"));
        }
        let bodies: Vec<&[u8]> = bodies.iter().map(AsRef::as_ref).collect();
        let shared = Shared::pipelined(&head.0, &bodies, natural("max_bytes", max_bytes)?);
        Ok(Self { shared: Arc::new(shared), experts: None })
    }

    /// The number of good replies before the one that is reported; see :meth:`replies`.
    #[getter]
    fn passed(&self) -> usize {
        self.shared.passed()
    }

    /// The number of tokens received so far.
    #[getter]
    fn token_count(&self) -> usize {
        self.shared.token_count()
    }

    /// When the first token was read from the socket: seconds of ``time.monotonic()``; infinity before.
    #[getter]
    fn first_token_at(&self) -> f64 {
        self.shared.first_token_at()
    }

    /// When the latest token was read from the socket: seconds of ``time.monotonic()``; infinity before one.
    #[getter]
    fn last_token_at(&self) -> f64 {
        self.shared.last_token_at()
    }

    /// The times between the tokens so far, and how many reads brought them. After :meth:`take` too.
    fn gaps(&self) -> (Durations, u32) {
        let gaps = self.shared.gaps();
        (gaps.durations().clone().into(), gaps.reads())
    }

    /// Bytes of memory held, without the request's body.
    #[getter]
    fn held_bytes(&self) -> usize {
        self.shared.held_bytes()
    }

    /// A copy of the tokens received so far: int32 ``[n]``. Empty after :meth:`take`.
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.shared.token_ids().into_pyarray(py)
    }

    /// Return a copy of what the stream has brought so far, which goes on. Empty after :meth:`take`.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, Generation>> {
        Generation::from_core(py, self.shared.snapshot(), self.experts)
    }

    /// Report ``"tokens"`` once ``count`` have come, in place of an earlier ``count``. Returns whether they have.
    fn notify_at(&self, count: usize) -> bool {
        self.shared.notify_at(count)
    }

    /// Return what the stream has brought so far, at any time; it is not read any further. Empty the second time.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, Generation>> {
        let generation = self.shared.take();
        // After the exchange has let go of the body, so that it is freed here, and not by who drives the exchange.
        self.shared.unpin();
        Generation::from_core(py, generation, self.experts)
    }

    /// Return what was kept of the body of a reply that is no stream. The second call returns no bytes.
    fn take_body<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.shared.take_body())
    }

    fn __repr__(&self) -> String {
        format!("<Exchange {:?}, token_count={}>", self.shared.state(), self.shared.token_count())
    }
}

impl Exchange {
    fn new(
        head: &RequestHead,
        body: &Bound<'_, PyBytes>,
        expected: Expected,
        experts: Option<streamfold_core::Experts>,
    ) -> Self {
        let body: Body = Arc::new(PyBackedBytes::from(body.clone()));
        Self { shared: Arc::new(Shared::new(head.0.clone(), body, expected)), experts }
    }
}
