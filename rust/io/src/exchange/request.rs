//! The request: its head, checked and written once, and its body.

use std::fmt;
use std::sync::Arc;

/// The body of a request. The exchange drops it when the sending has ended; a driver that must choose where it is freed,
/// or may send it again, keeps a clone.
pub type Body = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The fields that the exchange writes itself, or that would change how it has to read the reply.
const RESERVED: [&str; 8] =
    ["Content-Length", "Transfer-Encoding", "Connection", "Host", "Expect", "Upgrade", "TE", "Trailer"];

/// The method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Without a body.
    Get,
    /// With a body.
    Post,
}

/// Why a request can't be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// The host is empty, or holds bytes that an authority can't hold.
    Host(String),
    /// The target does not begin with `/`, or holds bytes other than visible ASCII.
    Target(String),
    /// The name of a field is no token.
    FieldName(String),
    /// The field is the exchange's own.
    ReservedField(String),
    /// The value of the field of that name holds a control character.
    ControlCharacter(String),
    /// The value of the field of that name can't be written in latin-1.
    NotLatin1(String),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => write!(f, "the host {host:?} is not a name or an address with an optional port"),
            Self::Target(target) => {
                write!(f, "the path {target:?} must begin with / and hold visible ASCII only; percent-encode the rest")
            }
            Self::FieldName(name) => {
                write!(f, "the header name {name:?} is no token: letters, digits and !#$%&'*+-.^_`|~ are allowed")
            }
            Self::ReservedField(name) => {
                write!(f, "the header {name} can't be set: the client writes {}, where needed", RESERVED.join(", "))
            }
            Self::ControlCharacter(name) => write!(f, "the value of the header {name} holds a control character"),
            Self::NotLatin1(name) => write!(f, "the value of the header {name} holds characters beyond latin-1"),
        }
    }
}

impl std::error::Error for RequestError {}

/// Check a field that a user wants to send.
///
/// # Errors
///
/// The name is no token or is reserved; the value holds a control character or a character beyond latin-1.
pub fn check_field(name: &str, value: &str) -> Result<(), RequestError> {
    if name.is_empty() || !name.bytes().all(is_token_byte) {
        return Err(RequestError::FieldName(name.to_owned()));
    }
    if let Some(reserved) = RESERVED.iter().find(|reserved| reserved.eq_ignore_ascii_case(name)) {
        return Err(RequestError::ReservedField((*reserved).to_owned()));
    }
    if value.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(RequestError::ControlCharacter(name.to_owned()));
    }
    if value.chars().any(|value| u8::try_from(value).is_err()) {
        return Err(RequestError::NotLatin1(name.to_owned()));
    }
    Ok(())
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The head of a request but for the length of its body. Fields are checked once; a clone can take more of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    method: Method,
    bytes: Vec<u8>,
}

impl RequestHead {
    /// A head without fields but `Host`.
    ///
    /// `host` is what the `Host` field holds: a name or an address, in brackets if it is IPv6 and without its zone, and
    /// a port unless it is the default one. `target` is the path with its query.
    ///
    /// # Errors
    ///
    /// `target` or `host` can't be written.
    pub fn new(method: Method, target: &str, host: &str) -> Result<Self, RequestError> {
        let is_visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if !target.starts_with('/') || !is_visible(target) {
            return Err(RequestError::Target(target.to_owned()));
        }
        if host.is_empty() || !is_visible(host) || host.contains(['/', '?', '#', '@', '\\']) {
            return Err(RequestError::Host(host.to_owned()));
        }
        let method_name = match method {
            Method::Get => "GET",
            Method::Post => "POST",
        };
        Ok(Self { method, bytes: format!("{method_name} {target} HTTP/1.1\r\nHost: {host}\r\n").into_bytes() })
    }

    /// The head with one more field.
    ///
    /// # Errors
    ///
    /// As [`check_field`] has it.
    pub fn field(mut self, name: &str, value: &str) -> Result<Self, RequestError> {
        check_field(name, value)?;
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.extend_from_slice(b": ");
        // Checked: every character is a byte of latin-1.
        self.bytes.extend(value.chars().filter_map(|value| u8::try_from(value).ok()));
        self.bytes.extend_from_slice(b"\r\n");
        Ok(self)
    }
}

/// A request, ready to be sent.
#[derive(Clone)]
pub struct Request {
    head: Vec<u8>,
    body: Option<Body>,
}

impl Request {
    /// The request of that head. The body of a `GET` is not sent.
    #[must_use]
    pub fn new(head: RequestHead, body: Body) -> Self {
        let RequestHead { method, bytes: mut head } = head;
        let body = (method == Method::Post).then_some(body);
        end_head(&mut head, body.as_ref().map(|body| (**body).as_ref().len()));
        Self { head, body }
    }

