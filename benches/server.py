"""Starts the engine of the benchmarks: the Rust program in ``benches/server``, in a process of its own.

It costs its client nothing: the client's CPU time is the client's alone. One thread serves thousands of streams, and
sends each event when it is due. The number of tokens is the request's ``max_new_tokens``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import ssl
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE: Final = 0.0005  # seconds from one event to the next, for a single stream
ROOT: Final = Path(__file__).parent.parent
TLS: Final = ROOT / "tests" / "data" / "tls"
_SOURCE: Final = Path(__file__).parent / "server" / "Cargo.toml"
_TARGET: Final = ROOT / "target" / "bench-server"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When the server sends what.

    Attributes:
        streams: a round starts when that many requests of more than one event are waiting.
        per_event: tokens per event.
        tick: seconds from one event of a stream to the next.
        pacing: ``"burst"``: all streams of a round at the tick; ``"spread"``: evenly spread over it.
        hold: seconds before the first tick of a round, and before the response to a request of one event.
        cumulative: each SGLang event repeats the whole response.
        tls: serve https, with the tests' certificate.
        cpu: the CPU that the server is pinned to; None: any.
    """

    streams: int = 1
    per_event: int = 1
    tick: float = 0.0
    pacing: Literal["burst", "spread"] = "burst"
    hold: float = 0.0
    cumulative: bool = False
    tls: bool = False
    cpu: int | None = None

    def arguments(self) -> list[str]:
        """The server's command line."""
        given = ["--streams", str(self.streams), "--per-event", str(self.per_event), "--tick", repr(self.tick)]
        given += ["--pacing", self.pacing, "--hold", repr(self.hold)]
        given += ["--cumulative"] * self.cumulative
        given += ["--tls", str(TLS / "cert.pem"), str(TLS / "key.pem")] * self.tls
        return given if self.cpu is None else [*given, "--cpu", str(self.cpu)]


@functools.cache
def build() -> Path:
    """Build the server, if it is not built; its path.

    Raises:
        FileNotFoundError: cargo is not installed.
        subprocess.CalledProcessError: it does not build.
    """
    cargo = shutil.which(os.environ.get("CARGO", "cargo"))
    if cargo is None:
        raise FileNotFoundError("the benchmarks' server is a Rust program: install a toolchain with rustup")
    command: list[str | Path] = [
        cargo,
        "build",
        "--quiet",
        "--release",
        "--locked",
        "--manifest-path",
        _SOURCE,
        "--target-dir",
        _TARGET,
    ]
    subprocess.run(command, check=True)
    return _TARGET / "release" / "bench-server"


@contextlib.contextmanager
def serving(pace: Pace) -> Iterator[str]:
    """Serve while the block runs; the base URL."""
    command: list[str | Path] = [build(), *pace.arguments()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"{'https' if pace.tls else 'http'}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def stats(url: str) -> dict[str, Any]:
    """What the server counted since the last call: connections, events, late ones, when each response was finished."""
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(f"{url}/stats", timeout=10) as response:
        found: dict[str, Any] = json.load(response)
    return found
