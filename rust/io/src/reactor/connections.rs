//! The reactor and its connections, from connecting to closing: `Reactor`.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;

use rustix::process::{Pid, getpid};

use crate::exchange::{Event, Input};
use crate::reactor::clock::monotonic;
use crate::reactor::connection::{Connection, Lane, Phase};
use crate::reactor::gate::Gate;
use crate::reactor::pace::{Next, Pace};
use crate::reactor::poll::{Interest, Poll};
use crate::reactor::queue::Queue;
use crate::reactor::report::{News, Report};
use crate::reactor::slab::{ConnectionId, Slab};
use crate::reactor::socket::Socket;
use crate::reactor::swept::Swept;
use crate::shared::Shared;

/// The most bytes of one read.
const BUFFER_BYTES: usize = 256 << 10;

/// Sockets to servers, and the exchanges that they carry.
pub struct Reactor {
    process: Pid,
    pub(crate) urgent: Poll,
    pub(crate) ordinary: Poll,
    /// Before the ordinary poll.
    gate: Gate,
    pace: Pace,
    /// Those that wait for their turn: in the urgent poll, in the ordinary one.
    pub(crate) queues: [Queue; 2],
    pub(crate) connections: Slab<Connection>,
    pub(crate) buffer: Vec<u8>,
    /// What an input changed, until it is reported.
    pub(crate) events: Vec<Event>,
    /// What happened outside of a sweep, where it can't be reported.
    pub(crate) late: Vec<Report>,
}

impl Reactor {
    /// A reactor without connections.
    ///
    /// # Errors
    ///
    /// There is no descriptor left for a poll.
    pub fn new(pace: Pace) -> io::Result<Self> {
        let ordinary = Poll::new()?;
        Ok(Self {
            process: getpid(),
            urgent: Poll::new()?,
            gate: Gate::new(ordinary.as_fd())?,
            ordinary,
            pace,
            queues: [Queue::default(), Queue::default()],
            connections: Slab::new(),
            buffer: vec![0; BUFFER_BYTES],
            events: Vec::new(),
            late: Vec::new(),
        })
    }

    /// The descriptor of a poll: readable when a socket in it is ready and, for the ordinary one, no rest is on.
    #[must_use]
    pub fn fileno(&self, lane: Lane) -> RawFd {
        match lane {
            Lane::Urgent => self.urgent.fileno(),
            Lane::Ordinary => self.gate.fileno(),
        }
    }

    /// After a sweep of the ordinary poll that ended `now`: keep its descriptor unreadable for a rest, unless sockets
    /// are left that have not had their turn, or none was ready.
    ///
    /// # Errors
    ///
    /// The descriptor has failed.
    pub fn pause(&mut self, swept: &Swept, now: f64) -> io::Result<()> {
        let poll = self.ordinary.as_fd();
        if swept.is_bounded {
            self.pace.go_on(swept.seconds);
            return self.gate.open(poll);
        }
        match self.pace.after(swept.seconds, swept.turns > 0, now) {
            Next::Watch => self.gate.open(poll),
            Next::Rest(seconds) => self.gate.rest(poll, seconds),
        }
    }

    /// The number of connections, in any phase.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Start to connect to a literal address; [`News::Opened`] follows. `scope_id` is the zone of an IPv6 address, 0 for
    /// none.
    ///
    /// # Errors
    ///
    /// There is no descriptor left, no way to the address, or no room in the poll.
    pub fn connect(&mut self, host: IpAddr, port: u16, scope_id: u32) -> io::Result<ConnectionId> {
        self.insert(Socket::connect(host, port, scope_id)?)
    }

    /// Connect to a Unix socket; [`News::Opened`] follows.
    ///
    /// # Errors
    ///
    /// Nobody listens; [`io::ErrorKind::WouldBlock`] while the server's backlog is full; otherwise as
    /// [`Reactor::connect`].
    pub fn connect_unix(&mut self, path: &[u8]) -> io::Result<ConnectionId> {
        self.insert(Socket::connect_unix(path)?)
    }

    /// Let an open connection carry an exchange, and send at once what the socket takes. Over TLS nothing is sent: next
    /// come [`Reactor::send_tls`] and [`Reactor::settle_tls_later`].
    ///
    /// Returns false if there is no such connection, or if it was kept and shows a byte or its end: then it is closed.
    pub fn start(&mut self, id: ConnectionId, exchange: Arc<Shared>, now: f64) -> bool {
        let Some(connection) = self.connections.get_mut(id) else { return false };
        let Phase::Idle { is_kept } = connection.phase else { return false };
        if is_kept && !connection.socket.is_silent() {
            self.end(id);
            return false;
        }
        exchange.start(now, &mut self.events);
        if connection.tls.is_some() {
            self.events.clear();
            connection.phase = Phase::Busy { exchange, is_aborted: false };
            return true;
        }
        exchange.send(now, &mut self.events, |parts| connection.socket.send(parts));
        connection.phase = Phase::Busy { exchange, is_aborted: false };
        self.events.retain(|event| !matches!(event, Event::Connected | Event::Sent));
        let mut late = std::mem::take(&mut self.late);
        self.settle(id, &mut late);
        self.late = late;
        if !self.late.is_empty() {
            self.wake(id);
        }
        true
    }

