//! What a reactor reports: `Report`.

use std::sync::Arc;

use crate::exchange::Event;
use crate::reactor::slab::ConnectionId;
use crate::shared::Shared;

/// Something that changed for one connection.
#[derive(Clone)]
pub struct Report {
    /// The connection.
    pub connection: ConnectionId,
    /// What changed.
    pub news: News,
}

/// What changed for a connection.
#[derive(Clone)]
pub enum News {
    /// It is open (0), or could not be opened and is gone (the errno).
    Opened(i32),
    /// Events of the exchange that it carries.
    Events(Arc<Shared>, Vec<Event>),
    /// What happened to its ciphertext.
    Ciphertext(Ciphertext),
}

/// What happened to the ciphertext of a connection that carries TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ciphertext {
    /// The next bytes, split at any byte.
    Received(Vec<u8>),
    /// No byte follows: the server has closed its side, or reading has failed (the errno).
    Ended(Option<i32>),
    /// The socket has taken all that was to be sent.
    Sent,
    /// Sending has failed (the errno). The connection may still hold a reply.
    SendFailed(i32),
}
