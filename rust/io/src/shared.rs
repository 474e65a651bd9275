//! One exchange between threads: `Shared`.

#![forbid(unsafe_code)]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use streamfold_core::Generation;

use crate::exchange::{Body, Event, Exchange, Expected, Head, Input, Request, RequestHead, State};
use crate::gaps::Gaps;

/// At most this much of a request is sent in one go, so that the sending of one does not keep others waiting.
const MAX_SEND_BYTES: usize = 1 << 20;

/// An [`Exchange`] that a socket layer drives on one thread, while another reads its progress or takes its result.
///
/// The lock is held for one read or write of the socket, and never while waiting for anything else. A panic in the
/// exchange ends it alone, with [`Event::Panicked`].
///
/// Times are seconds of the driver's clock.
pub struct Shared {
    guarded: Mutex<Guarded>,
    /// Keeps the request's body alive until [`Shared::unpin`]: who drives the exchange may not be allowed to free it.
    pinned: Mutex<Option<Body>>,
    expects_stream: bool,
    comes_in_parts: bool,
    token_count: AtomicUsize,
    /// The bits of an f64.
    first_token_at: AtomicU64,
    /// The bits of an f64.
    last_token_at: AtomicU64,
}

struct Guarded {
    exchange: Exchange,
    gaps: Gaps,
    /// It panicked: its state means nothing any more.
    is_broken: bool,
}

impl Shared {
    /// An exchange that waits for its connection.
    #[must_use]
    pub fn new(head: RequestHead, body: Body, expected: Expected) -> Self {
        Self::of(Request::new(head, body.clone()), Some(body), expected)
    }

    /// An exchange of several requests that are sent in one go, and of their replies: see [`Expected::Bodies`].
    #[must_use]
    pub fn pipelined(head: &RequestHead, bodies: &[&[u8]], max_bytes: usize) -> Self {
        Self::of(Request::pipelined(head, bodies), None, Expected::Bodies { count: bodies.len(), max_bytes })
    }

    fn of(request: Request, body: Option<Body>, expected: Expected) -> Self {
        let pinned = Mutex::new(body);
        let exchange = Exchange::new(request, expected);
        let never = f64::INFINITY.to_bits();
        Self {
            guarded: Mutex::new(Guarded { exchange, gaps: Gaps::default(), is_broken: false }),
            pinned,
            expects_stream: matches!(expected, Expected::Stream { .. }),
            comes_in_parts: !matches!(expected, Expected::Body { .. }),
            token_count: AtomicUsize::new(0),
            first_token_at: AtomicU64::new(never),
            last_token_at: AtomicU64::new(never),
        }
    }

    /// Take an input in at the time `now`; what changes is appended to `events`.
    pub fn handle(&self, input: Input<'_>, now: f64, events: &mut Vec<Event>) {
        self.run(now, events, |exchange, events| exchange.handle(input, events));
    }

    /// The connection stands, and the request may leave: next comes [`Shared::send`].
    pub fn start(&self, now: f64, events: &mut Vec<Event>) {
        self.handle(Input::Connected, now, events);
        self.handle(Input::Send, now, events);
    }

    /// Bytes have been received at the time `now`.
    pub fn receive(&self, bytes: &[u8], now: f64, events: &mut Vec<Event>) {
        self.handle(Input::Received(bytes), now, events);
    }

