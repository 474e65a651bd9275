//! An exchange between threads: its progress, the end of its sending, and a panic in it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use streamfold_core::{Dialect, Options};
use streamfold_io::{Body, Event, Expected, Input, Method, RequestHead, Shared, State};

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";

fn stream(body: Body) -> Shared {
    let head = RequestHead::new(Method::Post, "/generate", "engine").expect("sound");
    let options = Options { logprobs: false, ..Options::default() };
    Shared::new(head, body, Expected::Stream { dialect: Dialect::SglangIncremental, options })
}

fn event(tokens: usize) -> Vec<u8> {
    let meta = format!(r#"{{"id":"a","finish_reason":null,"prompt_tokens":1,"completion_tokens":{tokens}}}"#);
    format!("data: {{\"text\":\"a\",\"output_ids\":[7],\"meta_info\":{meta}}}\n\n").into_bytes()
}

/// Takes everything.
#[allow(clippy::unnecessary_wraps, reason = "as a socket's write has it")]
fn write_all(parts: [&[u8]; 2]) -> io::Result<usize> {
    Ok(parts[0].len() + parts[1].len())
}

/// A body whose bytes can be read so many times, and whose drop is counted.
struct Fragile {
    reads: AtomicUsize,
    dropped: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Fragile {
    fn as_ref(&self) -> &[u8] {
        let reads = self.reads.load(Ordering::Relaxed);
        assert!(reads > 0, "read once too often");
        self.reads.store(reads - 1, Ordering::Relaxed);
        b"{}"
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn progress_is_stamped_with_the_time_of_the_read() {
    let shared = stream(Arc::new(*b"{}"));
    let mut events = Vec::new();
    shared.start(1.0, &mut events);
    assert!(!shared.send(1.0, &mut events, write_all));
    shared.receive(HEAD, 2.0, &mut events);
    assert_eq!(
        (shared.token_count(), shared.first_token_at(), shared.last_token_at()),
        (0, f64::INFINITY, f64::INFINITY)
    );
    shared.receive(&event(1), 3.0, &mut events);
    assert_eq!((shared.token_count(), shared.first_token_at(), shared.last_token_at()), (1, 3.0, 3.0));
    shared.receive(b"data: ", 4.0, &mut events);
    shared.receive(&event(2)[6..], 5.0, &mut events);
    assert_eq!((shared.token_count(), shared.first_token_at(), shared.last_token_at()), (2, 3.0, 5.0));
    let gaps = shared.gaps();
    assert_eq!((gaps.durations().count(), gaps.durations().sum(), gaps.reads()), (1, 2.0, 2));
    assert_eq!(shared.take().token_ids, [7, 7]);
    assert_eq!((shared.token_count(), shared.state()), (2, State::Closed));
    assert_eq!(shared.gaps().durations().count(), 1, "after the tokens were taken, too");
}

#[test]
fn gaps_take_no_memory_before_there_is_one() {
    let shared = stream(Arc::new(*b"{}"));
    let mut events = Vec::new();
    shared.start(1.0, &mut events);
    shared.send(1.0, &mut events, write_all);
    shared.receive(HEAD, 2.0, &mut events);
    shared.receive(&event(1), 3.0, &mut events);
    assert_eq!(shared.gaps().durations().held_bytes(), 0);
    shared.receive(&event(2), 4.0, &mut events);
    assert!((1..=2048).contains(&shared.gaps().durations().held_bytes()));
}

#[test]
fn a_request_leaves_in_the_parts_that_the_connection_takes() {
    let shared = stream(Arc::new(vec![b'x'; 3 << 20]));
    let (mut events, mut sent) = (Vec::new(), Vec::new());
    shared.start(0.0, &mut events);
    let mut blocks = false;
    while shared.send(0.0, &mut events, |[head, body]| {
        blocks = !blocks;
        if blocks {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let part = [head, &body[..body.len().min(1_000_003)]].concat();
        sent.extend_from_slice(&part);
        Ok(part.len())
    }) {}
    assert!(sent.ends_with(b"x") && sent.starts_with(b"POST /generate"));
    let head = sent.windows(4).position(|part| part == b"\r\n\r\n").expect("a blank line") + 4;
    assert_eq!(sent.len() - head, 3 << 20);
    assert_eq!(events, [Event::Connected, Event::Sent]);
}

#[test]
fn a_failed_write_leaves_the_reply_to_be_read() {
    let shared = stream(Arc::new(*b"{}"));
    let mut events = Vec::new();
    shared.start(0.0, &mut events);
    assert!(!shared.send(0.0, &mut events, |_| Err(io::Error::from_raw_os_error(104))));
    assert_eq!(shared.state(), State::Head);
    shared.receive(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno", 0.0, &mut events);
    assert!(matches!(events[..], [Event::Connected, Event::Head(_), Event::Refused, Event::Ended { reusable: false }]));
    assert_eq!(shared.take_body(), b"no");
}

#[test]
fn a_pinned_body_is_freed_where_it_is_unpinned() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let shared = stream(Arc::new(Fragile { reads: AtomicUsize::new(9), dropped: dropped.clone() }));
    let mut events = Vec::new();
    shared.start(0.0, &mut events);
    shared.send(0.0, &mut events, write_all);
    shared.receive(HEAD, 0.0, &mut events);
    shared.handle(Input::Close, 0.0, &mut events);
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    shared.unpin();
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    assert!(shared.body().is_none());
}

#[test]
fn a_panic_ends_the_exchange_once_and_the_result_can_still_be_taken() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let shared = stream(Arc::new(Fragile { reads: AtomicUsize::new(1), dropped }));
    let mut events = Vec::new();
    shared.start(0.0, &mut events);
    assert!(!shared.send(0.0, &mut events, write_all));
    assert_eq!(events, [Event::Connected, Event::Panicked, Event::Ended { reusable: false }]);
    assert_eq!(shared.state(), State::Closed);
    shared.receive(HEAD, 0.0, &mut events);
    shared.handle(Input::Close, 0.0, &mut events);
    assert_eq!(events.len(), 3);
    assert_eq!(shared.take().token_ids, [0; 0]);
}
