use std::panic::{AssertUnwindSafe, catch_unwind};

use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

use crate::errors::{raise, raise_bug};
use crate::experts::Experts;
use crate::generation::Generation;
use crate::options::StreamOptions;

/// Parses the body of one streamed response into one :class:`Generation`.
///
/// - ``dialect``: the format of the stream, one of ``DIALECTS``.
/// - ``logprobs``: whether logprobs were requested. If so, tokens without logprobs are a ``DecodeError``.
/// - ``experts``: the shape of routed experts, if they were requested.
/// - ``prompt_len``: the number of prompt tokens sent. It is checked against the engine's count.
/// - ``experts_start``: the position of the first row of routed experts.
/// - ``clamped``: what to do with the engine's substitute for a logprob of minus infinity: ``"raise"`` a
///   ``DecodeError``, or ``"keep"`` and count it.
/// - ``max_new_tokens``: the number of tokens to reserve memory for when the first ones arrive. It is not a limit.
/// - ``token_limit``: the event with which the stream has more tokens than this is its last: its tokens are kept, the
///   finish reason is ``"length"``, and later events are skipped.
/// - ``max_event_bytes``: an event with more bytes is a ``DecodeError``.
///
/// Events are applied atomically. After an error, :meth:`feed` and :meth:`close` raise it again, and :meth:`take`
/// returns the tokens before the event with the error.
#[pyclass(module = "streamfold._core")]
pub(crate) struct Parser {
    inner: streamfold_core::Parser,
    dialect: &'static str,
    experts: Option<streamfold_core::Experts>,
    is_closed: bool,
    is_taken: bool,
    /// The core panicked: no more bytes are fed.
    is_broken: bool,
}

#[pymethods]
impl Parser {
    #[new]
    #[pyo3(signature = (dialect, *, logprobs=true, experts=None, prompt_len=None, experts_start=0, clamped="raise",
                        max_new_tokens=None, token_limit=None, max_event_bytes=1_073_741_824))]
    #[allow(clippy::too_many_arguments, reason = "the contract's keywords")]
    fn new(
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
        let StreamOptions { name, dialect, options } = StreamOptions::new(
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
        let inner = streamfold_core::Parser::new(dialect, options);
        Ok(Self { inner, dialect: name, experts: options.experts, is_closed: false, is_taken: false, is_broken: false })
    }

    /// Parse the next bytes of the body, split at any byte. Returns the number of tokens that became available.
    ///
    /// Raises ``DecodeError`` if the bytes break a rule of the dialect, ``EngineError`` if the engine reports an error
    /// in the stream, and ``ValueError`` after :meth:`close` or :meth:`take`.
    #[pyo3(signature = (data, /))]
    fn feed(&mut self, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.check_not_taken()?;
        if self.is_closed {
            // After an error, raise it again.
            self.run(data.py(), |parser| parser.close(true))?;
            return Err(PyValueError::new_err(
                "the parser is closed: its stream has ended; create a parser for each stream",
            ));
        }
        if let Ok(bytes) = data.cast::<PyBytes>() {
            return self.run(data.py(), |parser| parser.feed(bytes.as_bytes()));
        }
        if !data.is_instance_of::<PyByteArray>() && !data.is_instance_of::<PyMemoryView>() {
            let kind = data.get_type().name()?;
            return Err(PyTypeError::new_err(format!("feed takes bytes, bytearray or memoryview, not {kind}")));
        }
        // Copied, because another thread could change or shrink the buffer meanwhile.
        let bytes = data.py().get_type::<PyBytes>().call1((data,))?.cast_into::<PyBytes>()?;
        self.run(data.py(), |parser| parser.feed(bytes.as_bytes()))
    }

    /// End the stream: the body is complete or the connection is closed.
    ///
    /// Raises ``StreamTruncated`` if there was no finish reason, unless ``aborted``; ``DecodeError`` or ``EngineError``
    /// as :meth:`feed` does; ``ValueError`` after :meth:`take`.
    #[pyo3(signature = (aborted=false))]
    fn close(&mut self, py: Python<'_>, aborted: bool) -> PyResult<()> {
        self.check_not_taken()?;
        self.is_closed = true;
        self.run(py, |parser| parser.close(aborted))
    }

    /// Return the tokens and side data received so far. Works at any time, also after an error.
    ///
    /// The parser cannot be used afterwards: further calls raise ``ValueError``.
    fn take<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, Generation>> {
        self.check_not_taken()?;
        self.is_taken = true;
        Generation::from_core(py, self.inner.take(), self.experts)
    }

    /// The number of tokens received so far.
    #[getter]
    fn token_count(&self) -> usize {
        self.inner.token_count()
    }

    /// A copy of the tokens received so far: int32 ``[n]``. Raises ``ValueError`` after :meth:`take`.
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        self.check_not_taken()?;
        Ok(self.inner.token_ids().to_vec().into_pyarray(py))
    }

    /// Return a copy of the tokens and side data received so far, and go on. ``ValueError`` after :meth:`take`.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, Generation>> {
        self.check_not_taken()?;
        Generation::from_core(py, self.inner.snapshot(), self.experts)
    }

    /// Whether there is a finish reason: of the terminal event (vLLM sends usage after it) or by ``token_limit``.
    #[getter]
    fn finished(&self) -> bool {
        self.inner.finished()
    }

    /// Whether the generation ended because it went past ``token_limit``. The engine does not know that.
    #[getter]
    fn overrun(&self) -> bool {
        self.inner.overrun()
    }

    /// Whether ``[DONE]`` was received.
    #[getter]
    fn done(&self) -> bool {
        self.inner.done()
    }

    fn __repr__(&self) -> String {
        let python = |value: bool| if value { "True" } else { "False" };
        format!(
            "<Parser dialect='{}', token_count={}, finished={}, done={}>",
            self.dialect,
            self.token_count(),
            python(self.finished()),
            python(self.done())
        )
    }

    /// Bytes of memory held: arrays, text, and an incomplete event.
    fn __sizeof__(&self) -> usize {
        self.inner.held_bytes()
    }
}

impl Parser {
    fn check_not_taken(&self) -> PyResult<()> {
        if self.is_taken {
            return Err(PyValueError::new_err("the generation has been taken; create a parser for each stream"));
        }
        Ok(())
    }

    fn run<T>(
        &mut self,
        py: Python<'_>,
        work: impl FnOnce(&mut streamfold_core::Parser) -> Result<T, streamfold_core::Error>,
    ) -> PyResult<T> {
        if self.is_broken {
            return Err(raise_bug(py));
        }
        let Ok(result) = catch_unwind(AssertUnwindSafe(|| work(&mut self.inner))) else {
            self.is_broken = true;
            return Err(raise_bug(py));
        };
        result.map_err(|error| raise(py, &error))
    }
}
