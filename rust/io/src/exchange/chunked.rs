//! The chunked transfer coding (RFC 9112, section 7.1): `Chunked`.

use crate::exchange::failure::ProtocolError;
use crate::exchange::part::{Part, take};

/// The most bytes of chunk extensions, over the whole reply: hyper's limit.
pub(crate) const MAX_EXTENSION_BYTES: usize = 16 << 10;
/// The most bytes of trailers.
pub(crate) const MAX_TRAILER_BYTES: usize = 16 << 10;
/// The most digits of a chunk size.
const MAX_DIGITS: u8 = 16;
/// The most digits of a chunk size that is read in one step.
const MAX_PLAIN_DIGITS: usize = 8;

/// Reads a chunked body. Extensions and trailers are dropped. Lines end in CRLF, and nothing else.
#[derive(Default)]
pub(crate) struct Chunked {
    place: Place,
    /// The size of the chunk while it is read, then the bytes that are left of it.
    left: u64,
    extension_bytes: usize,
    trailer_bytes: usize,
}

/// Where the next byte stands.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a chunk size of which this many digits are known.
    Size(u8),
    /// In the blanks behind a chunk size.
    Blanks,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// At the start of a trailer, or of the blank line that ends the body.
    Trailers,
    Trailer,
    TrailerLf,
    LastLf,
}

impl Default for Place {
    fn default() -> Self {
        Self::Size(0)
    }
}

impl Chunked {
    /// Take the next part of the body off the front of `input`. Not to be called again after [`Part::End`].
    pub(crate) fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Part<'a>, ProtocolError> {
        loop {
            self.skip_plain_header(input);
            if let Place::Data = self.place {
                let part = take(input, &mut self.left);
                if self.left == 0 {
                    self.place = Place::DataCr;
                }
                return Ok(part);
            }
            let Some((&byte, rest)) = input.split_first() else { return Ok(Part::Pending) };
            *input = rest;
            if let (Place::LastLf, b'\n') = (self.place, byte) {
                return Ok(Part::End);
            }
            self.place = self.step(byte)?;
        }
    }

    /// Take the line end of a chunk and the size of the next one, if all of that is there and has no extension. Anything
    /// else is left to be read byte by byte.
    #[inline]
    fn skip_plain_header(&mut self, input: &mut &[u8]) {
        let mut rest = *input;
        match (self.place, rest) {
            (Place::DataCr, [b'\r', b'\n', after @ ..]) => rest = after,
            (Place::Size(0), _) => {}
            _ => return,
        }
        let mut size = 0;
        for (index, &byte) in rest.iter().take(MAX_PLAIN_DIGITS + 1).enumerate() {
            if let Some(digit) = hex_digit(byte) {
                size = size << 4 | digit;
                continue;
            }
            if size > 0 && rest[index..].starts_with(b"\r\n") {
                *input = &rest[index + 2..];
                self.left = size;
                self.place = Place::Data;
            }
            return;
        }
    }

    /// The place after `byte`, which is none of a chunk's data.
    fn step(&mut self, byte: u8) -> Result<Place, ProtocolError> {
        Ok(match (self.place, byte) {
            (Place::Size(1..) | Place::Blanks | Place::Extension, b'\r') => Place::SizeLf,
            (Place::Size(1..) | Place::Blanks, b' ' | b'\t') => self.extension(Place::Blanks)?,
            (Place::Size(1..) | Place::Blanks, b';') => self.extension(Place::Extension)?,
            (Place::Size(digits), _) => self.digit(digits, byte)?,
            (Place::Extension, b'\n') => return Err(ProtocolError::ChunkExtension),
            (Place::Extension, _) => self.extension(Place::Extension)?,
            (Place::SizeLf, b'\n') if self.left == 0 => Place::Trailers,
            (Place::SizeLf, b'\n') => Place::Data,
            (Place::Blanks | Place::SizeLf, _) => return Err(ProtocolError::ChunkSize),

            (Place::DataCr, b'\r') => Place::DataLf,
            (Place::DataLf, b'\n') => Place::Size(0),
            (Place::Data | Place::DataCr | Place::DataLf, _) => return Err(ProtocolError::ChunkEnd),

            (Place::Trailers, b'\r') => Place::LastLf,
            (Place::Trailer, b'\r') => self.trailer(Place::TrailerLf)?,
            (Place::TrailerLf, b'\n') => self.trailer(Place::Trailers)?,
            (Place::Trailers | Place::Trailer, b'\n') | (Place::TrailerLf | Place::LastLf, _) => {
                return Err(ProtocolError::Trailer);
            }
            (Place::Trailers | Place::Trailer, _) => self.trailer(Place::Trailer)?,
        })
    }

    fn digit(&mut self, digits: u8, byte: u8) -> Result<Place, ProtocolError> {
        let digit = hex_digit(byte).filter(|_| digits < MAX_DIGITS).ok_or(ProtocolError::ChunkSize)?;
        self.left = self.left << 4 | digit;
        Ok(Place::Size(digits + 1))
    }

    fn extension(&mut self, place: Place) -> Result<Place, ProtocolError> {
        self.extension_bytes += 1;
        if self.extension_bytes > MAX_EXTENSION_BYTES {
            return Err(ProtocolError::ChunkExtensionsTooLarge(MAX_EXTENSION_BYTES));
        }
        Ok(place)
    }

    fn trailer(&mut self, place: Place) -> Result<Place, ProtocolError> {
        self.trailer_bytes += 1;
        if self.trailer_bytes > MAX_TRAILER_BYTES {
            return Err(ProtocolError::TrailersTooLarge(MAX_TRAILER_BYTES));
        }
        Ok(place)
    }
}