    /// As many requests of that head as there are bodies, one behind the other, to be sent in one go. The bodies of a
    /// `GET` are not sent.
    #[must_use]
    pub fn pipelined(head: &RequestHead, bodies: &[&[u8]]) -> Self {
        let mut all = Vec::with_capacity(bodies.iter().map(|body| head.bytes.len() + body.len() + 32).sum());
        for body in bodies {
            all.extend_from_slice(&head.bytes);
            let sent = (head.method == Method::Post).then_some(*body);
            end_head(&mut all, sent.map(<[u8]>::len));
            all.extend_from_slice(sent.unwrap_or_default());
        }
        Self { head: all, body: None }
    }

    /// The bytes that remain after the first `sent`: of the head, of the body.
    pub(crate) fn unsent(&self, sent: usize) -> [&[u8]; 2] {
        let body: &[u8] = self.body.as_deref().map_or(&[], AsRef::as_ref);
        match self.head.get(sent..) {
            Some(head) => [head, body],
            None => [&[], body.get(sent - self.head.len()..).unwrap_or_default()],
        }
    }
}

/// Write the length of a body and the end of the head.
fn end_head(head: &mut Vec<u8>, length: Option<usize>) {
    if let Some(length) = length {
        head.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
    }
    head.extend_from_slice(b"\r\n");
}

impl fmt::Debug for Request {
    /// Without the body, and without fields: they may hold a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, body] = self.unsent(0).map(<[u8]>::len);
        f.debug_struct("Request").field("head_bytes", &head).field("body_bytes", &body).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Body, Method, RESERVED, Request, RequestError, RequestHead, check_field};

    fn body(bytes: &[u8]) -> Body {
        Arc::new(bytes.to_vec())
    }

    #[test]
    fn a_request_is_written_with_host_and_length() {
        let head = RequestHead::new(Method::Post, "/generate?x=1", "[::1]:30000").expect("sound");
        let head = head.field("X-Name", "café ü").expect("latin-1").field("Empty", "").expect("sound");
        let request = Request::new(head, body(b"{}"));
        let [head, body] = request.unsent(0);
        let expected = b"POST /generate?x=1 HTTP/1.1\r\nHost: [::1]:30000\r\nX-Name: caf\xe9 \xfc\r\nEmpty: \r\n\
            Content-Length: 2\r\n\r\n";
        assert_eq!((head, body), (&expected[..], &b"{}"[..]));
        let size = head.len();
        assert_eq!(request.unsent(size - 1), [&b"\n"[..], b"{}"]);
        assert_eq!(request.unsent(size), [&b""[..], b"{}"]);
        assert_eq!(request.unsent(size + 1), [&b""[..], b"}"]);
        assert_eq!(request.unsent(size + 2), [&b""[..], b""]);
        assert_eq!(request.unsent(size + 3), [&b""[..], b""]);
    }

    #[test]
    fn a_get_has_neither_body_nor_length() {
        let request = Request::new(RequestHead::new(Method::Get, "/", "a").expect("sound"), body(b"{}"));
        assert_eq!(request.unsent(0), [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], b""]);
    }

    #[test]
    fn pipelined_requests_are_the_single_ones_in_a_row() {
        for method in [Method::Post, Method::Get] {
            let head = RequestHead::new(method, "/abort", "a").expect("sound").field("X", "y").expect("sound");
            let bodies: [&[u8]; 3] = [b"{}", b"", b"{\"rid\":1}"];
            let single = bodies.map(|text| Request::new(head.clone(), body(text)).unsent(0).concat());
            assert_eq!(Request::pipelined(&head, &bodies).unsent(0).concat(), single.concat());
        }
    }

    #[test]
    fn reserved_fields_are_refused_by_name() {
        for name in RESERVED {
            let expected = Err(RequestError::ReservedField(name.to_owned()));
            assert_eq!(check_field(name, "x"), expected);
            assert_eq!(check_field(&name.to_ascii_lowercase(), "x"), expected);
        }
        assert!(check_field("Content-Length", "5").unwrap_err().to_string().contains("Content-Length"));
    }

    #[test]
    fn fields_that_could_change_the_request_are_refused() {
        for name in ["", "a b", "a:", "a\r\nb", "é", "a\0", "(a)"] {
            assert_eq!(check_field(name, "x"), Err(RequestError::FieldName(name.to_owned())), "{name:?}");
        }
        for value in ["a\r\nB: c", "\n", "\0", "\t", "\x7f"] {
            assert_eq!(check_field("A", value), Err(RequestError::ControlCharacter("A".to_owned())), "{value:?}");
        }
        assert_eq!(check_field("A", "€"), Err(RequestError::NotLatin1("A".to_owned())));
        assert_eq!(check_field("X-!#$%&'*+.^_`|~9", "bytes \u{80}\u{ff}"), Ok(()));
    }

    #[test]
    fn targets_and_hosts_that_could_change_the_request_are_refused() {
        for target in ["", "*", "generate", "/a b", "/a\r\n", "/é", "http://a/"] {
            let result = RequestHead::new(Method::Post, target, "a");
            assert_eq!(result, Err(RequestError::Target(target.to_owned())), "{target:?}");
        }
        for host in ["", "a b", "a\r\nb", "a/b", "user@a", "é"] {
            let result = RequestHead::new(Method::Post, "/", host);
            assert_eq!(result, Err(RequestError::Host(host.to_owned())), "{host:?}");
        }
    }
}
