//! What a cumulative list begins with, known by a fingerprint of its bytes.
//!
//! A cumulative event repeats everything. Reading it again would cost the square of the length; comparing a
//! fingerprint costs one pass over the bytes, which no reader can save. Keeping the bytes themselves would cost
//! 33 bytes a token; 128 bits of XXH3 do.

use xxhash_rust::xxh3::Xxh3;

/// The list of the last event that held the whole of one.
pub(crate) struct Prefix {
    /// Its elements.
    count: usize,
    /// Its bytes, from behind the bracket to the end of the last element.
    bytes: usize,
    digest: u128,
    /// Has read the first `bytes` bytes of a list that matched. Only cumulative streams need one.
    state: Option<Box<Xxh3>>,
}

impl Prefix {
    pub(crate) fn new() -> Self {
        Self { count: 0, bytes: 0, digest: 0, state: None }
    }

    /// Forget the list.
    pub(crate) fn clear(&mut self) {
        self.count = 0;
        self.state = None;
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.state.as_ref().map_or(0, |_| size_of::<Xxh3>())
    }

    /// If the list whose first element is at `start` begins with the known one: its elements, and where they end.
    pub(crate) fn matches(&mut self, data: &[u8], start: usize) -> Option<(usize, usize)> {
        let end = start + self.bytes;
        if self.count == 0 || !matches!(data.get(end), Some(b',' | b']')) {
            return None;
        }
        let state = self.state.get_or_insert_default();
        state.reset();
        state.update(&data[start..end]);
        (state.digest128() == self.digest).then_some((self.count, end))
    }

    /// Know the list of `count` elements in `data[start..end]`; `known` of them are those that have just matched.
    pub(crate) fn remember(&mut self, data: &[u8], start: usize, end: usize, count: usize, known: usize) {
        let state = self.state.get_or_insert_default();
        if known > 0 {
            state.update(&data[start + self.bytes..end]);
        } else {
            state.reset();
            state.update(&data[start..end]);
        }
        self.count = count;
        self.bytes = end - start;
        self.digest = state.digest128();
    }
}
