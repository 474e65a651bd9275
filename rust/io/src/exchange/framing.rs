//! Where the body of a reply ends (RFC 9112, section 6): `Framing`.

use crate::exchange::chunked::Chunked;
use crate::exchange::failure::ProtocolError;
use crate::exchange::head::Head;
use crate::exchange::part::{Part, take};

/// How the body of a reply is delimited, and how much of it is left.
pub(crate) enum Framing {
    /// By its length: this many bytes are left.
    Sized(u64),
    /// By chunks.
    Chunked(Chunked),
    /// By the end of the connection.
    UntilClose,
}

impl Framing {
    /// How the body behind `head` is delimited.
    pub(crate) fn new(head: &Head) -> Result<Self, ProtocolError> {
        let length = content_length(head)?;
        let codings: Vec<&str> = head.headers.elements("transfer-encoding").collect();
        match (&codings[..], length) {
            ([_, ..], Some(_)) => Err(ProtocolError::LengthWithEncoding),
            ([coding], None) if coding.eq_ignore_ascii_case("chunked") => Ok(Self::Chunked(Chunked::default())),
            ([_, ..], None) => Err(ProtocolError::TransferEncoding(codings.join(", "))),
            _ if matches!(head.status, 204 | 304) => Ok(Self::Sized(0)),
            ([], Some(length)) => Ok(Self::Sized(length)),
            ([], None) => Ok(Self::UntilClose),
        }
    }

    /// Take the next part of the body off the front of `input`. Not to be called again after [`Part::End`].
    pub(crate) fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Part<'a>, ProtocolError> {
        match self {
            Self::Sized(0) => Ok(Part::End),
            Self::Sized(left) => Ok(take(input, left)),
            Self::Chunked(chunked) => chunked.next(input),
            Self::UntilClose => Ok(take(input, &mut { u64::MAX })),
        }
    }

    /// Whether the end of the connection is the end of the body.
    pub(crate) fn ends_at_close(&self) -> bool {
        matches!(self, Self::UntilClose)
    }
}

/// The one length that the head reports. A list of equal ones counts as one.
fn content_length(head: &Head) -> Result<Option<u64>, ProtocolError> {
    let mut lengths = head.headers.all("content-length").flat_map(|value| value.split(',')).map(str::trim_ascii);
    let Some(first) = lengths.next() else { return Ok(None) };
    let is_number = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
    match first.parse() {
        Ok(length) if is_number && lengths.all(|other| other == first) => Ok(Some(length)),
        _ => {
            let values: Vec<&str> = head.headers.all("content-length").collect();
            Err(ProtocolError::ContentLength(values.join(", ")))
        }
    }
}

/// Whether the connection stays open behind the reply.
pub(crate) fn keeps_alive(head: &Head) -> bool {
    let has = |option: &str| head.headers.elements("connection").any(|other| other.eq_ignore_ascii_case(option));
    // RFC 9112, 6.1: with a Transfer-Encoding the framing of HTTP/1.0 can't be trusted.
    let is_http_10 = has("keep-alive") && head.headers.get("transfer-encoding").is_none();
    !has("close") && (head.is_http_11 || is_http_10)
}

#[cfg(test)]
mod tests {
    use super::{Framing, keeps_alive};
    use crate::exchange::failure::ProtocolError;
    use crate::exchange::head::{Head, HeadReader};
    use crate::exchange::part::Part;

    fn head(status: &str, fields: &str) -> Head {
        let bytes = format!("HTTP/{status}\r\n{fields}\r\n");
        HeadReader::default().read(&mut bytes.as_bytes()).expect("sound").expect("complete")
    }

    fn framing(fields: &str) -> Result<Framing, ProtocolError> {
        Framing::new(&head("1.1 200 OK", fields))
    }

    #[test]
    fn a_sized_body_ends_after_its_length() {
        let mut framing = framing("Content-Length: 5\r\nContent-Length: 5\r\n").expect("equal lengths are one");
        let mut input = &b"abc"[..];
        assert_eq!(framing.next(&mut input), Ok(Part::Data(b"abc")));
        assert_eq!(framing.next(&mut input), Ok(Part::Pending));
        input = b"defg";
        assert_eq!(framing.next(&mut input), Ok(Part::Data(b"de")));
        assert_eq!(framing.next(&mut input), Ok(Part::End));
        assert_eq!((input, framing.ends_at_close()), (&b"fg"[..], false));
    }

    #[test]
    fn a_body_without_length_ends_with_the_connection() {
        let mut framing = framing("").expect("sound");
        let mut input = &b"abc"[..];
        assert_eq!(framing.next(&mut input), Ok(Part::Data(b"abc")));
        assert_eq!(framing.next(&mut input), Ok(Part::Pending));
        assert!(framing.ends_at_close());
    }

    #[test]
    fn some_statuses_have_no_body() {
        for status in ["1.1 204 No Content", "1.1 304 Not Modified"] {
            for fields in ["", "Content-Length: 7\r\n"] {
                let mut framing = Framing::new(&head(status, fields)).expect("sound");
                assert_eq!(framing.next(&mut &b""[..]), Ok(Part::End), "{status}");
            }
        }
    }

    #[test]
    fn ambiguous_framing_is_an_error() {
        let error = |fields: &str| framing(fields).err();
        let chunked = "Transfer-Encoding: Chunked\r\n";
        assert!(matches!(framing(chunked), Ok(Framing::Chunked(_))));
        assert_eq!(error(&format!("{chunked}Content-Length: 5\r\n")), Some(ProtocolError::LengthWithEncoding));
        for codings in ["gzip, chunked", "chunked, chunked", "identity", "chunked, gzip"] {
            let expected = Some(ProtocolError::TransferEncoding(codings.to_owned()));
            assert_eq!(error(&format!("Transfer-Encoding: {codings}\r\n")), expected);
        }
        for length in ["", "-1", "+5", "5x", "0x5", "5, 6", "5,", "18446744073709551616"] {
            let expected = Some(ProtocolError::ContentLength(length.to_owned()));
            assert_eq!(error(&format!("Content-Length: {length}\r\n")), expected, "{length}");
        }
        let unequal = Some(ProtocolError::ContentLength("5, 6".to_owned()));
        assert_eq!(error("Content-Length: 5\r\nContent-Length: 6\r\n"), unequal);
    }

    #[test]
    fn the_connection_is_kept_as_the_head_says() {
        let kept = |status: &str, fields: &str| keeps_alive(&head(status, fields));
        assert!(kept("1.1 200 OK", ""));
        assert!(!kept("1.1 200 OK", "Connection: x, Close\r\n"));
        assert!(!kept("1.0 200 OK", ""));
        assert!(kept("1.0 200 OK", "Connection: Keep-Alive\r\n"));
        assert!(!kept("1.0 200 OK", "Connection: keep-alive\r\nConnection: close\r\n"));
        assert!(!kept("1.0 200 OK", "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n"));
    }
}
