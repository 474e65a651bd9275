//! The slow, obvious reader that the exchange must agree with: it has the whole reply before it, decodes it in passes,
//! and feeds the parser byte by byte.

use streamfold_core::{Error, FinishReason, Generation, Parser};
use streamfold_io::{Event, Expected, Failure, Head, Headers, ProtocolError, State};

use crate::drive::{Outcome, Tail};

/// What ends the bytes of a body.
enum BodyEnd<'a> {
    /// The framing; these bytes lie behind it.
    Framing(&'a [u8]),
    /// The bytes, before the framing does.
    Missing,
    Broken(ProtocolError),
}

/// Everything that must come of a reply that was received whole.
pub fn read(bytes: &[u8], tail: Tail, expected: Expected) -> Outcome {
    let mut outcome = Outcome {
        events: Vec::new(),
        state: State::Head,
        generation: Parser::new(options(expected).0, options(expected).1).take(),
        token_count: 0,
        body: Vec::new(),
    };
    let lost = match tail {
        Tail::Open => None,
        Tail::Eof => Some(Failure::Closed),
        Tail::Reset => Some(Failure::Reset(104)),
    };
    match head(bytes).and_then(|found| found.map_or(Ok(None), |(head, rest)| Ok(Some((framing(&head)?, head, rest))))) {
        Err(error) => fail(&mut outcome, error.into(), bytes.is_empty()),
        Ok(None) => {
            if let Some(failure) = lost {
                fail(&mut outcome, failure, bytes.is_empty());
            }
        }
        Ok(Some((framing, head, rest))) => {
            let is_kept = is_kept(&head);
            let is_stream = is_stream(&head);
            outcome.events.push(Event::Head(head));
            let (body, end) = body(framing, rest);
            let is_reusable =
                matches!(end, BodyEnd::Framing(behind) if is_kept && behind.is_empty() && tail == Tail::Open);
            let failure = match end {
                BodyEnd::Framing(_) => Some(None),
                BodyEnd::Broken(error) => Some(Some(error.into())),
                // Without a length the end of the connection is the end of the body.
                BodyEnd::Missing if matches!(framing, Framing::UntilClose) && tail == Tail::Eof => Some(None),
                BodyEnd::Missing => lost.map(Some),
            };
            if is_stream {
                read_stream(&mut outcome, &body, failure, is_reusable, expected);
            } else {
                read_other(&mut outcome, body, failure.is_some(), is_reusable);
            }
        }
    }
    outcome
}

fn options(expected: Expected) -> (streamfold_core::Dialect, streamfold_core::Options) {
    let Expected::Stream { dialect, options } = expected else { panic!("the twin reads streams") };
    (dialect, options)
}

fn fail(outcome: &mut Outcome, failure: Failure, is_unanswered: bool) {
    outcome.events.extend([Event::Failed { failure, is_unanswered }, Event::Ended { reusable: false }]);
    outcome.state = State::Failed;
}

fn end(outcome: &mut Outcome, reusable: bool) {
    outcome.events.push(Event::Ended { reusable });
    outcome.state = State::Done { reusable };
}

fn read_other(outcome: &mut Outcome, mut body: Vec<u8>, is_over: bool, is_reusable: bool) {
    outcome.state = State::Refused;
    let is_too_large = body.len() > 65_536;
    body.truncate(65_536);
    outcome.body = body;
    if is_over || is_too_large {
        outcome.events.push(Event::Refused);
        end(outcome, is_reusable && !is_too_large);
    }
}

