//! How long a reactor rests between two sweeps: `Pace`.

/// A rest below costs more than it saves.
const MIN_FLOOR: f64 = 0.001;
/// With 19, reading takes a twentieth of a core until the rests reach their ceiling. Measured against 9 in two runs: 512
/// streams of one token every 20 ms take about a quarter less CPU; their ends are seen within the ceiling in both.
const SHARE: f64 = 19.0;

/// The rests after sweeps of the ordinary poll: the more there is to read, the more of it one read takes.
///
/// A run of sweeps ends with one that finds nothing; then the poll is watched. Where the last run ended, the next one is
/// expected to end too: the poll is watched at once, without a rest and a sweep in vain. If something comes sooner than
/// the rest would have lasted, that was wrong, and the run goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    floor: f64,
    ceiling: f64,
    share: f64,
    /// What the bounded sweeps took that lead to this one.
    bounded: f64,
    /// The sweeps of this run that found something.
    run: u32,
    /// How many the last run had.
    expected: Option<u32>,
    /// When the poll was watched without a rest, and when the rest would have been over.
    skipped_until: Option<f64>,
}

/// What follows a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Next {
    /// The poll is watched: the next sweep comes when it is readable.
    Watch,
    /// The next sweep comes after so many seconds.
    Rest(f64),
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(0.005, 0.05, SHARE)
    }
}

impl Pace {
    /// The shortest and the longest rest, in seconds, and how many times as long as the sweep before it a rest is in
    /// between. The shortest is at least 1 ms, and the longest at least that.
    #[must_use]
    pub fn new(floor: f64, ceiling: f64, share: f64) -> Self {
        let floor = floor.max(MIN_FLOOR);
        Self { floor, ceiling: ceiling.max(floor), share, bounded: 0.0, run: 0, expected: None, skipped_until: None }
    }

    /// The rest, in seconds, after a sweep of so many seconds.
    #[must_use]
    pub fn rest(&self, seconds: f64) -> f64 {
        (self.share * seconds).max(self.floor).min(self.ceiling)
    }

    /// A sweep ended before its time: the next one goes on with it.
    pub(crate) fn go_on(&mut self, seconds: f64) {
        self.bounded += seconds;
    }

    /// What follows a sweep that took so many seconds and ended `now`; `found` tells whether a socket was ready.
    pub(crate) fn after(&mut self, seconds: f64, found: bool, now: f64) -> Next {
        let found = found || self.bounded > 0.0;
        let seconds = seconds + std::mem::take(&mut self.bounded);
        let skipped_until = self.skipped_until.take();
        if !found {
            if self.run > 0 {
                self.expected = Some(self.run);
            }
            self.run = 0;
            return Next::Watch;
        }
        match skipped_until {
            // The run had not ended.
            Some(until) if now - seconds < until => self.expected = None,
            Some(_) => self.run = 0,
            None => {}
        }
        self.run = self.run.saturating_add(1);
        let rest = self.rest(seconds);
        if self.expected == Some(self.run) {
            self.skipped_until = Some(now + rest);
            return Next::Watch;
        }
        Next::Rest(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::{Next, Pace};

    #[test]
    fn the_rest_is_a_multiple_of_the_sweep_within_its_bounds() {
        assert_eq!(Pace::default().rest(1.0 / 512.0), 19.0 / 512.0);
        let pace = Pace::new(0.005, 0.05, 9.0);
        let rests = [0.0, 0.0005, 1.0 / 512.0, 0.1, -1.0].map(|seconds| pace.rest(seconds));
        assert_eq!(rests, [0.005, 0.005, 9.0 / 512.0, 0.05, 0.005]);
        assert_eq!(Pace::new(0.0, 0.0, 9.0).rest(1.0), 0.001);
        assert_eq!(Pace::new(f64::NAN, f64::NAN, f64::NAN).rest(1.0), 0.001);
        assert_eq!(Pace::new(0.02, 0.01, 9.0).rest(0.0), 0.02);
    }

    #[test]
    fn a_rest_follows_all_parts_of_a_sweep() {
        let mut pace = Pace::new(0.005, 0.05, 9.0);
        pace.go_on(1.0 / 1024.0);
        pace.go_on(1.0 / 1024.0);
        assert_eq!(pace.after(1.0 / 1024.0, true, 0.0), Next::Rest(27.0 / 1024.0));
        assert_eq!(pace.after(1.0 / 1024.0, true, 0.0), Next::Rest(9.0 / 1024.0));
        // The last part may have found nothing.
        pace.go_on(1.0 / 1024.0);
        assert_eq!(pace.after(0.0, false, 0.0), Next::Rest(9.0 / 1024.0));
    }

    #[test]
    fn a_sweep_that_finds_nothing_ends_the_rests() {
        let mut pace = Pace::new(0.005, 0.05, 9.0);
        for now in 0..100 {
            assert_eq!(pace.after(0.0001, true, f64::from(now) * 0.01), Next::Rest(0.005));
        }
        assert_eq!(pace.after(0.0, false, 1.0), Next::Watch);
        assert_eq!(pace.after(0.0, false, 2.0), Next::Watch);
        assert_eq!(pace.after(0.0, true, 2.0), Next::Rest(0.005));
    }

    #[test]
    fn a_run_is_expected_to_end_where_the_last_one_did() {
        let mut pace = Pace::new(0.005, 0.05, 9.0);
        assert_eq!(pace.after(0.0, true, 0.0), Next::Rest(0.005));
        assert_eq!(pace.after(0.0, false, 0.005), Next::Watch);
        for tick in 1..10 {
            assert_eq!(pace.after(0.0, true, f64::from(tick) * 0.02), Next::Watch, "no sweep in vain");
        }
    }

    #[test]
    fn a_run_that_was_expected_to_end_too_soon_goes_on() {
        let mut pace = Pace::new(0.005, 0.05, 9.0);
        pace.after(0.0, true, 0.0);
        pace.after(0.0, false, 0.005);
        assert_eq!(pace.after(0.0, true, 0.02), Next::Watch);
        assert_eq!(pace.after(0.0, true, 0.021), Next::Rest(0.005), "sooner than the rest");
        assert_eq!(pace.after(0.0, true, 0.026), Next::Rest(0.005));
        assert_eq!(pace.after(0.0, false, 0.031), Next::Watch);
        // Now three are expected.
        assert_eq!(pace.after(0.0, true, 0.04), Next::Rest(0.005));
        assert_eq!(pace.after(0.0, true, 0.045), Next::Rest(0.005));
        assert_eq!(pace.after(0.0, true, 0.05), Next::Watch);
    }
}
