"""A server of raw bytes: it answers as told, byte for byte, and writes down what it saw.

A reply is a sequence of steps on the open connection::

    bytes           written as they are, and flushed
    float           a pause, in seconds
    asyncio.Event   a wait for the test (or for an abort: see Replay.aborted)
    END             the connection stays, as after a complete body; the next request may follow
    FIN             an orderly close          RST  a reset          HANG  silence, until the peer closes
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import ssl

    from typing_extensions import Self

    from streamfold import Call, Client

END, FIN, RST, HANG = "END", "FIN", "RST", "HANG"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


Step = bytes | float | str | asyncio.Event
Steps = Iterable[Step]


@dataclass
class Request:
    """A request as it came in, and what became of its connection.

    Attributes:
        fields: the headers in their order, with names in lower case.
    """

    method: str
    target: str
    fields: list[tuple[str, str]]
    body: bytes
    peer_closed: asyncio.Event = field(default_factory=asyncio.Event)

    @functools.cached_property
    def headers(self) -> dict[str, str]:
        return dict(self.fields)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def rid(self) -> str:
        """The id that it is known by, or of the one request that it is to end; empty if there is none."""
        [rid] = self.rids
        return rid

    @property
    def rids(self) -> list[str]:
        """The id that it is known by, or those of the requests that it is to end."""
        told = self.json
        if "request_ids" in told:  # vLLM's Python frontend puts a prefix before ids, the Rust one does not
            prefixed, rids = told["request_ids"][::2], told["request_ids"][1::2]
            assert prefixed == [f"generate-tokens-{rid}" for rid in rids]
            return list(rids)
        if "request_id" in told:
            assert self.headers["x-request-id"] == told["request_id"], "the header would win"
            return [str(told["request_id"])]
        return [str(told.get("rid", ""))]


Route = Steps | Callable[[Request], Steps]


class Replay:
    """Serve on a free loopback port while the context is open.

    ``routes`` maps a path (without its query) to steps, or to a function of the request that gives them. By default
    there is no router, aborts are taken, and nothing else is found. It is SGLang's unless other paths are given: see
    ``speaking``. With ``uds`` it listens on that path.

    Attributes:
        resets: so many of the next connections are reset as they open.
    """

    def __init__(
        self,
        generate: Route = (),
        *,
        host: str = "127.0.0.1",
        uds: str | None = None,
        tls: ssl.SSLContext | None = None,
        routes: Mapping[str, Route] | None = None,
        path: str = "/generate",
        abort_path: str = "/abort_request",
    ) -> None:
        self.path = path
        self.abort_path = abort_path
        self.routes: dict[str, Route] = {path: generate, abort_path: answer_json(None), **(routes or {})}
        self.requests: list[Request] = []
        self.accepted = 0
        self.open = 0
        self.most_open = 0
        self.resets = 0
        self._is_closed = False
        self.aborted: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._host = host
        self._uds = uds
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if self._uds is not None:
            self._server = await asyncio.start_unix_server(self._accept, self._uds, backlog=4096)
            self.url = f"http+unix://{quote(self._uds, safe='')}"
            return self
        self._server = await asyncio.start_server(self._accept, self._host, ssl=self._tls, backlog=4096)
        self.port: int = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._is_closed = True
        for _ in range(5):  # connections that asyncio is still accepting
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def at(self, path: str) -> list[Request]:
        """The requests to ``path``, in the order in which they came."""
        return [request for request in self.requests if request.target.partition("?")[0] == path]

    @property
    def generates(self) -> list[Request]:
        return self.at(self.path)

    @property
    def aborts(self) -> list[str]:
        return [rid for request in self.at(self.abort_path) for rid in request.rids]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called at once: a task that is cancelled before its first step would leave the connection open."""
        if self._is_closed:
            writer.transport.abort()
            return
        if self.resets:
            self.resets -= 1
            _reset(writer)
            return
        self.accepted += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        task = asyncio.ensure_future(self._serve_until_closed(reader, writer))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self.open -= 1
            self._tasks.discard(task)
            writer.transport.abort()

        task.add_done_callback(end)

    async def _serve_until_closed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead = b""
        while request := await read_request(reader, ahead):
            self.requests.append(request)
            if request.target.endswith(self.abort_path):
                for rid in request.rids:
                    self.aborted[rid].set()
            route = self.routes.get(request.target.partition("?")[0], answer_json({"detail": "Not Found"}, status=404))
            steps = route(request) if callable(route) else route
            watch = asyncio.ensure_future(reader.read(1))
            watch.add_done_callback(functools.partial(_note_close, request))
            try:
                if not await self._play(steps, writer, functools.partial(_closed, watch, reader, request)):
                    return
                ahead = await watch
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await watch
            if not ahead:
                return

    async def _play(self, steps: Steps, writer: asyncio.StreamWriter, closed: Callable[[], Awaitable[None]]) -> bool:
        """Whether the connection stays."""
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, (int, float)):
                await asyncio.sleep(step)
            elif step == HANG:
                await closed()
                return False
            elif step == RST:
                _reset(writer)
                return False
            elif step == FIN:
                writer.close()
                await writer.wait_closed()
                return False
        return True


