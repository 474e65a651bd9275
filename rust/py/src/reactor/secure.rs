//! TLS on the connections of a reactor: ciphertext is decrypted, and requests are encrypted, with the interpreter held.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};

use pyo3::exceptions::PyConnectionResetError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use streamfold_io::reactor::{Ciphertext, ConnectionId, monotonic};
use streamfold_io::{Event, Input, Shared, State};

use super::{MAX_ATTACHED_BYTES, Reactor, os_error};
use crate::tls::{self, CUT, CUT_HANDSHAKE, Decrypted, End, Tls};

/// So much of a request is encrypted at once: the next part when the socket has taken it.
const MAX_ENCRYPTED_BYTES: usize = 256 << 10;

impl Reactor {
    pub(super) fn keys(&self) -> MutexGuard<'_, HashMap<ConnectionId, Arc<Tls>>> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keys_of(&self, id: ConnectionId) -> Option<Arc<Tls>> {
        self.keys().get(&id).cloned()
    }

    pub(super) fn settle_later(&self, py: Python<'_>, id: ConnectionId, events: Vec<Event>) {
        self.with(py, |reactor| reactor.settle_tls_later(id, events));
    }

    /// Close a connection that is kept for the next exchange. It shows as closed when that comes.
    pub(super) fn end_idle(&self, py: Python<'_>, id: ConnectionId) {
        if self.with(py, |reactor| reactor.is_idle(id)).unwrap_or(false) {
            self.end(py, id.as_u64());
        }
    }

    pub(super) fn send(&self, py: Python<'_>, id: ConnectionId, ciphertext: &Bound<'_, PyBytes>) -> io::Result<()> {
        let ciphertext = ciphertext.as_bytes();
        if ciphertext.is_empty() {
            return Ok(());
        }
        self.with(py, |reactor| reactor.send_tls(id, ciphertext)).unwrap_or(Ok(()))
    }

    /// Go on with the handshake. Returns whether it is over.
    pub(super) fn shake_hands(&self, py: Python<'_>, id: ConnectionId, tls: &Tls) -> PyResult<bool> {
        let result = tls.shake_hands(py);
        // An alert, if it has failed.
        let sent = self.send(py, id, &tls.to_send(py)?);
        let is_over = result?;
        sent.map_err(|error| os_error(py, &error))?;
        if is_over {
            self.with(py, |reactor| reactor.end_handshake(id));
        }
        Ok(is_over)
    }

    pub(super) fn receive_handshake(
        &self,
        py: Python<'_>,
        id: ConnectionId,
        tls: &Tls,
        ciphertext: Ciphertext,
    ) -> PyResult<bool> {
        match ciphertext {
            Ciphertext::Sent => return Ok(false),
            Ciphertext::Received(bytes) => tls.receive(py, &bytes)?,
            Ciphertext::Ended(None) => return Err(PyConnectionResetError::new_err(CUT_HANDSHAKE)),
            Ciphertext::Ended(Some(errno)) | Ciphertext::SendFailed(errno) => {
                return Err(os_error(py, &io::Error::from_raw_os_error(errno)));
            }
        }
        let is_over = self.shake_hands(py, id, tls)?;
        let mut reports = Vec::new();
        self.with(py, |reactor| reactor.settle_tls(id, Vec::new(), &mut reports));
        match reports.pop() {
            None => Ok(is_over),
            Some(_) => Err(PyConnectionResetError::new_err(CUT_HANDSHAKE)),
        }
    }

    /// Tell an exchange what came, and send what it and TLS want to send.
    pub(super) fn carry(
        &self,
        py: Python<'_>,
        id: ConnectionId,
        tls: &Tls,
        exchange: &Shared,
        ciphertext: Option<Ciphertext>,
        events: &mut Vec<Event>,
    ) -> PyResult<()> {
        let now = monotonic();
        let mut interrupt = None;
        match ciphertext {
            None | Some(Ciphertext::Sent) => {}
            Some(Ciphertext::SendFailed(errno)) => exchange.handle(Input::SendFailed(errno), now, events),
            Some(Ciphertext::Ended(Some(errno))) => exchange.handle(Input::Reset(errno), now, events),
            // TLS has ended before, or it is cut.
            Some(Ciphertext::Ended(None)) => exchange.handle(Input::TlsFailed(CUT), now, events),
            Some(Ciphertext::Received(bytes)) => tls.receive(py, &bytes)?,
        }
        if tls.is_pending(py)? {
            interrupt = receive_plain(py, tls, exchange, now, events);
        }
        let is_sent = self.with(py, |reactor| reactor.is_sent(id)).unwrap_or(true);
        let result = self.send_plain(py, id, tls, exchange, is_sent, events);
        if let Err(error) = result {
            let (words, other) = tls::words(py, error);
            exchange.handle(Input::TlsFailed(&words), now, events);
            interrupt = interrupt.or(other);
        }
        self.check_reusable(py, id, tls, events)?;
        interrupt.map_or(Ok(()), Err)
    }

    /// Encrypt and send as much of the request as the socket takes.
    pub(super) fn send_plain(
        &self,
        py: Python<'_>,
        id: ConnectionId,
        tls: &Tls,
        exchange: &Shared,
        mut is_sent: bool,
        events: &mut Vec<Event>,
    ) -> PyResult<()> {
        loop {
            let mut is_last = false;
            let ciphertext = tls.encrypt(py, || {
                let mut plain = Vec::new();
                if is_sent && exchange.state() == State::Sending {
                    exchange.send(monotonic(), events, |parts| {
                        for part in parts {
                            plain.extend_from_slice(&part[..part.len().min(MAX_ENCRYPTED_BYTES - plain.len())]);
                        }
                        Ok(plain.len())
                    });
                }
                is_last = plain.is_empty();
                Ok(plain)
            })?;
            if let Err(error) = self.send(py, id, &ciphertext) {
                let errno = error.raw_os_error().unwrap_or_default();
                exchange.handle(Input::SendFailed(errno), monotonic(), events);
                return Ok(());
            }
            is_sent = self.with(py, |reactor| reactor.is_sent(id)).unwrap_or(true);
            if is_last || !is_sent || tls.is_unwritten() {
                return Ok(());
            }
        }
    }

    /// A connection can't carry another exchange if something of the request or behind the reply is left.
    pub(super) fn check_reusable(
        &self,
        py: Python<'_>,
        id: ConnectionId,
        tls: &Tls,
        events: &mut [Event],
    ) -> PyResult<()> {
        if let Some(Event::Ended { reusable }) = events.last_mut()
            && *reusable
        {
            let is_sent = self.with(py, |reactor| reactor.is_sent(id)).unwrap_or(true);
            *reusable = is_sent && !tls.is_unwritten() && !tls.is_pending(py)?;
        }
        Ok(())
    }
}

/// Decrypt what was received, and tell the exchange. Returns what has interrupted it.
fn receive_plain(py: Python<'_>, tls: &Tls, exchange: &Shared, now: f64, events: &mut Vec<Event>) -> Option<PyErr> {
    let Decrypted { plain, end } = tls.decrypt(py);
    if plain.len() > MAX_ATTACHED_BYTES {
        py.detach(|| exchange.receive(&plain, now, events));
    } else if !plain.is_empty() {
        exchange.receive(&plain, now, events);
    }
    match end {
        None => None,
        Some(End::Closed) => {
            exchange.handle(Input::Eof, now, events);
            None
        }
        Some(End::Failed(error)) => {
            let (words, interrupt) = tls::words(py, error);
            exchange.handle(Input::TlsFailed(&words), now, events);
            interrupt
        }
    }
}
