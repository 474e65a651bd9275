//! The loop: sockets, requests, and events when they are due.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use polling::{Event, Events, PollMode, Poller};
use rustls::ServerConfig;
use serde_json::{Value, json};

use crate::connection::Connection;
use crate::http::{Generate, Request, small};
use crate::options::Options;
use crate::reply::{Engine, Reply};
use crate::rounds::{Due, Key, Rounds};
use crate::stats::Stats;
use crate::tokens::Tokens;

const BACKLOG: i32 = 4096;
const LISTENER: Key = 0;
/// Events that are sent before the sockets are looked at again.
const AT_ONCE: usize = 64;

/// What a request gets.
enum Answer {
    Stream,
    /// A status and a JSON body.
    Small(&'static str, Value),
}

impl Answer {
    fn error(status: &'static str, message: &str) -> Self {
        Self::Small(status, json!({"error": {"message": message}}))
    }
}

/// Serves forever.
pub struct Server {
    options: Options,
    tls: Option<Arc<ServerConfig>>,
    poller: Poller,
    listener: TcpListener,
    connections: HashMap<Key, Connection>,
    last_key: Key,
    /// Streams of the next round.
    waiting: Vec<Key>,
    rounds: Rounds,
    tokens: Tokens,
    stats: Stats,
}

impl Server {
    /// Listen on a free port of the loopback interface.
    pub fn new(options: Options, tls: Option<Arc<ServerConfig>>) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        rustix::net::listen(&listener, BACKLOG)?; // again: std's own backlog is 128 on some systems
        listener.set_nonblocking(true)?;
        let poller = Poller::new()?;
        // SAFETY: the listener lives as long as the poller.
        unsafe { poller.add_with_mode(&listener, Event::readable(LISTENER), PollMode::Level)? };
        Ok(Self {
            rounds: Rounds::new(options.tick, options.pacing),
            options,
            tls,
            poller,
            listener,
            connections: HashMap::new(),
            last_key: LISTENER,
            waiting: Vec::new(),
            tokens: Tokens::new(),
            stats: Stats::default(),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serve.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(NonZeroUsize::new(1024).expect("not 0"));
        loop {
            self.send_due();
            let wait = self.rounds.next_at().map(|at| at.saturating_duration_since(Instant::now()));
            events.clear();
            self.poller.wait(&mut events, wait)?;
            for event in events.iter() {
                if event.key == LISTENER {
                    self.accept()?;
                } else {
                    self.serve(event.key, event.readable);
                }
            }
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            let connection = Connection::new(socket, self.tls.as_ref())?;
            self.last_key += 1;
            // SAFETY: `close` deletes the socket from the poller before it is dropped.
            unsafe {
                self.poller.add_with_mode(connection.socket(), Event::readable(self.last_key), PollMode::Level)?;
            }
            self.connections.insert(self.last_key, connection);
            self.stats.connections += 1;
        }
    }

    fn close(&mut self, key: Key) {
        if let Some(connection) = self.connections.remove(&key) {
            self.poller.delete(connection.socket()).expect("the socket was added");
            self.waiting.retain(|waiting| *waiting != key);
        }
    }

    fn send_due(&mut self) {
        let now = Instant::now();
        for _ in 0..AT_ONCE {
            let Some(Due { key, event, at }) = self.rounds.take(now) else { break };
            let Some(reply) = self.connections.get_mut(&key).and_then(|connection| connection.reply.as_mut()) else {
                continue;
            };
            reply.due = reply.tokens.min((event + 1) * reply.per_event);
            self.stats.count_event(now.saturating_duration_since(at));
            self.serve(key, false);
        }
    }

    /// Do what can be done on one connection, and close it if it has failed or finished.
    fn serve(&mut self, key: Key, readable: bool) {
        if !self.advance(key, readable).unwrap_or(false) {
            self.close(key);
        }
    }

    /// False if the connection is to be closed. Nothing is written before the socket has taken all bytes so far.
    fn advance(&mut self, key: Key, readable: bool) -> io::Result<bool> {
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(true) }; // closed in this pass
        let was_stuck = connection.is_stuck();
        if readable && !connection.receive()? {
            return Ok(false);
        }
        while let Some(connection) = self.connections.get_mut(&key) {
            connection.flush()?;
            if connection.is_stuck() {
                break;
            }
            let Some(reply) = &mut connection.reply else {
                if connection.is_last {
                    connection.finish()?;
                    return Ok(false);
                }
                if !self.take_request(key)? {
                    break;
                }
                continue;
            };
            if reply.finished {
                self.stats.count_finished(&reply.rid);
                connection.reply = None;
            } else if !connection.write(|reply, out| reply.write_next(&self.tokens, out)) {
                break;
            }
        }
        if let Some(connection) = self.connections.get_mut(&key)
            && connection.is_stuck() != was_stuck
        {
            let interest = Event::new(key, true, !was_stuck);
            self.poller.modify_with_mode(connection.socket(), interest, PollMode::Level)?;
        }
        Ok(true)
    }

