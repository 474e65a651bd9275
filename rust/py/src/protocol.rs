use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyMemoryView, PySlice, PyString};
use pyo3::{PyTraverseError, PyVisit};
use streamfold_io::{Event, Input, Shared, State};

use crate::event::convert;
use crate::exchange::Exchange;
use crate::py_socket;
use crate::read_rest::{Habit, ReadRest};

/// A transport copies what it can't send at once.
const MAX_WRITE_BYTES: usize = 256 << 10;

/// More than this is parsed without the interpreter's lock.
const DETACHED_BYTES: usize = 64 << 10;

type PyEvent<'py> = (Bound<'py, PyString>, Bound<'py, PyAny>);

/// Carries exchanges on one connection of an event loop. A protocol, to be mixed with ``asyncio.BufferedProtocol``.
///
/// - ``buffer``: what transports read into; its content is used at once, so all connections of a loop share one.
/// - ``rest``: where a connection rests after it has read from a stream.
/// - ``socket``: the socket below the transport.
///
/// It carries one exchange at a time, and is used in the thread of its loop.
#[pyclass(frozen, subclass, module = "streamfold._core")]
pub(crate) struct ConnectionProtocol {
    buffer: Py<PyMemoryView>,
    rest: Py<ReadRest>,
    /// Held for moments: never while Python is called, or an object of it is dropped.
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    socket: Option<Py<PyAny>>,
    /// What is written to.
    transport: Option<Py<PyAny>>,
    /// What reads from the socket: the same, or the transport below TLS.
    reader: Option<Py<PyAny>>,
    phase: Phase,
    /// While busy.
    carried: Option<Carried>,
    is_write_paused: bool,
    habit: Habit,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// There is no transport yet.
    #[default]
    Opening,
    /// It has carried nothing yet.
    New,
    /// The last reply ended well.
    Kept,
    /// It carries an exchange.
    Busy,
    /// It carries nothing any more, and is open until it is ended.
    Over,
}

struct Carried {
    exchange: Arc<Shared>,
    on_event: Py<PyAny>,
    is_aborted: bool,
}

#[pymethods]
impl ConnectionProtocol {
    #[new]
    fn new(buffer: Py<PyMemoryView>, rest: Py<ReadRest>, socket: Py<PyAny>) -> Self {
        let inner = Inner { socket: Some(socket), ..Inner::default() };
        Self { buffer, rest, inner: Mutex::new(inner) }
    }

    /// Use ``transport``, above ``reader``, which reads from the socket.
    fn attach(&self, transport: Py<PyAny>, reader: Py<PyAny>) {
        let mut inner = self.lock();
        let old = (inner.transport.replace(transport), inner.reader.replace(reader));
        inner.phase = Phase::New;
        drop(inner);
        drop(old);
    }

