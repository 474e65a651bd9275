//! Reads arrays in numpy's file format (.npy): a header with type and shape, then the numbers.
//!
//! The header is a Python literal. Only headers as numpy writes them are accepted: the three keys in their order, with
//! any blanks. Format: `numpy.lib.format`, versions 1.0 and 2.0.

use crate::arrays::{base64_array, metadata_error};
use crate::error::{ErrorKind, EventError};
use crate::generation::RoutedExperts;
use crate::options::Dtype;
use crate::span::RawStr;

/// An array with its shape, in C order.
#[derive(Debug)]
pub(crate) struct Npy {
    pub numbers: RoutedExperts,
    pub shape: Vec<usize>,
}

/// The content of a header.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    dtype: Dtype,
    shape: Vec<usize>,
    /// The offset of the first number.
    end: usize,
}

/// Decode the base64 of a whole file.
pub(crate) fn base64_npy(data: &[u8], text: RawStr, path: &'static str) -> Result<Npy, EventError> {
    let at = text.span.start();
    let mut bytes: Vec<u8> = base64_array(data, text, None, path, |_| {})?;
    let Header { dtype, shape, end } =
        header(&bytes).map_err(|why| metadata_error(at, path, format!("not a numpy file (.npy): {why}")))?;
    let expected = shape.iter().try_fold(dtype.size(), |product: usize, &count| product.checked_mul(count));
    let found = bytes.len() - end;
    if expected != Some(found) {
        let message = format!(
            "{found} bytes follow the header, but they do not fit its type and shape, {} {shape:?}",
            dtype.name()
        );
        return Err(metadata_error(at, path, message));
    }
    let numbers = match dtype {
        Dtype::Uint8 => {
            bytes.drain(..end);
            Some(RoutedExperts::Uint8(bytes))
        }
        Dtype::Uint16 => numbers(&bytes[end..], u16::from_le_bytes).map(RoutedExperts::Uint16),
        Dtype::Int32 => numbers(&bytes[end..], i32::from_le_bytes).map(RoutedExperts::Int32),
    };
    match numbers {
        Some(numbers) => Ok(Npy { numbers, shape }),
        None => {
            Err(EventError::new(ErrorKind::TooLarge, at, path, format!("out of memory for an array of {found} bytes")))
        }
    }
}

/// Copy the numbers, because they may not be aligned.
fn numbers<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
    let (numbers, _) = bytes.as_chunks();
    let mut array = Vec::new();
    array.try_reserve_exact(numbers.len()).ok()?;
    array.extend(numbers.iter().map(|&number| from(number)));
    Some(array)
}

fn header(bytes: &[u8]) -> Result<Header, &'static str> {
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or("its first bytes are not \\x93NUMPY")?;
    let (length, rest) = match rest {
        [1, 0, low, high, rest @ ..] => (u32::from(u16::from_le_bytes([*low, *high])), rest),
        [2, 0, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]), rest),
        _ => return Err("its version is neither 1.0 nor 2.0"),
    };
    let length =
        usize::try_from(length).ok().filter(|&length| length <= rest.len()).ok_or("its header is truncated")?;
    let (dtype, shape) = Literal(&rest[..length]).header()?;
    Ok(Header { dtype, shape, end: bytes.len() - rest.len() + length })
}

/// The rest of a Python literal.
struct Literal<'a>(&'a [u8]);

impl Literal<'_> {
    fn header(&mut self) -> Result<(Dtype, Vec<usize>), &'static str> {
        const KEYS: &str = "its header does not consist of descr, fortran_order and shape";
        self.all(&["{", "'descr'", ":"]).ok_or(KEYS)?;
        let dtype = self.dtype().ok_or("descr is none of '|u1', '<u2', '<i4'")?;
        self.all(&[",", "'fortran_order'", ":"]).ok_or(KEYS)?;
        self.next("False").ok_or("fortran_order is not False")?;
        self.all(&[",", "'shape'", ":"]).ok_or(KEYS)?;
        let shape = self.tuple().ok_or("shape is not a tuple of counts")?;
        // numpy writes a comma after the last member.
        let _ = self.next(",");
        self.next("}").ok_or(KEYS)?;
        self.skip_blanks();
        if self.0 == b"\n" { Ok((dtype, shape)) } else { Err("its header does not end with a line feed") }
    }

    fn dtype(&mut self) -> Option<Dtype> {
        let names = [("'|u1'", Dtype::Uint8), ("'<u2'", Dtype::Uint16), ("'<i4'", Dtype::Int32)];
        names.into_iter().find_map(|(name, dtype)| self.next(name).map(|()| dtype))
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        self.next("(")?;
        let mut counts = Vec::new();
        loop {
            self.skip_blanks();
            if self.next(")").is_some() {
                return Some(counts);
            }
            counts.push(self.count()?);
            if self.next(",").is_none() {
                // A number in parentheses is not a tuple.
                self.next(")")?;
                return (counts.len() > 1).then_some(counts);
            }
        }
    }

    fn count(&mut self) -> Option<usize> {
        let length = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(length);
        self.0 = rest;
        if digits.len() > 1 && digits[0] == b'0' {
            return None;
        }
        std::str::from_utf8(digits).ok()?.parse().ok()
    }

    fn all(&mut self, words: &[&str]) -> Option<()> {
        words.iter().try_for_each(|word| self.next(word))
    }

    /// Take the word, if it comes next after blanks.
    fn next(&mut self, word: &str) -> Option<()> {
        self.skip_blanks();
        self.0 = self.0.strip_prefix(word.as_bytes())?;
        Some(())
    }

    fn skip_blanks(&mut self) {
        while let [b' ', rest @ ..] = self.0 {
            self.0 = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        let length = u32::try_from(header.len()).unwrap().to_le_bytes();
        bytes.extend(if version == 1 { &length[..2] } else { &length });
        bytes.extend(header.as_bytes());
        bytes
    }

    #[test]
    fn a_header_is_read_as_numpy_and_its_imitators_write_it() {
        for (text, dtype, shape) in [
            ("{'descr': '|u1', 'fortran_order': False, 'shape': (7, 2, 2), }   \n", Dtype::Uint8, &[7, 2, 2][..]),
            ("{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }\n", Dtype::Int32, &[3]),
            ("{'descr':'<u2','fortran_order':False,'shape':(3,2)}\n", Dtype::Uint16, &[3, 2]),
            ("{ 'descr' : '<u2' , 'fortran_order' : False , 'shape' : ( ) } \n", Dtype::Uint16, &[]),
        ] {
            for version in [1, 2] {
                let bytes = file(version, text);
                assert_eq!(header(&bytes), Ok(Header { dtype, shape: shape.to_vec(), end: bytes.len() }), "{text}");
            }
        }
    }

    #[test]
    fn any_other_header_is_refused() {
        for text in [
            "",
            "\n",
            "{}\n",
            "{'descr': '>u2', 'fortran_order': False, 'shape': (1,), }\n",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n",
            "{'descr': '|u1', 'fortran_order': True, 'shape': (1,), }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1), }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (01,), }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (,), }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999,), }\n",
            "{'descr': '|u1', 'fortran_order': False, }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), 'x': 1, }\n",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }\n\n",
        ] {
            assert!(header(&file(1, text)).is_err(), "{text}");
        }
        let good = file(1, "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }\n");
        assert!(header(&file(3, "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }\n")).is_err());
        for end in 0..good.len() {
            assert!(header(&good[..end]).is_err(), "truncated at {end}");
        }
    }
}
