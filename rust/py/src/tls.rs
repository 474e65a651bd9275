//! TLS above a connection that moves only bytes: `Tls`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;
use pyo3::{PyTraverseError, PyVisit};

/// No record holds more.
const MAX_RECORD_BYTES: usize = 16 << 10;

/// What is told of a connection that closes without TLS's own end: what came may not be all.
pub(crate) const CUT: &str = "the server closed it without ending TLS (close_notify)";

/// What is told of one that closes during the handshake.
pub(crate) const CUT_HANDSHAKE: &str = "the server closed the connection in the TLS handshake";

/// One end of a TLS connection: an `ssl.SSLObject` between two `ssl.MemoryBIO`.
pub(crate) struct Tls {
    object: Py<PyAny>,
    incoming: Py<PyAny>,
    outgoing: Py<PyAny>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// What could not be encrypted yet: the server has begun a handshake of its own.
    unwritten: Option<Py<PyBytes>>,
    /// The server has ended TLS, or it has failed.
    is_over: bool,
}

/// What came of received ciphertext.
#[derive(Default)]
pub(crate) struct Decrypted {
    /// As the records hold it.
    pub plain: Vec<u8>,
    /// If no more follows.
    pub end: Option<End>,
}

/// How TLS ended.
pub(crate) enum End {
    /// As it should.
    Closed,
    /// It failed.
    Failed(PyErr),
}

impl Tls {
    pub(crate) fn new(object: Py<PyAny>, incoming: Py<PyAny>, outgoing: Py<PyAny>) -> Self {
        Self { object, incoming, outgoing, inner: Mutex::default() }
    }

    /// Take ciphertext in.
    pub(crate) fn receive(&self, py: Python<'_>, ciphertext: &[u8]) -> PyResult<()> {
        self.incoming.call_method1(py, intern!(py, "write"), (PyBytes::new(py, ciphertext),)).map(drop)
    }

    /// Go on with the handshake. Returns whether it is over.
    pub(crate) fn shake_hands(&self, py: Python<'_>) -> PyResult<bool> {
        match self.object.call_method0(py, intern!(py, "do_handshake")) {
            Ok(_) => Ok(true),
            Err(error) if wants_read(py, &error)? => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether there is ciphertext that was not decrypted yet.
    pub(crate) fn is_pending(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.incoming.getattr(py, intern!(py, "pending"))?.extract::<usize>(py)? > 0)
    }

    /// Decrypt what was received. Whatever fails, what came before it is returned.
    pub(crate) fn decrypt(&self, py: Python<'_>) -> Decrypted {
        let mut decrypted = Decrypted::default();
        if !self.lock().is_over {
            decrypted.end =
                self.read_records(py, &mut decrypted.plain).unwrap_or_else(|error| Some(End::Failed(error)));
            self.lock().is_over |= decrypted.end.is_some();
        }
        decrypted
    }

    fn read_records(&self, py: Python<'_>, plain: &mut Vec<u8>) -> PyResult<Option<End>> {
        while self.is_pending(py)? {
            match self.object.call_method1(py, intern!(py, "read"), (MAX_RECORD_BYTES,)) {
                Ok(part) => {
                    let part = part.cast_bound::<PyBytes>(py)?.as_bytes();
                    if part.is_empty() {
                        return Ok(Some(End::Closed));
                    }
                    plain.extend_from_slice(part);
                }
                Err(error) if wants_read(py, &error)? => break,
                Err(error) if is_closed(py, &error)? => return Ok(Some(End::Closed)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Whether nothing can be received any more.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// Encrypt what `next` gives, until it gives nothing, and as long as TLS takes it and there is not too much of it.
    /// Returns the ciphertext that is to be sent: of this, and of TLS's own messages.
    pub(crate) fn encrypt<'py>(
        &self,
        py: Python<'py>,
        mut next: impl FnMut() -> PyResult<Vec<u8>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut plain = self.lock().unwritten.take().map(|plain| plain.into_bound(py));
        if plain.is_none() {
            let new = next()?;
            plain = (!new.is_empty()).then(|| PyBytes::new(py, &new));
        }
        while let Some(part) = plain.take() {
            match self.object.call_method1(py, intern!(py, "write"), (&part,)) {
                Ok(count) => {
                    let rest = part.as_bytes().get(count.extract(py)?..).unwrap_or_default();
                    plain = (!rest.is_empty()).then(|| PyBytes::new(py, rest));
                }
                Err(error) if wants_read(py, &error)? => {
                    self.lock().unwritten = Some(part.unbind());
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        self.to_send(py)
    }

    /// The ciphertext that is to be sent.
    pub(crate) fn to_send<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if self.outgoing.getattr(py, intern!(py, "pending"))?.extract::<usize>(py)? == 0 {
            return Ok(PyBytes::new(py, b""));
        }
        Ok(self.outgoing.call_method0(py, intern!(py, "read"))?.into_bound(py).cast_into()?)
    }

    /// Whether some of what was to be encrypted still waits.
    pub(crate) fn is_unwritten(&self) -> bool {
        self.lock().unwritten.is_some()
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        [&self.object, &self.incoming, &self.outgoing].into_iter().try_for_each(|object| visit.call(object))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The words of an error, and the error itself if it is not TLS's but an interrupt of the program's.
pub(crate) fn words(py: Python<'_>, error: PyErr) -> (String, Option<PyErr>) {
    let text = error.value(py).to_string();
    (text, Some(error).filter(|error| !error.is_instance_of::<PyException>(py)))
}

fn wants_read(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    static KIND: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    error.value(py).is_instance(KIND.import(py, "ssl", "SSLWantReadError")?)
}

fn is_closed(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    static KIND: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    error.value(py).is_instance(KIND.import(py, "ssl", "SSLZeroReturnError")?)
}
