"""Loopback router: an HTTP router in front of several engines that behaves like sgl-model-gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, get_args

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from streamfold.loopback.http.responses import OrjsonResponse
from streamfold.loopback.http.serving import HttpServer, ServerThread, listen
from streamfold.loopback.router.balancer import ROUTING_KEY, SESSION_KEY, Balancer, Policy, RouterError
from streamfold.loopback.router.worker import Worker, WorkerDisconnected

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from starlette.types import Receive, Scope, Send
    from typing_extensions import Self

    from streamfold.loopback.router.worker import Headers, WorkerRequest

__all__ = ["Policy", "Router"]

# Request headers that are forwarded to the worker.
FORWARDED = (
    b"authorization", b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", ROUTING_KEY, SESSION_KEY,
    b"x-data-parallel-rank",
)  # fmt: skip
# Paths that generate: SGLang's, then vLLM's.
GENERATING = ("/generate", "/inference/v1/generate", "/v1/completions")
# Response headers that are not forwarded: those of one connection, and the date, which the server sets itself.
NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding upgrade "
    b"content-encoding host date".split()
)


class RunningEngine(Protocol):
    """An engine with a URL, such as :class:`streamfold.loopback.Loopback`."""

    @property
    def url(self) -> str:
        """Its URL, ``http://host:port``."""


