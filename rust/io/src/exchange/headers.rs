//! The header fields of a reply.

/// The fields of a reply's head, in their order.
///
/// Names are in lower case. Values are latin-1, without surrounding blanks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(Box<str>, Box<str>)>);

impl Headers {
    /// The value of the first field of that name, in lower case.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// The values of all fields of that name, in lower case.
    pub fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.iter().filter(move |(other, _)| *other == name).map(|(_, value)| value)
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    /// The elements of all fields of that name, split at commas, without blanks, empty ones left out.
    pub(crate) fn elements<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.all(name).flat_map(|value| value.split(',')).map(str::trim_ascii).filter(|part| !part.is_empty())
    }
}

impl<'a> FromIterator<(&'a str, &'a [u8])> for Headers {
    fn from_iter<T: IntoIterator<Item = (&'a str, &'a [u8])>>(fields: T) -> Self {
        let latin_1 = |value: &[u8]| value.iter().map(|&byte| char::from(byte)).collect::<String>();
        let field = |(name, value): (&str, &[u8])| (name.to_ascii_lowercase().into(), latin_1(value).into());
        Self(fields.into_iter().map(field).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::Headers;

    #[test]
    fn names_are_lower_case_and_values_latin_1() {
        let headers: Headers =
            [("X-Name", &b"caf\xe9"[..]), ("x-name", b"a, ,b"), ("other", b"")].into_iter().collect();
        assert_eq!(headers.get("x-name"), Some("café"));
        assert_eq!(headers.elements("x-name").collect::<Vec<_>>(), ["café", "a", "b"]);
        assert_eq!(headers.iter().last(), Some(("other", "")));
        assert_eq!(headers.get("absent"), None);
    }
}
