use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};
use streamfold_io::reactor::{ConnectionId, Lane, Limits, News, Pace, Report, Swept, monotonic};

mod secure;

use crate::event::convert;
use crate::exchange::Exchange;
use crate::tls::{self, Tls};

/// A sweep of so many sockets, or of so many bytes, keeps the interpreter: beside a busy thread, to give it up and take
/// it again costs more than to read them.
const MAX_ATTACHED_SOCKETS: usize = 16;
const MAX_ATTACHED_BYTES: usize = 64 << 10;

type Inner = streamfold_io::reactor::Reactor;

/// Sockets to servers, and the exchanges that they carry, below an event loop. Linux only.
///
/// The loop watches two descriptors: when :meth:`fileno` is readable, it calls :meth:`sweep`; when
/// :meth:`urgent_fileno` is readable, it calls :meth:`sweep_urgent`. While there is something to read,
/// :meth:`fileno` is unreadable for a rest after each sweep, so that one read takes several events.
///
/// - ``rest_floor``: the shortest rest, in seconds; at least 0.001.
/// - ``rest_ceiling``: the longest rest, in seconds.
/// - ``rest_share``: in between, how many times as long as the sweep a rest is. With 19, reading takes a twentieth
///   of a core.
///
/// Events are tuples ``(connection, kind, payload)``:
///
/// - ``"opened"``: 0, or the errno, and the connection is gone
/// - ``"secured"``: None, or the exception that ended the TLS handshake, and the connection is gone
/// - ``"head"``: ``(status, is_stream, fields)``; the fields are a list of names in lower case and values, or None
///   for a stream
/// - ``"first_token"``, ``"tokens"`` (see :meth:`Exchange.notify_at`), ``"finished"``, ``"overrun"``: None
/// - ``"error"``: the exception
/// - ``"failed"``: ``(errno or None, message, whether no byte of a reply was received)``
/// - ``"ended"``: whether the connection can carry another exchange. It stays open in any case, until :meth:`end`
///
/// Raises ``OSError`` if there are no descriptors left.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct Reactor {
    /// Its lock is never held while waiting for the interpreter, nor waited for while attached. None: closed.
    inner: Mutex<Option<Inner>>,
    /// Of the connections that carry TLS. Held for moments: never while Python is called, or an object of it is dropped.
    tls: Mutex<HashMap<ConnectionId, Arc<Tls>>>,
    /// The process that made it. In a forked child, the lock may be held by a thread that is not there.
    process: u32,
}

#[pymethods]
impl Reactor {
    #[new]
    #[pyo3(signature = (*, rest_floor=0.005, rest_ceiling=0.05, rest_share=19.0))]
    fn new(py: Python<'_>, rest_floor: f64, rest_ceiling: f64, rest_share: f64) -> PyResult<Self> {
        let inner =
            Inner::new(Pace::new(rest_floor, rest_ceiling, rest_share)).map_err(|error| os_error(py, &error))?;
        Ok(Self { inner: Mutex::new(Some(inner)), tls: Mutex::default(), process: std::process::id() })
    }

    /// The descriptor of the ordinary poll: streams, and idle connections. -1 after :meth:`close`.
    fn fileno(&self, py: Python<'_>) -> i32 {
        self.with(py, |reactor| reactor.fileno(Lane::Ordinary)).unwrap_or(-1)
    }

    /// The descriptor of the urgent poll: of what connects, sends, gets no stream, or follows an abort.
    fn urgent_fileno(&self, py: Python<'_>) -> i32 {
        self.with(py, |reactor| reactor.fileno(Lane::Urgent)).unwrap_or(-1)
    }

    /// Start to connect to a literal address, and return the connection; ``"opened"`` follows.
    ///
    /// ``scope_id`` is the zone of an IPv6 address, as the index of its interface; 0 for none.
    ///
    /// Raises ``OSError`` if there is no descriptor left or no way to the address, and ``ValueError`` if it is no
    /// literal address.
    #[pyo3(signature = (host, port, scope_id=0))]
    fn connect(&self, py: Python<'_>, host: &str, port: u16, scope_id: u32) -> PyResult<u64> {
        let address: IpAddr =
            host.parse().map_err(|_| PyValueError::new_err(format!("host must be a literal address, not {host:?}")))?;
        self.open(py, |reactor| reactor.connect(address, port, scope_id))
    }

    /// As :meth:`connect`, to a Unix socket. Raises ``BlockingIOError`` while its backlog is full.
    #[allow(clippy::needless_pass_by_value, reason = "converted from str, bytes or a path")]
    fn connect_unix(&self, py: Python<'_>, path: std::path::PathBuf) -> PyResult<u64> {
        self.open(py, |reactor| reactor.connect_unix(path.as_os_str().as_encoded_bytes()))
    }

