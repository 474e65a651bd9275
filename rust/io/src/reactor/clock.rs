//! The clock of the reactor.

use rustix::time::{ClockId, clock_gettime};

/// The monotonic clock in seconds: what Python's `time.monotonic()` reads.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "seconds since the machine's start, to the nanosecond for three months")]
pub fn monotonic() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
