//! One accepted connection: bytes in, bytes out, plain or TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use rustls::{ServerConfig, ServerConnection};

use crate::reply::Reply;

/// A non-blocking socket and what is under way on it.
pub struct Connection {
    socket: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// Received bytes that no request was made of yet.
    pub received: Vec<u8>,
    /// The response that is being sent.
    pub reply: Option<Reply>,
    /// Whether the connection is closed behind the response.
    pub is_last: bool,
    pending: Vec<u8>,
    sent: usize,
}

impl Connection {
    /// Take a connection over.
    pub fn new(socket: TcpStream, tls: Option<&Arc<ServerConfig>>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let tls = tls.map(|config| ServerConnection::new(Arc::clone(config))).transpose().map_err(io::Error::other)?;
        let tls = tls.map(|mut connection| {
            connection.set_buffer_limit(None);
            Box::new(connection)
        });
        let (received, pending) = (Vec::new(), Vec::new());
        Ok(Self { socket, tls, received, reply: None, is_last: false, pending, sent: 0 })
    }

    /// The socket, for the poller.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Where the next bytes are written; [`Self::flush`] sends them.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Write more of the response with `write`, and give its result; the default if there is no response.
    pub fn write<T: Default>(&mut self, write: impl FnOnce(&mut Reply, &mut Vec<u8>) -> T) -> T {
        self.reply.as_mut().map_or_else(T::default, |reply| write(reply, &mut self.pending))
    }

    /// Receive what is there; false once the client has closed.
    pub fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 * 1024];
        loop {
            let read = match &mut self.tls {
                None => self.socket.read(&mut buffer),
                Some(tls) => tls.read_tls(&mut self.socket),
            };
            match read {
                Ok(0) => return Ok(false),
                Ok(len) => match &mut self.tls {
                    None => self.received.extend_from_slice(&buffer[..len]),
                    Some(tls) => {
                        let state = tls.process_new_packets().map_err(io::Error::other)?;
                        let start = self.received.len();
                        self.received.resize(start + state.plaintext_bytes_to_read(), 0);
                        tls.reader().read_exact(&mut self.received[start..])?;
                        if state.peer_has_closed() {
                            return Ok(false);
                        }
                    }
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Send what the socket takes. A finished TLS handshake is also sent here.
    pub fn flush(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            if !tls.is_handshaking() {
                tls.writer().write_all(&self.pending[self.sent..])?;
                self.pending.clear();
                self.sent = 0;
            }
            while tls.wants_write() {
                match tls.write_tls(&mut self.socket) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            return Ok(());
        }
        while self.sent < self.pending.len() {
            match self.socket.write(&self.pending[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.pending.clear();
        self.sent = 0;
        Ok(())
    }

    /// Whether [`Self::flush`] has left something.
    pub fn is_stuck(&self) -> bool {
        self.sent < self.pending.len() || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// End the sending side, after everything was flushed.
    pub fn finish(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            self.flush()?;
        }
        self.socket.shutdown(Shutdown::Write)
    }
}
