use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Buckets with their counts, the sum, the longest.
type State = (Vec<(usize, u32)>, f64, f64);

/// Durations in seconds, counted in 2 KiB: quantiles are right to within 3 %, counts and sums are exact.
#[pyclass(frozen, module = "streamfold._core")]
#[derive(Default)]
pub(crate) struct Durations(Mutex<streamfold_io::Durations>);

#[pymethods]
impl Durations {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Add ``count`` equal durations; a negative one counts as 0.
    #[pyo3(signature = (seconds, count=1))]
    fn add(&self, seconds: f64, count: u32) {
        self.lock().add(seconds, count);
    }

    /// Add all of another.
    fn merge(&self, other: &Self) {
        let other = other.lock().clone();
        self.lock().merge(&other);
    }

    /// How many there are.
    #[getter]
    fn count(&self) -> u64 {
        self.lock().count()
    }

    /// Their sum.
    #[getter]
    fn sum(&self) -> f64 {
        self.lock().sum()
    }

    /// The duration that a ``share`` of all, 0 to 1, does not exceed; None if there are none.
    fn quantile(&self, share: f64) -> PyResult<Option<f64>> {
        if !(0.0..=1.0).contains(&share) {
            return Err(PyValueError::new_err(format!("share must be a number from 0 to 1, not {share}")));
        }
        Ok(self.lock().quantile(share))
    }

    /// How many are shorter than ``seconds``: exactly where that is a power of two.
    fn below(&self, seconds: f64) -> u64 {
        self.lock().below(seconds)
    }

    fn __getstate__(&self) -> State {
        self.lock().parts()
    }

    fn __setstate__(&self, state: State) -> PyResult<()> {
        let restored = streamfold_io::Durations::restored(state.0, state.1, state.2);
        *self.lock() = restored.ok_or_else(|| PyValueError::new_err("these are not the parts of durations"))?;
        Ok(())
    }

    fn __repr__(&self) -> String {
        let durations = self.lock();
        format!("<Durations: {} of {} s>", durations.count(), durations.sum())
    }
}

impl Durations {
    fn lock(&self) -> MutexGuard<'_, streamfold_io::Durations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<streamfold_io::Durations> for Durations {
    fn from(durations: streamfold_io::Durations) -> Self {
        Self(Mutex::new(durations))
    }
}
