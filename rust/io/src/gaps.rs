//! The times between the tokens of a stream: `Gaps`.

#![forbid(unsafe_code)]

use crate::durations::Durations;

/// The times between tokens, from the times of the reads that brought them.
///
/// The tokens of one read share the time since the read before evenly: within it nothing tells when each was sent.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    /// One for each token behind those of the first read.
    durations: Durations,
    /// Reads that brought tokens.
    reads: u32,
    last: f64,
}

impl Gaps {
    /// A read at the time `now`, in seconds, has brought so many tokens, at least one.
    pub fn note(&mut self, now: f64, tokens: usize) {
        if self.reads > 0 {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            self.durations.add((now - self.last) / f64::from(tokens), tokens);
        }
        self.reads = self.reads.saturating_add(1);
        self.last = now;
    }

    /// The times, in seconds; none before the second read.
    #[must_use]
    pub fn durations(&self) -> &Durations {
        &self.durations
    }

    /// Reads that brought tokens.
    #[must_use]
    pub fn reads(&self) -> u32 {
        self.reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_read_share_the_time_since_the_last() {
        let mut gaps = Gaps::default();
        gaps.note(10.0, 3);
        assert_eq!((gaps.durations().count(), gaps.reads()), (0, 1));
        gaps.note(10.5, 2);
        gaps.note(11.0, 1);
        assert_eq!((gaps.durations().count(), gaps.durations().sum()), (3, 1.0));
        assert_eq!(gaps.reads(), 3);
        assert_eq!(gaps.durations().quantile(1.0), Some(0.5));
        let median = gaps.durations().quantile(0.5).expect("three");
        assert!((median / 0.25 - 1.0).abs() < 0.032, "{median}");
    }

    #[test]
    fn one_read_tells_no_gap_and_holds_nothing() {
        let mut gaps = Gaps::default();
        gaps.note(1.0, 100);
        assert_eq!((gaps.durations().held_bytes(), gaps.durations().quantile(0.5)), (0, None));
    }
}