    /// Carry an exchange: its request leaves at once.
    ///
    /// ``on_event`` gets kind and payload of each event from now on. Returns the events that there are already, or None
    /// if the connection had been kept and shows a byte or its end: then it is closed, and nothing was sent.
    fn begin<'py>(
        &self,
        py: Python<'py>,
        exchange: &Exchange,
        on_event: Py<PyAny>,
    ) -> PyResult<Option<Vec<PyEvent<'py>>>> {
        let phase = self.lock().phase;
        if !matches!(phase, Phase::New | Phase::Kept) || (phase == Phase::Kept && self.shows_anything(py)?) {
            self.end(py)?;
            return Ok(None);
        }
        let shared = Arc::clone(&exchange.shared);
        {
            let mut inner = self.lock();
            inner.carried = Some(Carried { exchange: Arc::clone(&shared), on_event, is_aborted: false });
            inner.habit = Habit::default();
            inner.phase = Phase::Busy;
        }
        let mut events = Vec::new();
        shared.start(monotonic(py)?, &mut events);
        self.write(py, &shared, &mut events)?;
        self.settle(py, &shared, events).map(Some)
    }

    /// The rest of the reply is of no use: read it without a rest, and do not report what goes wrong with it.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Some(carried) = self.carried(py) else { return Ok(()) };
        if let Some(carried) = &mut self.lock().carried {
            carried.is_aborted = true;
        }
        self.input(py, &carried, Input::Abort)?;
        self.urgent(py)
    }

    /// Read as soon as the loop can.
    fn urgent(&self, py: Python<'_>) -> PyResult<()> {
        match (self.carried(py), self.reader(py)) {
            (Some(_), Some(reader)) => reader.call_method0(intern!(py, "resume_reading")).map(drop),
            _ => Ok(()),
        }
    }

    /// Close the connection now; no event follows. Idempotent.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let (socket, transport, carried, reader) = {
            let mut inner = self.lock();
            inner.phase = Phase::Over;
            (inner.socket.take(), inner.transport.take(), inner.carried.take(), inner.reader.take())
        };
        drop(reader);
        if let Some(carried) = carried {
            carried.exchange.handle(Input::Close, monotonic(py)?, &mut Vec::new());
            carried.exchange.unpin();
        }
        let Some(socket) = socket else { return Ok(()) };
        py_socket::shut_down(socket.bind(py))?;
        let is_aborted = transport.is_some_and(|transport| transport.call_method0(py, intern!(py, "abort")).is_ok());
        if !is_aborted {
            socket.call_method0(py, intern!(py, "close"))?; // the loop is closed
        }
        Ok(())
    }

    // What transports call.

    /// The transport is open.
    fn connection_made(&self, transport: Py<PyAny>, py: Python<'_>) {
        self.attach(transport.clone_ref(py), transport);
    }

    /// Return what the transport reads into.
    fn get_buffer(&self, sizehint: i64, py: Python<'_>) -> Py<PyMemoryView> {
        let _ = sizehint;
        self.rest.get().begin();
        self.buffer.clone_ref(py)
    }

    /// The transport has read ``nbytes``.
    fn buffer_updated(&self, nbytes: usize, py: Python<'_>) -> PyResult<()> {
        let Some(carried) = self.carried(py) else { return self.on_stray_input(py) };
        let part = self.buffer.bind(py).get_item(PySlice::new(py, 0, nbytes.try_into()?, 1))?;
        let part = py.get_type::<PyBytes>().call1((part,))?.cast_into::<PyBytes>()?;
        self.receive(py, &carried, part.as_bytes())?;
        self.rest_if_ordinary(py, nbytes)
    }

    /// The server has closed its side. Returns whether the transport stays open.
    fn eof_received(&self, py: Python<'_>) -> PyResult<bool> {
        match self.carried(py) {
            Some(carried) => self.input(py, &carried, Input::Eof)?,
            None => self.on_stray_input(py)?,
        }
        // The caller decides when to close. A transport with TLS closes always, and warns of a true value.
        Ok(!self.has_tls(py))
    }

    /// The transport is closed, or ``exc`` has broken it.
    #[pyo3(signature = (exc))]
    fn connection_lost(&self, exc: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<()> {
        let result = match self.carried(py) {
            Some(carried) => self.on_lost(py, &carried, exc),
            None => Ok(()),
        };
        let left = {
            let mut inner = self.lock();
            inner.phase = Phase::Over;
            (inner.transport.take(), inner.reader.take(), inner.socket.take(), inner.carried.take())
        };
        if let (Some(transport), Some(reader)) = (&left.0, &left.1)
            && !transport.is(reader)
        {
            transport.call_method0(py, intern!(py, "close"))?; // one with TLS does not know yet (Python 3.10)
        }
        drop(left);
        result
    }

    /// The transport holds enough of the request for now.
    fn pause_writing(&self) {
        self.lock().is_write_paused = true;
    }

    /// The transport takes more of the request.
    fn resume_writing(&self, py: Python<'_>) -> PyResult<()> {
        self.lock().is_write_paused = false;
        let Some(carried) = self.carried(py) else { return Ok(()) };
        let mut events = Vec::new();
        self.write(py, &carried.exchange, &mut events)?;
        self.report(py, &carried, events)
    }

    #[allow(clippy::needless_pass_by_value, reason = "the signature of the slot")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.buffer)?;
        visit.call(&self.rest)?;
        let Ok(inner) = self.inner.try_lock() else { return Ok(()) };
        for object in [&inner.socket, &inner.transport, &inner.reader].into_iter().flatten() {
            visit.call(object)?;
        }
        inner.carried.as_ref().map_or(Ok(()), |carried| visit.call(&carried.on_event))
    }

    fn __clear__(&self) {
        let inner = std::mem::take(&mut *self.lock());
        drop(inner); // after the lock
    }
}

impl ConnectionProtocol {
    /// Hand unsent bytes to the transport, for as long as it takes them.
    fn write(&self, py: Python<'_>, exchange: &Shared, events: &mut Vec<Event>) -> PyResult<()> {
        let Some(transport) = self.object(py, |inner| &inner.transport) else { return Ok(()) };
        let mut chunk = Vec::new();
        while !self.lock().is_write_paused {
            chunk.clear();
            exchange.send(monotonic(py)?, events, |parts| {
                for part in parts {
                    chunk.extend_from_slice(&part[..part.len().min(MAX_WRITE_BYTES - chunk.len())]);
                }
                Ok(chunk.len())
            });
            if chunk.is_empty() {
                break;
            }
            transport.call_method1(intern!(py, "write"), (PyBytes::new(py, &chunk),))?;
        }
        Ok(())
    }

    fn receive(&self, py: Python<'_>, carried: &Carried, bytes: &[u8]) -> PyResult<()> {
        let now = monotonic(py)?;
        let mut events = Vec::new();
        let exchange = &*carried.exchange;
        if bytes.len() > DETACHED_BYTES {
            py.detach(|| exchange.receive(bytes, now, &mut events));
        } else {
            exchange.receive(bytes, now, &mut events);
        }
        self.report(py, carried, events)
    }

