//! What an engine tells beside all that the generation has a field for.

use std::collections::HashMap;

use crate::span::Span;
use crate::text::plain;

/// One member of an event that no field of the generation holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// Without its quotes, as it stands on the wire.
    pub key: Span,
    pub value: Span,
}

/// Those of one level of one event; kept from event to event for its memory.
#[derive(Default)]
pub(crate) struct Members {
    all: Vec<Member>,
    /// Some are lists, which stand for their keys only until the event is read.
    has_lists: bool,
}

impl Members {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.has_lists = false;
    }

    /// Note a member. A list is not kept, but what stood under its key earlier in the event must go, if anything did.
    #[inline]
    pub(crate) fn push(&mut self, data: &[u8], member: Member, may_be_duplicate: impl FnOnce() -> bool) {
        if data[member.value.start()] != b'[' {
            self.all.push(member);
        } else if may_be_duplicate() {
            self.has_lists = true;
            self.all.push(member);
        }
    }

    /// The event is read: of equal keys the last counts, and lists are dropped.
    #[inline]
    pub(crate) fn finish(&mut self, data: &[u8]) {
        if self.has_lists {
            self.drop_lists(data);
        }
    }

    #[cold]
    fn drop_lists(&mut self, data: &[u8]) {
        let mut lasts = HashMap::new();
        for (index, member) in self.all.iter().enumerate() {
            lasts.insert(plain(member.key.of(data)), index);
        }
        let mut index = 0..;
        self.all.retain(|member| {
            let is_last = lasts.get(&plain(member.key.of(data))).copied() == index.next();
            is_last && data[member.value.start()] != b'['
        });
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.all.capacity() * size_of::<Member>()
    }
}

/// The latest value of each such key, in the order of their first coming.
#[derive(Default)]
pub(crate) struct Meta {
    entries: Vec<Entry>,
    /// Where a key stands among them, by its name.
    places: HashMap<Box<[u8]>, usize>,
}

/// So many entries are looked at before the map is asked.
const NEAR: usize = 16;

struct Entry {
    /// As it was spelled when it came first.
    key: Box<[u8]>,
    value: Vec<u8>,
}

impl Meta {
    pub(crate) fn update(&mut self, data: &[u8], members: &Members) {
        let mut next = 0;
        for member in &members.all {
            let key = member.key.of(data);
            // Engines write the same keys in the same order, so it stands a little further on.
            let ahead = self.entries.iter().skip(next).take(NEAR).position(|entry| *entry.key == *key);
            let place = ahead.map_or_else(|| self.place(key), |ahead| next + ahead);
            next = place + 1;
            let latest = &mut self.entries[place].value;
            latest.clear();
            latest.extend_from_slice(member.value.of(data));
        }
    }

    /// Where a key stands; a new one at the end.
    fn place(&mut self, key: &[u8]) -> usize {
        let name = plain(key);
        if let Some(&place) = self.places.get(&*name) {
            return place;
        }
        self.entries.push(Entry { key: key.into(), value: Vec::new() });
        self.places.insert(name.into(), self.entries.len() - 1);
        self.entries.len() - 1
    }

    pub(crate) fn take(&mut self) -> Vec<(String, String)> {
        let owned = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap_or_default();
        let entries = std::mem::take(&mut self.entries).into_iter();
        entries.map(|entry| (owned(entry.key.into_vec()), owned(entry.value))).collect()
    }

    pub(crate) fn held_bytes(&self) -> usize {
        let entries = self.entries.capacity() * size_of::<Entry>();
        let places = self.places.capacity() * size_of::<(Box<[u8]>, usize)>();
        entries + places + self.entries.iter().map(|entry| 2 * entry.key.len() + entry.value.capacity()).sum::<usize>()
    }
}
