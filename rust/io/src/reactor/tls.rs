//! Connections that carry TLS: the reactor moves their ciphertext, and whoever holds the keys is told what came.

use std::io;
use std::sync::Arc;

use crate::exchange::Event;
use crate::reactor::ciphertext::Tls;
use crate::reactor::connection::Phase;
use crate::reactor::connections::Reactor;
use crate::reactor::poll::Readiness;
use crate::reactor::report::{Ciphertext, News, Report};
use crate::reactor::slab::ConnectionId;
use crate::reactor::sweep::Turn;
use crate::shared::Shared;

impl Reactor {
    /// From now on an open connection that carries nothing yet carries TLS. [`News::Ciphertext`] tells what comes.
    pub fn start_tls(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && matches!(connection.phase, Phase::Idle { .. })
        {
            connection.tls = Some(Tls::default());
            connection.phase = Phase::Handshake;
        }
    }

    /// The handshake is over: the connection can carry an exchange.
    pub fn end_handshake(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && matches!(connection.phase, Phase::Handshake)
        {
            connection.phase = Phase::Idle { is_kept: false };
        }
    }

    /// Whether a connection waits for its next exchange.
    #[must_use]
    pub fn is_idle(&mut self, id: ConnectionId) -> bool {
        self.connections.get_mut(id).is_some_and(|connection| matches!(connection.phase, Phase::Idle { .. }))
    }

    /// Whether TLS is still being agreed on.
    #[must_use]
    pub fn is_shaking_hands(&mut self, id: ConnectionId) -> bool {
        self.connections.get_mut(id).is_some_and(|connection| matches!(connection.phase, Phase::Handshake))
    }

    /// Send ciphertext behind what is still unsent. Call [`Reactor::settle_tls`] afterwards.
    ///
    /// # Errors
    ///
    /// The socket has failed. It may still hold what was received.
    pub fn send_tls(&mut self, id: ConnectionId, ciphertext: &[u8]) -> io::Result<()> {
        let Some(tls) = self.connections.get_mut(id).and_then(|connection| connection.tls.as_mut()) else {
            return Ok(());
        };
        let was_sent = tls.is_sent();
        tls.push(ciphertext);
        if was_sent { self.flush(id).map(drop) } else { Ok(()) }
    }

    /// Whether the socket has taken all that was sent.
    #[must_use]
    pub fn is_sent(&mut self, id: ConnectionId) -> bool {
        self.connections.get_mut(id).and_then(|connection| connection.tls.as_ref()).is_none_or(Tls::is_sent)
    }

    /// The exchange that a connection carries.
    #[must_use]
    pub fn carried(&mut self, id: ConnectionId) -> Option<Arc<Shared>> {
        match &self.connections.get_mut(id)?.phase {
            Phase::Busy { exchange, .. } => Some(exchange.clone()),
            Phase::Connecting | Phase::Handshake | Phase::Idle { .. } | Phase::Over => None,
        }
    }

    /// Report the events of the exchange that a connection carries, and watch the socket for what it now waits for.
    pub fn settle_tls(&mut self, id: ConnectionId, events: Vec<Event>, reports: &mut Vec<Report>) {
        self.events = events;
        self.settle(id, reports);
        self.events.clear(); // of a connection that carries nothing
        self.watch_tls(id, reports);
    }

    /// As [`Reactor::settle_tls`], outside of a sweep: what there is to report comes with the next sweep of the urgent
    /// poll.
    pub fn settle_tls_later(&mut self, id: ConnectionId, mut events: Vec<Event>) {
        events.retain(|event| !matches!(event, Event::Connected | Event::Sent));
        let mut late = std::mem::take(&mut self.late);
        self.settle_tls(id, events, &mut late);
        self.late = late;
        if !self.late.is_empty()
            && let Some(connection) = self.connections.get_mut(id)
            && let Some(tls) = &mut connection.tls
        {
            tls.is_woken = true;
            let mut late = std::mem::take(&mut self.late);
            self.watch_tls(id, &mut late);
            self.late = late;
        }
    }

    /// The turn of a connection that carries TLS.
    pub(crate) fn turn_tls(
        &mut self,
        id: ConnectionId,
        ready: Readiness,
        clock: &mut impl FnMut() -> f64,
        reports: &mut Vec<Report>,
    ) -> Turn {
        let mut turn = if ready.read || ready.end {
            self.receive_tls(id, ready.end, clock, reports)
        } else {
            Turn::nothing(clock())
        };
        let Some(tls) = self.connections.get_mut(id).and_then(|connection| connection.tls.as_mut()) else {
            return turn;
        };
        tls.is_woken = false;
        if ready.write && !tls.is_sent() {
            let ciphertext = match self.flush(id) {
                Ok(bytes) => {
                    turn.bytes += bytes;
                    Some(Ciphertext::Sent).filter(|_| self.is_sent(id))
                }
                Err(error) => Some(Ciphertext::SendFailed(error.raw_os_error().unwrap_or_default())),
            };
            reports.extend(ciphertext.map(|ciphertext| Report { connection: id, news: News::Ciphertext(ciphertext) }));
        }
        if ready.write || turn.is_end {
            self.watch_tls(id, reports);
        }
        if turn.again
            && let Some(connection) = self.connections.get_mut(id)
        {
            connection.readiness.merge(Readiness { read: true, write: false, end: ready.end });
        }
        turn
    }

    /// Read once, as [`Reactor::receive`] does.
    pub(crate) fn receive_tls(
        &mut self,
        id: ConnectionId,
        is_behind: bool,
        clock: &mut impl FnMut() -> f64,
        reports: &mut Vec<Report>,
    ) -> Turn {
        let Some(connection) = self.connections.get_mut(id) else { return Turn::nothing(clock()) };
        let Some(tls) = connection.tls.as_mut().filter(|tls| !tls.is_ended()) else { return Turn::nothing(clock()) };
        let result = connection.socket.receive(&mut self.buffer);
        let mut turn = Turn::nothing(clock());
        let ciphertext = match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return turn,
            Ok(count) if count > 0 => {
                turn.bytes = count;
                turn.ciphertext = count;
                turn.again = is_behind || count == self.buffer.len();
                Ciphertext::Received(self.buffer[..count].to_vec())
            }
            result => {
                tls.end();
                turn.is_end = true;
                Ciphertext::Ended(result.err().map(|error| error.raw_os_error().unwrap_or_default()))
            }
        };
        reports.push(Report { connection: id, news: News::Ciphertext(ciphertext) });
        turn
    }

    /// Send what the socket takes of the ciphertext. Returns how many bytes that was.
    fn flush(&mut self, id: ConnectionId) -> io::Result<usize> {
        let Some(connection) = self.connections.get_mut(id) else { return Ok(0) };
        let Some(tls) = &mut connection.tls else { return Ok(0) };
        tls.flush(|part| connection.socket.send([part, &[]]))
    }

    /// Put a connection into the poll that it belongs into. If that fails nothing more would be heard of it.
    fn watch_tls(&mut self, id: ConnectionId, reports: &mut Vec<Report>) {
        if let Err(error) = self.watch(id)
            && let Some(tls) = self.connections.get_mut(id).and_then(|connection| connection.tls.as_mut())
            && !tls.is_ended()
        {
            tls.end();
            let ciphertext = Ciphertext::Ended(error.raw_os_error());
            reports.push(Report { connection: id, news: News::Ciphertext(ciphertext) });
        }
    }
}
