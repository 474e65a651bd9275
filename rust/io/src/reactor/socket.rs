//! A non-blocking stream socket: `Socket`.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
    connect, ipproto, recv, sendmsg, shutdown, socket_with, sockopt,
};

/// A dead connection is found after 30 s of silence and three probes, 10 s apart.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;
/// Milliseconds that sent bytes may remain unacknowledged.
const USER_TIMEOUT: u32 = 30_000;

/// A socket that is closed when it is dropped.
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// Start to connect to a literal address. `scope_id` is the zone of an IPv6 address, 0 for none.
    pub(crate) fn connect(host: IpAddr, port: u16, scope_id: u32) -> io::Result<Self> {
        let (family, address) = match host {
            IpAddr::V4(_) => (AddressFamily::INET, SocketAddr::new(host, port)),
            IpAddr::V6(host) => (AddressFamily::INET6, SocketAddrV6::new(host, port, 0, scope_id).into()),
        };
        let socket = Self::new(family)?;
        sockopt::set_tcp_nodelay(&socket.0, true)?;
        sockopt::set_socket_keepalive(&socket.0, true)?;
        sockopt::set_tcp_keepidle(&socket.0, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&socket.0, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&socket.0, KEEPALIVE_PROBES)?;
        sockopt::set_tcp_user_timeout(&socket.0, USER_TIMEOUT)?;
        socket.begin(connect(&socket.0, &address))?;
        Ok(socket)
    }

    /// Connect to a Unix socket. Fails with `WouldBlock` while the server's backlog is full: it can be tried again.
    pub(crate) fn connect_unix(path: &[u8]) -> io::Result<Self> {
        let socket = Self::new(AddressFamily::UNIX)?;
        connect(&socket.0, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    fn new(family: AddressFamily) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let protocol = (family != AddressFamily::UNIX).then_some(ipproto::TCP);
        Ok(Self(socket_with(family, SocketType::STREAM, flags, protocol)?))
    }

    #[allow(clippy::unused_self, reason = "reads as what it is about")]
    fn begin(&self, result: Result<(), Errno>) -> io::Result<()> {
        match result {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What became of connecting, once the socket is writable: an errno, or 0.
    pub(crate) fn connected(&self) -> i32 {
        match sockopt::socket_error(&self.0) {
            Ok(Ok(())) => 0,
            Ok(Err(error)) | Err(error) => error.raw_os_error(),
        }
    }

    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(retry(|| recv(&self.0, &mut *buffer, RecvFlags::empty()))?.1)
    }

    pub(crate) fn send(&self, parts: [&[u8]; 2]) -> io::Result<usize> {
        let slices = parts.map(IoSlice::new);
        Ok(retry(|| sendmsg(&self.0, &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL))?)
    }

    /// Whether nothing was received, not even the end.
    pub(crate) fn is_silent(&self) -> bool {
        let mut byte = [0];
        matches!(retry(|| recv(&self.0, &mut byte, RecvFlags::PEEK)), Err(Errno::AGAIN))
    }

    /// End the connection for both sides, and for all processes that hold it.
    pub(crate) fn shut_down(&self) {
        // It fails only for a connection that has no peer.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
