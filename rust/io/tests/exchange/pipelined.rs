//! Several requests sent in one go: good replies are passed over, and the last or the first other one is reported.

use std::iter::once;

use streamfold_io::{Exchange, Expected, Failure, Input, Method, Request, RequestHead, State};

use crate::drive::{ALERT, chunked, names, put};

const BODIES: [&[u8]; 3] = [b"a", b"bb", b"ccc"];
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const COUNTED: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
const BUSY: &[u8] = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy";
const LEAVING: &[u8] = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
const UNTIL_CLOSE: &[u8] = b"HTTP/1.1 200 OK\r\n\r\nrest";

fn sending() -> Exchange {
    let head = RequestHead::new(Method::Post, "/abort", "engine").expect("sound");
    let expected = Expected::Bodies { count: BODIES.len(), max_bytes: 100 };
    let mut exchange = Exchange::new(Request::pipelined(&head, &BODIES), expected);
    put(&mut exchange, Input::Connected);
    put(&mut exchange, Input::Send);
    exchange
}

fn sent() -> Exchange {
    let mut exchange = sending();
    let size = exchange.unsent().concat().len();
    put(&mut exchange, Input::Sent(size));
    exchange
}

/// Names of the events, replies passed, body: read whole, and split at each byte and two bytes.
fn read(bytes: &[u8], tail: Option<Input<'_>>) -> (Vec<&'static str>, usize, Vec<u8>) {
    let mut outcomes = Vec::new();
    for size in [bytes.len(), 1, 2] {
        let mut exchange = sent();
        let inputs = bytes.chunks(size).map(Input::Received).chain(tail);
        let events: Vec<_> = inputs.flat_map(|input| put(&mut exchange, input)).collect();
        outcomes.push((names(&events), exchange.passed(), exchange.take_body()));
    }
    assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]), "{outcomes:?}");
    outcomes.remove(0)
}

#[test]
fn the_last_of_good_replies_is_reported_and_the_connection_is_kept() {
    let chunked = chunked(b"{\"aborted\":1}");
    for replies in [[OK, OK, OK], [COUNTED, OK, COUNTED], [&chunked, &chunked, OK]] {
        let last = if replies[2] == OK { &b""[..] } else { b"{}" };
        assert_eq!(read(&replies.concat(), None), (vec!["head", "refused", "reusable"], 2, last.to_vec()));
    }
}

#[test]
fn the_first_other_reply_is_reported_and_the_connection_is_not_kept() {
    for (place, ended) in [(0, "ended"), (1, "ended"), (2, "reusable")] {
        let replies: Vec<u8> = std::iter::repeat_n(OK, place).chain(once(BUSY)).collect::<Vec<_>>().concat();
        assert_eq!(read(&replies, None), (vec!["head", "refused", ended], place, b"busy".to_vec()));
    }
}

#[test]
fn a_reply_that_ends_the_connection_is_the_one_that_is_reported() {
    let eof = Some(Input::Eof);
    assert_eq!(read(&[OK, LEAVING].concat(), eof), (vec!["head", "refused", "ended"], 1, vec![]));
    assert_eq!(read(&[OK, UNTIL_CLOSE].concat(), eof), (vec!["head", "refused", "ended"], 1, b"rest".to_vec()));
}

#[test]
fn a_connection_that_breaks_between_replies_or_within_one_is_a_failure_behind_the_good_ones() {
    for half in [&b""[..], &OK[..20], &COUNTED[..COUNTED.len() - 1]] {
        for tail in [Input::Eof, Input::Reset(104), Input::TlsFailed(ALERT)] {
            let (events, passed, _) = read(&[OK, half].concat(), Some(tail));
            assert_eq!((events, passed), (vec!["failed", "ended"], 1));
        }
    }
    let mut exchange = sent();
    let events = put(&mut exchange, Input::Eof);
    assert!(matches!(&events[0], streamfold_io::Event::Failed { failure: Failure::Closed, is_unanswered: true }));
}

#[test]
fn replies_that_come_while_requests_are_being_sent_do_not_end_the_sending() {
    let mut exchange = sending();
    put(&mut exchange, Input::Sent(100));
    assert_eq!(put(&mut exchange, Input::Received(OK)), []);
    assert_eq!((exchange.state(), exchange.passed()), (State::Sending, 1));
    let left = exchange.unsent().concat();
    assert!(left.ends_with(b"ccc"));
    put(&mut exchange, Input::Sent(left.len()));
    let events = put(&mut exchange, Input::Received(&[OK, OK].concat()));
    assert_eq!(names(&events), ["head", "refused", "reusable"]);
}
