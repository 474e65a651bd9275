//! The keys that a dialect reads: for each its name on the wire and its [`Use`].

/// What the reader does with the value of a key, beside parsing it into its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nothing: the generation has an attribute for it.
    Field,
    /// As `Field`. If the value equals the one in the last event, it is not parsed again.
    RepeatedField,
    /// As `RepeatedField`, but every event needs the value: the reader is given a repeated one.
    NeededField,
    /// As `Field`. If the value is null as in the last event, it is not parsed again.
    NullField,
    /// It is kept for `Generation.meta`.
    Meta,
    /// As `Meta`. If the value equals the one in the last event, it is not parsed again.
    RepeatedMeta,
    /// As `RepeatedMeta`, but every event needs the value: the reader is given a repeated one.
    NeededMeta,
}

impl Use {
    pub(crate) const fn is_meta(self) -> bool {
        matches!(self, Self::Meta | Self::RepeatedMeta | Self::NeededMeta)
    }

    pub(crate) const fn repeats(self) -> bool {
        !matches!(self, Self::Field | Self::Meta)
    }

    /// What of a value is kept to recognize its repetition.
    pub(crate) fn repeated(self, value: &[u8]) -> &[u8] {
        if self == Self::NullField && value != b"null" { &[] } else { value }
    }

    pub(crate) const fn is_needed(self) -> bool {
        matches!(self, Self::NeededField | Self::NeededMeta)
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

    fn usage(self) -> Use;
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
            }

            impl $crate::key_table::LevelKey for $LevelKey {
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

                #[inline]
                fn usage(self) -> $crate::key_table::Use {
                    match self {
                        $(Self::$Key => $crate::key_table::Use::$use,)*
                        Self::Other => $crate::key_table::Use::RepeatedMeta,
                    }
                }
            }
        )*
    };
}
pub(crate) use keys;
