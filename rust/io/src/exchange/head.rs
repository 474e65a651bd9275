//! Bytes to the head of a reply: `HeadReader`.

use httparse::{EMPTY_HEADER, Response, Status};
use memchr::memrchr;

use crate::exchange::failure::ProtocolError;
use crate::exchange::headers::Headers;

/// The largest head, status line and blank line included.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;
/// The most fields of a head.
pub(crate) const MAX_FIELDS: usize = 256;
/// The most interim replies (1xx) before the final one.
pub(crate) const MAX_INTERIM: usize = 16;

/// The head of the final reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The status, 200 or more.
    pub status: u16,
    /// Whether the reply is HTTP/1.1, and not 1.0.
    pub is_http_11: bool,
    /// The fields.
    pub headers: Headers,
}

impl Head {
    /// Whether the body may go to the parser: status 200, `text/event-stream`, no content encoding.
    #[must_use]
    pub fn is_event_stream(&self) -> bool {
        let is_event_stream = |value: &str| {
            let (kind, _) = value.split_once(';').unwrap_or((value, ""));
            kind.trim_ascii().eq_ignore_ascii_case("text/event-stream")
        };
        let mut kinds = self.headers.all("content-type").peekable();
        let is_plain = self.headers.elements("content-encoding").all(|coding| coding.eq_ignore_ascii_case("identity"));
        self.status == 200 && kinds.peek().is_some() && kinds.all(is_event_stream) && is_plain
    }
}

/// Reads the head of the final reply, and skips the interim ones before it.
///
/// The bytes are parsed when a line has ended, and only up to its end: any split gives the same head or the same error.
/// The buffer holds a head that is incomplete, and nothing otherwise.
#[derive(Default)]
pub(crate) struct HeadReader {
    buffer: Vec<u8>,
    interim: usize,
}

impl HeadReader {
    /// Take a head off the front of `input`; None, and all of it taken, if more is needed.
    pub(crate) fn read(&mut self, input: &mut &[u8]) -> Result<Option<Head>, ProtocolError> {
        while let Some(head) = self.next(input)? {
            match head.status {
                101 => return Err(ProtocolError::SwitchingProtocols),
                100..200 if self.interim == MAX_INTERIM => return Err(ProtocolError::TooManyInterim(MAX_INTERIM)),
                100..200 => self.interim += 1,
                200.. => return Ok(Some(head)),
                status => return Err(ProtocolError::Status(status)),
            }
        }
        Ok(None)
    }

    /// Bytes of memory held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// Take the next head, of whatever status.
    fn next(&mut self, input: &mut &[u8]) -> Result<Option<Head>, ProtocolError> {
        let buffered = self.buffer.len();
        let within = &input[..input.len().min(MAX_HEAD_BYTES - buffered)];
        if let Some(last) = memrchr(b'\n', within) {
            let lines = &within[..=last];
            let parsed = if buffered == 0 {
                parse(lines)?
            } else {
                self.buffer.extend_from_slice(lines);
                parse(&self.buffer)?
            };
            if let Some((head, length)) = parsed {
                // No earlier line ended a head, so this one ends in the input.
                *input = &input[length - buffered..];
                self.buffer = Vec::new();
                return Ok(Some(head));
            }
            self.buffer.truncate(buffered);
        }
        if within.len() < input.len() {
            return Err(ProtocolError::HeadTooLarge(MAX_HEAD_BYTES));
        }
        self.buffer.extend_from_slice(input);
        *input = &[];
        Ok(None)
    }
}

