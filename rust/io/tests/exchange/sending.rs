//! From the connection to the head of the reply: what is sent when, and what ends the sending.

use std::sync::Arc;

use streamfold_io::{Body, Event, Exchange, Failure, Input, ProtocolError, State};

use crate::drive::{ALERT, chunked, names, new, put, request, sent, stream};
use crate::streams::short;

fn failed(failure: Failure, is_unanswered: bool) -> [Event; 2] {
    [Event::Failed { failure, is_unanswered }, Event::Ended { reusable: false }]
}

/// An exchange in `Sending` with a body of `size` bytes.
fn sending(size: usize) -> Exchange {
    let body: Body = Arc::new(vec![b'x'; size]);
    let mut exchange = Exchange::new(request(body), stream(None));
    put(&mut exchange, Input::Connected);
    put(&mut exchange, Input::Send);
    assert_eq!(exchange.state(), State::Sending);
    exchange
}

#[test]
fn nothing_is_sent_before_the_caller_says_so() {
    let mut exchange = new(stream(None));
    assert_eq!((exchange.state(), exchange.unsent().concat()), (State::Connecting, vec![]));
    assert_eq!(put(&mut exchange, Input::Send), [], "not connected yet");
    assert_eq!(put(&mut exchange, Input::Connected), [Event::Connected]);
    assert_eq!((exchange.state(), exchange.unsent().concat()), (State::Ready, vec![]));
    assert_eq!(put(&mut exchange, Input::Sent(5)), [], "nothing is being sent");
    assert_eq!(put(&mut exchange, Input::Send), []);
    assert!(exchange.unsent().concat().starts_with(b"POST /generate HTTP/1.1\r\n"));
}

#[test]
fn a_large_body_goes_out_in_parts() {
    let mut exchange = sending(40 << 20);
    let (mut size, mut events) = (0, Vec::new());
    while exchange.state() == State::Sending {
        assert!(events.is_empty());
        let part: usize = exchange.unsent().iter().map(|part| part.len()).sum::<usize>().min(300_000);
        size += part;
        events = put(&mut exchange, Input::Sent(part));
    }
    assert_eq!((events, exchange.state()), (vec![Event::Sent], State::Head));
    assert!(size > 40 << 20);
    assert_eq!(exchange.unsent().concat(), b"");
}

#[test]
fn each_byte_is_sent_once() {
    let mut exchange = sending(3);
    let whole = exchange.unsent().concat();
    let mut wire = Vec::new();
    while exchange.state() == State::Sending {
        wire.push(exchange.unsent().concat()[0]);
        put(&mut exchange, Input::Sent(1));
    }
    assert_eq!(wire, whole);
}

#[test]
fn a_reply_that_comes_early_ends_the_sending() {
    let mut exchange = sending(1 << 20);
    put(&mut exchange, Input::Sent(1000));
    let reply = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno";
    let (incomplete, rest) = reply.split_at(30);
    assert_eq!(put(&mut exchange, Input::Received(incomplete)), []);
    assert_eq!(exchange.state(), State::Sending, "until the head is complete");
    assert_eq!(names(&put(&mut exchange, Input::Received(rest))), ["head", "refused", "ended"]);
    assert_eq!(exchange.unsent().concat(), b"");
    assert_eq!(put(&mut exchange, Input::Sent(1000)), [], "overtaken by the reply");
    assert_eq!(exchange.state(), State::Done { reusable: false }, "half a request is on the connection");
    assert_eq!(exchange.take_body(), b"no");
}

#[test]
fn an_interim_reply_does_not_end_the_sending() {
    let mut exchange = sending(1000);
    assert_eq!(put(&mut exchange, Input::Received(b"HTTP/1.1 102 Processing\r\n\r\n")), []);
    assert_eq!(exchange.state(), State::Sending);
    let rest = exchange.unsent().concat().len();
    assert_eq!(put(&mut exchange, Input::Sent(rest)), [Event::Sent]);
    let events = put(&mut exchange, Input::Received(&chunked(short().as_bytes())));
    assert_eq!(names(&events), ["head", "first_token", "finished", "reusable"]);
}

#[test]
fn after_a_failed_write_the_reply_is_still_read() {
    let mut exchange = sending(1000);
    assert_eq!(put(&mut exchange, Input::SendFailed(32)), []);
    assert_eq!((exchange.state(), exchange.unsent().concat()), (State::Head, vec![]));
    let reply = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(names(&put(&mut exchange, Input::Received(reply))), ["head", "refused", "ended"]);
}

#[test]
fn without_a_reply_a_failed_write_is_the_failure() {
    let mut exchange = sending(1000);
    put(&mut exchange, Input::SendFailed(32));
    assert_eq!(put(&mut exchange, Input::Eof), failed(Failure::Reset(32), true));
    assert!(Failure::Reset(32).to_string().contains("Broken pipe"));
}

#[test]
fn a_failed_connect_names_its_errno() {
    let mut exchange = new(stream(None));
    assert_eq!(put(&mut exchange, Input::ConnectFailed(111)), failed(Failure::Connect(111), true));
    assert_eq!(exchange.state(), State::Failed);
    assert!(Failure::Connect(111).to_string().contains("Connection refused"));
    assert_eq!(put(&mut exchange, Input::Connected), [], "over");
}

#[test]
fn a_connection_that_ends_before_the_reply_fails() {
    for is_ready in [true, false] {
        for (input, failure) in [
            (Input::Eof, Failure::Closed),
            (Input::Reset(104), Failure::Reset(104)),
            (Input::TlsFailed(ALERT), Failure::Tls(ALERT.to_owned())),
        ] {
            let mut exchange = if is_ready { new(stream(None)) } else { sent(stream(None)) };
            put(&mut exchange, Input::Connected);
            assert_eq!(put(&mut exchange, input), failed(failure, true));
            assert_eq!(exchange.state(), State::Failed);
        }
    }
    let mut exchange = sent(stream(None));
    put(&mut exchange, Input::Received(b"H"));
    assert_eq!(put(&mut exchange, Input::Eof), failed(Failure::Closed, false), "a reply had begun");
}

#[test]
fn bytes_before_the_request_are_an_error() {
    let mut exchange = new(stream(None));
    put(&mut exchange, Input::Connected);
    let failure = Failure::Protocol(ProtocolError::Unsolicited);
    assert_eq!(put(&mut exchange, Input::Received(b"HTTP/1.1 408 Timeout\r\n\r\n")), failed(failure, true));
}

#[test]
fn an_abort_before_the_request_is_sent_ends_the_exchange() {
    let ready = || {
        let mut exchange = new(stream(None));
        put(&mut exchange, Input::Connected);
        exchange
    };
    for mut exchange in [new(stream(None)), ready(), sending(10)] {
        assert_eq!(put(&mut exchange, Input::Abort), [Event::Ended { reusable: false }]);
        assert_eq!(exchange.state(), State::Done { reusable: false });
        assert_eq!(exchange.unsent().concat(), b"");
        assert_eq!(put(&mut exchange, Input::Connected), []);
    }
}
