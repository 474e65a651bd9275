//! Cumulative or incremental.

/// Whether each event repeats the whole response or holds only what is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Not known yet; the first event that can decide does.
    Unknown,
    Cumulative,
    Incremental,
}
