//! Exchanges over the sockets of Linux, below an event loop: `Reactor`.
//!
//! The loop watches the descriptors of two polls, [`Reactor::fileno`], and sweeps the one that is ready:
//! [`Reactor::look`], then [`Reactor::sweep`]. After a sweep of the ordinary poll, [`Reactor::pause`] keeps its
//! descriptor unreadable for a rest, see [`Pace`]: the more there is to read, the more of it one read takes. The urgent
//! poll is swept at once.
//!
//! A reactor belongs to the process that made it. A forked child only closes its descriptors.

#![forbid(unsafe_code)]

mod ciphertext;
mod clock;
mod connection;
mod connections;
mod gate;
mod pace;
mod poll;
mod queue;
mod report;
mod slab;
mod socket;
mod sweep;
mod swept;
mod tls;

pub use crate::reactor::clock::monotonic;
pub use crate::reactor::connection::Lane;
pub use crate::reactor::connections::Reactor;
pub use crate::reactor::pace::Pace;
pub use crate::reactor::report::{Ciphertext, News, Report};
pub use crate::reactor::slab::ConnectionId;
pub use crate::reactor::swept::{Limits, Swept};
