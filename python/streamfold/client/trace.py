"""Trace: the timeline of calls as a file of Chrome trace events, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from streamfold.client.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from streamfold._core import Generation
    from streamfold.client.observer import ObservedCall, Phase, Subject

__all__ = ["Trace"]

_logger = logging.getLogger("streamfold")

_MAX_PENDING: Final = 1000  # records
_MAX_LINES: Final = 1 << 14  # samples whose line is remembered; one that comes again later gets another line
_COUNTER_SECONDS: Final = 0.01  # between two records of one engine's counters
_COUNTED: Final[dict[str, tuple[Phase, ...]]] = {
    "waiting": ("queue", "connect", "retry"),
    "prefill": ("prefill",),
    "tokens": ("tokens",),
}
_BEGIN: Final = b"[\n"
_END: Final = b"\n]\n"
_BEGINNINGS: Final = (_BEGIN + b'{"ph":"', _BEGIN + _END)  # of traces, as far as a process came that was killed
_NO_TRACE: Final = "the file there is not a trace, and is not replaced: give another one, or move it away"


class Trace(Observer):
    """Writes what calls and samples do to a file, as they do it: open it at https://ui.perfetto.dev.

    Each engine is a process of the trace, each sample a line of it, also over resumes and rollouts; a call that is
    made for no sample has a line of its own. A line shows each call with its phases: ``queue`` (for a slot),
    ``connect``, ``prefill`` (from the request to the first token), ``tokens``, ``abort``, ``drain``, ``retry`` (the
    pause after a failed try); and resumes, changes of the weight version and rewards. Each engine has counters of the
    calls in each phase.

    A dozen records are written for a call, none for an event or token. They are written in the next pass of the event
    loop, so that the file shows what was waited for when the process was killed; it is then a JSON array without its
    closing bracket, which the format allows.

    ::

        with Trace("trace.json") as trace:
            async with Client(url, trace=trace) as client:
                ...

    Any number of clients and rollouts may share one, in one thread at a time. In a forked child it writes nothing.

    Args:
        path: the file. A trace that is there is replaced when there is something to write, or when this one is closed;
            any other file is not.

    Raises:
        FileExistsError: the file there is not empty, and no trace.
        OSError: the file cannot be read and written, is no regular one, or another trace writes to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._origin = time.monotonic()
        self._file: int | None = _opened(self.path)
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[..., Trace] = weakref.finalize(self, os.close, self._file)
        self._has_begun = False
        self._pending: list[bytes] = []
        self._flushing_in: asyncio.AbstractEventLoop | None = None
        self._next_line = 1
        self._engines: dict[str, _Engine] = {}
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # by sample, the latest ones
        self._open: dict[int, _Open] = {}  # calls that have not ended

    def __repr__(self) -> str:
        return f"<Trace to {self.path}{'' if self._file is not None else ', closed'}>"

    def __reduce__(self) -> str:
        raise TypeError(
            f"a Trace cannot be pickled or copied, since it writes one file ({self.path}) in one process: make one in "
            'each process, with a file of its own, as Client(url, trace=Trace(f"trace-{os.getpid()}.json"))'
        )

    def close(self) -> None:
        """End all calls that are open, and the file. Idempotent."""
        if self._file is None:
            return
        now = time.monotonic()
        for opened in list(self._open.values()):
            self._write(*opened.ends(self._at(now), {"open": True}))
        self._open.clear()
        self._flush()
        self._begin_file()
        self._file = None
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What calls do.

    def on_phase(self, call: ObservedCall, subject: Subject | None, phase: Phase, at: float) -> None:
        """Write the end of the phase before, and the beginning of this one."""
        if self._file is None:
            return
        ts, opened = self._at(at), self._open.get(id(call))
        if opened is None:
            self._open[id(call)] = opened = self._begin(call, subject, self._at(call.started_at))
        notes = {"error": str(call.failure)} if phase == "retry" and call.failure is not None else {}
        records = opened.end_phase(ts, notes)
        details = {"try": call.tries, "rid": call.rid} if phase == "connect" else {}
        self._write(*records, opened.begin_phase(phase, ts, details))
        self._count(opened.line.engine, at)

    def on_end(self, call: ObservedCall, subject: Subject | None, at: float) -> None:  # noqa: ARG002
        """Write the end of the call, with what it has brought."""
        opened = self._open.pop(id(call), None)
        if opened is None or self._file is None:
            return
        ts, generation, line = self._at(at), call.generation(), opened.line
        line.is_busy = False
        versions = [version for version, _, _ in generation.version_spans if version is not None]
        self._write(*opened.ends(ts, _notes(call, generation, versions)), *line.updates(versions, ts))
        self._count(line.engine, at)

    def on_work(self, subject: Subject, name: str, began_at: float, ended_at: float, notes: Mapping[str, Any]) -> None:
        """Write what was done for a sample beside its calls."""
        if self._file is None:
            return
        line = self._lines.get(subject.key)
        if line is None:
            line = self._line_of(subject, self._engine("streamfold"))
        began = self._at(began_at)
        record = line.record("X", name, began)
        self._write({**record, "dur": round(max(0.0, self._at(ended_at) - began), 3), "args": dict(notes)})

    # Lines.

    def _begin(self, call: ObservedCall, subject: Subject | None, ts: float) -> _Open:
        engine = self._engine(call.base_url)
        line = self._line_of(subject, engine) if subject is not None else self._new_line(engine, f"call {call.rid}")
        records: list[dict[str, Any]] = []
        if line.calls:
            records.append(line.instant("resume", ts, {"calls": line.calls}))
        line.calls += 1
        line.is_busy = True
        self._write(*records, {**line.record("B", "call", ts), "args": {"rid": call.rid, "engine": call.engine_name}})
        return _Open(line)

    def _line_of(self, subject: Subject, engine: _Engine) -> _Line:
        """The line of a sample at this engine; another one while a call for the sample is running there."""
        line = self._lines.get(subject.key)
        if line is None or line.engine is not engine or line.is_busy:
            line = self._new_line(engine, subject.label)
            self._lines[subject.key] = line
        self._lines.move_to_end(subject.key)
        while len(self._lines) > _MAX_LINES:
            self._lines.popitem(last=False)
        return line

    def _new_line(self, engine: _Engine, label: str) -> _Line:
        line = _Line(engine, self._next_line)
        self._next_line += 1
        self._write({**line.record("M", "thread_name", 0.0), "args": {"name": label}})
        return line

    def _engine(self, url: str) -> _Engine:
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = _Engine(len(self._engines) + 1)
            self._write(
                {"ph": "M", "name": "process_name", "ts": 0.0, "pid": engine.pid, "tid": 0, "args": {"name": url}}
            )
        return engine

    def _count(self, engine: _Engine, at: float) -> None:
        """Write how many calls are in each phase, unless that was written a moment ago and calls are left."""
        if at - engine.counted_at >= _COUNTER_SECONDS or not any(engine.calls.values()):
            engine.counted_at = at
            args = {name: sum(engine.calls[phase] for phase in phases) for name, phases in _COUNTED.items()}
            self._write({"ph": "C", "name": "calls", "ts": self._at(at), "pid": engine.pid, "tid": 0, "args": args})

    # The file.

    def _at(self, seconds: float) -> float:
        """A time in microseconds from the beginning of the trace."""
        return round(max(0.0, seconds - self._origin) * 1e6, 3)

    def _write(self, *records: Mapping[str, Any]) -> None:
        """Write records in the next pass of the event loop, together with what else comes in this one."""
        if self._file is None or os.getpid() != self._pid:
            return
        self._pending += map(orjson.dumps, records)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush()
            return
        if self._flushing_in is not loop or len(self._pending) >= _MAX_PENDING:
            self._flushing_in = loop
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing_in = None
        pending, self._pending = self._pending, []
        if self._file is None or not pending:
            return
        text = b"\n,".join(pending)
        data = b"\n," + text if self._has_begun else text
        try:
            self._begin_file()
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._file = None
            _logger.warning("the trace %s ends here, as it cannot be written: %s", self.path, error)

    def _begin_file(self) -> None:
        """Replace the trace that was there, which is kept as long as there is nothing to put in its place."""
        if self._file is None or self._has_begun or os.getpid() != self._pid:
            return
        self._has_begun = True
        os.ftruncate(self._file, 0)
        os.write(self._file, _BEGIN)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _finish, self._file, self._pid)


