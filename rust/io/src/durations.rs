//! Durations and how often each occurred, in bounded memory: `Durations`.

#![forbid(unsafe_code)]

/// Binary digits behind the first one that tell buckets apart: 16 buckets for each doubling.
const DIGITS: u32 = 4;
const FIXED_DIGITS: u32 = f64::MANTISSA_DIGITS - 1 - DIGITS;
const PER_OCTAVE: usize = 1 << DIGITS;
/// The shortest durations that are told apart, 61 µs, as a power of two.
const SHORTEST: i32 = -14;
/// The longest ones, 36 hours.
const LONGEST: i32 = 17;
const BUCKETS: usize = (LONGEST - SHORTEST) as usize * PER_OCTAVE;
/// The digits of the first bucket.
const FIRST: u64 = ((1023 + SHORTEST) as u64) << DIGITS;

/// How often durations occurred. Quantiles are right to within 3 %, counts and sums are exact.
///
/// It takes 2 KiB, and nothing but a few numbers before the first duration.
#[derive(Clone, Debug, Default)]
pub struct Durations {
    counts: Option<Box<[u32; BUCKETS]>>,
    count: u64,
    sum: f64,
    longest: f64,
}

impl Durations {
    /// Add a number of equal durations, in seconds. A negative one counts as 0.
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn add(&mut self, seconds: f64, count: u32) {
        let seconds = seconds.max(0.0);
        let counts = self.counts.get_or_insert_with(|| Box::new([0; BUCKETS]));
        let slot = &mut counts[bucket(seconds)];
        *slot = slot.saturating_add(count);
        self.count += u64::from(count);
        self.sum += seconds * f64::from(count);
        self.longest = self.longest.max(seconds);
    }

    /// Add all of `other`.
    pub fn merge(&mut self, other: &Self) {
        let Some(more) = &other.counts else { return };
        let counts = self.counts.get_or_insert_with(|| Box::new([0; BUCKETS]));
        for (count, more) in counts.iter_mut().zip(more.iter()) {
            *count = count.saturating_add(*more);
        }
        self.count += other.count;
        self.sum += other.sum;
        self.longest = self.longest.max(other.longest);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their sum in seconds.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The duration, in seconds, that a `share` of all does not exceed: with 0.5 the median, with 1.0 the longest. None
    /// if there are none.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let counts = self.counts.as_ref()?;
        let rank = (share * self.count as f64).ceil().max(1.0);
        let mut passed = 0.0;
        let index = counts.iter().position(|count| {
            passed += f64::from(*count);
            passed >= rank
        });
        // The longest duration is known exactly.
        Some(index.filter(|_| rank < self.count as f64).map_or(self.longest, middle).min(self.longest))
    }

    /// How many are shorter than `seconds`: exactly where that is a power of two, elsewhere to within 1/16 of it.
    #[must_use]
    pub fn below(&self, seconds: f64) -> u64 {
        if seconds > self.longest {
            return self.count;
        }
        let counts = self.counts.as_ref().map_or(&[][..], |counts| &counts[..bucket(seconds)]);
        counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// What [`Self::restored`] takes: the buckets that are not empty, with their counts, the sum and the longest.
    #[must_use]
    pub fn parts(&self) -> (Vec<(usize, u32)>, f64, f64) {
        let counts = self.counts.iter().flat_map(|counts| counts.iter().copied().enumerate());
        (counts.filter(|(_, count)| *count > 0).collect(), self.sum, self.longest)
    }

    /// Durations from their [`Self::parts`]. None if a bucket does not exist.
    #[must_use]
    pub fn restored(buckets: impl IntoIterator<Item = (usize, u32)>, sum: f64, longest: f64) -> Option<Self> {
        let mut restored = Self { sum, longest, ..Self::default() };
        for (index, count) in buckets {
            *restored.counts.get_or_insert_with(|| Box::new([0; BUCKETS])).get_mut(index)? = count;
            restored.count += u64::from(count);
        }
        Some(restored)
    }

    /// Bytes of memory held beside the struct itself.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.counts.as_ref().map_or(0, |counts| size_of_val(&**counts))
    }
}

