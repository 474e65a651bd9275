//! Growing of buffers, without a panic if memory runs out.

/// Make room for `more` elements, or change nothing and return false.
///
/// A buffer grows by at least a sixteenth of its length: little memory is unused, and copying takes linear time.
pub(crate) fn grow<T>(buffer: &mut Vec<T>, more: usize) -> bool {
    buffer.capacity() - buffer.len() >= more || buffer.try_reserve_exact(more.max(buffer.len() / 16)).is_ok()
}
