//! A level-triggered epoll: `Poll`.
//!
//! Level-triggered, so that nothing is lost: what a bounded sweep leaves in a socket, and an end of the connection that
//! arrives together with bytes, are reported again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::time::Timespec;

use crate::reactor::slab::ConnectionId;

/// The most sockets that one look at the poll reports. More are reported by the next one, in their turn.
const MAX_READY: usize = 1024;

/// What a socket is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub read: bool,
    pub write: bool,
    /// The peer has closed its side, or the connection broke: it must be read to its end.
    pub end: bool,
}

impl Readiness {
    pub(crate) fn merge(&mut self, other: Self) {
        self.read |= other.read;
        self.write |= other.write;
        self.end |= other.end;
    }
}

/// What a socket is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
    Both,
}

impl Interest {
    fn flags(self) -> EventFlags {
        let read = EventFlags::IN | EventFlags::RDHUP;
        match self {
            Self::Read => read,
            Self::Write => EventFlags::OUT,
            Self::Both => read | EventFlags::OUT,
        }
    }
}

pub(crate) struct Poll {
    epoll: OwnedFd,
    ready: Vec<(ConnectionId, Readiness)>,
}

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, ready: Vec::new() })
    }

    pub(crate) fn fileno(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn add(&self, socket: BorrowedFd<'_>, id: ConnectionId, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, EventData::new_u64(id.as_u64()), interest.flags())?)
    }

    pub(crate) fn modify(&self, socket: BorrowedFd<'_>, id: ConnectionId, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, socket, EventData::new_u64(id.as_u64()), interest.flags())?)
    }

    pub(crate) fn remove(&self, socket: BorrowedFd<'_>) {
        // It fails only for a socket that is not in the poll.
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// The sockets that are ready now, and whether there may be more of them.
    pub(crate) fn ready(&mut self) -> io::Result<(impl Iterator<Item = (ConnectionId, Readiness)>, bool)> {
        let mut room = [const { MaybeUninit::<Event>::uninit() }; MAX_READY];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let events: &[Event] = match epoll::wait(self.epoll.as_fd(), &mut room[..], Some(&now)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        self.ready.extend(events.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let readiness = Readiness {
                read: flags.contains(EventFlags::IN),
                write: flags.contains(EventFlags::OUT),
                end: flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR),
            };
            (ConnectionId::from_u64(data.u64()), readiness)
        }));
        let is_full = self.ready.len() == MAX_READY;
        Ok((self.ready.drain(..), is_full))
    }
}