fn bucket(seconds: f64) -> usize {
    let digits = seconds.max(2f64.powi(SHORTEST)).to_bits() >> FIXED_DIGITS;
    usize::try_from(digits - FIRST).map_or(BUCKETS - 1, |index| index.min(BUCKETS - 1))
}

/// The middle of a bucket, in seconds.
fn middle(bucket: usize) -> f64 {
    f64::from_bits((FIRST + bucket as u64) << FIXED_DIGITS | 1 << (FIXED_DIGITS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_own_middle_and_buckets_rise() {
        for index in 0..BUCKETS {
            assert_eq!(bucket(middle(index)), index);
            assert!(index == 0 || middle(index - 1) < middle(index));
        }
    }

    #[test]
    fn every_duration_has_a_bucket() {
        for (seconds, index) in
            [(0.0, 0), (-1.0, 0), (f64::NAN, 0), (1e-5, 0), (1e9, BUCKETS - 1), (f64::INFINITY, BUCKETS - 1)]
        {
            assert_eq!(bucket(seconds), index, "{seconds}");
        }
    }

    #[test]
    fn quantiles_are_right_to_within_three_percent() {
        let mut durations = Durations::default();
        let mut sorted = Vec::new();
        for step in 1..=1000_u32 {
            let seconds = 0.001 * 1.007f64.powi(i32::try_from(step).expect("small"));
            durations.add(seconds, step % 3 + 1);
            sorted.extend((0..=step % 3).map(|_| seconds));
        }
        for share in [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.9999] {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let exact = sorted[((share * sorted.len() as f64).ceil() as usize).max(1) - 1];
            let found = durations.quantile(share).expect("there are some");
            assert!((found / exact - 1.0).abs() < 0.032, "{share}: {found}, exactly {exact}");
        }
        assert_eq!(durations.quantile(1.0), sorted.last().copied());
    }

    #[test]
    fn shorter_ones_are_counted_exactly_at_powers_of_two() {
        let mut durations = Durations::default();
        assert_eq!(durations.below(1.0), 0);
        for (seconds, count) in [(0.125, 1), (0.24, 2), (0.25, 4), (0.3, 8), (1.0, 16), (1e9, 32)] {
            durations.add(seconds, count);
        }
        let shorter = [0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 1e9, 2e9].map(|seconds| durations.below(seconds));
        assert_eq!(shorter, [0, 0, 3, 15, 15, 31, 31, 63]);
    }

    #[test]
    fn merged_durations_are_those_of_both() {
        let (mut one, mut other, mut both) = (Durations::default(), Durations::default(), Durations::default());
        one.add(0.25, 3);
        other.add(2.0, 1);
        for (seconds, count) in [(0.25, 3), (2.0, 1)] {
            both.add(seconds, count);
        }
        one.merge(&other);
        one.merge(&Durations::default());
        let shown = |durations: &Durations| {
            (durations.count(), durations.sum(), [0.5, 0.75, 1.0].map(|share| durations.quantile(share)))
        };
        assert_eq!(shown(&one), shown(&both));
        assert_eq!(shown(&both).0, 4);
    }

    #[test]
    fn durations_are_restored_from_their_parts() {
        let mut durations = Durations::default();
        for _ in 0..2 {
            let (buckets, sum, longest) = durations.parts();
            let restored = Durations::restored(buckets, sum, longest).expect("all buckets exist");
            assert_eq!(format!("{restored:?}"), format!("{durations:?}"));
            durations.add(0.25, 3);
            durations.add(1e9, 1);
        }
        assert!(Durations::restored([(BUCKETS, 1)], 0.0, 0.0).is_none());
    }

    #[test]
    fn nothing_is_held_before_the_first_duration() {
        let mut durations = Durations::default();
        assert_eq!((durations.held_bytes(), durations.quantile(0.5)), (0, None));
        durations.add(1.0, 1);
        assert!(durations.held_bytes() <= 2048);
    }
}
