use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use streamfold_io::reactor::{ConnectionId, Lane, Limits, News, Pace, Report, Swept, monotonic};

use crate::event::convert;
use crate::exchange::Exchange;

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
        Ok(Self { inner: Mutex::new(Some(inner)), process: std::process::id() })
    }

    /// The descriptor of the ordinary poll: streams, and idle connections. -1 after :meth:`close`.
    fn fileno(&self, py: Python<'_>) -> i32 {
        self.with(py, |reactor| reactor.fileno(Lane::Ordinary)).unwrap_or(-1)
    }

    /// The descriptor of the poll that is swept without a rest. -1 after :meth:`close`.
    ///
    /// It has what connects, sends, or receives a reply that is no stream, and what follows an abort.
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

    /// Connect to a Unix socket, and return the connection; ``"opened"`` follows.
    ///
    /// Raises ``BlockingIOError`` while the server's backlog is full, and ``OSError`` as :meth:`connect`.
    #[allow(clippy::needless_pass_by_value, reason = "converted from str, bytes or a path")]
    fn connect_unix(&self, py: Python<'_>, path: std::path::PathBuf) -> PyResult<u64> {
        self.open(py, |reactor| reactor.connect_unix(path.as_os_str().as_encoded_bytes()))
    }

    /// Let an open connection carry an exchange, and send at once what the socket takes.
    ///
    /// Returns False if there is no such connection, or if it has carried one before and shows a byte or its end:
    /// then it is closed, and the exchange can go over another connection.
    fn start(&self, py: Python<'_>, connection: u64, exchange: &Exchange) -> bool {
        let (id, exchange) = (ConnectionId::from_u64(connection), exchange.shared.clone());
        self.with(py, |reactor| reactor.start(id, exchange, monotonic())).unwrap_or(false)
    }

    /// Read what the sockets of the ordinary poll hold, for 5 ms or 4 MiB. Returns the events.
    ///
    /// The descriptor stays readable if sockets are left that have not had their turn.
    fn sweep<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let reports = self.sweep_lane(py, Lane::Ordinary)?;
        events(py, reports)
    }

    /// Connect, send and read what the sockets of the urgent poll can, for 5 ms or 4 MiB. Returns the events.
    ///
    /// The descriptor stays readable if sockets are left that have not had their turn.
    fn sweep_urgent<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let reports = self.sweep_lane(py, Lane::Urgent)?;
        events(py, reports)
    }

    /// Read what the socket of one connection holds, up to 4 MiB. Returns the events.
    fn read_now<'py>(&self, py: Python<'py>, connection: u64) -> PyResult<Bound<'py, PyList>> {
        let reports = self.with(py, |reactor| {
            let mut reports = Vec::new();
            reactor.read_now(ConnectionId::from_u64(connection), monotonic, &mut reports);
            reports
        });
        events(py, reports.unwrap_or_default())
    }

    /// The rest of the reply is of no use: read it without a rest, keep what arrives. Returns the events.
    fn abort<'py>(&self, py: Python<'py>, connection: u64) -> PyResult<Bound<'py, PyList>> {
        let reports = self.with(py, |reactor| {
            let mut reports = Vec::new();
            reactor.abort(ConnectionId::from_u64(connection), monotonic(), &mut reports);
            reports
        });
        events(py, reports.unwrap_or_default())
    }

    /// Close a connection now, for the server as well. No event follows. Idempotent.
    fn end(&self, py: Python<'_>, connection: u64) {
        drop(self.with(py, |reactor| reactor.end(ConnectionId::from_u64(connection))));
    }

    /// Close all connections and the polls. The loop must not watch the descriptors any more. Idempotent.
    fn close(&self, py: Python<'_>) {
        // Taken out, so that the exchanges are freed while attached, and not under the lock.
        drop(match self.try_lock() {
            Some(mut guard) => guard.take(),
            None if self.is_forked() => None,
            None => py.detach(|| self.lock().take()),
        });
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

    fn sweep_lane(&self, py: Python<'_>, lane: Lane) -> PyResult<Vec<Report>> {
        let mut reports = Vec::new();
        let small = Limits { bytes: MAX_ATTACHED_BYTES, ..Limits::default() };
        let attached = self.try_lock().map(|mut guard| -> io::Result<Option<Swept>> {
            let Some(reactor) = guard.as_mut() else { return Ok(None) };
            if reactor.look(lane)? > MAX_ATTACHED_SOCKETS {
                return Ok(Some(Swept { is_bounded: true, ..Swept::default() }));
            }
            let swept = reactor.sweep(lane, small, monotonic, &mut reports);
            let is_over = !swept.is_bounded || swept.seconds >= small.seconds;
            if is_over {
                pause(reactor, lane, &swept)?;
            }
            Ok(Some(swept).filter(|_| !is_over))
        });
        let Some(swept) =
            attached.unwrap_or_else(|| Ok(Some(Swept::default()))).map_err(|error| os_error(py, &error))?
        else {
            return Ok(reports);
        };
        py.detach(|| -> io::Result<()> {
            let mut guard = self.lock();
            let Some(reactor) = guard.as_mut() else { return Ok(()) };
            if !swept.is_bounded {
                reactor.look(lane)?;
            }
            let limits = Limits::default();
            let left =
                Limits { seconds: limits.seconds - swept.seconds, bytes: limits.bytes.saturating_sub(swept.bytes) };
            let later = reactor.sweep(lane, left, monotonic, &mut reports);
            pause(reactor, lane, &swept.then(later))
        })
        .map_err(|error| os_error(py, &error))?;
        Ok(reports)
    }
}

fn pause(reactor: &mut Inner, lane: Lane, swept: &Swept) -> io::Result<()> {
    if lane == Lane::Ordinary { reactor.pause(swept, monotonic()) } else { Ok(()) }
}

fn events(py: Python<'_>, reports: Vec<Report>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for Report { connection, news } in reports {
        let connection = connection.as_u64();
        let add = |kind: &Bound<'_, PyString>, payload: Bound<'_, PyAny>| list.append((connection, kind, payload));
        match news {
            News::Opened(errno) => add(intern!(py, "opened"), errno.into_pyobject(py)?.into_any())?,
            News::Events(exchange, events) => convert(py, &exchange, events, add)?,
        }
    }
    Ok(list)
}

/// As Python's own sockets raise it: with the errno, and of the class that belongs to it.
fn os_error(py: Python<'_>, error: &io::Error) -> PyErr {
    let Some(errno) = error.raw_os_error() else { return PyOSError::new_err(error.to_string()) };
    let message = py.import("os").and_then(|os| os.call_method1("strerror", (errno,))).map(Bound::unbind);
    message.map_or_else(|failure| failure, |message| PyOSError::new_err((errno, message)))
}
