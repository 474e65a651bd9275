//! `Exchange::notify_at`: told once, when as many tokens have come as were asked for.

use streamfold_io::{Event, Input};

use crate::drive::{chunked, names, new, put, sent, stream};
use crate::streams::{event, short};

/// A stream of so many tokens, three an event.
fn reply(events: usize) -> Vec<u8> {
    let body: Vec<_> = (0..events).map(|i| event(3 * i, 3, (i + 1 == events).then_some("stop")) + "\n\n").collect();
    chunked((body.concat() + "data: [DONE]\n\n").as_bytes())
}

#[test]
fn the_tokens_are_told_once_with_the_part_that_brings_enough_however_the_stream_is_split() {
    let bytes = reply(4);
    for size in [1, 7, 200, bytes.len()] {
        for count in 1..=12 {
            let mut exchange = sent(stream(None));
            assert!(!exchange.notify_at(count));
            let mut told = 0;
            for part in bytes.chunks(size) {
                let before = exchange.token_count();
                let events = put(&mut exchange, Input::Received(part));
                let is_told = events.contains(&Event::Tokens);
                assert_eq!(is_told, before < count && exchange.token_count() >= count, "{count} by {size}");
                told += usize::from(is_told);
            }
            assert_eq!(told, 1);
        }
    }
}

#[test]
fn the_tokens_are_told_after_the_first_one_and_before_the_end() {
    let mut exchange = sent(stream(None));
    assert!(!exchange.notify_at(2));
    let events = put(&mut exchange, Input::Received(&chunked(short().as_bytes())));
    assert_eq!(names(&events), ["head", "first_token", "tokens", "finished", "reusable"]);
}

#[test]
fn tokens_that_have_come_already_are_told_by_the_return_and_never_again() {
    let bytes = reply(4);
    let half = bytes.len() / 2;
    let mut exchange = sent(stream(None));
    assert!(exchange.notify_at(0));
    assert!(!exchange.notify_at(1));
    assert!(!exchange.notify_at(100), "it replaces what was asked for before");
    assert_eq!(names(&put(&mut exchange, Input::Received(&bytes[..half]))), ["head", "first_token"]);
    let came = exchange.token_count();
    assert!(came > 0 && exchange.notify_at(came));
    assert_eq!(names(&put(&mut exchange, Input::Received(&bytes[half..]))), ["finished", "reusable"]);
}

#[test]
fn the_tokens_so_far_can_be_read_until_they_are_taken() {
    let bytes = reply(2);
    let mut exchange = new(stream(None));
    assert_eq!(exchange.token_ids(), [0; 0]);
    assert_eq!(exchange.snapshot(), new(stream(None)).take());
    let mut running = sent(stream(None));
    for part in bytes.chunks(11) {
        put(&mut running, Input::Received(part));
        let ids: Vec<_> = (0..6).take(running.token_count()).collect();
        assert_eq!(running.token_ids(), ids);
        assert_eq!(running.snapshot().token_ids, ids);
    }
    let snapshot = running.snapshot();
    assert_eq!(snapshot.logprobs.map(|logprobs| logprobs.len()), Some(6));
    assert_eq!(running.take().token_ids, [0, 1, 2, 3, 4, 5]);
    assert_eq!(running.token_ids(), [0; 0]);
    assert_eq!(running.snapshot().token_ids, [0; 0]);
    assert!(running.notify_at(6), "the count stays");
    assert!(!exchange.notify_at(1));
}
