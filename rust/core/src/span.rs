//! Ranges of bytes in an event: they refer to a value without copying it.

/// The largest event, in bytes, whose offsets fit in a [`Span`].
pub(crate) const MAX_EVENT: usize = u32::MAX as usize;

/// A range of the event's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "no event is larger than MAX_EVENT")]
    pub(crate) fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    #[inline]
    pub(crate) fn start(self) -> usize {
        self.start as usize
    }

    #[inline]
    pub(crate) fn end(self) -> usize {
        self.end as usize
    }

    #[inline]
    pub(crate) fn of(self, data: &[u8]) -> &[u8] {
        &data[self.start()..self.end()]
    }
}

/// A JSON string as sent, without its quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawStr {
    pub span: Span,
    pub has_escapes: bool,
}
