//! The two modes of SGLang's stream: cumulative and incremental.

/// Whether each event repeats the whole response or holds only the new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Not known yet: the first event that differs between the modes decides.
    Unknown,
    Cumulative,
    Incremental,
}