class Router:
    """A router that runs in a background thread during the ``with`` block.

    ::

        with Loopback() as one, Loopback() as two, Router([one, two], policy="least_load") as router:
            httpx.post(f"{router.url}/generate", json={"text": " a story", "stream": True})
            router.stats()  # {one.url: 1, two.url: 0}

    ``POST /generate`` is sent to one worker, and its stream is forwarded byte for byte. A client's disconnect is passed
    on to the worker, and a worker's disconnect to the client. ``GET /workers`` lists the workers. Aborts, pauses and
    weight updates are not routed: send them to the workers themselves.

    Args:
        workers: the engines, which must run before the router starts, or their URLs, ``http://host:port``.
        policy: ``round_robin``; ``least_load``, the worker with the fewest requests of this router; or ``hash``, one
            worker for each value of the header ``X-SMG-Routing-Key``, and round robin without it.
        drops: keys that are removed from the request's JSON object.
        tries: maximum number of attempts per request, while workers disconnect or respond with 408, 429, 500, 502, 503
            or 504. A request is not retried after its response has started.
        down_seconds: how long a worker that refuses connections gets no requests.
        host: 127.0.0.1 or ::1.
        port: 0 is any free port.

    Raises:
        ValueError: the policy is unknown, a worker's URL is invalid, or ``tries`` is less than 1.
    """

    def __init__(
        self,
        workers: Sequence[RunningEngine | str],
        policy: Policy = "round_robin",
        *,
        drops: Collection[str] = (),
        tries: int = 5,
        down_seconds: float = 1.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, not {policy!r}")
        if tries < 1:
            raise ValueError(f"tries must be 1 or more, not {tries}")
        for url in workers:
            if isinstance(url, str):
                Worker(url)
        self._given = list(workers)
        self._policy: Policy = policy
        self._drops = frozenset([drops] if isinstance(drops, str) else drops)
        self._tries = tries
        self._down_seconds = down_seconds
        self._host, self._port = host, port
        self._workers: list[Worker] = []
        self._thread: ServerThread | None = None

    def __enter__(self) -> Self:
        """Start the router; requests are accepted when this returns. Raises OSError if the port is in use."""
        self._workers = [Worker(given if isinstance(given, str) else given.url) for given in self._given]
        balancer = Balancer(self._workers, self._policy, tries=self._tries, down_seconds=self._down_seconds)
        app = Starlette(routes=_routes(balancer, self._drops))
        self._thread = ServerThread(HttpServer(app, listen(self._host, self._port), server_header=False))
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop the router: interrupt streams on both sides, close sockets, join the thread. Raises an earlier error."""
        thread = self._started
        thread.stop()
        if thread.failure is not None:
            raise thread.failure

    @property
    def url(self) -> str:
        """Its URL."""
        return self._started.server.url

    def stats(self) -> dict[str, int]:
        """Return the number of requests that each worker was sent, by its URL, all from one moment."""
        return self._started.call(lambda: {worker.url: worker.requests for worker in self._workers})

    @property
    def _started(self) -> ServerThread:
        if self._thread is None:
            msg = "the router runs only inside the with block"
            raise RuntimeError(msg)
        return self._thread


class _GenerateRoute:
    """The ASGI application of a path that generates."""

    def __init__(self, balancer: Balancer, path: str, drops: frozenset[str]) -> None:
        self._balancer = balancer
        self._path = path
        self._drops = drops

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        try:
            body = orjson.loads(await http.body())
        except ClientDisconnect:
            return
        except orjson.JSONDecodeError as error:
            await PlainTextResponse(f"the body is no JSON: {error}", 400)(scope, receive, send)
            return
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            await PlainTextResponse("the content type must be application/json", 415)(scope, receive, send)
            return
        if not isinstance(body, dict):
            await PlainTextResponse("the body is no JSON object", 422)(scope, receive, send)
            return
        data = orjson.dumps({key: value for key, value in body.items() if key not in self._drops})
        starting = self._balancer.generate(self._path, _forwarded(scope), data)
        await _until_disconnect(scope, receive, _relay(starting, scope, send, streamed=body.get("stream") is True))


class _InfoRoute:
    """The ASGI application of a path whose response is the same for all workers."""

    def __init__(self, balancer: Balancer, path: str) -> None:
        self._balancer = balancer
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        starting = self._balancer.info(_forwarded(scope), self._path)
        await _until_disconnect(scope, receive, _relay(starting, scope, send, streamed=False))


def _routes(balancer: Balancer, drops: frozenset[str]) -> list[Route]:
    async def health(_request: HttpRequest) -> Response:
        return PlainTextResponse("OK")

    async def readiness(_request: HttpRequest) -> Response:
        up, total = len(balancer.up()), len(balancer.workers)
        if not up:
            return OrjsonResponse({"status": "not ready", "reason": "no worker takes connections"}, 503)
        return OrjsonResponse({"status": "ready", "healthy_workers": up, "total_workers": total})

    async def workers(_request: HttpRequest) -> Response:
        up = balancer.up()
        states = [
            {
                "id": f"worker-{i}",
                "url": worker.url,
                "model_id": "unknown",
                "worker_type": "regular",
                "is_healthy": worker in up,
                "load": worker.running,
                "connection_mode": "HTTP",
            }
            for i, worker in enumerate(balancer.workers)
        ]
        return OrjsonResponse({"workers": states, "total": len(states), "stats": {"regular_count": len(states)}})

    handlers = {"/health": health, "/liveness": health, "/readiness": readiness, "/workers": workers}
    routes = [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]
    routes += [Route(path, _GenerateRoute(balancer, path, drops), methods=["POST"]) for path in GENERATING]
    for path in ("/server_info", "/model_info"):
        routes += [Route(alias, _InfoRoute(balancer, path), methods=["GET"]) for alias in (path, f"/get_{path[1:]}")]
    routes.append(Route("/health_generate", _InfoRoute(balancer, "/health_generate"), methods=["GET"]))
    return routes


async def _until_disconnect(scope: Scope, receive: Receive, relay: Coroutine[Any, Any, None]) -> None:
    """Relay until that is done or the client disconnects. If the worker disconnects, disconnect the client."""
    relaying = asyncio.create_task(relay)
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if relaying.done():
            relaying.result()
    except WorkerDisconnected:
        # What was received is sent, but no last chunk after it.
        scope["state"]["transport"].close()
        await leaving
    finally:
        relaying.cancel()
        leaving.cancel()
        await asyncio.wait({relaying, leaving})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(starting: Coroutine[Any, Any, WorkerRequest], scope: Scope, send: Send, *, streamed: bool) -> None:
    """Forward a worker's response. Raises WorkerDisconnected if a stream is interrupted."""
    try:
        request = await starting
    except RouterError as error:
        await _send_error(send, error)
        return
    headers = [(name, value) for name, value in request.headers if name not in NOT_FORWARDED]
    try:
        if streamed:
            # For JSON errors too, as the gateway does.
            headers = [*_without(headers, b"content-type"), (b"content-type", b"text/event-stream")]
            await _send_stream(request, headers, scope, send)
        else:
            await _send_whole(request, headers, send)
    finally:
        request.close()


async def _send_stream(request: WorkerRequest, headers: Headers, scope: Scope, send: Send) -> None:
    client: asyncio.Transport = scope["state"]["transport"]
    await send({"type": "http.response.start", "status": request.status, "headers": headers})
    while (piece := await request.read()) is not None:
        if client.is_closing():
            await asyncio.sleep(0)  # the server notices it, and writes nothing more
        # Backpressure: this waits for a slow client, so the worker has to wait, too.
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(request: WorkerRequest, headers: Headers, send: Send) -> None:
    try:
        body = await request.read_all()
    except WorkerDisconnected as error:
        await _send_error(send, RouterError(500, "read_response_body_failed", f"{request.worker.url}: {error}"))
        return
    length = (b"content-length", b"%d" % len(body))
    await _send(send, request.status, [*_without(headers, b"content-length"), length], body)


async def _send_error(send: Send, error: RouterError) -> None:
    kind = {500: "internal_server_error", 503: "service_unavailable"}[error.status]
    response = OrjsonResponse({"error": {"message": str(error), "type": kind, "code": error.code}})
    await _send(send, error.status, response.raw_headers, bytes(response.body))


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _forwarded(scope: Scope) -> Headers:
    return [(name, value) for name, value in scope["headers"] if name in FORWARDED or name.startswith(b"x-request-id-")]


def _without(headers: Headers, unwanted: bytes) -> Headers:
    return [(name, value) for name, value in headers if name != unwanted]