/// `failure`: None if more is to come, Some(None) if the body has ended.
fn read_stream(
    outcome: &mut Outcome,
    body: &[u8],
    failure: Option<Option<Failure>>,
    is_reusable: bool,
    expected: Expected,
) {
    let (dialect, options) = options(expected);
    let limit = options.max_new_tokens.map_or(usize::MAX, |count| count + 256);
    let mut parser = Parser::new(dialect, options);
    let (mut error, mut rest, mut is_first, mut is_overrun) = (None::<Error>, None::<usize>, true, false);
    let mut is_open = true;
    let mut steps = body.iter().map(Some).chain(std::iter::once(None));
    while let (true, Some(step)) = (is_open, steps.next()) {
        let was_finished = parser.finished();
        if step.is_some() {
            rest = rest.map(|rest| rest + 1);
        } else if failure.is_none() {
            break; // the body may continue
        }
        is_open = step.is_some() && rest.is_none_or(|rest| rest <= 65_536);
        let result = match step {
            _ if error.is_some() => Ok(()),
            Some(byte) if is_open => parser.feed(&[*byte]).map(drop),
            _ => parser.close(false),
        };
        if is_first && parser.token_count() > 0 {
            is_first = false;
            outcome.events.push(Event::FirstToken);
        }
        is_overrun = !parser.finished() && parser.token_count() > limit;
        match result {
            Ok(()) | Err(Error::Truncated { .. }) if is_overrun => {
                outcome.events.push(Event::Overrun);
                is_open = false;
            }
            Err(found) => {
                rest = rest.or(Some(0));
                let is_last = !is_open;
                is_open &= matches!(found, Error::Engine(_));
                let is_broken = !is_last && !is_open;
                let cause = failure.clone().flatten().filter(|_| is_last && step.is_none());
                outcome.events.extend(cause.clone().map(|failure| Event::Failed { failure, is_unanswered: false }));
                outcome.events.push(Event::DecodeError(found.clone()));
                if is_broken || cause.is_some() {
                    outcome.state = State::Failed;
                }
                error = Some(found);
            }
            Ok(()) if parser.finished() && !was_finished => {
                outcome.events.push(Event::Finished);
                rest = Some(0);
            }
            Ok(()) => {}
        }
    }
    if is_open {
        outcome.state = match (rest, is_first) {
            (Some(_), _) => State::Rest,
            (None, true) => State::Waiting,
            (None, false) => State::Streaming,
        };
    } else if outcome.state == State::Failed {
        outcome.events.push(Event::Ended { reusable: false });
    } else {
        let is_complete = rest.is_none_or(|rest| rest <= 65_536) && !is_overrun;
        end(outcome, is_complete && is_reusable && failure == Some(None));
    }
    outcome.token_count = parser.token_count();
    outcome.generation = parser.take();
    if is_overrun {
        outcome.generation = Generation { finish_reason: Some(FinishReason::Length), ..outcome.generation.clone() };
    }
}

/// The first final head, and what follows it; None if it is incomplete.
fn head(mut bytes: &[u8]) -> Result<Option<(Head, &[u8])>, ProtocolError> {
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
enum Framing {
    Chunked,
    Sized(usize),
    UntilClose,
}

fn framing(head: &Head) -> Result<Framing, ProtocolError> {
    let codings: Vec<_> = head.headers.all("transfer-encoding").collect();
    let lengths: Vec<_> = head.headers.all("content-length").collect();
    if lengths.iter().any(|length| *length != lengths[0]) {
        return Err(ProtocolError::ContentLength(lengths.join(", ")));
    }
    match (&codings[..], lengths.first()) {
        ([_, ..], Some(_)) => Err(ProtocolError::LengthWithEncoding),
        ([_], None) if head.status != 204 => Ok(Framing::Chunked),
        ([_], None) => Ok(Framing::Chunked),
        ([_, ..], None) => Err(ProtocolError::TransferEncoding(codings.join(", "))),
        _ if head.status == 204 => Ok(Framing::Sized(0)),
        ([], Some(length)) => Ok(Framing::Sized(length.parse().expect("the scripts hold no other length"))),
        ([], None) => Ok(Framing::UntilClose),
    }
}

fn is_kept(head: &Head) -> bool {
    let options = head.headers.all("connection").collect::<Vec<_>>().join(",").to_lowercase();
    let is_chunked = head.headers.get("transfer-encoding").is_some();
    !options.contains("close") && (head.is_http_11 || (options.contains("keep-alive") && !is_chunked))
}

fn is_stream(head: &Head) -> bool {
    let kind = head.headers.get("content-type").unwrap_or_default().to_lowercase();
    head.status == 200 && kind.starts_with("text/event-stream") && head.headers.get("content-encoding").is_none()
}

fn body(framing: Framing, bytes: &[u8]) -> (Vec<u8>, BodyEnd<'_>) {
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
    loop {
        let digits = bytes.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let (size, mut rest) = bytes.split_at(digits);
        let size = usize::from_str_radix(std::str::from_utf8(size).expect("digits"), 16);
        let blanks = rest.iter().take_while(|&&byte| byte == b' ').count();
        rest = &rest[blanks..];
        if let [b';', ..] = rest {
            let end = rest.iter().position(|byte| b"\r\n".contains(byte)).ok_or(None)?;
            if rest[end] == b'\n' {
                return Err(Some(ProtocolError::ChunkExtension));
            }
            rest = &rest[end..];
        }
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
