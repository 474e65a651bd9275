//! How long a reactor rests between two sweeps: `Pace`.

/// A sweep that took t seconds is followed by a rest of 9 t, so that reading takes a tenth of a core at most.
const SHARE: f64 = 9.0;
/// Event loops round their timers to milliseconds.
const MIN_FLOOR: f64 = 0.001;

/// The rest after a sweep of the ordinary poll: the more there is to read, the more of it one read takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    floor: f64,
    ceiling: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { floor: 0.005, ceiling: 0.05 }
    }
}

impl Pace {
    /// The shortest and the longest rest, in seconds. The shortest is at least 1 ms, and the longest at least that.
    #[must_use]
    pub fn new(floor: f64, ceiling: f64) -> Self {
        let floor = floor.max(MIN_FLOOR);
        Self { floor, ceiling: ceiling.max(floor) }
    }

    /// The rest, in seconds, after a sweep of so many seconds.
    #[must_use]
    pub fn rest(&self, seconds: f64) -> f64 {
        (SHARE * seconds).max(self.floor).min(self.ceiling)
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;

    #[test]
    fn the_rest_is_nine_times_the_sweep_within_its_bounds() {
        let pace = Pace::default();
        assert_eq!(
            [0.0, 0.0005, 0.001_953_125, 0.1, -1.0].map(|seconds| pace.rest(seconds)),
            [0.005, 0.005, 0.017_578_125, 0.05, 0.005]
        );
        assert_eq!(Pace::new(0.0, 0.0).rest(1.0), 0.001);
        assert_eq!(Pace::new(f64::NAN, f64::NAN).rest(1.0), 0.001);
        assert_eq!(Pace::new(0.02, 0.01).rest(0.0), 0.02);
    }
}