@dataclass
class _Engine:
    """A process of the trace."""

    pid: int
    counted_at: float = float("-inf")
    calls: Counter[Phase] = field(default_factory=Counter)


@dataclass
class _Line:
    """A thread of the trace."""

    engine: _Engine
    tid: int
    calls: int = 0
    is_busy: bool = False
    version: str | None = None

    def record(self, kind: str, name: str, ts: float) -> dict[str, Any]:
        return {"ph": kind, "name": name, "ts": ts, "pid": self.engine.pid, "tid": self.tid, "cat": "streamfold"}

    def updates(self, versions: Sequence[str], ts: float) -> Iterator[dict[str, Any]]:
        """Marks where the weight version is another than before."""
        for version in versions:
            if self.version not in (None, version):
                yield self.instant("weight version", ts, {"from": self.version, "to": version})
            self.version = version

    def instant(self, name: str, ts: float, args: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.record("i", name, ts), "s": "t", "args": args}


@dataclass
class _Open:
    """A call that has not ended."""

    line: _Line
    phase: Phase | None = field(default=None)

    def begin_phase(self, phase: Phase, ts: float, args: Mapping[str, Any]) -> dict[str, Any]:
        self.phase = phase
        self.line.engine.calls[phase] += 1
        return {**self.line.record("B", phase, ts), "args": args}

    def end_phase(self, ts: float, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        phase, self.phase = self.phase, None
        if phase is None:
            return []
        self.line.engine.calls[phase] -= 1
        return [{**self.line.record("E", phase, ts), "args": args}]

    def ends(self, ts: float, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [*self.end_phase(ts, {}), {**self.line.record("E", "call", ts), "args": args}]


def _notes(call: ObservedCall, generation: Generation, versions: list[str]) -> dict[str, Any]:
    """What a call has brought, at its end."""
    notes: dict[str, Any] = {"tokens": len(generation.token_ids), "finish_reason": generation.finish_reason}
    if call.error is not None:
        notes["error"] = str(call.error)
    if generation.timings is not None and generation.timings.ttft is not None:
        notes["ttft"] = generation.timings.ttft
    return {**notes, "weight_versions": versions} if versions else notes


def _opened(path: Path) -> int:
    """Open the file for this process alone, and check that it holds a trace or nothing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "a trace needs a regular file", str(path))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(begin.startswith(os.pread(file, len(begin), 0)) for begin in _BEGINNINGS):
            raise FileExistsError(errno.EEXIST, _NO_TRACE, str(path))
    except BlockingIOError as error:
        os.close(file)
        raise BlockingIOError(error.errno, "another trace is being written to this file", str(path)) from None
    except BaseException:
        os.close(file)
        raise
    return file


def _finish(file: int, pid: int) -> None:
    """Close the array and the file; in a forked child the file alone."""
    try:
        if os.getpid() == pid:
            os.write(file, _END)
    finally:
        os.close(file)
