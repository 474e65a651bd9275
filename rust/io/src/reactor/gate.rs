//! What the event loop watches of the ordinary poll: `Gate`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// An epoll over a poll and a timer: readable when the poll is, or, during a rest, when the rest is over.
///
/// To open and close it costs a system call or two. To let the loop watch a descriptor anew, and to set one of its
/// timers, costs ten times as much.
pub(crate) struct Gate {
    epoll: OwnedFd,
    timer: OwnedFd,
    is_open: bool,
}

impl Gate {
    /// An open gate.
    pub(crate) fn new(poll: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        epoll::add(&epoll, poll, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(1), EventFlags::IN)?;
        Ok(Self { epoll, timer, is_open: true })
    }

    pub(crate) fn fileno(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Readable when the poll is.
    pub(crate) fn open(&mut self, poll: BorrowedFd<'_>) -> io::Result<()> {
        if !self.is_open {
            self.set_timer(0.0)?;
            epoll::modify(&self.epoll, poll, EventData::new_u64(0), EventFlags::IN)?;
            self.is_open = true;
        }
        Ok(())
    }

    /// Readable after so many seconds, more than none.
    pub(crate) fn rest(&mut self, poll: BorrowedFd<'_>, seconds: f64) -> io::Result<()> {
        if self.is_open {
            epoll::modify(&self.epoll, poll, EventData::new_u64(0), EventFlags::empty())?;
            self.is_open = false;
        }
        self.set_timer(seconds)
    }

    /// Set the timer anew; 0 stops it. In both cases it is not readable any more.
    #[allow(clippy::cast_possible_truncation, reason = "of a rest: whole seconds, and less than a second")]
    fn set_timer(&self, seconds: f64) -> io::Result<()> {
        let value = Timespec { tv_sec: seconds as i64, tv_nsec: (seconds.fract() * 1e9) as _ };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }
}