    fn input(&self, py: Python<'_>, carried: &Carried, input: Input<'_>) -> PyResult<()> {
        let mut events = Vec::new();
        carried.exchange.handle(input, monotonic(py)?, &mut events);
        self.report(py, carried, events)
    }

    /// Report events to who carries the exchange. One that raises does not keep the others from being reported.
    fn report(&self, py: Python<'_>, carried: &Carried, events: Vec<Event>) -> PyResult<()> {
        if events.is_empty() {
            return Ok(());
        }
        let mut result = Ok(());
        for (kind, payload) in self.settle(py, &carried.exchange, events)? {
            result = result.and(carried.on_event.call1(py, (kind, payload)).map(drop));
        }
        result
    }

    /// Convert events. If they end the exchange the connection is free, or is not read any more.
    fn settle<'py>(&self, py: Python<'py>, exchange: &Shared, events: Vec<Event>) -> PyResult<Vec<PyEvent<'py>>> {
        let end = events.iter().find_map(|event| match event {
            Event::Ended { reusable } => Some(*reusable),
            _ => None,
        });
        if let Some(is_reusable) = end {
            let (carried, is_over) = {
                let mut inner = self.lock();
                let carried = inner.carried.take();
                let is_free = is_reusable && carried.as_ref().is_some_and(|carried| !carried.is_aborted);
                inner.phase = if is_free { Phase::Kept } else { Phase::Over };
                (carried, !is_free)
            };
            drop(carried);
            if let (true, Some(reader)) = (is_over, self.reader(py)) {
                reader.call_method0(intern!(py, "pause_reading"))?;
            }
        }
        let mut converted = Vec::new();
        convert(py, exchange, events, |kind, payload| {
            converted.push((kind.clone(), payload));
            Ok(())
        })?;
        Ok(converted)
    }

    /// Let the connection rest after a read of a part, unless somebody waits for what comes.
    fn rest_if_ordinary(&self, py: Python<'_>, bytes: usize) -> PyResult<()> {
        let should_rest = self.rest.get().finish(bytes, &mut self.lock().habit);
        let (Some(carried), Some(reader)) = (self.carried(py), self.reader(py)) else { return Ok(()) };
        let state = carried.exchange.state();
        let is_ordinary = carried.exchange.comes_in_parts()
            && !carried.is_aborted
            && matches!(state, State::Head | State::Waiting | State::Streaming | State::Rest);
        if should_rest && is_ordinary { self.rest.get().pause(&reader) } else { Ok(()) }
    }

    /// The connection broke, or was closed by the transport.
    fn on_lost(&self, py: Python<'_>, carried: &Carried, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(error) = error else { return self.input(py, carried, Input::Eof) };
        if !self.has_tls(py)
            && let Some(socket) = self.object(py, |inner| &inner.socket)
        {
            // A transport gives up when writing fails, but the server may have replied before it closed.
            while let Some(part) = py_socket::receive(&socket, MAX_WRITE_BYTES)? {
                self.receive(py, carried, part.as_bytes())?;
            }
        }
        if self.carried(py).is_none() {
            return Ok(());
        }
        self.input(py, carried, Input::Reset(py_socket::errno(error)?))
    }

    /// Nothing is carried. A connection that waits for its next exchange is of no use after this; one that is open until
    /// its caller ends it, is read no further.
    fn on_stray_input(&self, py: Python<'_>) -> PyResult<()> {
        let phase = self.lock().phase;
        match (phase, self.reader(py)) {
            (Phase::New | Phase::Kept, _) => self.end(py),
            (_, Some(reader)) => reader.call_method0(intern!(py, "pause_reading")).map(drop),
            (_, None) => Ok(()),
        }
    }

    fn shows_anything(&self, py: Python<'_>) -> PyResult<bool> {
        self.object(py, |inner| &inner.socket).map_or(Ok(true), |socket| py_socket::shows_anything(&socket))
    }

    fn has_tls(&self, py: Python<'_>) -> bool {
        let (transport, reader) = (self.object(py, |inner| &inner.transport), self.reader(py));
        transport.zip(reader).is_some_and(|(transport, reader)| !transport.is(&reader))
    }

    fn reader<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.object(py, |inner| &inner.reader)
    }

    fn object<'py>(
        &self,
        py: Python<'py>,
        which: impl FnOnce(&Inner) -> &Option<Py<PyAny>>,
    ) -> Option<Bound<'py, PyAny>> {
        which(&self.lock()).as_ref().map(|object| object.bind(py).clone())
    }

    fn carried(&self, py: Python<'_>) -> Option<Carried> {
        let inner = self.lock();
        let Carried { exchange, on_event, is_aborted } = inner.carried.as_ref()?;
        Some(Carried { exchange: Arc::clone(exchange), on_event: on_event.clone_ref(py), is_aborted: *is_aborted })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Now, in the seconds of `time.monotonic()`.
fn monotonic(py: Python<'_>) -> PyResult<f64> {
    static CLOCK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    CLOCK.import(py, "time", "monotonic")?.call0()?.extract()
}
