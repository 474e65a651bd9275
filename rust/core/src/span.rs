//! Ranges of an event's bytes: where a value stands, without a copy of it.

/// The largest event whose places fit in a [`Span`].
pub(crate) const MAX_EVENT: usize = u32::MAX as usize;

/// A part of the event's data.
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

/// A string as it stands on the wire, without its quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawStr {
    pub span: Span,
    pub has_escapes: bool,
}