    /// The caller has no use for the rest of the reply: it is read without a rest, and what arrives is kept.
    pub fn abort(&mut self, id: ConnectionId, now: f64, reports: &mut Vec<Report>) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let Phase::Busy { exchange, is_aborted } = &mut connection.phase else { return };
        *is_aborted = true;
        exchange.handle(Input::Abort, now, &mut self.events);
        self.settle(id, reports);
    }

    /// Close a connection now, in any phase. No event follows.
    ///
    /// Returns the exchange that it carried, to be dropped where its request may be freed.
    pub fn end(&mut self, id: ConnectionId) -> Option<Arc<Shared>> {
        let connection = self.connections.remove(id)?;
        if self.is_owner() {
            if let Some((lane, _)) = connection.watched {
                // A forked child that holds the socket would keep it in the poll.
                self.poll(lane).remove(connection.socket.as_fd());
            }
            finish(&connection);
        }
        match connection.phase {
            Phase::Busy { exchange, .. } => Some(exchange),
            Phase::Connecting | Phase::Handshake | Phase::Idle { .. } | Phase::Over => None,
        }
    }

    /// Close all connections.
    pub fn close(&mut self) {
        let is_owner = self.is_owner();
        for connection in self.connections.drain() {
            if is_owner {
                finish(&connection);
            }
        }
        self.queues = [Queue::default(), Queue::default()];
        self.late.clear();
    }

    fn insert(&mut self, socket: Socket) -> io::Result<ConnectionId> {
        let id = self.connections.insert(Connection::new(socket));
        if let Err(error) = self.watch(id) {
            self.end(id);
            return Err(error);
        }
        Ok(id)
    }

    /// Report what an input changed, and put the connection where it now belongs.
    pub(crate) fn settle(&mut self, id: ConnectionId, reports: &mut Vec<Report>) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let Phase::Busy { exchange, .. } = &connection.phase else { return };
        let exchange = exchange.clone();
        if let Some(Event::Ended { reusable: true }) = self.events.last() {
            connection.phase = Phase::Idle { is_kept: true };
        } else if exchange.state().is_over() {
            connection.phase = Phase::Over;
        }
        if let Err(error) = self.watch(id) {
            // Nothing would be heard of it any more.
            let errno = error.raw_os_error().unwrap_or_default();
            exchange.handle(Input::Reset(errno), monotonic(), &mut self.events);
            if let Some(connection) = self.connections.get_mut(id) {
                connection.phase = Phase::Over;
            }
        }
        if !self.events.is_empty() {
            let events = std::mem::take(&mut self.events);
            reports.push(Report { connection: id, news: News::Events(exchange, events) });
        }
    }

    /// Put a connection into the poll that it belongs into.
    pub(crate) fn watch(&mut self, id: ConnectionId) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(id) else { return Ok(()) };
        let place = connection.place();
        if connection.watched == place {
            return Ok(());
        }
        let poll = |lane| if lane == Lane::Urgent { &self.urgent } else { &self.ordinary };
        let socket = connection.socket.as_fd();
        let earlier = connection.watched.take();
        match (earlier, place) {
            (Some((from, _)), Some((to, interest))) if from == to => poll(to).modify(socket, id, interest)?,
            (earlier, place) => {
                if let Some((from, _)) = earlier {
                    poll(from).remove(socket);
                }
                if let Some((to, interest)) = place {
                    poll(to).add(socket, id, interest)?;
                }
            }
        }
        connection.watched = place;
        Ok(())
    }

    /// Let the next sweep of the urgent poll come at once: a socket can always be written to when little was sent.
    fn wake(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if connection.watched.is_none() && self.urgent.add(connection.socket.as_fd(), id, Interest::Write).is_ok() {
            connection.watched = Some((Lane::Urgent, Interest::Write));
        }
    }

    fn poll(&self, lane: Lane) -> &Poll {
        match lane {
            Lane::Urgent => &self.urgent,
            Lane::Ordinary => &self.ordinary,
        }
    }

    fn is_owner(&self) -> bool {
        getpid() == self.process
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.close();
    }
}

/// End a connection for its server, and its exchange. The socket is closed when it is dropped.
fn finish(connection: &Connection) {
    if let Phase::Busy { exchange, .. } = &connection.phase {
        exchange.handle(Input::Close, 0.0, &mut Vec::new());
    }
    connection.socket.shut_down();
}
