"""A raw socket client: it shows the received bytes, in which reads they arrived, and how the connection ended."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from support.loopback_http import LIMIT, payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold.loopback import Loopback

LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Heard:
    """What came in answer to one request; ``end`` is "whole", "fin", "rst", or "silence" if nothing more came."""

    reads: list[bytes] = field(default_factory=list)
    end: str = ""

    @property
    def raw(self) -> bytes:
        return b"".join(self.reads)

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode()

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def chunks(self) -> list[bytes]:
        """The chunks of the body; the last one may be incomplete."""
        rest, found = self.raw.partition(b"\r\n\r\n")[2], []
        while rest and rest != LAST_CHUNK:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) :].removeprefix(b"\r\n")
        return found

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def events(self) -> list[bytes]:
        """The whole events of the body, without what ends them."""
        return self.body.split(b"\n\n")[:-1]

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The objects of all whole events but "[DONE]"."""
        return [json.loads(e.removeprefix(b"data: ")) for e in self.events if e.startswith(b"data: {")]

    @property
    def counts(self) -> list[int]:
        """The tokens that each event tells of."""
        return [frame["meta_info"]["completion_tokens"] for frame in self.frames]


@contextlib.contextmanager
def connected(engine: Loopback, seconds: float = LIMIT) -> Iterator[socket.socket]:
    """An open connection on which ``seconds`` of silence are an end."""
    url = httpx.URL(engine.url)
    with socket.create_connection((url.host, url.port or 80), timeout=seconds) as sock:
        yield sock


def send(sock: socket.socket, *, path: str = "/generate", **body: Any) -> None:
    """Send a request; those for /generate are as :func:`loopback_http.payload` makes them."""
    data = json.dumps(payload(**body) if path == "/generate" else body).encode()
    sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))


def listen(sock: socket.socket) -> Heard:
    """Read an answer as far as it goes."""
    heard = Heard()
    try:
        while not heard.end:
            heard.reads.append(sock.recv(1 << 16))
            if not heard.reads[-1]:
                heard.end = "fin"
            elif _is_whole(heard.raw):
                heard.end = "whole"
    except ConnectionResetError:
        heard.end = "rst"
    except TimeoutError:
        heard.end = "silence"
    return heard


def ask(engine: Loopback, *, seconds: float = LIMIT, path: str = "/generate", **body: Any) -> Heard:
    """Send one request on a connection of its own, and read the answer.

    Raises:
        ConnectionRefusedError: Nobody listens. (A worker that dies while the connection is made resets it.)
    """
    try:
        with connected(engine, seconds) as sock:
            send(sock, path=path, **body)
            return listen(sock)
    except (ConnectionResetError, BrokenPipeError):
        return Heard(end="rst")


def _is_whole(raw: bytes) -> bool:
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next((f for f in head.lower().split(b"\r\n") if f.startswith(b"content-length:")), None)
    return body.endswith(LAST_CHUNK) if length is None else len(body) == int(length.split(b":")[1])
