//! Recognizes the repeated beginning of a list by a fingerprint of its bytes.
//!
//! A cumulative event repeats the whole list. Parsing it each time costs quadratic time; comparing a fingerprint costs
//! one pass over the bytes. Keeping the bytes for a comparison would take 33 bytes for each token; the fingerprint
//! (XXH3) takes 128 bits for the whole list.

use xxhash_rust::xxh3::Xxh3;

/// The fingerprint of the last complete list.
pub(crate) struct Prefix {
    /// The number of its elements.
    count: usize,
    /// The number of its bytes, from the opening bracket to the end of the last element.
    bytes: usize,
    digest: u128,
    /// The hash state after the first `bytes` bytes of a list that matched. Only lists that repeat need one.
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

    /// If the list whose first element is at `start` begins with the remembered one: the number of those elements, and
    /// the offset after them.
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

    /// Remember the list of `count` elements in `data[start..end]`. `known` of them have just matched.
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
