//! The keys of an event, as the one before it had them.
//!
//! An engine writes the same keys in the same order, event after event, and most of what no field holds stays the
//! same. So a key is first compared with the one that stood there last time, delimiter and colon included, and its
//! value with the one before; only where that fails is it read.

use std::ops::Range;

use crate::json::{Cursor, Result};
use crate::span::Span;
use crate::text::name as plain_name;

/// The keys of a dialect that mean something.
pub(crate) trait Key: Copy {
    /// The kind of object that a key stands in.
    type Level: Copy + PartialEq;
    /// No key: the object ends.
    const END: Self;

    /// The key of that name.
    fn of(level: Self::Level, name: &[u8]) -> Self;
}

/// A longer value is not kept to be compared.
const MAX_VALUE_BYTES: usize = 64;

/// An event of more keys is read plainly, so that looking for twins stays cheap.
const MAX_KEYS: usize = 128;

/// One key of the last event.
struct CachedKey<K: Key> {
    level: K::Level,
    key: K,
    /// As in `,"text":`, with the brace or comma before it.
    raw: Vec<u8>,
    /// The name in `raw`, as it is spelled there.
    name: Range<usize>,
    /// The name itself.
    plain: Box<[u8]>,
    /// The last value, if it may be passed over when it comes again; else empty.
    value: Vec<u8>,
    /// The key stands twice in an object: then which one is the last must not be forgotten.
    is_duplicate: bool,
}

/// The keys of the last event, in order.
pub(crate) struct KeyCache<K: Key> {
    places: Vec<CachedKey<K>>,
    next: usize,
    /// An event had too many keys.
    is_disabled: bool,
    /// The key that has just been taken, if it has no place.
    name: Option<Span>,
}

impl<K: Key> Default for KeyCache<K> {
    fn default() -> Self {
        Self { places: Vec::new(), next: 0, is_disabled: false, name: None }
    }
}

impl<K: Key> KeyCache<K> {
    /// An event begins.
    pub(crate) fn start_event(&mut self) {
        self.next = 0;
    }

    /// Take the brace or comma, the key and the colon; or the brace at the end of the object.
    #[inline]
    pub(crate) fn next_key(
        &mut self,
        cursor: &mut Cursor<'_>,
        data: &[u8],
        level: K::Level,
        is_first: bool,
    ) -> Result<K> {
        if let Some(place) = self.places.get(self.next)
            && place.level == level
            && data[cursor.at..].starts_with(&place.raw)
        {
            cursor.at += place.raw.len();
            self.next += 1;
            return Ok(place.key);
        }
        self.read_key(cursor, data, level, is_first)
    }

    /// The name of the key that has just been taken; the value's first byte is at `from`.
    #[inline]
    pub(crate) fn name(&self, from: usize) -> Span {
        if let Some(name) = self.name {
            return name;
        }
        let place = &self.places[self.next - 1];
        let start = from - place.raw.len();
        Span::new(start + place.name.start, start + place.name.end)
    }

    /// Take the value of the last key, if it is the same as in the last event.
    #[inline]
    pub(crate) fn next_same_value(&self, cursor: &mut Cursor<'_>, data: &[u8]) -> bool {
        if self.name.is_some() {
            return false;
        }
        let value = &self.places[self.next - 1].value;
        let end = cursor.at + value.len();
        let is_same =
            !value.is_empty() && matches!(data.get(end), Some(b',' | b'}')) && data[cursor.at..end] == **value;
        if is_same {
            cursor.at = end;
        }
        is_same
    }

    /// Keep the value of the key at `index` for the next event; an empty one forgets the last.
    #[inline]
    pub(crate) fn keep_value(&mut self, index: usize, value: &[u8]) {
        let Some(place) = self.places.get_mut(index).filter(|_| self.name.is_none()) else { return };
        place.value.clear();
        if value.len() <= MAX_VALUE_BYTES && !place.is_duplicate {
            place.value.extend_from_slice(value);
        }
    }

    /// Whether the key at `index` may stand twice.
    pub(crate) fn is_duplicate(&self, index: usize) -> bool {
        self.places.get(index).is_none_or(|place| place.is_duplicate)
    }

    /// What the last event said does not count: keep no value of it.
    pub(crate) fn forget_values(&mut self) {
        self.places.iter_mut().for_each(|place| place.value.clear());
    }

    /// The index of the key that has just been taken.
    pub(crate) fn last(&self) -> usize {
        self.next.wrapping_sub(1)
    }

    #[cold]
    fn read_key(&mut self, cursor: &mut Cursor<'_>, data: &[u8], level: K::Level, is_first: bool) -> Result<K> {
        let start = cursor.at;
        let Some(name) = (if is_first { cursor.next_object()? } else { cursor.next_member()? }) else {
            return Ok(K::END);
        };
        let plain = plain_name(data, name);
        let key = K::of(level, &plain);
        if self.is_disabled || self.next == MAX_KEYS {
            self.is_disabled = true;
            self.places.clear();
            self.name = Some(name.span);
            return Ok(key);
        }
        let place = CachedKey {
            level,
            key,
            raw: data[start..cursor.at].to_vec(),
            name: name.span.start() - start..name.span.end() - start,
            plain: plain.into(),
            value: Vec::new(),
            is_duplicate: false,
        };
        self.put(place);
        Ok(key)
    }

    fn put(&mut self, mut place: CachedKey<K>) {
        for (index, other) in self.places.iter_mut().enumerate() {
            if index != self.next && other.level == place.level && other.plain == place.plain {
                other.is_duplicate = true;
                other.value.clear();
                place.is_duplicate = true;
            }
        }
        match self.places.get_mut(self.next) {
            Some(old) => *old = place,
            None => self.places.push(place),
        }
        self.next += 1;
    }

    pub(crate) fn held_bytes(&self) -> usize {
        let kept = |place: &CachedKey<K>| place.raw.capacity() + place.value.capacity() + place.plain.len();
        self.places.capacity() * size_of::<CachedKey<K>>() + self.places.iter().map(kept).sum::<usize>()
    }
}
