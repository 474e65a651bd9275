"""``python -W error -m streamfold`` in a process of its own, without the second that an interpreter takes to import it.

One interpreter has imported the command line. Each command is a fork of it, with its own arguments, environment,
working directory and output, and ends as an interpreter ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECONDS = 60  # after which a command hangs
ENVIRONMENT = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_COLOR": "1", "COLUMNS": "200"}
"""Of each command: a proxy that nobody listens at, as on many a cluster, and a wide terminal without colors."""

# A command's help imports what typer takes for a command's options; the other modules are those of nearly all commands.
_PROGRAM = """
import contextlib, io
import streamfold.client.drivers.by_loop, streamfold.client.drivers.direct, streamfold.loopback
from streamfold.cli.main import app
from support.commands import be_next
with contextlib.redirect_stdout(io.StringIO()):
    app(["rollout", "--help"], standalone_mode=False)
be_next()
app(prog_name="streamfold")
"""


class Commands:
    """Where commands are started, in a context: a second for the first one, and little for all others."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders

    @classmethod
    @contextlib.contextmanager
    def ready(cls) -> Iterator[Commands]:
        """Start the interpreter that commands are forked from; it ends with the context."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        # One thread alone can be forked without a warning: numpy starts others for its linear algebra.
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error", "-c", _PROGRAM]
        with subprocess.Popen(command, stdin=theirs.fileno(), env=environment), ours:
            theirs.close()
            yield cls(ours)

    def run(self, arguments: Sequence[str | Path], *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``streamfold`` with these arguments to its end.

        Its environment is this process's with ``ENVIRONMENT``, but what is read at import (``PYTHONPATH``, ``COLUMNS``)
        is as it was when the context was entered.

        Raises:
            TimeoutError: it has run for a minute, and has been killed.
        """
        given = [str(argument) for argument in arguments]
        order = {"arguments": given, "environment": {**os.environ, **ENVIRONMENT}, "cwd": str(cwd or Path.cwd())}
        message = json.dumps(order).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._orders, [len(message).to_bytes(4, "big")], [out.fileno(), err.fileno()])
            self._orders.sendall(message)
            pid = _number(self._orders)
            if not select.select([self._orders], [], [], SECONDS)[0]:
                os.kill(pid, signal.SIGKILL)
                _number(self._orders)
                raise TimeoutError(f"streamfold {' '.join(given)} has not ended in {SECONDS} s")
            code = _number(self._orders)
            told, wrong = (_text(file.fileno()) for file in (out, err))
        return subprocess.CompletedProcess(["streamfold", *given], code, told, wrong)


def be_next() -> None:
    """Fork for each order that comes, and return in the fork; exit when no more can come."""
    gc.freeze()  # no fork has to copy all modules because its collector looked at them
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            size, files, _, _ = socket.recv_fds(orders, 4, 2)
            if not size:
                sys.exit()
            order = json.loads(_exactly(orders, int.from_bytes(size, "big")))
            pid = os.fork()
            if pid == 0:
                break
            for file in files:
                os.close(file)
            orders.sendall(pid.to_bytes(4, "big"))
            _, status = os.waitpid(pid, 0)
            orders.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = order["arguments"]


def _text(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, encoding="utf-8", closefd=False) as whole:
        return whole.read()


def _number(orders: socket.socket) -> int:
    return int.from_bytes(_exactly(orders, 4), "big", signed=True)


def _exactly(orders: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = orders.recv(size - len(read))
        if not more:
            raise ConnectionError("the interpreter that starts commands has ended")
        read += more
    return read
