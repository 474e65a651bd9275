//! `Generation.meta`: all keys of the events that have no attribute of their own, with their latest values.

use std::collections::HashMap;

use crate::span::Span;
use crate::text::plain;

/// One key of an event with its value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// The key as sent, without its quotes.
    pub key: Span,
    pub value: Span,
}

/// The members of one level of an event. Its memory is reused for the next event.
#[derive(Default)]
pub(crate) struct Members {
    all: Vec<Member>,
    /// Some values are lists: they replace an earlier value of the same key, and are dropped at the end of the event.
    has_lists: bool,
}

impl Members {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.has_lists = false;
    }

    /// Add a member. A list is not kept for `meta`, but it replaces an earlier value of the same key in this event.
    #[inline]
    pub(crate) fn push(&mut self, data: &[u8], member: Member, may_be_duplicate: impl FnOnce() -> bool) {
        if data[member.value.start()] != b'[' {
            self.all.push(member);
        } else if may_be_duplicate() {
            self.has_lists = true;
            self.all.push(member);
        }
    }

    /// The event is complete: of equal keys the last counts, and lists are dropped.
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

/// The latest value of each key, in the order in which keys first appeared.
#[derive(Clone, Default)]
pub(crate) struct Meta {
    entries: Vec<Entry>,
    /// The index of each key in `entries`, by its name without escapes.
    places: HashMap<Box<[u8]>, usize>,
    /// The index in `entries` of each member of the last event.
    last: Vec<usize>,
}

/// The number of entries to compare before the map is used.
const NEAR: usize = 16;

#[derive(Clone)]
struct Entry {
    /// The key as first sent.
    key: Box<[u8]>,
    value: Vec<u8>,
}

impl Meta {
    pub(crate) fn update(&mut self, data: &[u8], members: &Members) {
        let mut next = 0;
        for (index, member) in members.all.iter().enumerate() {
            let key = member.key.of(data);
            // Most events have the members of the last one.
            let last = self.last.get(index).copied().filter(|&place| *self.entries[place].key == *key);
            let place = last.unwrap_or_else(|| self.find(index, next, key));
            next = place + 1;
            let latest = &mut self.entries[place].value;
            latest.clear();
            latest.extend_from_slice(member.value.of(data));
        }
    }

    /// The index of the key of the member at `index`; that of the member before it is before `next`.
    #[cold]
    fn find(&mut self, index: usize, next: usize, key: &[u8]) -> usize {
        // Engines write keys in the same order, so the entry is one of the next.
        let ahead = self.entries.iter().skip(next).take(NEAR).position(|entry| *entry.key == *key);
        let place = ahead.map_or_else(|| self.place(key), |ahead| next + ahead);
        self.last.truncate(index);
        self.last.push(place);
        place
    }

    /// The index of a key. A new key is added at the end.
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
        self.last = Vec::new();
        let entries = std::mem::take(&mut self.entries).into_iter();
        entries.map(|entry| (owned(entry.key.into_vec()), owned(entry.value))).collect()
    }

    pub(crate) fn held_bytes(&self) -> usize {
        let entries = self.entries.capacity() * size_of::<Entry>();
        let places = self.places.capacity() * size_of::<(Box<[u8]>, usize)>();
        let last = self.last.capacity() * size_of::<usize>();
        entries
            + places
            + last
            + self.entries.iter().map(|entry| 2 * entry.key.len() + entry.value.capacity()).sum::<usize>()
    }
}
