//! Random numbers that are the same in every run: `Random`.

/// A xorshift generator.
pub struct Random(u64);

impl Random {
    /// The generator of this seed, which is not 0.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number in `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or_default() % end
    }

    /// A number in 0 … 1.
    #[allow(clippy::cast_precision_loss, reason = "less than 2^30")]
    pub fn unit(&mut self) -> f64 {
        self.below(1 << 30) as f64 / f64::from(1 << 30)
    }
}