/// Parse whole lines: the head and its length, or None if its blank line has not come.
fn parse(lines: &[u8]) -> Result<Option<(Head, usize)>, ProtocolError> {
    let mut fields = [EMPTY_HEADER; MAX_FIELDS];
    let mut response = Response::new(&mut fields);
    match response.parse(lines) {
        Ok(Status::Partial) => Ok(None),
        Ok(Status::Complete(length)) => {
            let head = Head {
                status: response.code.unwrap_or_default(),
                is_http_11: response.version == Some(1),
                headers: response.headers.iter().map(|field| (field.name, field.value)).collect(),
            };
            Ok(Some((head, length)))
        }
        Err(error) => Err(match error {
            httparse::Error::TooManyHeaders => ProtocolError::TooManyFields(MAX_FIELDS),
            httparse::Error::HeaderName => ProtocolError::HeadSyntax("invalid byte in the name of a field"),
            httparse::Error::HeaderValue => ProtocolError::HeadSyntax("invalid byte in the value of a field"),
            httparse::Error::NewLine => ProtocolError::HeadSyntax("invalid line end"),
            httparse::Error::Status => ProtocolError::HeadSyntax("invalid status"),
            httparse::Error::Token => ProtocolError::HeadSyntax("invalid token"),
            httparse::Error::Version => ProtocolError::HeadSyntax("neither HTTP/1.1 nor HTTP/1.0"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::{Head, HeadReader, MAX_FIELDS, MAX_HEAD_BYTES, MAX_INTERIM};
    use crate::exchange::failure::ProtocolError;

    /// Read in one piece and byte by byte: the same result, and the same rest.
    fn read(bytes: &[u8]) -> Result<Option<(Head, Vec<u8>)>, ProtocolError> {
        let mut rest = bytes;
        let mut reader = HeadReader::default();
        let whole = reader.read(&mut rest).map(|head| head.map(|head| (head, rest.to_vec())));
        assert!(!matches!(whole, Ok(Some(_))) || reader.held_bytes() == 0, "the buffer is freed");
        let mut reader = HeadReader::default();
        let split = bytes.iter().enumerate().find_map(|(index, byte)| {
            let result = reader.read(&mut std::slice::from_ref(byte)).transpose()?;
            Some(result.map(|head| (head, bytes[index + 1..].to_vec())))
        });
        assert_eq!(whole, split.transpose());
        whole
    }

    fn head(bytes: &[u8]) -> Head {
        read(bytes).expect("a sound head").expect("a complete head").0
    }

    fn syntax(bytes: &[u8]) -> bool {
        matches!(read(bytes), Err(ProtocolError::HeadSyntax(_)))
    }

    #[test]
    fn a_head_is_read_up_to_its_blank_line() {
        let (head, rest) = read(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\ndata\n").expect("sound").expect("complete");
        assert_eq!((head.status, head.is_http_11, head.headers.get("a")), (200, true, Some("b")));
        assert_eq!(rest, b"data\n");
        assert_eq!(read(b"HTTP/1.1 200 OK\r\nA: b\r\n"), Ok(None));
        assert!(!self::head(b"HTTP/1.0 503 \r\n\r\n").is_http_11);
    }

    #[test]
    fn interim_replies_are_skipped_up_to_a_limit() {
        let interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n".repeat(MAX_INTERIM);
        let last = b"HTTP/1.1 204 No Content\r\n\r\n";
        assert_eq!(head(&[&interim[..], last].concat()).status, 204);
        let more = [&interim[..], b"HTTP/1.1 100 Continue\r\n\r\n", last].concat();
        assert_eq!(read(&more), Err(ProtocolError::TooManyInterim(MAX_INTERIM)));
        assert_eq!(read(b"HTTP/1.1 101 Switching\r\n\r\n"), Err(ProtocolError::SwitchingProtocols));
        assert_eq!(read(b"HTTP/1.1 099 What\r\n\r\n"), Err(ProtocolError::Status(99)));
    }

    #[test]
    fn malformed_heads_are_errors() {
        assert!(syntax(b"HTTP/2 200 OK\r\n"));
        assert!(syntax(b"SSH-2.0-OpenSSH_9.6\r\n"));
        assert!(syntax(b"HTTP/1.1 2oo OK\r\n"));
        assert!(syntax(b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n"), "obs-fold");
        assert!(syntax(b"HTTP/1.1 200 OK\r\nA: b\0c\r\n"), "NUL");
        assert!(syntax(b"HTTP/1.1 200 OK\r\nA : b\r\n"), "a blank before the colon");
        assert!(syntax(b"HTTP/1.1 200 OK\r\nA: b\rC: d\r\n"), "CR alone");
        // RFC 9112, 2.2: a recipient may take LF alone for a line end, and httparse does.
        assert_eq!(head(b"HTTP/1.1 200 OK\nA: b\n\n").headers.get("a"), Some("b"));
    }

    #[test]
    fn a_head_is_bounded_in_bytes_and_fields() {
        let padded = |size: usize| {
            let (start, end) = (b"HTTP/1.1 200 OK\r\nA: ", b"\r\n\r\n");
            [&start[..], &vec![b'a'; size - start.len() - end.len()], end].concat()
        };
        assert_eq!(head(&padded(MAX_HEAD_BYTES)).status, 200);
        let too_large = Err(ProtocolError::HeadTooLarge(MAX_HEAD_BYTES));
        assert_eq!(read(&padded(MAX_HEAD_BYTES + 1)), too_large);
        assert_eq!(read(&vec![b'a'; MAX_HEAD_BYTES + 1]), too_large);
        let fields = |count| [&b"HTTP/1.1 200 OK\r\n"[..], &b"A: b\r\n".repeat(count), b"\r\n"].concat();
        assert_eq!(head(&fields(MAX_FIELDS)).headers.iter().count(), MAX_FIELDS);
        assert_eq!(read(&fields(MAX_FIELDS + 1)), Err(ProtocolError::TooManyFields(MAX_FIELDS)));
    }

    #[test]
    fn only_a_plain_event_stream_of_status_200_is_a_stream() {
        let is_stream = |status: &str, fields: &str| {
            head(format!("HTTP/1.1 {status} OK\r\n{fields}\r\n").as_bytes()).is_event_stream()
        };
        assert!(is_stream("200", "Content-Type: text/event-stream\r\n"));
        assert!(is_stream("200", "content-type: Text/Event-Stream ; charset=utf-8\r\nContent-Encoding: identity\r\n"));
        assert!(!is_stream("200", ""));
        assert!(!is_stream("201", "Content-Type: text/event-stream\r\n"));
        assert!(!is_stream("200", "Content-Type: application/json\r\n"));
        assert!(!is_stream("200", "Content-Type: text/event-stream\r\nContent-Type: application/json\r\n"));
        assert!(!is_stream("200", "Content-Type: text/event-stream\r\nContent-Encoding: identity, gzip\r\n"));
    }
}
