use std::mem::{replace, take};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

/// What an event loop does for each read beside calling the protocol.
const LOOP_WORK: Duration = Duration::from_micros(15);

/// A rest is so many times as long as the work before it: reading takes a tenth of a core.
const REST_SHARE: u32 = 9;

/// After so many rests in a row one is left out, to see what a single event looks like by now.
const SAMPLED_RESTS: u8 = 16;

/// Lets transports rest after a read, so that the next one finds several events at once.
///
/// - ``schedule``: called once, when the first transport rests: it has to call :meth:`resume` after :attr:`seconds`.
/// - ``shortest``, ``longest``: the bounds of a rest, in seconds.
///
/// A transport whose events come too rarely for a rest to gather them does not rest.
///
/// Raises ``ValueError`` if a bound is negative, or the shortest is longer than the longest.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct ReadRest {
    schedule: Py<PyAny>,
    shortest: Duration,
    longest: Duration,
    cycle: Mutex<Cycle>,
}

/// From one resumption to the next, or, while nothing rests, a stretch as long as the longest rest.
struct Cycle {
    began: Instant,
    read_began: Instant,
    work: Duration,
    work_before: Duration,
    resting: Vec<Py<PyAny>>,
    is_scheduled: bool,
}

/// How the reads of one transport come.
#[derive(Default)]
pub(crate) struct Habit {
    last_read: Option<Instant>,
    rested: bool,
    rests: u8,
    /// Bytes of a read without a rest before it: about an event.
    single_bytes: usize,
}

#[pymethods]
impl ReadRest {
    #[new]
    fn new(schedule: Py<PyAny>, shortest: f64, longest: f64) -> PyResult<Self> {
        let bound =
            |seconds| Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()));
        let (shortest, longest) = (bound(shortest)?, bound(longest)?);
        if shortest > longest {
            return Err(PyValueError::new_err("the shortest rest must not be longer than the longest"));
        }
        let now = Instant::now();
        let cycle = Cycle {
            began: now,
            read_began: now,
            work: Duration::ZERO,
            work_before: Duration::ZERO,
            resting: Vec::new(),
            is_scheduled: false,
        };
        Ok(Self { schedule, shortest, longest, cycle: Mutex::new(cycle) })
    }

    /// Seconds that a rest takes now: nine times the work of the reads since the last one, within the bounds.
    #[getter]
    fn seconds(&self) -> f64 {
        self.length(&self.lock()).as_secs_f64()
    }

    /// Let all transports read again.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        let resting = {
            let mut cycle = self.lock();
            cycle.turn(Instant::now(), 1.0);
            cycle.is_scheduled = false;
            take(&mut cycle.resting)
        };
        for transport in resting {
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
        self.cycle
            .try_lock()
            .map_or(Ok(()), |cycle| cycle.resting.iter().try_for_each(|transport| visit.call(transport)))
    }

    fn __clear__(&self) {
        let resting = take(&mut self.lock().resting);
        drop(resting); // after the lock
    }
}

impl ReadRest {
    /// A read begins.
    pub(crate) fn begin(&self) {
        self.lock().read_began = Instant::now();
    }

    /// A read of `bytes` is over. Returns whether the transport should rest now.
    pub(crate) fn finish(&self, bytes: usize, habit: &mut Habit) -> bool {
        let now = Instant::now();
        let mut cycle = self.lock();
        let (read_began, elapsed) = (cycle.read_began, now - cycle.began);
        cycle.work += now - read_began + LOOP_WORK;
        if !cycle.is_scheduled && elapsed > self.longest {
            cycle.turn(now, self.longest.as_secs_f64() / elapsed.as_secs_f64());
        }
        let gap = habit.last_read.replace(now).map(|last| read_began.saturating_duration_since(last));
        if habit.rested {
            habit.rests = habit.rests.wrapping_add(1);
            let gathers = bytes.saturating_mul(5) >= habit.single_bytes.saturating_mul(9);
            habit.rested = gathers && !habit.rests.is_multiple_of(SAMPLED_RESTS);
        } else {
            habit.single_bytes = bytes;
            habit.rested = gap.is_some_and(|gap| gap * 2 <= self.length(&cycle));
        }
        habit.rested
    }

    /// Let the transport rest.
    pub(crate) fn pause(&self, transport: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = transport.py();
        transport.call_method0(intern!(py, "pause_reading"))?;
        let is_first = {
            let mut cycle = self.lock();
            cycle.resting.push(transport.clone().unbind());
            !replace(&mut cycle.is_scheduled, true)
        };
        if is_first {
            self.schedule.call0(py)?;
        }
        Ok(())
    }

    fn length(&self, cycle: &Cycle) -> Duration {
        (cycle.work.max(cycle.work_before) * REST_SHARE).clamp(self.shortest, self.longest)
    }

    fn lock(&self) -> MutexGuard<'_, Cycle> {
        self.cycle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cycle {
    /// Begin the next cycle. `share` of this one's work counts.
    fn turn(&mut self, now: Instant, share: f64) {
        self.work_before = take(&mut self.work).mul_f64(share);
        self.began = now;
    }
}