    /// Agree on TLS over a connection that was opened and carries nothing yet; ``"secured"`` follows.
    ///
    /// ``ssl_object`` is over the two ``ssl.MemoryBIO``. From now on the connection carries ciphertext. Raises what
    /// ends the handshake, and then the connection is gone.
    fn start_tls(
        &self,
        py: Python<'_>,
        connection: u64,
        ssl_object: Py<PyAny>,
        incoming: Py<PyAny>,
        outgoing: Py<PyAny>,
    ) -> PyResult<()> {
        let id = ConnectionId::from_u64(connection);
        let tls = Arc::new(Tls::new(ssl_object, incoming, outgoing));
        self.with(py, |reactor| reactor.start_tls(id));
        self.keys().insert(id, tls.clone());
        let result = self.shake_hands(py, id, &tls).map(drop);
        self.settle_later(py, id, Vec::new());
        if result.is_err() {
            self.end(py, connection);
        }
        result
    }

    /// Let an open connection carry an exchange, and send at once what the socket takes.
    ///
    /// Returns False if there is no such connection, or if it has carried one before and shows a byte or its end:
    /// then it is closed, and the exchange can go over another connection.
    fn start(&self, py: Python<'_>, connection: u64, exchange: &Exchange) -> PyResult<bool> {
        let (id, shared) = (ConnectionId::from_u64(connection), exchange.shared.clone());
        let tls = self.keys_of(id);
        let is_started = self.with(py, |reactor| reactor.start(id, shared, monotonic())).unwrap_or(false);
        if let (true, Some(tls)) = (is_started, tls) {
            let mut events = Vec::new();
            let result = self.carry(py, id, &tls, &exchange.shared, None, &mut events);
            self.settle_later(py, id, events);
            if tls.is_over() {
                self.end_idle(py, id);
            }
            result?;
        }
        Ok(is_started)
    }

    /// Read what the sockets of the ordinary poll hold, for 5 ms, 4 MiB, or 256 KiB of TLS. Returns the events.
    ///
    /// The descriptor stays readable if sockets are left that have not had their turn.
    fn sweep<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.sweep_lane(py, Lane::Ordinary)
    }

    /// Connect, send and read what the sockets of the urgent poll can, as :meth:`sweep`. Returns the events.
    fn sweep_urgent<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.sweep_lane(py, Lane::Urgent)
    }

    /// Read what the socket of one connection holds, up to 4 MiB. Returns the events.
    fn read_now<'py>(&self, py: Python<'py>, connection: u64) -> PyResult<Bound<'py, PyList>> {
        let reports = self.with(py, |reactor| {
            let mut reports = Vec::new();
            reactor.read_now(ConnectionId::from_u64(connection), monotonic, &mut reports);
            reports
        });
        self.events(py, reports.unwrap_or_default())
    }

    /// The rest of the reply is of no use: read it without a rest, keep what arrives. Returns the events.
    fn abort<'py>(&self, py: Python<'py>, connection: u64) -> PyResult<Bound<'py, PyList>> {
        let reports = self.with(py, |reactor| {
            let mut reports = Vec::new();
            reactor.abort(ConnectionId::from_u64(connection), monotonic(), &mut reports);
            reports
        });
        self.events(py, reports.unwrap_or_default())
    }

    /// Close a connection now, for the server as well. No event follows. Idempotent.
    fn end(&self, py: Python<'_>, connection: u64) {
        let id = ConnectionId::from_u64(connection);
        drop(self.with(py, |reactor| reactor.end(id)));
        let tls = self.keys().remove(&id);
        drop(tls); // after the lock
    }

    /// Close all connections and the polls. The loop must not watch the descriptors any more. Idempotent.
    fn close(&self, py: Python<'_>) {
        // Taken out, so that the exchanges are freed while attached, and not under the lock.
        drop(match self.try_lock() {
            Some(mut guard) => guard.take(),
            None if self.is_forked() => None,
            None => py.detach(|| self.lock().take()),
        });
        let tls = std::mem::take(&mut *self.keys());
        drop(tls); // after the lock
    }

    #[allow(clippy::needless_pass_by_value, reason = "the signature of the slot")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(all) = self.tls.try_lock() else { return Ok(()) };
        all.values().try_for_each(|tls| tls.traverse(&visit))
    }

    fn __clear__(&self) {
        let tls = std::mem::take(&mut *self.keys());
        drop(tls); // after the lock
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.with(py, |reactor| reactor.len()) {
            Some(count) => format!("<Reactor of {count} connections>"),
            None => "<Reactor, closed>".to_owned(),
        }
    }
}