    /// Hand what is unsent to `write`, which returns how much of its two parts the connection took. Ends when the
    /// connection would block or has taken enough for now.
    ///
    /// Returns whether there is more to send.
    pub fn send(
        &self,
        now: f64,
        events: &mut Vec<Event>,
        mut write: impl FnMut([&[u8]; 2]) -> io::Result<usize>,
    ) -> bool {
        let mut is_unsent = false;
        self.run(now, events, |exchange, events| {
            let mut room = MAX_SEND_BYTES;
            while exchange.state() == State::Sending && room > 0 {
                let [head, body] = exchange.unsent();
                // A head is small, and so is a row of requests.
                let parts = [head, &body[..body.len().min(room)]];
                let wanted = parts[0].len() + parts[1].len();
                match write(parts) {
                    Ok(count) => {
                        exchange.handle(Input::Sent(count), events);
                        room = room.saturating_sub(count);
                        if count < wanted {
                            break;
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => {
                        exchange.handle(Input::SendFailed(error.raw_os_error().unwrap_or_default()), events);
                    }
                }
            }
            is_unsent = exchange.state() == State::Sending;
        });
        is_unsent
    }

    /// Where the exchange is.
    #[must_use]
    pub fn state(&self) -> State {
        let guarded = self.lock();
        if guarded.is_broken { State::Closed } else { guarded.exchange.state() }
    }

    /// Whether a stream is expected.
    #[must_use]
    pub fn expects_stream(&self) -> bool {
        self.expects_stream
    }

    /// Whether one read may take many parts of what is expected: a stream, or replies to several requests.
    #[must_use]
    pub fn comes_in_parts(&self) -> bool {
        self.comes_in_parts
    }

    /// Whether the reply with that head is the stream that is expected.
    #[must_use]
    pub fn is_stream(&self, head: &Head) -> bool {
        self.expects_stream && head.is_event_stream()
    }

    /// Tokens received so far.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.token_count.load(Ordering::Acquire)
    }

    /// Whole good replies before the one that is being read or was reported, see [`Expected::Bodies`].
    #[must_use]
    pub fn passed(&self) -> usize {
        self.lock().exchange.passed()
    }

    /// When the first token came; infinity before.
    #[must_use]
    pub fn first_token_at(&self) -> f64 {
        f64::from_bits(self.first_token_at.load(Ordering::Acquire))
    }

    /// When the latest token came; infinity before the first.
    #[must_use]
    pub fn last_token_at(&self) -> f64 {
        f64::from_bits(self.last_token_at.load(Ordering::Acquire))
    }

    /// The times between the tokens so far.
    #[must_use]
    pub fn gaps(&self) -> Gaps {
        self.lock().gaps.clone()
    }

    /// A copy of the tokens received so far; none after [`Shared::take`].
    #[must_use]
    pub fn token_ids(&self) -> Vec<i32> {
        self.lock().exchange.token_ids().to_vec()
    }

    /// A copy of what the stream has brought so far, see [`Exchange::snapshot`].
    #[must_use]
    pub fn snapshot(&self) -> Generation {
        let guarded = self.lock();
        catch_unwind(AssertUnwindSafe(|| guarded.exchange.snapshot())).unwrap_or_default()
    }

    /// Report [`Event::Tokens`] once, see [`Exchange::notify_at`].
    pub fn notify_at(&self, count: usize) -> bool {
        self.lock().exchange.notify_at(count)
    }

    /// Hand out what the stream has brought, see [`Exchange::take`].
    pub fn take(&self) -> Generation {
        let mut guarded = self.lock();
        let generation = catch_unwind(AssertUnwindSafe(|| guarded.exchange.take())).unwrap_or_default();
        self.token_count.fetch_max(generation.token_ids.len(), Ordering::AcqRel);
        generation
    }

    /// Hand out the body of a reply that is no stream, see [`Exchange::take_body`].
    pub fn take_body(&self) -> Vec<u8> {
        self.lock().exchange.take_body()
    }

    /// Bytes of memory held, the request's apart.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let guarded = self.lock();
        let gaps = guarded.gaps.durations().held_bytes();
        size_of::<Self>() - size_of::<Exchange>() + guarded.exchange.held_bytes() + gaps
    }

    /// The request's body until it is no longer pinned.
    #[must_use]
    pub fn body(&self) -> Option<Body> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drop the request's body unless it is still being sent. To be called where it may be freed, when the head of the
    /// reply has come or the exchange has ended.
    pub fn unpin(&self) {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, now: f64, events: &mut Vec<Event>, work: impl FnOnce(&mut Exchange, &mut Vec<Event>)) {
        let mut guarded = self.lock();
        if guarded.is_broken {
            return;
        }
        let was_over = guarded.exchange.state().is_over();
        let earlier = events.len();
        if catch_unwind(AssertUnwindSafe(|| work(&mut guarded.exchange, events))).is_err() {
            guarded.is_broken = true;
            let is_ended = events[earlier..].iter().any(|event| matches!(event, Event::Ended { .. }));
            if !was_over && !is_ended {
                events.extend([Event::Panicked, Event::Ended { reusable: false }]);
            }
            return;
        }
        let tokens = guarded.exchange.token_count();
        let before = self.token_count.load(Ordering::Relaxed);
        if tokens > before {
            if before == 0 {
                self.first_token_at.store(now.to_bits(), Ordering::Release);
            }
            self.last_token_at.store(now.to_bits(), Ordering::Release);
            guarded.gaps.note(now, tokens - before);
            self.token_count.store(tokens, Ordering::Release);
        }
    }
}
