//! The keys that a dialect reads, and a cache of the keys of the last event.
//!
//! An engine writes the same keys in the same order in every event, and most values that go to `Generation.meta` stay
//! the same. So a key is first compared with the key at that position in the last event, delimiter and colon included,
//! and its value with the last value. A key is looked up by its name only if it differs, and a value is parsed only if
//! the key or the value differs.

use std::ops::Range;

use crate::json::{Cursor, Result};
use crate::span::Span;
use crate::text::name as plain_name;

/// What the reader does with the value of a key, beside parsing it into its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nothing: the generation has an attribute for it.
    Field,
    /// As `Field`. If the value equals the one in the last event, it is not parsed again.
    RepeatedField,
    /// It is kept for `Generation.meta`.
    Meta,
    /// As `Meta`. If the value equals the one in the last event, it is not parsed again.
    RepeatedMeta,
}

impl Use {
    pub(crate) const fn is_meta(self) -> bool {
        matches!(self, Self::Meta | Self::RepeatedMeta)
    }

    pub(crate) const fn repeats(self) -> bool {
        matches!(self, Self::RepeatedField | Self::RepeatedMeta)
    }
}

/// The keys of one level of an event, such as those of `meta_info`.
pub(crate) trait LevelKey: Copy {
    /// A key of any level.
    type Key: Copy;

    /// The key with this name.
    fn of(name: &[u8]) -> Self;

    /// The key, if it belongs to this level.
    fn from_key(key: Self::Key) -> Option<Self>;

    fn into_key(self) -> Self::Key;
}

/// The table of a dialect's keys: for each level an enum, and for each key its name on the wire and its [`Use`].
///
/// Readers match on a level's enum without a wildcard, so a key that is added here and not read does not compile.
macro_rules! keys {
    ($(
        $(#[$about:meta])*
        $Level:ident($LevelKey:ident) at $path:literal { $($(#[$note:meta])* $Key:ident = $name:literal: $use:ident,)* }
    )*) => {
        /// A key of any level.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Key {
            $($Level($LevelKey),)*
        }

        $(
            $(#[$about])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub(super) enum $LevelKey {
                $($(#[$note])* $Key,)*
                /// Every other key: it goes to `Generation.meta`.
                Other,
            }

            impl $LevelKey {
                /// The path of the value in an event, for errors.
                pub(super) const fn path(self) -> &'static str {
                    match self {
                        $(Self::$Key => concat!($path, $name),)*
                        Self::Other => $path,
                    }
                }

                pub(super) const fn usage(self) -> $crate::key_cache::Use {
                    match self {
                        $(Self::$Key => $crate::key_cache::Use::$use,)*
                        Self::Other => $crate::key_cache::Use::RepeatedMeta,
                    }
                }
            }

            impl $crate::key_cache::LevelKey for $LevelKey {
                type Key = Key;

                fn of(name: &[u8]) -> Self {
                    $(
                        if name == $name.as_bytes() {
                            return Self::$Key;
                        }
                    )*
                    Self::Other
                }

                #[inline]
                fn from_key(key: Key) -> Option<Self> {
                    match key {
                        Key::$Level(key) => Some(key),
                        _ => None,
                    }
                }

                fn into_key(self) -> Key {
                    Key::$Level(self)
                }
            }
        )*
    };
}
pub(crate) use keys;

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
}

/// The keys of the last event, in their order.
pub(crate) struct KeyCache<K> {
    keys: Vec<CachedKey<K>>,
    next: usize,
    /// An event had too many keys.
    is_disabled: bool,
    /// The name of the key just taken, if the cache is disabled.
    name: Option<Span>,
}

impl<K> Default for KeyCache<K> {
    fn default() -> Self {
        Self { keys: Vec::new(), next: 0, is_disabled: false, name: None }
    }
}

impl<K: Copy> KeyCache<K> {
    /// Start at the first key of an event.
    pub(crate) fn start_event(&mut self) {
        self.next = 0;
    }

    /// Take the brace or comma, the key and the colon. None: the object has ended, and its brace is taken.
    #[inline]
    pub(crate) fn next_key<L: LevelKey<Key = K>>(
        &mut self,
        cursor: &mut Cursor<'_>,
        data: &[u8],
        is_first: bool,
    ) -> Result<Option<L>> {
        if let Some(cached) = self.keys.get(self.next)
            && let Some(key) = L::from_key(cached.key)
            && data[cursor.at..].starts_with(&cached.raw)
        {
            cursor.at += cached.raw.len();
            self.next += 1;
            return Ok(Some(key));
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
    pub(crate) fn next_same_value(&self, cursor: &mut Cursor<'_>, data: &[u8]) -> bool {
        if self.name.is_some() {
            return false;
        }
        let value = &self.keys[self.next - 1].value;
        let end = cursor.at + value.len();
        let is_same =
            !value.is_empty() && matches!(data.get(end), Some(b',' | b'}')) && data[cursor.at..end] == **value;
        if is_same {
            cursor.at = end;
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
    }

    /// Whether the object may have the key just taken twice.
    pub(crate) fn may_be_duplicate(&self) -> bool {
        self.keys.get(self.next.wrapping_sub(1)).is_none_or(|cached| cached.is_duplicate)
    }

    /// Clear all values: those of the last event do not count.
    pub(crate) fn forget_values(&mut self) {
        self.keys.iter_mut().for_each(|cached| cached.value.clear());
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
        });
        Ok(Some(key))
    }

    fn insert<L: LevelKey<Key = K>>(&mut self, mut new: CachedKey<K>) {
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
        let kept = |cached: &CachedKey<K>| cached.raw.capacity() + cached.value.capacity() + cached.plain.len();
        self.keys.capacity() * size_of::<CachedKey<K>>() + self.keys.iter().map(kept).sum::<usize>()
    }
}
