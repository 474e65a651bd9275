"""A plain client of the loopback engine: single frames and whole responses, over httpx or a bare socket."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from reference import Reading, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamfold.loopback import Loopback
    from streamfold.loopback.core.reply import Reply

PROMPT = [300, 301, 302]
LIMIT = 60.0  # seconds after which something hangs
# No proxy, and no certificates to load for each request: all is plain HTTP on this machine.
PLAIN: dict[str, Any] = {"timeout": LIMIT, "trust_env": False, "verify": False}


@dataclass
class Answer:
    """A whole response."""

    status: int
    headers: httpx.Headers
    body: bytes
    dialect: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The objects of all events, after a look at the framing."""
        *events, done, rest = self.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert all(event.startswith(b"data: {") for event in events)
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    @property
    def last(self) -> dict[str, Any]:
        return self.frames[-1]

    @property
    def ids(self) -> list[int]:
        """The ids that the frames bring; the reference reader is slow on many events."""
        frames = self.frames if self.dialect == "sglang-incremental" else self.frames[-1:]
        return [token for frame in frames for token in frame["output_ids"]]

    @property
    def finish(self) -> dict[str, Any]:
        """The finish reason of the last event."""
        reason = self.last["meta_info"]["finish_reason"]
        assert isinstance(reason, dict)
        return reason

    def read(self, **asked: Any) -> Reading:
        """What the obvious reader makes of it."""
        reading = read(self.body, self.dialect, **asked)
        assert reading.error is None, reading
        return reading


def dialect(engine: Loopback) -> str:
    return "sglang-incremental" if engine.config.incremental else "sglang-cumulative"


def payload(**body: Any) -> dict[str, Any]:
    """The body of a request: three tokens in, greedy, streamed, with logprobs, by default."""
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True, **body.pop("params", {})}
    given = {"input_ids": PROMPT, "stream": True, "return_logprob": True, "sampling_params": params, **body}
    return {key: value for key, value in given.items() if value is not ...}


def generate(engine: Loopback, *, method: str = "POST", headers: dict[str, str] | None = None, **body: Any) -> Answer:
    response = httpx.request(method, f"{engine.url}/generate", json=payload(**body), headers=headers, **PLAIN)
    return Answer(response.status_code, response.headers, response.content, dialect(engine))


def undisturbed(engine: Loopback, **body: Any) -> Reply:
    """What the same request must generate."""
    given = payload(**body)
    return engine.undisturbed(given["input_ids"], given["sampling_params"], return_logprob=given["return_logprob"])


def post(engine: Loopback, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(f"{engine.url}/{path}", json={} if body is None else body, **PLAIN)


def get(engine: Loopback, path: str) -> httpx.Response:
    return httpx.get(f"{engine.url}/{path}", **PLAIN)


def load(engine: Loopback) -> tuple[int, int]:
    """How many requests run and wait, as the engine tells."""
    (reported,) = get(engine, "v1/loads?include=core").json()["loads"]
    return reported["num_running_reqs"], reported["num_waiting_reqs"]


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must become true."""
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@dataclass
class OpenStream:
    """A stream that is read frame by frame."""

    response: httpx.Response
    dialect: str
    body: bytes = b""
    _events: list[bytes] = field(default_factory=list)
    _taken: int = 0

    def __post_init__(self) -> None:
        self._raw = self.response.iter_raw()

    def frame(self) -> dict[str, Any]:
        """The next frame."""
        while not self._events:
            self.body += next(self._raw)
            *self._events, _ = self.body[self._taken :].split(b"\n\n")
        event = self._events.pop(0)
        self._taken += len(event) + 2
        found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
        return found

    def to_end(self) -> Answer:
        """All of it, what was taken before included."""
        self.body += b"".join(self._raw)
        return Answer(self.response.status_code, self.response.headers, self.body, self.dialect)


@contextlib.contextmanager
def opened(engine: Loopback, **body: Any) -> Iterator[OpenStream]:
    """Start a stream; leaving the block leaves the stream."""
    with httpx.stream("POST", f"{engine.url}/generate", json=payload(**body), **PLAIN) as response:
        yield OpenStream(response, dialect(engine))


@contextlib.contextmanager
def unread(engine: Loopback, **body: Any) -> Iterator[Callable[[], Answer]]:
    """Start a stream and let it fill the buffers on its way; the function that is given reads all of it."""
    url = httpx.URL(engine.url)
    sent = json.dumps(payload(**body)).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIMIT)
        sock.connect((url.host, url.port))
        head = f"POST {url.path.rstrip('/')}/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n"
        sock.sendall(f"{head}connection: close\r\n\r\n".encode() + sent)

        def read_all() -> Answer:
            raw = b"".join(iter(lambda: sock.recv(1 << 20), b""))
            head, _, chunked = raw.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
            return Answer(200, httpx.Headers(), b"".join(chunks(chunked)), dialect(engine))

        yield read_all


def chunks(body: bytes) -> list[bytes]:
    """The chunks of a chunked body, whose end must be there."""
    found: list[bytes] = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n", "a chunk is incomplete"
        if not length:
            return found
        found.append(rest[:length])
        body = rest[length + 2 :]
