//! One round through the sockets that are ready.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::exchange::Input;
use crate::reactor::connection::{Lane, Phase};
use crate::reactor::connections::Reactor;
use crate::reactor::poll::Readiness;
use crate::reactor::report::{News, Report};
use crate::reactor::slab::ConnectionId;
use crate::reactor::swept::{Limits, Swept};
use crate::shared::Shared;

/// What a turn did.
pub(crate) struct Turn {
    pub bytes: usize,
    /// Those of ciphertext.
    pub ciphertext: usize,
    /// Whether the socket may have more.
    pub again: bool,
    /// Whether the end of the connection was read.
    pub is_end: bool,
    /// When it was over.
    pub at: f64,
}

impl Turn {
    pub(crate) fn nothing(at: f64) -> Self {
        Self { bytes: 0, ciphertext: 0, again: false, is_end: false, at }
    }
}

impl Reactor {
    /// Find the sockets that are ready, unless some of the last look still wait. Returns how many wait for their turn.
    ///
    /// # Errors
    ///
    /// The poll has failed.
    pub fn look(&mut self, lane: Lane) -> io::Result<usize> {
        let (poll, queue) = match lane {
            Lane::Urgent => (&mut self.urgent, &mut self.queues[0]),
            Lane::Ordinary => (&mut self.ordinary, &mut self.queues[1]),
        };
        // The poll goes round too: a socket that comes again comes after all others.
        while queue.left == 0 {
            let (ready, is_full) = poll.ready()?;
            let again = ready.filter(|&(id, readiness)| !queue.push(&mut self.connections, id, readiness)).count();
            if !is_full || again > 0 {
                queue.left = queue.ids.len();
                break;
            }
        }
        Ok(queue.left)
    }

    /// Give the sockets that wait their turn, one after the other: each sends what it can, and reads once. One that may
    /// have more comes again after the others. `clock` gives seconds. What changes is appended to `reports`.
    pub fn sweep(
        &mut self,
        lane: Lane,
        limits: Limits,
        mut clock: impl FnMut() -> f64,
        reports: &mut Vec<Report>,
    ) -> Swept {
        let place = usize::from(lane == Lane::Ordinary);
        let begin = clock();
        let mut swept = Swept::default();
        reports.append(&mut self.late);
        while let Some(id) = self.queues[place].ids.pop_front() {
            self.queues[place].left = self.queues[place].left.saturating_sub(1);
            let turn = self.turn(id, &mut clock, reports);
            swept.turns += 1;
            swept.bytes += turn.bytes;
            swept.ciphertext += turn.ciphertext;
            swept.seconds = turn.at - begin;
            if turn.again {
                self.queues[place].push(&mut self.connections, id, Readiness::default());
            }
            let is_full = swept.bytes >= limits.bytes || swept.ciphertext >= limits.ciphertext;
            if is_full || swept.seconds >= limits.seconds {
                break;
            }
        }
        swept.is_bounded = !self.queues[place].ids.is_empty();
        swept
    }

    /// Read what the socket of one connection holds, to its end. What changes is appended to `reports`.
    pub fn read_now(&mut self, id: ConnectionId, mut clock: impl FnMut() -> f64, reports: &mut Vec<Report>) {
        let limit = Limits::default().bytes;
        let mut bytes = 0;
        while bytes < limit {
            let Some(connection) = self.connections.get_mut(id) else { return };
            let Phase::Busy { exchange, .. } = &connection.phase else { return };
            let turn = if connection.tls.is_some() {
                self.receive_tls(id, true, &mut clock, reports)
            } else {
                let exchange = exchange.clone();
                let turn = self.receive(id, &exchange, true, &mut clock);
                self.settle(id, reports);
                turn
            };
            bytes += turn.bytes;
            if !turn.again {
                return;
            }
        }
    }

