use std::mem::take;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

/// Transports that rest after a read, so that the next one finds several events at once.
///
/// ``schedule`` is called once, when the first transport pauses; :meth:`resume` ends the rest of all.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct ReadRest {
    schedule: Py<PyAny>,
    batch: Mutex<Batch>,
}

#[derive(Default)]
struct Batch {
    paused: Vec<Py<PyAny>>,
    is_scheduled: bool,
    /// When the first read since the last rest began.
    began: Option<Instant>,
    work: Duration,
}

#[pymethods]
impl ReadRest {
    #[new]
    fn new(schedule: Py<PyAny>) -> Self {
        Self { schedule, batch: Mutex::default() }
    }

    /// Seconds from the beginning of the first read since the last rest to the end of the latest one.
    #[getter]
    fn work(&self) -> f64 {
        self.lock().work.as_secs_f64()
    }

    /// Let all transports read again.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let paused = take(&mut *self.lock()).paused;
        for transport in paused {
            let transport = transport.bind(py);
            if !transport.call_method0(intern!(py, "is_closing"))?.is_truthy()? {
                transport.call_method0(intern!(py, "resume_reading"))?;
            }
        }
        Ok(())
    }

    #[allow(clippy::needless_pass_by_value, reason = "the signature of the slot")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.schedule)?;
        self.batch
            .try_lock()
            .map_or(Ok(()), |batch| batch.paused.iter().try_for_each(|transport| visit.call(transport)))
    }

    fn __clear__(&self) {
        let paused = take(&mut self.lock().paused);
        drop(paused); // after the lock
    }
}

impl ReadRest {
    /// A read begins.
    pub(crate) fn begin(&self) {
        self.lock().began.get_or_insert_with(Instant::now);
    }

    /// A read is over: let the transport rest.
    pub(crate) fn pause(&self, transport: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = transport.py();
        transport.call_method0(intern!(py, "pause_reading"))?;
        let is_first = {
            let mut batch = self.lock();
            batch.paused.push(transport.clone().unbind());
            batch.work = batch.began.map_or(Duration::ZERO, |began| began.elapsed());
            !std::mem::replace(&mut batch.is_scheduled, true)
        };
        if is_first {
            self.schedule.call0(py)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