    /// Answer the next request, or start its stream; false if none has been received.
    fn take_request(&mut self, key: Key) -> io::Result<bool> {
        let Some(connection) = self.connections.get_mut(&key) else { return Ok(false) };
        let Some(request) = Request::take(&mut connection.received).map_err(io::Error::other)? else {
            return Ok(false);
        };
        connection.is_last = !request.keep_alive;
        let answer = self.answer(key, &request);
        let (status, body) = match answer.unwrap_or_else(|message| Answer::error("400 Bad Request", &message)) {
            Answer::Stream => return Ok(true),
            Answer::Small(status, body) => (status, body),
        };
        if let Some(connection) = self.connections.get_mut(&key) {
            connection.out().extend_from_slice(&small(status, &body));
        }
        Ok(true)
    }

    /// Do what a request asks for; the error says what is wrong with it.
    fn answer(&mut self, key: Key, request: &Request) -> Result<Answer, String> {
        match request.target.as_str() {
            "POST /generate" if self.options.cumulative => self.generate(key, request, Engine::SglangCumulative),
            "POST /generate" => self.generate(key, request, Engine::SglangIncremental),
            "POST /inference/v1/generate" => self.generate(key, request, Engine::Vllm),
            "POST /abort_request" | "POST /inference/v1/abort_requests" => {
                let body = request.json()?;
                let prefix = body["rid"].as_str(); // SGLang matches by prefix, vLLM exactly
                let ids: Vec<_> = body["request_ids"].as_array().into_iter().flatten().collect();
                let all = body["abort_all"] == true;
                self.abort(|rid| {
                    all || prefix.is_some_and(|prefix| rid.starts_with(prefix)) || ids.iter().any(|id| *id == rid)
                });
                Ok(Answer::Small("200 OK", json!({})))
            }
            "GET /stats" => {
                let waiting = self.waiting.len();
                Ok(Answer::Small("200 OK", self.stats.take(waiting)))
            }
            target => Ok(Answer::error("404 Not Found", target)),
        }
    }

    fn generate(&mut self, key: Key, request: &Request, engine: Engine) -> Result<Answer, String> {
        let asked = Generate::from_json(&request.json()?)?;
        let per_event = self.options.per_event;
        self.tokens.grow(asked.max_new_tokens);
        let connection = self.connections.get_mut(&key).expect("it has sent the request");
        connection.reply = Some(Reply {
            engine,
            rid: asked.rid.unwrap_or_else(|| format!("{key:032x}")),
            prompt_tokens: asked.prompt_tokens,
            tokens: asked.max_new_tokens,
            per_event,
            due: 0,
            sent: 0,
            finished: false,
        });
        let now = Instant::now();
        if asked.max_new_tokens <= per_event {
            // A short call waits for no others, and its event for no tick.
            let start = (now + self.options.hold).checked_sub(self.options.tick).unwrap_or(now);
            self.rounds.start(vec![key], 1, start);
            return Ok(Answer::Stream);
        }
        self.waiting.push(key);
        if self.waiting.len() == self.options.streams {
            let streams = std::mem::take(&mut self.waiting);
            let replies = streams.iter().filter_map(|key| self.connections[key].reply.as_ref());
            let events = replies.map(Reply::events).max().unwrap_or(0);
            self.rounds.start(streams, events, now + self.options.hold);
        }
        Ok(Answer::Stream)
    }

    fn abort(&mut self, is_meant: impl Fn(&str) -> bool) {
        let mut aborted = Vec::new();
        for (key, connection) in &mut self.connections {
            if connection.reply.as_ref().is_some_and(|reply| !reply.finished && is_meant(&reply.rid)) {
                connection.write(|reply, out| reply.write_abort(&self.tokens, out));
                aborted.push(*key);
            }
        }
        self.waiting.retain(|key| !aborted.contains(key));
        for key in aborted {
            self.serve(key, false);
        }
    }
}