    /// The turn of one connection.
    fn turn(&mut self, id: ConnectionId, clock: &mut impl FnMut() -> f64, reports: &mut Vec<Report>) -> Turn {
        let Some(connection) = self.connections.get_mut(id) else { return Turn::nothing(clock()) };
        let ready = std::mem::take(&mut connection.readiness);
        connection.is_queued = false;
        match &connection.phase {
            Phase::Handshake => self.turn_tls(id, ready, clock, reports),
            Phase::Busy { .. } if connection.tls.is_some() => self.turn_tls(id, ready, clock, reports),
            Phase::Connecting => {
                let errno = connection.socket.connected();
                self.opened(id, errno, reports);
                Turn::nothing(clock())
            }
            Phase::Idle { is_kept } => {
                if *is_kept && !connection.socket.is_silent() {
                    self.end(id);
                }
                Turn::nothing(clock())
            }
            Phase::Busy { exchange, .. } => {
                let exchange = exchange.clone();
                let mut turn = if ready.read || ready.end {
                    self.receive(id, &exchange, ready.end, clock)
                } else {
                    Turn::nothing(clock())
                };
                let mut is_changed = turn.is_end || !self.events.is_empty();
                if ready.write {
                    turn.bytes += self.send(id, &exchange, turn.at);
                    is_changed = true;
                }
                // Nothing else changes while a stream brings tokens.
                if is_changed {
                    self.settle(id, reports);
                }
                if turn.again
                    && let Some(connection) = self.connections.get_mut(id)
                {
                    connection.readiness.merge(Readiness { read: true, write: false, end: ready.end });
                }
                turn
            }
            Phase::Over => {
                if let Some(tls) = &mut connection.tls {
                    tls.is_woken = false;
                }
                self.unwatch(id);
                Turn::nothing(clock())
            }
        }
    }

    fn opened(&mut self, id: ConnectionId, mut errno: i32, reports: &mut Vec<Report>) {
        if errno == 0
            && let Some(connection) = self.connections.get_mut(id)
        {
            connection.phase = Phase::Idle { is_kept: false };
            if let Err(error) = self.watch(id) {
                errno = error.raw_os_error().unwrap_or_default();
            }
        }
        if errno != 0 {
            self.end(id);
        }
        reports.push(Report { connection: id, news: News::Opened(errno) });
    }

    /// Read once. The socket may have more if the buffer was filled, or if it is known that its end is behind.
    fn receive(
        &mut self,
        id: ConnectionId,
        exchange: &Arc<Shared>,
        is_behind: bool,
        clock: &mut impl FnMut() -> f64,
    ) -> Turn {
        let Some(connection) = self.connections.get_mut(id) else {
            return Turn { is_end: true, ..Turn::nothing(clock()) };
        };
        let result = connection.socket.receive(&mut self.buffer);
        let at = clock();
        match result {
            Ok(0) => exchange.handle(Input::Eof, at, &mut self.events),
            Ok(count) => {
                exchange.receive(&self.buffer[..count], at, &mut self.events);
                let again = is_behind || count == self.buffer.len();
                return Turn { bytes: count, again, ..Turn::nothing(at) };
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Turn::nothing(at);
            }
            Err(error) => {
                exchange.handle(Input::Reset(error.raw_os_error().unwrap_or_default()), at, &mut self.events);
            }
        }
        Turn { is_end: true, ..Turn::nothing(at) }
    }

    /// Send what the socket takes. Returns how many bytes that was.
    fn send(&mut self, id: ConnectionId, exchange: &Arc<Shared>, now: f64) -> usize {
        let Some(connection) = self.connections.get_mut(id) else { return 0 };
        let mut bytes = 0;
        exchange.send(now, &mut self.events, |parts| connection.socket.send(parts).inspect(|count| bytes += count));
        bytes
    }

    fn unwatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if let Some((lane, _)) = connection.watched.take() {
            let poll = if lane == Lane::Urgent { &self.urgent } else { &self.ordinary };
            poll.remove(connection.socket.as_fd());
        }
    }
}
