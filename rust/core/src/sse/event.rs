//! One event of a stream: `Event`.

use std::ops::Range;

/// One event.
pub(crate) struct Event<'a> {
    /// The values of its `data:` lines, joined with LF.
    pub data: &'a [u8],
    /// Whether its `event:` line is `error`.
    pub is_error: bool,
    /// Whether the data is known to be ASCII. It is if it was copied: the copies are looked at while they are near.
    pub is_ascii: bool,
    /// A range of the data that is known to have no quote, backslash or control character.
    pub plain: Range<usize>,
    pub(super) origin: Origin<'a>,
}

impl Event<'_> {
    /// The offset in the body of the byte at `index` of the data.
    pub(crate) fn offset(&self, index: usize) -> u64 {
        match self.origin {
            Origin::Line(start) => start + index as u64,
            Origin::Lines(lines) => {
                let line = lines.partition_point(|&(first, _)| first <= index).saturating_sub(1);
                let (first, start) = lines[line];
                start + (index - first) as u64
            }
        }
    }
}

/// What becomes of the bytes behind an event.
#[derive(Clone, Copy)]
pub(crate) struct Next {
    /// All later events but `[DONE]` are skipped.
    pub skips: bool,
    /// The rest of the read is not taken.
    pub pauses: bool,
}

impl Next {
    /// The next event is read.
    pub(super) const READ: Self = Self { skips: false, pauses: false };
}

/// Where the data stands in the body.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// The offset in the body of the only data line.
    Line(u64),
    /// For each data line: its offset in the data and in the body.
    Lines(&'a [(usize, u64)]),
}
