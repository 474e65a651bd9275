//! How far a sweep goes, and what it did: `Limits`, `Swept`.

/// When a sweep ends although sockets are still ready.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Seconds.
    pub seconds: f64,
    /// Bytes sent and received.
    pub bytes: usize,
    /// Bytes of ciphertext received: to decrypt them takes longer than the sweep.
    pub ciphertext: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { seconds: 0.005, bytes: 4 << 20, ciphertext: 256 << 10 }
    }
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Swept {
    /// How many sockets had their turn; one that had it twice counts twice.
    pub turns: usize,
    /// Bytes sent and received.
    pub bytes: usize,
    /// Bytes of ciphertext received.
    pub ciphertext: usize,
    /// How long it took.
    pub seconds: f64,
    /// Whether sockets are left that have not had their turn.
    pub is_bounded: bool,
}

impl Swept {
    /// Both of them, as one.
    #[must_use]
    pub fn then(self, later: Self) -> Self {
        Self {
            turns: self.turns + later.turns,
            bytes: self.bytes + later.bytes,
            ciphertext: self.ciphertext + later.ciphertext,
            seconds: self.seconds + later.seconds,
            is_bounded: later.is_bounded,
        }
    }
}