#[inline]
fn hex_digit(byte: u8) -> Option<u64> {
    Some(u64::from(match byte {
        b'0'..=b'9' => byte - b'0',
        b'a'..=b'f' => byte - b'a' + 10,
        b'A'..=b'F' => byte - b'A' + 10,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::{Chunked, MAX_EXTENSION_BYTES, MAX_TRAILER_BYTES};
    use crate::exchange::failure::ProtocolError;
    use crate::exchange::part::Part;

    /// The body and what lies behind it; None if the body has not ended.
    type Body = Result<(Vec<u8>, Option<Vec<u8>>), ProtocolError>;

    fn read_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Body {
        let (mut chunked, mut body, mut behind) = (Chunked::default(), Vec::new(), None::<Vec<u8>>);
        for mut part in parts {
            if let Some(behind) = &mut behind {
                behind.extend_from_slice(part);
                continue;
            }
            loop {
                match chunked.next(&mut part)? {
                    Part::Data(data) => body.extend_from_slice(data),
                    Part::Pending => break,
                    Part::End => {
                        behind = Some(part.to_vec());
                        break;
                    }
                }
            }
        }
        Ok((body, behind))
    }

    /// Read in one piece and byte by byte: the same result.
    fn read(bytes: &[u8]) -> Body {
        let whole = read_parts(std::iter::once(bytes));
        assert_eq!(whole, read_parts(bytes.chunks(1)));
        whole
    }

    #[test]
    fn chunks_are_joined() {
        let body = b"3\r\nabc\r\n00A;name=\"value\"\r\n0123456789\r\n2 \t;x\r\n\r\n\r\n0\r\n\r\n";
        assert_eq!(read(body), Ok((b"abc0123456789\r\n".to_vec(), Some(vec![]))));
        assert_eq!(read(b"1\r\na\r\n0\r\nX: y\r\nZ: \r\n\r\nHTTP"), Ok((b"a".to_vec(), Some(b"HTTP".to_vec()))));
        assert_eq!(read(b"5\r\nab"), Ok((b"ab".to_vec(), None)), "truncated");
        assert_eq!(read(b"1\r\na\r\n0\r\n"), Ok((b"a".to_vec(), None)), "without its last line");
    }

    #[test]
    fn malformed_chunks_are_errors() {
        for size in ["\r\n", "g\r\n", "-1\r\n", "0x1\r\n", "1\n", " 1\r\n", "1 2\r\n", "1\rx", "00000000000000001\r\n"]
        {
            assert_eq!(read(size.as_bytes()), Err(ProtocolError::ChunkSize), "{size:?}");
        }
        assert_eq!(read(b"FFFFFFFFFFFFFFFF\r\nab"), Ok((b"ab".to_vec(), None)), "the largest size");
        assert_eq!(read(b"1;x\ny\r\n"), Err(ProtocolError::ChunkExtension));
        assert_eq!(read(b"1\r\nab"), Err(ProtocolError::ChunkEnd));
        assert_eq!(read(b"1\r\na\n"), Err(ProtocolError::ChunkEnd));
        assert_eq!(read(b"1\r\na\r0"), Err(ProtocolError::ChunkEnd));
        for trailers in ["\n", "a\n", "a\rb", "\ra"] {
            assert_eq!(read(format!("0\r\n{trailers}").as_bytes()), Err(ProtocolError::Trailer), "{trailers:?}");
        }
    }

    #[test]
    fn extensions_and_trailers_are_bounded() {
        let extended = |count: usize| [&b"1;"[..], &vec![b'x'; count - 1], b"\r\na\r\n0\r\n\r\n"].concat();
        assert!(read(&extended(MAX_EXTENSION_BYTES)).is_ok());
        let too_large = Err(ProtocolError::ChunkExtensionsTooLarge(MAX_EXTENSION_BYTES));
        assert_eq!(read(&extended(MAX_EXTENSION_BYTES + 1)), too_large);
        assert_eq!(read(&b"1;x\r\na\r\n".repeat(MAX_EXTENSION_BYTES)), too_large, "over all chunks");
        let trailed = |count: usize| [&b"0\r\n"[..], &vec![b'x'; count - 2], b"\r\n\r\n"].concat();
        assert!(read(&trailed(MAX_TRAILER_BYTES)).is_ok());
        assert_eq!(read(&trailed(MAX_TRAILER_BYTES + 1)), Err(ProtocolError::TrailersTooLarge(MAX_TRAILER_BYTES)));
    }
}
