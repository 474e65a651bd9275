//! A cache of the keys of the last event.
//!
//! An engine writes the same keys in the same order in every event, and most values that go to `Generation.meta` stay
//! the same. So a key is first compared with the key at that position in the last event, delimiter and colon included,
//! and its value with the last value. A key is looked up by its name only if it differs, and a value is parsed only if
//! the key or the value differs.
//!
//! Keys whose values were all the same form a run, up to the key behind them or to the end of the object. The bytes of
//! a run are compared at once.

use std::ops::Range;

use crate::json::{Cursor, Result};
use crate::key_table::LevelKey;
use crate::span::Span;
use crate::text::{name as plain_name, starts_with};

/// Longer values are not kept for comparison.
const MAX_VALUE_BYTES: usize = 64;

/// An event with more keys is read without the cache, because each new key is compared with all others.
const MAX_KEYS: usize = 128;

/// One key of the last event.
struct CachedKey<K> {
    key: K,
    /// The bytes from the brace or comma before the key to the colon behind it, as in `,"text":`.
    raw: Vec<u8>,
    /// The range of the name in `raw`.
    name: Range<usize>,
    /// The name without escapes.
    plain: Box<[u8]>,
    /// The last value, if it may be skipped when it is repeated; else empty.
    value: Vec<u8>,
    /// The object has this key twice, and the last one counts. So both must be read.
    is_duplicate: bool,
    /// The run that begins with this key.
    run: Option<Box<Run>>,
    /// A run includes the value.
    is_in_run: bool,
}

/// Keys of one object whose values were the same in the last two events.
struct Run {
    /// The bytes from the brace or comma before the first key to the colon behind the key that follows the last one, or
    /// to the brace that ends the object.
    bytes: Vec<u8>,
    /// The number of keys whose values are in the bytes.
    count: usize,
    /// Whether the object ends with the run.
    ends_object: bool,
    /// The values that every event needs: the index of the key, and the range in the bytes.
    needed: Vec<(usize, Range<usize>)>,
}

/// The keys of the last event, in their order.
pub(crate) struct KeyCache<K> {
    keys: Vec<CachedKey<K>>,
    next: usize,
    /// The first of the keys before the next one whose values were the same, and the offset of its brace or comma.
    first_same: (usize, usize),
    /// Whether the value of the key just taken was the same.
    was_same: bool,
    /// An event had too many keys.
    is_disabled: bool,
    /// The name of the key just taken, if the cache is disabled.
    name: Option<Span>,
}

impl<K> Default for KeyCache<K> {
    fn default() -> Self {
        Self { keys: Vec::new(), next: 0, first_same: (0, 0), was_same: false, is_disabled: false, name: None }
    }
}

impl<K: Copy> KeyCache<K> {
    /// Start at the first key of an event.
    pub(crate) fn start_event(&mut self) {
        self.next = 0;
        self.was_same = false;
    }

    /// Take the brace or comma, the key and the colon. None: the object has ended, and its brace is taken.
    ///
    /// Keys before it that repeat their values may be taken with it. `on_needed` is given those that every event needs.
    #[inline]
    pub(crate) fn next_key<L: LevelKey<Key = K>>(
        &mut self,
        cursor: &mut Cursor<'_>,
        data: &[u8],
        is_first: bool,
        on_needed: impl FnMut(L, Span),
    ) -> Result<Option<L>> {
        let goes_on = std::mem::replace(&mut self.was_same, false);
        if !goes_on {
            self.first_same = (self.next, cursor.at);
        }
        let key = self.next_known(cursor, data, is_first, on_needed)?;
        if goes_on {
            self.keep_run::<L>(data, cursor.at, key.is_none());
        }
        Ok(key)
    }

    #[inline]
    fn next_known<L: LevelKey<Key = K>>(
        &mut self,
        cursor: &mut Cursor<'_>,
        data: &[u8],
        is_first: bool,
        mut on_needed: impl FnMut(L, Span),
    ) -> Result<Option<L>> {
        let rest = &data[cursor.at..];
        if let Some(cached) = self.keys.get(self.next)
            && let Some(key) = L::from_key(cached.key)
        {
            if let Some(run) = cached.run.as_deref().filter(|run| rest.starts_with(&run.bytes)) {
                for (index, range) in &run.needed {
                    if let Some(key) = L::from_key(self.keys[*index].key) {
                        on_needed(key, Span::new(cursor.at + range.start, cursor.at + range.end));
                    }
                }
                cursor.at += run.bytes.len();
                self.next += run.count;
                if run.ends_object {
                    return Ok(None);
                }
                self.next += 1;
                return Ok(L::from_key(self.keys[self.next - 1].key));
            }
            if starts_with(rest, &cached.raw) {
                cursor.at += cached.raw.len();
                self.next += 1;
                return Ok(Some(key));
            }
        }
        if !is_first && rest.first() == Some(&b'}') {
            cursor.at += 1;
            return Ok(None);
        }
        self.read_key(cursor, data, is_first)
    }

    /// The name of the key just taken. The position behind its colon is `from`.
    #[inline]
    pub(crate) fn name(&self, from: usize) -> Span {
        if let Some(name) = self.name {
            return name;
        }
        let cached = &self.keys[self.next - 1];
        let start = from - cached.raw.len();
        Span::new(start + cached.name.start, start + cached.name.end)
    }

