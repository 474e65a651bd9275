//! A reactor with a server that the test plays itself.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use streamfold_core::{Dialect, Options};
use streamfold_io::reactor::{ConnectionId, Lane, Limits, News, Pace, Reactor, Report, Swept, monotonic};
use streamfold_io::{Body, Event, Expected, Method, RequestHead, Shared};

/// The head of a stream that lasts until the connection closes.
pub const UNTIL_CLOSE: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
/// The head of a chunked stream.
pub const CHUNKED: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
/// A whole reply that is no stream.
pub const PLAIN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Long enough for anything that should happen, on any machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// An event of an SGLang stream with one new token.
pub fn event(tokens: usize, is_last: bool) -> String {
    let reason = if is_last { r#"{"type":"length","length":1}"# } else { "null" };
    let meta = format!(r#"{{"id":"a","finish_reason":{reason},"prompt_tokens":1,"completion_tokens":{tokens}}}"#);
    format!("data: {{\"text\":\"a\",\"output_ids\":[7],\"meta_info\":{meta}}}\n\n")
}

/// The events of a stream of so many tokens, and its end.
pub fn body(tokens: usize) -> String {
    let events = (1..=tokens).map(|count| event(count, count == tokens));
    events.chain(["data: [DONE]\n\n".to_owned()]).collect()
}

/// A text in one chunk, and the end of the body.
pub fn whole_chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len())
}

pub fn stream() -> Arc<Shared> {
    stream_of(Arc::new(*b"{}"))
}

pub fn stream_of(body: Body) -> Arc<Shared> {
    let options = Options { logprobs: false, ..Options::default() };
    let expected = Expected::Stream { dialect: Dialect::SglangIncremental, options };
    Arc::new(Shared::new(head(), body, expected))
}

pub fn reply() -> Arc<Shared> {
    Arc::new(Shared::new(head(), Arc::new(*b"{}"), Expected::Body { max_bytes: 1 << 20 }))
}

fn head() -> RequestHead {
    RequestHead::new(Method::Post, "/generate", "engine").expect("sound")
}

/// A reactor, and what it has reported.
pub struct Driven {
    pub reactor: Reactor,
    pub listener: TcpListener,
    pub reports: Vec<Report>,
}

impl Driven {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Self { reactor: Reactor::new(Pace::default()).expect("descriptors"), listener, reports: Vec::new() }
    }

    pub fn connect(&mut self) -> ConnectionId {
        let address = self.listener.local_addr().expect("bound");
        self.reactor.connect(address.ip(), address.port(), 0).expect("a socket")
    }

    /// An open connection, and the server's side of it.
    pub fn open(&mut self) -> (ConnectionId, TcpStream) {
        let id = self.connect();
        let (server, _) = self.listener.accept().expect("a connection");
        server.set_read_timeout(Some(PATIENCE)).expect("possible");
        self.until(|driven| driven.opened(id).is_some());
        assert_eq!(self.opened(id), Some(0));
        (id, server)
    }

    /// An open connection with an exchange whose request the server has read.
    pub fn begin(&mut self, exchange: &Arc<Shared>) -> (ConnectionId, TcpStream) {
        let (id, mut server) = self.open();
        assert!(self.reactor.start(id, exchange.clone(), monotonic()));
        read_request(&mut server);
        (id, server)
    }

    /// Sweep both polls until it holds.
    pub fn until(&mut self, mut holds: impl FnMut(&Self) -> bool) {
        let begin = Instant::now();
        while !holds(self) {
            assert!(begin.elapsed() < PATIENCE, "it never happened; reported: {:?}", self.reported());
            for lane in [Lane::Urgent, Lane::Ordinary] {
                self.sweep(lane, Limits::default());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Wait until so many sockets are ready.
    pub fn until_ready(&mut self, lane: Lane, count: usize) {
        let begin = Instant::now();
        while self.reactor.look(lane).expect("a poll") < count {
            assert!(begin.elapsed() < PATIENCE, "{count} sockets never became ready");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn sweep(&mut self, lane: Lane, limits: Limits) -> Swept {
        self.reactor.look(lane).expect("a poll");
        self.reactor.sweep(lane, limits, monotonic, &mut self.reports)
    }

    /// What became of connecting.
    pub fn opened(&self, id: ConnectionId) -> Option<i32> {
        self.reports.iter().find_map(|report| match report.news {
            News::Opened(errno) if report.connection == id => Some(errno),
            _ => None,
        })
    }

    /// The events of a connection, as they were reported.
    pub fn events(&self, id: ConnectionId) -> Vec<&Event> {
        let of_id = self.reports.iter().filter(|report| report.connection == id);
        of_id.flat_map(|report| if let News::Events(_, events) = &report.news { &events[..] } else { &[] }).collect()
    }

    /// Whether the exchange has ended, and its connection can carry another one.
    pub fn ended(&self, id: ConnectionId) -> Option<bool> {
        match self.events(id).last() {
            Some(Event::Ended { reusable }) => Some(*reusable),
            _ => None,
        }
    }

    /// Nothing is ready, and nothing becomes ready.
    pub fn is_quiet(&mut self) -> bool {
        let wait = Duration::from_millis(20);
        [Lane::Urgent, Lane::Ordinary].into_iter().all(|lane| {
            self.sweep(lane, Limits::default());
            std::thread::sleep(wait);
            self.reactor.look(lane).expect("a poll") == 0
        })
    }

    fn reported(&self) -> Vec<(ConnectionId, String)> {
        let text = |news: &News| match news {
            News::Opened(errno) => format!("opened {errno}"),
            News::Events(_, events) => format!("{events:?}"),
            News::Ciphertext(ciphertext) => format!("{ciphertext:?}"),
        };
        self.reports.iter().map(|report| (report.connection, text(&report.news))).collect()
    }
}

/// Read a request with a small body.
pub fn read_request(server: &mut TcpStream) {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n{}") {
        let mut part = [0; 4096];
        let count = server.read(&mut part).expect("a request");
        assert!(count > 0, "the request ends early");
        bytes.extend_from_slice(&part[..count]);
    }
}

pub fn write(server: &mut TcpStream, text: &str) {
    server.write_all(text.as_bytes()).expect("somebody listens");
}
