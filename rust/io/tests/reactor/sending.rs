//! Large requests, replies that come before they are sent, and servers that do not read them.

use std::io::Read;
use std::sync::Arc;

use streamfold_io::Event;
use streamfold_io::reactor::{Lane, Limits, monotonic};

use crate::driven::{CHUNKED, Driven, body, stream_of, whole_chunk, write};

const SIZE: usize = 40 << 20;

#[test]
fn forty_megabytes_leave_in_parts() {
    let mut driven = Driven::new();
    let (id, mut server) = driven.open();
    let exchange = stream_of(Arc::new(vec![b'x'; SIZE]));
    assert!(driven.reactor.start(id, exchange.clone(), monotonic()));
    let swept = driven.sweep(Lane::Urgent, Limits::default());
    assert!(swept.bytes < SIZE / 2, "bounded: {swept:?}");
    let reader = std::thread::spawn(move || {
        let (mut count, mut part) = (0, vec![0; 1 << 20]);
        while count < SIZE {
            count += server.read(&mut part).expect("the request");
        }
        write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(1))));
        server
    });
    driven.until(|driven| driven.ended(id).is_some());
    assert_eq!(driven.ended(id), Some(true));
    assert_eq!(exchange.take().token_ids, [7]);
    drop(reader.join().expect("read"));
}

#[test]
fn a_reply_that_comes_early_ends_the_sending_and_is_read() {
    let mut driven = Driven::new();
    let (id, mut server) = driven.open();
    let exchange = stream_of(Arc::new(vec![b'x'; SIZE]));
    assert!(driven.reactor.start(id, exchange.clone(), monotonic()));
    write(&mut server, "HTTP/1.1 413 Too Large\r\nContent-Length: 9\r\n\r\ntoo large");
    driven.until(|driven| driven.ended(id).is_some());
    let events = driven.events(id);
    assert!(
        matches!(events[..], [Event::Head(_), Event::Refused, Event::Ended { reusable: false }]),
        "the connection holds a part of a request: {events:?}"
    );
    assert_eq!(exchange.take_body(), b"too large");
    assert!(driven.is_quiet());
}

#[test]
fn a_reply_is_read_although_the_server_has_stopped_reading() {
    let mut driven = Driven::new();
    let (id, mut server) = driven.open();
    let exchange = stream_of(Arc::new(vec![b'x'; SIZE]));
    assert!(driven.reactor.start(id, exchange.clone(), monotonic()));
    write(&mut server, "HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\nno");
    server.shutdown(std::net::Shutdown::Both).expect("possible");
    driven.until(|driven| driven.ended(id).is_some());
    assert!(matches!(driven.events(id)[0], Event::Head(_) | Event::Failed { .. }));
}

#[test]
fn an_abort_while_sending_ends_the_exchange_at_once() {
    let mut driven = Driven::new();
    let (id, _server) = driven.open();
    let exchange = stream_of(Arc::new(vec![b'x'; SIZE]));
    assert!(driven.reactor.start(id, exchange, monotonic()));
    driven.reactor.abort(id, monotonic(), &mut driven.reports);
    assert!(matches!(driven.events(id)[..], [Event::Ended { reusable: false }]));
    assert!(driven.is_quiet());
}
