//! One connection of a reactor: `Connection`.

use std::sync::Arc;

use crate::exchange::State;
use crate::reactor::ciphertext::Tls;
use crate::reactor::poll::{Interest, Readiness};
use crate::reactor::socket::Socket;
use crate::shared::Shared;

/// The two polls of a reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Swept without a rest: connecting, sending, single replies that are no stream, what follows an abort.
    Urgent,
    /// Swept with rests: streams, replies to several requests, and connections without an exchange.
    Ordinary,
}

/// What a connection is doing.
pub(crate) enum Phase {
    Connecting,
    /// TLS is being agreed on.
    Handshake,
    /// It has no exchange.
    Idle {
        /// It has carried an exchange: the server may close it at any time.
        is_kept: bool,
    },
    Busy {
        exchange: Arc<Shared>,
        is_aborted: bool,
    },
    /// Its exchange has ended, and it can't carry another one: it stays open and is not read until it is ended.
    Over,
}

pub(crate) struct Connection {
    pub socket: Socket,
    pub phase: Phase,
    /// If it carries TLS.
    pub tls: Option<Tls>,
    /// The poll that it is in.
    pub watched: Option<(Lane, Interest)>,
    /// What it is ready for, while it waits for its turn in a sweep.
    pub readiness: Readiness,
    pub is_queued: bool,
}

impl Connection {
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            phase: Phase::Connecting,
            tls: None,
            watched: None,
            readiness: Readiness::default(),
            is_queued: false,
        }
    }

    /// The poll that it belongs into.
    pub(crate) fn place(&self) -> Option<(Lane, Interest)> {
        let place = self.place_of_phase();
        match &self.tls {
            None => place,
            Some(tls) if tls.is_woken => Some((Lane::Urgent, Interest::Both)),
            Some(tls) if tls.is_ended() => None,
            Some(tls) if !tls.is_sent() => place.map(|_| (Lane::Urgent, Interest::Both)),
            // Written to only while ciphertext waits.
            Some(_) => place.map(|(lane, _)| (lane, Interest::Read)),
        }
    }

    fn place_of_phase(&self) -> Option<(Lane, Interest)> {
        match &self.phase {
            Phase::Handshake => Some((Lane::Urgent, Interest::Read)),
            Phase::Connecting => Some((Lane::Urgent, Interest::Write)),
            // Where it is: to move it costs two system calls.
            Phase::Idle { is_kept: true } => {
                Some((self.watched.map_or(Lane::Ordinary, |(lane, _)| lane), Interest::Read))
            }
            Phase::Busy { exchange, is_aborted } => Some(match exchange.state() {
                State::Sending => (Lane::Urgent, Interest::Both),
                State::Refused => (Lane::Urgent, Interest::Read),
                _ if *is_aborted || !exchange.comes_in_parts() => (Lane::Urgent, Interest::Read),
                _ => (Lane::Ordinary, Interest::Read),
            }),
            // The exchange of a new connection is about to start.
            Phase::Idle { is_kept: false } | Phase::Over => None,
        }
    }
}
