//! What the server reports of itself at `/stats`: whether it kept its pace, and when it finished each response.

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

/// An event that is sent later than this after its time counts as late.
const LATE: Duration = Duration::from_millis(5);

/// Since the last `/stats`, but for the CPU time.
#[derive(Default)]
pub struct Stats {
    pub connections: u64,
    events: u64,
    late: u64,
    latest: Duration,
    finished: Map<String, Value>,
}

impl Stats {
    /// Count an event that was sent so long after its time.
    pub fn count_event(&mut self, lateness: Duration) {
        self.events += 1;
        self.late += u64::from(lateness > LATE);
        self.latest = self.latest.max(lateness);
    }

    /// Note when the last byte of a response was handed to its socket.
    pub fn count_finished(&mut self, rid: &str) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.finished.insert(rid.to_owned(), now.as_secs_f64().into());
    }

    /// Report, and start again.
    pub fn take(&mut self, waiting: usize) -> Value {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = Duration::new(u64::try_from(cpu.tv_sec).unwrap_or(0), u32::try_from(cpu.tv_nsec).unwrap_or(0));
        let stats = std::mem::take(self);
        json!({
            "connections": stats.connections,
            "events": stats.events,
            "late": stats.late,
            "latest": stats.latest.as_secs_f64(),
            "waiting": waiting,
            "finished": stats.finished,
            "cpu": cpu.as_secs_f64(),
        })
    }
}
