//! What a sweep reads: to the end, within its limits, in turns.

use std::io::Read;

use streamfold_io::reactor::{Lane, Limits, Swept, monotonic};
use streamfold_io::{Event, State};

use crate::driven::{CHUNKED, Driven, PLAIN, UNTIL_CLOSE, body, event, reply, stream, whole_chunk, write};

#[test]
fn bytes_and_the_end_that_comes_with_them_are_seen_in_one_sweep() {
    let mut driven = Driven::new();
    let exchange = stream();
    let (id, mut server) = driven.begin(&exchange);
    write(&mut server, &format!("{UNTIL_CLOSE}{}", body(3)));
    drop(server);
    // The end is marked when the bytes are there.
    std::thread::sleep(std::time::Duration::from_millis(50));
    driven.until_ready(Lane::Ordinary, 1);
    driven.sweep(Lane::Ordinary, Limits::default());
    assert_eq!(driven.ended(id), Some(false));
    assert_eq!(exchange.take().token_ids, [7; 3]);
    assert!(driven.is_quiet());
}

#[test]
fn an_end_behind_more_than_one_read_is_seen_in_the_same_sweep() {
    let mut driven = Driven::new();
    let exchange = stream();
    let (id, mut server) = driven.begin(&exchange);
    let text = format!("{UNTIL_CLOSE}{}", body(4000));
    let writer = std::thread::spawn(move || write(&mut server, &text));
    driven.until(|driven| driven.ended(id).is_some());
    writer.join().expect("written");
    assert_eq!(exchange.take().token_ids.len(), 4000);
}

#[test]
fn a_bounded_sweep_leaves_some_sockets_and_the_next_one_begins_with_them() {
    let mut driven = Driven::new();
    let exchanges: Vec<_> = (0..5).map(|_| stream()).collect();
    let mut servers: Vec<_> = exchanges.iter().map(|exchange| driven.begin(exchange).1).collect();
    let limits = Limits { seconds: f64::INFINITY, bytes: 1, ..Limits::default() };
    for round in 1..=3 {
        for server in &mut servers {
            let head = if round == 1 { UNTIL_CLOSE } else { "" };
            write(server, &format!("{head}{}", event(round, false)));
        }
        driven.until_ready(Lane::Ordinary, 5);
        for turn in 1..=5 {
            let swept = driven.sweep(Lane::Ordinary, limits);
            assert_eq!((swept.turns, swept.is_bounded), (1, turn < 5), "round {round}, turn {turn}");
            // Each has had its turn before one has its second.
            let counts: Vec<_> = exchanges.iter().map(|exchange| exchange.token_count()).collect();
            assert_eq!(counts.iter().filter(|&&count| count == round).count(), turn, "{counts:?}");
        }
        assert_eq!(driven.sweep(Lane::Ordinary, limits), Swept { seconds: 0.0, ..Swept::default() });
    }
}

#[test]
fn sockets_that_are_ready_again_wait_for_the_next_round() {
    let mut driven = Driven::new();
    let exchanges: Vec<_> = (0..3).map(|_| stream()).collect();
    let mut servers: Vec<_> = exchanges.iter().map(|exchange| driven.begin(exchange).1).collect();
    for server in &mut servers {
        write(server, &format!("{UNTIL_CLOSE}{}", event(1, false)));
    }
    driven.until_ready(Lane::Ordinary, 3);
    let limits = Limits { seconds: f64::INFINITY, bytes: 1, ..Limits::default() };
    for turn in 1..=3 {
        let swept = driven.sweep(Lane::Ordinary, limits);
        assert_eq!((swept.turns, swept.is_bounded), (1, turn < 3));
        for (server, exchange) in servers.iter_mut().zip(&exchanges) {
            if exchange.token_count() == 1 {
                write(server, ": a comment\n\n");
            }
        }
    }
    assert!(exchanges.iter().all(|exchange| exchange.token_count() == 1));
    driven.until_ready(Lane::Ordinary, 3);
}

#[test]
fn a_sweep_ends_when_its_time_is_up() {
    let mut driven = Driven::new();
    let exchanges: Vec<_> = (0..4).map(|_| stream()).collect();
    let mut servers: Vec<_> = exchanges.iter().map(|exchange| driven.begin(exchange).1).collect();
    for server in &mut servers {
        write(server, &format!("{UNTIL_CLOSE}{}", event(1, false)));
    }
    driven.until_ready(Lane::Ordinary, 4);
    // Each look at this clock takes 3 ms.
    let mut now = 0.0;
    let clock = || {
        now += 0.003;
        now
    };
    let swept = driven.reactor.sweep(Lane::Ordinary, Limits::default(), clock, &mut driven.reports);
    assert_eq!((swept.turns, swept.is_bounded), (2, true));
    assert!(swept.seconds >= 0.005);
    driven.until(|_| exchanges.iter().all(|exchange| exchange.token_count() == 1));
}