    /// Take the value of the key just taken, if it equals the value in the last event.
    #[inline]
    pub(crate) fn next_same_value(&mut self, cursor: &mut Cursor<'_>, data: &[u8]) -> bool {
        if self.name.is_some() {
            return false;
        }
        let value = &self.keys[self.next - 1].value;
        let end = cursor.at + value.len();
        let is_same =
            !value.is_empty() && matches!(data.get(end), Some(b',' | b'}')) && data[cursor.at..end] == **value;
        if is_same {
            cursor.at = end;
            self.was_same = true;
        }
        is_same
    }

    /// Keep the value of the key just taken, to compare it in the next event. An empty one clears the last value.
    #[inline]
    pub(crate) fn keep_value(&mut self, value: &[u8]) {
        let index = self.next.wrapping_sub(1);
        let Some(cached) = self.keys.get_mut(index).filter(|_| self.name.is_none()) else { return };
        cached.value.clear();
        if value.len() <= MAX_VALUE_BYTES && !cached.is_duplicate {
            cached.value.extend_from_slice(value);
        }
        if cached.is_in_run {
            self.drop_run(index);
        }
    }

    /// Whether the object may have the key just taken twice.
    pub(crate) fn may_be_duplicate(&self) -> bool {
        self.keys.get(self.next.wrapping_sub(1)).is_none_or(|cached| cached.is_duplicate)
    }

    /// Clear all values: those of the last event do not count.
    pub(crate) fn forget_values(&mut self) {
        self.keys.iter_mut().for_each(|cached| cached.value.clear());
        self.drop_runs();
    }

    /// The values of the keys before the next one, from `first_same` on, were the same as in the last event: keep them
    /// as a run that ends at `end`.
    #[cold]
    fn keep_run<L: LevelKey<Key = K>>(&mut self, data: &[u8], end: usize, ends_object: bool) {
        let (first, start) = self.first_same;
        let last = if ends_object { self.next } else { self.next.saturating_sub(1) };
        if self.name.is_some() || first >= last || last > self.keys.len() {
            return;
        }
        let mut needed = Vec::new();
        let mut at = 0;
        for (index, cached) in self.keys[first..last].iter_mut().enumerate() {
            at += cached.raw.len();
            if L::from_key(cached.key).is_some_and(|key| key.usage().is_needed()) {
                needed.push((first + index, at..at + cached.value.len()));
            }
            at += cached.value.len();
            cached.is_in_run = true;
            cached.run = None;
        }
        let bytes = data[start..end].to_vec();
        self.keys[first].run = Some(Box::new(Run { bytes, count: last - first, ends_object, needed }));
    }

    /// Drop the run that includes the value of this key.
    #[cold]
    fn drop_run(&mut self, index: usize) {
        let Some(first) = (0..=index).rev().find(|&first| self.keys[first].run.is_some()) else { return };
        let count = self.keys[first].run.take().map_or(0, |run| run.count);
        self.keys[first..first + count].iter_mut().for_each(|cached| cached.is_in_run = false);
    }

    fn drop_runs(&mut self) {
        for cached in &mut self.keys {
            cached.run = None;
            cached.is_in_run = false;
        }
    }

    #[cold]
    fn read_key<L: LevelKey<Key = K>>(
        &mut self,
        cursor: &mut Cursor<'_>,
        data: &[u8],
        is_first: bool,
    ) -> Result<Option<L>> {
        let start = cursor.at;
        let Some(name) = (if is_first { cursor.next_object()? } else { cursor.next_member()? }) else {
            return Ok(None);
        };
        let plain = plain_name(data, name);
        let key = L::of(&plain);
        if self.is_disabled || self.next == MAX_KEYS {
            self.is_disabled = true;
            self.keys.clear();
            self.name = Some(name.span);
            return Ok(Some(key));
        }
        self.insert::<L>(CachedKey {
            key: key.into_key(),
            raw: data[start..cursor.at].to_vec(),
            name: name.span.start() - start..name.span.end() - start,
            plain: plain.into(),
            value: Vec::new(),
            is_duplicate: false,
            run: None,
            is_in_run: false,
        });
        Ok(Some(key))
    }

    fn insert<L: LevelKey<Key = K>>(&mut self, mut new: CachedKey<K>) {
        // Runs go by the places of their keys, and a key that is there twice is in none.
        self.drop_runs();
        for (index, other) in self.keys.iter_mut().enumerate() {
            if index != self.next && L::from_key(other.key).is_some() && other.plain == new.plain {
                other.is_duplicate = true;
                other.value.clear();
                new.is_duplicate = true;
            }
        }
        match self.keys.get_mut(self.next) {
            Some(old) => *old = new,
            None => self.keys.push(new),
        }
        self.next += 1;
    }

    pub(crate) fn held_bytes(&self) -> usize {
        let run = |run: &Run| {
            size_of::<Run>() + run.bytes.capacity() + run.needed.capacity() * size_of::<(usize, Range<usize>)>()
        };
        let kept = |cached: &CachedKey<K>| {
            let run = cached.run.as_deref().map_or(0, run);
            cached.raw.capacity() + cached.value.capacity() + cached.plain.len() + run
        };
        self.keys.capacity() * size_of::<CachedKey<K>>() + self.keys.iter().map(kept).sum::<usize>()
    }
}
