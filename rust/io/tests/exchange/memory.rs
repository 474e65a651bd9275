//! An exchange that waits holds little, and nothing that it no longer needs.

use std::sync::Arc;

use streamfold_io::{Body, Exchange, Input, State};

use crate::drive::{ALERT, chunked, put, request, sent, stream};
use crate::streams::short;

#[test]
fn a_waiting_exchange_is_small() {
    let mut exchange = sent(stream(Some(100_000)));
    assert!(exchange.held_bytes() < 1024, "{} bytes", exchange.held_bytes());
    let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nA: b\r\n\r\n";
    for byte in head {
        put(&mut exchange, Input::Received(&[*byte]));
    }
    assert_eq!(exchange.state(), State::Waiting);
    assert!(exchange.held_bytes() < 1024, "the head's buffer is freed: {} bytes", exchange.held_bytes());
    put(&mut exchange, Input::Received(b": ping\n\n"));
    assert!(exchange.held_bytes() < 8192, "no array before the first token: {} bytes", exchange.held_bytes());
}

#[test]
fn the_body_is_freed_when_the_sending_ends() {
    let body: Body = Arc::new(vec![b'x'; 1000]);
    let sending = || {
        let mut exchange = Exchange::new(request(body.clone()), stream(None));
        put(&mut exchange, Input::Connected);
        put(&mut exchange, Input::Send);
        assert_eq!(Arc::strong_count(&body), 2);
        exchange
    };
    let endings = [
        Input::Sent(usize::MAX),
        Input::SendFailed(32),
        Input::Received(b"HTTP/1.1 503 Busy\r\n\r\n"),
        Input::Reset(104),
        Input::TlsFailed(ALERT),
        Input::Abort,
        Input::Close,
    ];
    for input in endings {
        let mut exchange = sending();
        put(&mut exchange, input);
        assert_eq!(Arc::strong_count(&body), 1, "{input:?}");
    }
}

#[test]
fn a_taken_generation_leaves_nothing_behind() {
    let mut exchange = sent(stream(None));
    put(&mut exchange, Input::Received(&chunked(short().as_bytes())));
    assert!(exchange.held_bytes() > 1024);
    exchange.take();
    assert!(exchange.held_bytes() < 1024);
}
