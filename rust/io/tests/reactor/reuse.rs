//! A connection carries one exchange after the other, as long as nothing speaks against it.

use std::io::Read;

use streamfold_io::reactor::{Lane, monotonic};

use crate::driven::{CHUNKED, Driven, PLAIN, body, read_request, reply, stream, whole_chunk, write};

#[test]
fn a_kept_connection_carries_streams_and_replies_in_any_order() {
    let mut driven = Driven::new();
    let first = stream();
    let (id, mut server) = driven.begin(&first);
    write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(2))));
    driven.until(|driven| driven.ended(id) == Some(true));
    for is_stream in [true, false, false, true] {
        driven.reports.clear();
        let exchange = if is_stream { stream() } else { reply() };
        assert!(driven.reactor.start(id, exchange.clone(), monotonic()));
        read_request(&mut server);
        if is_stream {
            write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(3))));
        } else {
            write(&mut server, PLAIN);
        }
        driven.until(|driven| driven.ended(id) == Some(true));
        if is_stream {
            assert_eq!(exchange.take().token_ids, [7; 3]);
        } else {
            assert_eq!(exchange.take_body(), b"ok");
        }
    }
    assert_eq!(driven.reactor.len(), 1);
}

#[test]
fn a_kept_connection_that_the_server_closes_is_closed_by_the_next_sweep() {
    let mut driven = Driven::new();
    let (id, mut server) = driven.begin(&reply());
    write(&mut server, PLAIN);
    driven.until(|driven| driven.ended(id) == Some(true));
    drop(server);
    driven.until(|driven| driven.reactor.is_empty());
    assert!(!driven.reactor.start(id, reply(), 0.0));
}

#[test]
fn a_kept_connection_that_shows_its_end_or_a_byte_is_not_used() {
    for stray in [None, Some("HTTP/1.1 408 Request Timeout\r\n\r\n")] {
        let mut driven = Driven::new();
        let (id, mut server) = driven.begin(&stream());
        write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(1))));
        driven.until(|driven| driven.ended(id) == Some(true));
        match stray {
            Some(bytes) => write(&mut server, bytes),
            None => server.shutdown(std::net::Shutdown::Write).expect("possible"),
        }
        // It has arrived, and no sweep has seen it.
        driven.until_ready(Lane::Ordinary, 1);
        let exchange = reply();
        assert!(!driven.reactor.start(id, exchange.clone(), 0.0));
        assert!(driven.reactor.is_empty());
        assert_eq!(exchange.state(), streamfold_io::State::Connecting, "it can go over another connection");
        let _ = server.set_read_timeout(Some(std::time::Duration::from_secs(20)));
        assert!(matches!(server.read(&mut [0]), Ok(0) | Err(_)), "the server sees the end");
    }
}

#[test]
fn an_exchange_does_not_start_on_a_connection_that_is_busy_or_not_open() {
    let mut driven = Driven::new();
    let (busy, _server) = driven.begin(&reply());
    assert!(!driven.reactor.start(busy, reply(), 0.0));
    let connecting = driven.connect();
    assert!(!driven.reactor.start(connecting, reply(), 0.0));
    assert_eq!(driven.reactor.len(), 2);
}
