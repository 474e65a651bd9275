//! The parts of a body, as its framing hands them out.

/// What comes next of a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// Bytes of the body, at least one.
    Data(&'a [u8]),
    /// The input is used up; more is needed.
    Pending,
    /// The body has ended; what is left of the input lies behind it.
    End,
}

/// Take up to `left` bytes off the front of `input`.
pub(crate) fn take<'a>(input: &mut &'a [u8], left: &mut u64) -> Part<'a> {
    let count = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
    let (part, rest) = input.split_at(count);
    *input = rest;
    *left -= count as u64;
    if part.is_empty() { Part::Pending } else { Part::Data(part) }
}
