//! Any reply, split anywhere, gives what the whole one gives: the same events, state, generation and body; and a closed
//! exchange does nothing more. A recorded stream is a good seed: a choice puts a head before the input.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use streamfold_core::{Dialect, Generation, Options};
use streamfold_io::{Event, Exchange, Expected, Input, Method, Request, RequestHead, State};

const HEADS: [&str; 4] = [
    "",
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 4000\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
];

#[derive(Debug, PartialEq)]
struct Outcome {
    events: Vec<Event>,
    state: State,
    generation: Generation,
    body: Vec<u8>,
}

fn sent(expected: Expected, events: &mut Vec<Event>) -> Exchange {
    let head = RequestHead::new(Method::Post, "/", "engine").expect("sound");
    let mut exchange = Exchange::new(Request::new(head, Arc::new([])), expected);
    for input in [Input::Connected, Input::Send, Input::Sent(usize::MAX)] {
        exchange.handle(input, events);
    }
    assert_eq!(exchange.state(), State::Head);
    exchange
}

fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>, choice: u8, expected: Expected) -> Outcome {
    let mut events = Vec::new();
    let mut exchange = sent(expected, &mut events);
    if choice & 64 != 0 {
        exchange.handle(Input::Abort, &mut events);
    }
    for part in parts {
        exchange.handle(Input::Received(part), &mut events);
    }
    match choice >> 4 & 3 {
        0 => exchange.handle(Input::Eof, &mut events),
        1 => exchange.handle(Input::Reset(104), &mut events),
        2 => exchange.handle(Input::TlsFailed("an alert"), &mut events),
        _ => {}
    }
    let ends = events.iter().filter(|event| matches!(event, Event::Ended { .. })).count();
    assert_eq!(ends, usize::from(exchange.state().is_over()));
    // What lies behind the reply is seen at its end only if it came in the same read.
    if let (Some(Event::Ended { reusable }), State::Done { reusable: later }) = (events.last_mut(), exchange.state()) {
        assert!(*reusable || !later);
        *reusable = later;
    }
    let state = exchange.state();
    let outcome = Outcome { events, state, generation: exchange.take(), body: exchange.take_body() };
    assert_eq!(outcome.generation.token_ids.len(), exchange.token_count());
    outcome
}

fn close(bytes: &[u8], place: usize, expected: Expected) {
    let mut events = Vec::new();
    let mut exchange = sent(expected, &mut events);
    let (before, after) = bytes.split_at(place);
    exchange.handle(Input::Received(before), &mut events);
    exchange.handle(Input::Close, &mut events);
    let (count, tokens) = (events.len(), exchange.token_count());
    let inputs = [
        Input::Received(after),
        Input::Eof,
        Input::Send,
        Input::Connected,
        Input::Abort,
        Input::Reset(104),
        Input::TlsFailed("an alert"),
    ];
    for input in inputs {
        exchange.handle(input, &mut events);
    }
    assert_eq!((exchange.state(), exchange.token_count(), events.len()), (State::Closed, tokens, count));
}

fuzz_target!(|input: &[u8]| {
    let Some((bytes, &[choice, first, second, step])) = input.split_last_chunk::<4>() else { return };
    let bytes = [HEADS[usize::from(choice & 3)].as_bytes(), bytes].concat();
    let (_, dialect) = Dialect::ALL[usize::from(step) % Dialect::ALL.len()];
    let options = Options { max_new_tokens: (choice & 4 != 0).then_some(0), ..Options::default() };
    let expected =
        if choice & 8 == 0 { Expected::Stream { dialect, options } } else { Expected::Body { max_bytes: 100 } };
    let whole = read([&bytes[..]], choice, expected);
    let low = usize::from(first.min(second)).min(bytes.len());
    let high = usize::from(first.max(second)).min(bytes.len());
    assert_eq!(whole, read([&bytes[..low], &bytes[low..high], &bytes[high..]], choice, expected));
    assert_eq!(whole, read(bytes.chunks(usize::from(step).max(1)), choice, expected));
    close(&bytes, low, expected);
});