impl Reactor {
    fn try_lock(&self) -> Option<MutexGuard<'_, Option<Inner>>> {
        match self.inner.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Only while detached.
    fn lock(&self) -> MutexGuard<'_, Option<Inner>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// None if the reactor is closed.
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Inner) -> T + Send) -> Option<T> {
        match self.try_lock() {
            Some(mut guard) => guard.as_mut().map(work),
            None if self.is_forked() => None,
            None => py.detach(|| self.lock().as_mut().map(work)),
        }
    }

    fn open(
        &self,
        py: Python<'_>,
        connect: impl FnOnce(&mut Inner) -> io::Result<ConnectionId> + Send,
    ) -> PyResult<u64> {
        match self.with(py, connect) {
            Some(Ok(id)) => Ok(id.as_u64()),
            Some(Err(error)) => Err(os_error(py, &error)),
            None => Err(PyValueError::new_err("the reactor is closed")),
        }
    }

    fn sweep_lane<'py>(&self, py: Python<'py>, lane: Lane) -> PyResult<Bound<'py, PyList>> {
        let mut reports = Vec::new();
        let result = self.sweep_sockets(py, lane, &mut reports).map_err(|error| os_error(py, &error));
        let has_ciphertext = reports.iter().any(|report| matches!(report.news, News::Ciphertext(_)));
        let began = if has_ciphertext { monotonic() } else { 0.0 };
        let list = self.events(py, reports);
        let mut swept = result?;
        if lane == Lane::Ordinary {
            if has_ciphertext {
                swept.seconds += monotonic() - began;
            }
            let paused = self.with(py, |reactor| reactor.pause(&swept, monotonic()));
            paused.unwrap_or(Ok(())).map_err(|error| os_error(py, &error))?;
        }
        list
    }

    fn sweep_sockets(&self, py: Python<'_>, lane: Lane, reports: &mut Vec<Report>) -> io::Result<Swept> {
        let small = Limits { bytes: MAX_ATTACHED_BYTES, ..Limits::default() };
        let attached = self.try_lock().map(|mut guard| -> io::Result<(Swept, bool)> {
            let Some(reactor) = guard.as_mut() else { return Ok((Swept::default(), true)) };
            if reactor.look(lane)? > MAX_ATTACHED_SOCKETS {
                return Ok((Swept { is_bounded: true, ..Swept::default() }, false));
            }
            let swept = reactor.sweep(lane, small, monotonic, reports);
            Ok((swept, !swept.is_bounded || swept.seconds >= small.seconds))
        });
        let (swept, is_over) = attached.unwrap_or(Ok((Swept::default(), false)))?;
        if is_over {
            return Ok(swept);
        }
        py.detach(|| {
            let mut guard = self.lock();
            let Some(reactor) = guard.as_mut() else { return Ok(swept) };
            if !swept.is_bounded {
                reactor.look(lane)?;
            }
            let limits = Limits::default();
            let left = Limits {
                seconds: limits.seconds - swept.seconds,
                bytes: limits.bytes.saturating_sub(swept.bytes),
                ciphertext: limits.ciphertext.saturating_sub(swept.ciphertext),
            };
            Ok(swept.then(reactor.sweep(lane, left, monotonic, reports)))
        })
    }

    /// What Python is told. An error does not keep what is left from being told to the exchanges.
    fn events<'py>(&self, py: Python<'py>, reports: Vec<Report>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        let mut result = Ok(());
        for report in reports {
            result = result.and(self.add_events(py, report, &list));
        }
        result.map(|()| list)
    }

    fn add_events(&self, py: Python<'_>, report: Report, list: &Bound<'_, PyList>) -> PyResult<()> {
        let Report { connection: id, news } = report;
        let connection = id.as_u64();
        let add = |kind: &Bound<'_, PyString>, payload: Bound<'_, PyAny>| list.append((connection, kind, payload));
        match news {
            News::Opened(errno) => add(intern!(py, "opened"), errno.into_pyobject(py)?.into_any()),
            News::Events(exchange, events) => convert(py, &exchange, events, add),
            News::Ciphertext(ciphertext) => {
                let Some(tls) = self.keys_of(id) else { return Ok(()) };
                match self.with(py, |reactor| reactor.carried(id)).flatten() {
                    Some(exchange) => {
                        let mut events = Vec::new();
                        let result = self.carry(py, id, &tls, &exchange, Some(ciphertext), &mut events);
                        let mut reports = Vec::new();
                        self.with(py, |reactor| reactor.settle_tls(id, events, &mut reports));
                        if tls.is_over() {
                            self.end_idle(py, id);
                        }
                        reports.into_iter().fold(result, |result, report| result.and(self.add_events(py, report, list)))
                    }
                    None if !self.with(py, |reactor| reactor.is_shaking_hands(id)).unwrap_or(false) => {
                        self.end_idle(py, id); // behind a reply
                        Ok(())
                    }
                    None => match self.receive_handshake(py, id, &tls, ciphertext) {
                        Ok(false) => Ok(()),
                        Ok(true) => add(intern!(py, "secured"), py.None().into_bound(py)),
                        Err(error) => {
                            self.end(py, connection);
                            let (_, interrupt) = tls::words(py, error.clone_ref(py));
                            add(intern!(py, "secured"), error.into_value(py).into_bound(py).into_any())?;
                            interrupt.map_or(Ok(()), Err)
                        }
                    },
                }
            }
        }
    }
}

/// As Python's own sockets raise it: with the errno, and of the class that belongs to it.
fn os_error(py: Python<'_>, error: &io::Error) -> PyErr {
    let Some(errno) = error.raw_os_error() else { return PyOSError::new_err(error.to_string()) };
    let message = py.import("os").and_then(|os| os.call_method1("strerror", (errno,))).map(Bound::unbind);
    message.map_or_else(|failure| failure, |message| PyOSError::new_err((errno, message)))
}
