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
}
