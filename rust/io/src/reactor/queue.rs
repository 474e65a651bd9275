//! Who waits for a turn in a sweep: `Queue`.

use std::collections::VecDeque;

use crate::reactor::connection::Connection;
use crate::reactor::poll::Readiness;
use crate::reactor::slab::{ConnectionId, Slab};

/// The connections that wait for their turn.
///
/// They go round: all that were ready at a look have had their turn before the next look. What a sweep leaves comes
/// first in the next one; and sockets that are ready again meanwhile do not keep the reactor from its rest.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) ids: VecDeque<ConnectionId>,
    /// The turns that are left of this round.
    pub(crate) left: usize,
}

impl Queue {
    /// Returns whether it did not wait before.
    pub(crate) fn push(&mut self, connections: &mut Slab<Connection>, id: ConnectionId, readiness: Readiness) -> bool {
        let Some(connection) = connections.get_mut(id) else { return false };
        connection.readiness.merge(readiness);
        let is_new = !std::mem::replace(&mut connection.is_queued, true);
        if is_new {
            self.ids.push_back(id);
        }
        is_new
    }
}