async def read_request(reader: asyncio.StreamReader, ahead: bytes = b"") -> Request | None:
    """The next request of a connection; None once the peer has closed it."""
    try:
        head = ahead + await reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").rstrip().split("\r\n")
        fields = [(name.lower(), value.strip(" ")) for name, _, value in (line.partition(":") for line in lines)]
        body = await reader.readexactly(int(dict(fields).get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    method, target, _ = line.split(" ")
    return Request(method, target, fields, body)


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _closed(watch: asyncio.Future[bytes], reader: asyncio.StreamReader, request: Request) -> None:
    """Wait until the peer closes; what it sends before, as further requests, is not answered."""
    if await watch:
        while await reader.read(1 << 16):
            pass
        request.peer_closed.set()


def _note_close(request: Request, watch: asyncio.Future[bytes]) -> None:
    if not watch.cancelled() and (watch.exception() or not watch.result()):
        request.peer_closed.set()


# What an engine writes.

PROMPT = [5, 6, 7]
ASKED = {"max_new_tokens": 100}  # vLLM is never asked without a budget


def head(
    status: int = 200, kind: str | None = "text/event-stream; charset=utf-8", length: int | None = None, **more: str
) -> bytes:
    """The head of a reply: chunked, unless a length is given."""
    fields = {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    if kind is not None:
        fields["content-type"] = kind
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return f"HTTP/1.1 {status} X\r\n".encode() + b"".join(f"{n}: {v}\r\n".encode() for n, v in fields.items()) + b"\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: bytes, status: int = 200, kind: str | None = "application/json", **more: str) -> list[Step]:
    return [head(status, kind, len(body), **more) + body, END]


def answer_json(value: object, status: int = 200) -> list[Step]:
    return answer(b"" if value is None else json.dumps(value).encode(), status)


def event(
    ids: Sequence[int], total: int, finish: str | dict[str, Any] | None = None, *, logprobs: bool = True, **meta: Any
) -> bytes:
    """One incremental event of a reply to PROMPT: ``ids`` are new, ``total`` is all so far; a logprob is -id / 8."""
    reason: dict[str, Any] | None = {"type": finish} if isinstance(finish, str) else finish
    told: dict[str, Any] = {
        "id": "r",
        "finish_reason": reason,
        "prompt_tokens": len(PROMPT),
        "completion_tokens": total,
    }
    if logprobs:
        told["output_token_logprobs"] = [[-token / 8, token, None] for token in ids]
        told["output_token_logprobs_length"] = total
    text = "".join(chr(97 + token % 26) for token in ids)
    frame = {"text": text, "output_ids": list(ids), "meta_info": told | meta}
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def events(count: int, finish: str | None = "stop", *, start: int = 1) -> list[bytes]:
    """Events of one token each, the tokens being ``start``, ``start + 1``, ...; the last one with ``finish``."""
    return [event([start + i], start + i, finish if i == count - 1 else None) for i in range(count)]


def stream(*payloads: bytes, end: str = END) -> list[Step]:
    """A whole chunked reply: its head, one chunk for each payload, and the last chunk if it ends well."""
    return [head(), *map(chunk, payloads), *([LAST_CHUNK] if end == END else []), end]


def dripped(steps: Iterable[Step], size: int = 1, pause: float = 0.0) -> Iterator[Step]:
    """The same steps, ``size`` bytes in each write."""
    for step in steps:
        if isinstance(step, bytes):
            for i in range(0, len(step), size):
                yield step[i : i + size]
                yield pause
        else:
            yield step


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that is bound to come."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it has not come"
        await asyncio.sleep(0.002)


# What most tests ask for: a whole reply, one that stays open after two tokens, and a call that has got that far.

WHOLE = stream(*events(3), DONE)
RUNNING: list[Step] = [head(), *map(chunk, events(2, finish=None)), HANG]


async def begun(client: Client, **asked: Any) -> Call:
    """A call whose first two tokens are there."""
    call = client.start(PROMPT, ASKED, **asked)
    await until(lambda: call.token_count == 2)
    return call
