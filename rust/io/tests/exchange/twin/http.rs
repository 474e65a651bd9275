//! HTTP/1.1 for the twin: heads and bodies of whole replies. It knows only what the scripts hold.

use streamfold_io::{Head, Headers, ProtocolError};

/// What ends the bytes of a body.
pub enum BodyEnd<'a> {
    /// The framing; these bytes lie behind it.
    Framing(&'a [u8]),
    /// The bytes, before the framing does.
    Missing,
    Broken(ProtocolError),
}

/// The first final head, and what follows it; None if it is incomplete.
pub fn head(mut bytes: &[u8]) -> Result<Option<(Head, &[u8])>, ProtocolError> {
    let syntax = Err(ProtocolError::HeadSyntax(""));
    for count in 0.. {
        let (mut status, mut fields) = (None, Vec::new());
        loop {
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return Ok(None) };
            let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
            bytes = &bytes[end + 1..];
            let text: String = line.iter().map(|&byte| char::from(byte)).collect();
            if status.is_none() {
                let Some((version, rest)) = text.split_once(' ') else { return syntax };
                if !["HTTP/1.0", "HTTP/1.1"].contains(&version) {
                    return syntax;
                }
                let code: u16 = rest[..3].parse().expect("the scripts hold no other status");
                status = Some((version == "HTTP/1.1", code));
            } else if line.is_empty() {
                break;
            } else {
                match text.split_once(':') {
                    Some((name, value)) if !name.contains(' ') && !value.contains('\0') => {
                        fields.push((name.to_owned(), value.trim().chars().map(|char| char as u8).collect::<Vec<_>>()));
                    }
                    _ => return syntax,
                }
            }
        }
        let headers: Headers = fields.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        match status.expect("read above") {
            (_, ..100) => return Err(ProtocolError::Status(99)),
            (_, 100..200) if count == 16 => return Err(ProtocolError::TooManyInterim(16)),
            (_, 100..200) => {}
            (is_http_11, status) => return Ok(Some((Head { status, is_http_11, headers }, bytes))),
        }
    }
    unreachable!("the loop returns");
}

#[derive(Clone, Copy)]
pub enum Framing {
    Chunked,
    Sized(usize),
    UntilClose,
}

pub fn framing(head: &Head) -> Result<Framing, ProtocolError> {
    let codings: Vec<_> = head.headers.all("transfer-encoding").collect();
    let lengths: Vec<_> = head.headers.all("content-length").collect();
    if lengths.iter().any(|length| *length != lengths[0]) {
        return Err(ProtocolError::ContentLength(lengths.join(", ")));
    }
    match (&codings[..], lengths.first()) {
        ([_, ..], Some(_)) => Err(ProtocolError::LengthWithEncoding),
        ([_], None) => Ok(Framing::Chunked),
        ([_, ..], None) => Err(ProtocolError::TransferEncoding(codings.join(", "))),
        _ if head.status == 204 => Ok(Framing::Sized(0)),
        ([], Some(length)) => Ok(Framing::Sized(length.parse().expect("the scripts hold no other length"))),
        ([], None) => Ok(Framing::UntilClose),
    }
}

pub fn is_kept(head: &Head) -> bool {
    let options = head.headers.all("connection").collect::<Vec<_>>().join(",").to_lowercase();
    let is_chunked = head.headers.get("transfer-encoding").is_some();
    !options.contains("close") && (head.is_http_11 || (options.contains("keep-alive") && !is_chunked))
}

pub fn is_stream(head: &Head) -> bool {
    let kind = head.headers.get("content-type").unwrap_or_default().to_lowercase();
    head.status == 200 && kind.starts_with("text/event-stream") && head.headers.get("content-encoding").is_none()
}

pub fn body(framing: Framing, bytes: &[u8]) -> (Vec<u8>, BodyEnd<'_>) {
    match framing {
        Framing::UntilClose => (bytes.to_vec(), BodyEnd::Missing),
        Framing::Sized(length) if length > bytes.len() => (bytes.to_vec(), BodyEnd::Missing),
        Framing::Sized(length) => (bytes[..length].to_vec(), BodyEnd::Framing(&bytes[length..])),
        Framing::Chunked => {
            let mut body = Vec::new();
            let end = chunks(bytes, &mut body).unwrap_or_else(|error| error.map_or(BodyEnd::Missing, BodyEnd::Broken));
            (body, end)
        }
    }
}

/// The error is None where bytes are missing.
fn chunks<'a>(mut bytes: &'a [u8], body: &mut Vec<u8>) -> Result<BodyEnd<'a>, Option<ProtocolError>> {
    let mut extension_bytes = 0;
    loop {
        let digits = bytes.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let (size, mut rest) = bytes.split_at(digits);
        let size = usize::from_str_radix(std::str::from_utf8(size).expect("digits"), 16);
        let blanks = rest.iter().take_while(|&&byte| byte == b' ').count();
        let length = match rest[blanks..] {
            [b';', ..] => rest.iter().position(|byte| b"\r\n".contains(byte)).unwrap_or(rest.len()),
            _ => blanks,
        };
        extension_bytes += length;
        if extension_bytes > 16_384 {
            return Err(Some(ProtocolError::ChunkExtensionsTooLarge(16_384)));
        }
        if length > blanks && rest[length..].starts_with(b"\n") {
            return Err(Some(ProtocolError::ChunkExtension));
        }
        rest = &rest[length..];
        rest = literal(rest, b"\r\n", ProtocolError::ChunkSize)?;
        let size = size.map_err(|_| ProtocolError::ChunkSize)?;
        if size == 0 {
            return trailers(rest);
        }
        body.extend_from_slice(&rest[..size.min(rest.len())]);
        bytes = literal(rest.get(size..).ok_or(None)?, b"\r\n", ProtocolError::ChunkEnd)?;
    }
}

fn trailers(mut bytes: &[u8]) -> Result<BodyEnd<'_>, Option<ProtocolError>> {
    loop {
        let end = bytes.iter().position(|byte| b"\r\n".contains(byte)).ok_or(None)?;
        bytes = literal(&bytes[end..], b"\r\n", ProtocolError::Trailer)?;
        if end == 0 {
            return Ok(BodyEnd::Framing(bytes));
        }
    }
}

/// What follows `expected`, which the bytes must begin with.
fn literal<'a>(bytes: &'a [u8], expected: &[u8], error: ProtocolError) -> Result<&'a [u8], Option<ProtocolError>> {
    match bytes.strip_prefix(expected) {
        Some(rest) => Ok(rest),
        None if expected.starts_with(bytes) => Err(None),
        None => Err(Some(error)),
    }
}