#[test]
fn a_flood_on_one_socket_does_not_keep_the_others_waiting() {
    let mut driven = Driven::new();
    let (flooded, other) = (stream(), stream());
    let (flood_id, mut flooding) = driven.begin(&flooded);
    let (id, mut server) = driven.begin(&other);
    write(&mut flooding, &format!("{CHUNKED}fffffff\r\n"));
    let flood = std::thread::spawn(move || {
        let comment = format!(":{}\n", "x".repeat(1 << 16));
        // Until the connection is closed.
        while std::io::Write::write_all(&mut flooding, comment.as_bytes()).is_ok() {}
    });
    driven.until(|driven| !driven.events(flood_id).is_empty());
    write(&mut server, &format!("{CHUNKED}{}", whole_chunk(&body(1))));
    driven.until(|driven| driven.ended(id).is_some());
    driven.reactor.close();
    flood.join().expect("ended by the close");
}

#[test]
fn streams_are_ordinary_and_replies_refusals_and_aborted_streams_are_urgent() {
    let mut driven = Driven::new();
    let exchanges = [stream(), reply(), stream(), stream()];
    let [(_, mut a), (_, mut b), (refused, mut c), (aborted, mut d)] =
        [0, 1, 2, 3].map(|place| driven.begin(&exchanges[place]));
    write(&mut a, UNTIL_CLOSE);
    driven.until_ready(Lane::Ordinary, 1);
    write(&mut b, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n");
    driven.until_ready(Lane::Urgent, 1);
    driven.until(|driven| !driven.reports.is_empty() && exchanges[1].state() == State::Refused);

    write(&mut c, "HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\n");
    driven.until(|driven| !driven.events(refused).is_empty());
    write(&mut c, "too busy.");
    driven.until_ready(Lane::Urgent, 1);
    driven.sweep(Lane::Urgent, Limits::default());
    assert_eq!(driven.ended(refused), Some(true));

    write(&mut d, &format!("{UNTIL_CLOSE}{}", event(1, false)));
    driven.until(|_| exchanges[3].token_count() == 1);
    driven.reactor.abort(aborted, monotonic(), &mut driven.reports);
    write(&mut d, &event(2, false));
    driven.until_ready(Lane::Urgent, 1);
    driven.sweep(Lane::Urgent, Limits::default());
    assert_eq!(exchanges[3].token_count(), 2);
    drop(d);
    driven.until(|driven| driven.ended(aborted).is_some());
    let events = driven.events(aborted);
    assert!(matches!(events[..], [Event::Head(_), Event::FirstToken, Event::Ended { reusable: false }]), "{events:?}");
}

#[test]
fn one_socket_can_be_read_at_once_to_its_end() {
    let mut driven = Driven::new();
    let exchange = stream();
    let (id, mut server) = driven.begin(&exchange);
    write(&mut server, &format!("{UNTIL_CLOSE}{}", body(2)));
    drop(server);
    let begin = monotonic();
    while driven.ended(id).is_none() && monotonic() < begin + 20.0 {
        driven.reactor.read_now(id, monotonic, &mut driven.reports);
    }
    assert_eq!(driven.ended(id), Some(false));
    assert!(exchange.first_token_at() >= begin && exchange.last_token_at() <= monotonic());
    driven.reactor.read_now(id, monotonic, &mut driven.reports);
    assert!(driven.is_quiet());
}

#[test]
fn an_ended_exchange_leaves_its_socket_open_and_unread_until_it_is_ended() {
    let mut driven = Driven::new();
    let exchange = stream();
    let (id, mut server) = driven.begin(&exchange);
    write(
        &mut server,
        &format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\
        Transfer-Encoding: chunked\r\n\r\n{}",
            whole_chunk(&body(1))
        ),
    );
    driven.until(|driven| driven.ended(id).is_some());
    write(&mut server, "more");
    assert!(driven.is_quiet(), "it is not watched");
    server.set_nonblocking(true).expect("possible");
    let still_open = server.read(&mut [0]).expect_err("nothing to read");
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock);
    server.set_nonblocking(false).expect("possible");
    driven.reactor.end(id);
    driven.reactor.end(id);
    // Unread bytes make it a reset.
    assert!(matches!(server.read(&mut [0]), Ok(0) | Err(_)));
    assert!(driven.reactor.is_empty());
}

#[test]
fn a_stream_that_was_taken_is_not_watched_past_its_end() {
    let mut driven = Driven::new();
    let exchange = stream();
    let (id, mut server) = driven.begin(&exchange);
    write(&mut server, &format!("{UNTIL_CLOSE}{}", event(1, false)));
    driven.until(|_| exchange.token_count() == 1);
    assert_eq!(exchange.take().token_ids, [7]);
    write(&mut server, &body(5));
    drop(server);
    let before = driven.events(id).len();
    driven.until_ready(Lane::Ordinary, 1);
    assert!(driven.is_quiet());
    assert_eq!((driven.events(id).len(), exchange.token_count()), (before, 1));
}

#[test]
fn an_unknown_connection_is_ignored_everywhere() {
    let mut driven = Driven::new();
    let (id, _server) = driven.open();
    driven.reactor.end(id);
    assert!(!driven.reactor.start(id, reply(), 0.0));
    driven.reports.clear();
    driven.reactor.abort(id, 0.0, &mut driven.reports);
    driven.reactor.read_now(id, monotonic, &mut driven.reports);
    driven.reactor.end(id);
    assert!(driven.reports.is_empty());
    let (_, mut server) = driven.begin(&reply());
    write(&mut server, PLAIN);
    driven.until(|driven| driven.reports.len() >= 2);
}
