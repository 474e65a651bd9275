//! What is known of the ciphertext of a connection: `Tls`.

use std::io;

/// The ciphertext of a connection that carries TLS.
#[derive(Default)]
pub(crate) struct Tls {
    /// What the socket has not taken yet, behind the first `sent` bytes.
    unsent: Vec<u8>,
    sent: usize,
    is_ended: bool,
    /// A report waits for the next sweep of the urgent poll.
    pub is_woken: bool,
}

impl Tls {
    /// Send this behind what is unsent.
    pub(crate) fn push(&mut self, ciphertext: &[u8]) {
        self.unsent.extend_from_slice(ciphertext);
    }

    /// Whether nothing waits for the socket.
    pub(crate) fn is_sent(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Hand what is unsent to `send`, which returns how much the socket took. Returns how much it took in all.
    pub(crate) fn flush(&mut self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<usize> {
        let before = self.sent;
        while self.sent < self.unsent.len() {
            match send(&self.unsent[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(self.sent - before),
                Err(error) => {
                    self.forget();
                    return Err(error);
                }
            }
        }
        let bytes = self.sent - before;
        self.forget();
        Ok(bytes)
    }

    /// Whether nothing more comes.
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Nothing more comes, and nothing more is sent.
    pub(crate) fn end(&mut self) {
        self.is_ended = true;
        self.forget();
    }

    fn forget(&mut self) {
        self.unsent = Vec::new();
        self.sent = 0;
    }
}
