//! The fields of an event: `data` and `event`.

/// A line that counts.
pub(super) enum Field {
    /// A data line, and the index of its value.
    Data(usize),
    /// An event line, and whether it is `error`.
    Event(bool),
}

/// The field of a line. None: other fields and comments, which are skipped.
pub(super) fn field(line: &[u8]) -> Option<Field> {
    if let Some(value) = line.strip_prefix(b"data") {
        return match value {
            [] => Some(Field::Data(4)),
            [b':', b' ', ..] => Some(Field::Data(6)),
            [b':', ..] => Some(Field::Data(5)),
            _ => None,
        };
    }
    match line.strip_prefix(b"event")? {
        [] => Some(Field::Event(false)),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(Field::Event(value == b"error")),
        _ => None,
    }
}
