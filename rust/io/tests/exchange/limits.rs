//! A hostile or broken server is bounded in everything that it sends.

use streamfold_core::FinishReason;
use streamfold_io::{Event, Input, State};

use crate::drive::{Outcome, Tail, chunked, names, put, read, sent, stream};
use crate::streams::{event, short};

/// Read in one piece, in small pieces and event by event: the same outcome.
fn read_split(bytes: &[u8], limit: Option<usize>) -> Outcome {
    let whole = read([bytes], Tail::Open, stream(limit), false);
    assert_eq!(whole, read(bytes.chunks(7), Tail::Open, stream(limit), false));
    assert_eq!(whole, read(bytes.split_inclusive(|&byte| byte == b'\n'), Tail::Open, stream(limit), false));
    whole
}

#[test]
fn a_stream_that_floods_ends_as_length() {
    let flood: String = (0..500).map(|index| event(index, 1, None) + "\n\n").collect();
    let outcome = read_split(&chunked(flood.as_bytes()), Some(10));
    assert_eq!(names(&outcome.events), ["head", "first_token", "overrun", "ended"]);
    assert_eq!(outcome.state, State::Done { reusable: false });
    assert_eq!(outcome.generation.token_ids.len(), 10 + 256 + 1, "up to the event that goes too far");
    assert_eq!(outcome.generation.finish_reason, Some(FinishReason::Length));
    assert_eq!(outcome.generation.logprobs.map(|logprobs| logprobs.len()), Some(267));
}

#[test]
fn a_stream_that_floods_and_breaks_off_ends_as_length() {
    let flood = event(0, 300, None) + "\n";
    let outcome = read_split(&chunked(flood.as_bytes()), Some(10));
    assert_eq!(names(&outcome.events), ["head", "first_token", "overrun", "ended"]);
    let broken = read([&chunked(flood.as_bytes())[..]], Tail::Reset, stream(Some(10)), false);
    assert_eq!(broken, outcome);
}

#[test]
fn a_stream_may_go_a_little_past_its_budget() {
    let body = format!("{}\n\n{}\n\n", event(0, 266, None), event(266, 0, Some("stop")));
    let outcome = read_split(&chunked(body.as_bytes()), Some(10));
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "reusable"]);
    assert_eq!(outcome.generation.finish_reason, Some(FinishReason::Stop));
}

#[test]
fn the_terminal_event_is_never_too_much() {
    let body = format!("{}\n\n", event(0, 1000, Some("stop")));
    let outcome = read_split(&chunked(body.as_bytes()), Some(10));
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "reusable"]);
    assert_eq!(outcome.generation.token_ids.len(), 1000);
}

#[test]
fn the_rest_behind_the_terminal_event_is_bounded() {
    let last = event(0, 1, Some("stop")) + "\n\n";
    let ping = ": ping\n\n".repeat(65_536 / 8);
    let outcome = read_split(&chunked(format!("{last}{ping}").as_bytes()), None);
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "reusable"]);
    let outcome = read_split(&chunked(format!("{last}{ping}\n").as_bytes()), None);
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "ended"]);
}

#[test]
fn a_refusal_is_kept_up_to_64_kib() {
    let reply = |size: usize| {
        let head = format!("HTTP/1.1 500 Error\r\nContent-Length: {size}\r\n\r\n");
        [head.as_bytes(), &vec![b'x'; size]].concat()
    };
    let outcome = read_split(&reply(65_536), None);
    assert_eq!((names(&outcome.events), outcome.body.len()), (vec!["head", "refused", "reusable"], 65_536));
    let outcome = read_split(&reply(65_537), None);
    assert_eq!((names(&outcome.events), outcome.body.len()), (vec!["head", "refused", "ended"], 65_536));
}

#[test]
fn an_interrupted_refusal_gives_what_there_is() {
    let reply = b"HTTP/1.1 500 Error\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\nde";
    for tail in [Tail::Eof, Tail::Reset, Tail::TlsFailed] {
        let outcome = read([&reply[..]], tail, stream(None), false);
        assert_eq!((names(&outcome.events), &outcome.body[..]), (vec!["head", "refused", "ended"], &b"abcde"[..]));
    }
    let open = read([&reply[..]], Tail::Open, stream(None), false);
    assert_eq!((names(&open.events), &open.body[..]), (vec!["head"], &b"abcde"[..]), "the driver may give up");
}

#[test]
fn an_endless_trickle_of_heads_ends() {
    let mut exchange = sent(stream(None));
    let mut bytes = 0;
    while !exchange.state().is_over() {
        bytes += 100;
        put(&mut exchange, Input::Received(&b"\r\n".repeat(50)));
    }
    assert!(bytes <= (64 << 10) + 100);
    assert_eq!(exchange.state(), State::Failed);
}

#[test]
fn a_second_reply_is_not_read() {
    let bytes = chunked(short().as_bytes()).repeat(2);
    let mut exchange = sent(stream(None));
    let events = put(&mut exchange, Input::Received(&bytes));
    assert_eq!(names(&events), ["head", "first_token", "finished", "ended"]);
    assert_eq!(events.last(), Some(&Event::Ended { reusable: false }));
    assert_eq!(exchange.take().token_ids.len(), 2);
}
