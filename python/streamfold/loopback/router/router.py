"""A router in a box: it stands before engines as sgl-model-gateway does, and shows a client what that one shows it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, get_args

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from streamfold.loopback.http.serving import Background, Server, listen
from streamfold.loopback.router.balancer import ROUTING_KEY, SESSION_KEY, Fleet, Policy, Unanswered
from streamfold.loopback.router.worker import Broken, Exchange, Worker

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from starlette.types import Receive, Scope, Send
    from typing_extensions import Self

    from streamfold.loopback.http.server import Loopback
    from streamfold.loopback.router.worker import Headers

__all__ = ["Policy", "Router"]

# What of a request's headers goes on to a worker.
FORWARDED = (
    b"authorization", b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", ROUTING_KEY, SESSION_KEY,
    b"x-data-parallel-rank",
)  # fmt: skip
# SGLang's endpoint, and vLLM's.
GENERATING = ("/generate", "/inference/v1/generate", "/v1/completions")
# What of a response's headers does not go back: those of one connection, and the date, which the server adds anew.
KEPT_BACK = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding upgrade "
    b"content-encoding host date".split()
)


class Router:
    """A router in a box, running in a thread of its own while the ``with`` block does.

    ::

        with Loopback() as one, Loopback() as two, Router([one, two], policy="least_load") as router:
            httpx.post(f"{router.url}/generate", json={"text": " a story", "stream": True})
            router.stats()  # {one.url: 1, two.url: 0}

    ``POST /generate`` goes to one worker, and the stream comes back byte for byte as it comes. Who leaves the router
    leaves the worker; a response that breaks off at the worker breaks off here. ``GET /workers`` lists the workers.
    Aborts, pauses and weight updates are not routed: they are for the workers themselves.

    Args:
        workers: the engines, each running before the router is, or their URLs, ``http://host:port``.
        policy: ``round_robin``; ``least_load``, the worker with the fewest requests under way here; or ``hash``, one
            worker for each value of the header ``X-SMG-Routing-Key``, and round robin without it.
        drops: keys that a request's JSON object loses here, as it is written anew.
        tries: how often a request is sent at most while workers answer with 408, 429, 500, 502, 503 or 504, or not at
            all. A response that has begun is never asked for again.
        down_seconds: how long a worker that refuses connections is left alone.
        host: 127.0.0.1 or ::1.
        port: 0 is any free one.

    Raises:
        ValueError: the policy is unknown, a URL is not one of a worker, or no try is left.
    """

    def __init__(
        self,
        workers: Sequence[Loopback | str],
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
        self._background: Background | None = None

    def __enter__(self) -> Self:
        """Start it; requests are taken when this returns. Raises OSError if the port is taken."""
        self._workers = [Worker(given if isinstance(given, str) else given.url) for given in self._given]
        fleet = Fleet(self._workers, self._policy, tries=self._tries, down_seconds=self._down_seconds)
        app = _create_app(fleet, self._drops)
        self._background = Background(Server(app, listen(self._host, self._port), server_header=False))
        self._background.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """End it: streams are cut on both sides, sockets closed, the thread joined. Raises what it died of, if so."""
        background = self._started
        background.stop()
        if background.failure is not None:
            raise background.failure

    @property
    def url(self) -> str:
        """Where it is."""
        return self._started.server.url

    def stats(self) -> dict[str, int]:
        """Count the requests that each worker was sent, by its URL, in one moment of the router's loop."""
        return self._started.ask(lambda: {worker.url: worker.requests for worker in self._workers})

    @property
    def _started(self) -> Background:
        if self._background is None:
            msg = "the router runs only inside the with block"
            raise RuntimeError(msg)
        return self._background


class _Generate:
    """The ASGI application behind a path that generates."""

    def __init__(self, fleet: Fleet, path: str, drops: frozenset[str]) -> None:
        self._fleet = fleet
        self._path = path
        self._drops = drops

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        try:
            body = orjson.loads(await request.body())
        except ClientDisconnect:
            return
        except orjson.JSONDecodeError as error:
            await PlainTextResponse(f"the body is no JSON: {error}", 400)(scope, receive, send)
            return
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            await PlainTextResponse("the content type must be application/json", 415)(scope, receive, send)
            return
        if not isinstance(body, dict):
            await PlainTextResponse("the body is no JSON object", 422)(scope, receive, send)
            return
        written = orjson.dumps({key: value for key, value in body.items() if key not in self._drops})
        asked = self._fleet.generate(self._path, _forwarded(scope), written)
        await _while_client_stays(scope, receive, _relay(asked, scope, send, streamed=body.get("stream") is True))


class _Info:
    """The ASGI application behind a path that one worker answers for all."""

    def __init__(self, fleet: Fleet, path: str) -> None:
        self._fleet = fleet
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._fleet.info(_forwarded(scope), self._path)
        await _while_client_stays(scope, receive, _relay(asked, scope, send, streamed=False))


def _create_app(fleet: Fleet, drops: frozenset[str]) -> Starlette:
    async def health(_request: HttpRequest) -> Response:
        return PlainTextResponse("OK")

    async def readiness(_request: HttpRequest) -> Response:
        up, total = len(fleet.up()), len(fleet.workers)
        if not up:
            return _json({"status": "not ready", "reason": "no worker takes connections"}, 503)
        return _json({"status": "ready", "healthy_workers": up, "total_workers": total})

    async def workers(_request: HttpRequest) -> Response:
        up = fleet.up()
        told = [
            {
                "id": f"worker-{i}",
                "url": worker.url,
                "model_id": "unknown",
                "worker_type": "regular",
                "is_healthy": worker in up,
                "load": worker.running,
                "connection_mode": "HTTP",
            }
            for i, worker in enumerate(fleet.workers)
        ]
        return _json({"workers": told, "total": len(told), "stats": {"regular_count": len(told)}})

    handlers = {"/health": health, "/liveness": health, "/readiness": readiness, "/workers": workers}
    routes = [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]
    routes += [Route(path, _Generate(fleet, path, drops), methods=["POST"]) for path in GENERATING]
    for path in ("/server_info", "/model_info"):
        routes += [Route(alias, _Info(fleet, path), methods=["GET"]) for alias in (path, f"/get_{path[1:]}")]
    routes.append(Route("/health_generate", _Info(fleet, "/health_generate"), methods=["GET"]))
    return Starlette(routes=routes)


async def _while_client_stays(scope: Scope, receive: Receive, relay: Coroutine[Any, Any, None]) -> None:
    """Relay until that is done, or the client leaves, or the worker breaks: then the client is left the same way."""
    relaying = asyncio.create_task(relay)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if relaying.done():
            relaying.result()
    except Broken:
        # What came before goes out, and no last chunk after it.
        scope["state"]["transport"].close()
        await leaving
    finally:
        relaying.cancel()
        leaving.cancel()
        await asyncio.wait({relaying, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(asked: Coroutine[Any, Any, Exchange], scope: Scope, send: Send, *, streamed: bool) -> None:
    """Pass on what a worker answers. Raises Broken if a stream breaks off."""
    try:
        answer = await asked
    except Unanswered as error:
        await _send_error(send, error)
        return
    headers = [(name, value) for name, value in answer.headers if name not in KEPT_BACK]
    try:
        if streamed:
            # Whatever it is: the gateway says so of an error's JSON as well.
            headers = [*_without(headers, b"content-type"), (b"content-type", b"text/event-stream")]
            await _send_stream(answer, headers, scope, send)
        else:
            await _send_whole(answer, headers, send)
    finally:
        answer.close()


async def _send_stream(answer: Exchange, headers: Headers, scope: Scope, send: Send) -> None:
    client: asyncio.Transport = scope["state"]["transport"]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    while (piece := await answer.read()) is not None:
        if client.is_closing():
            await asyncio.sleep(0)  # the server learns of it, and writes nothing more
        # This waits while the client reads slowly, and then the worker has to.
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(answer: Exchange, headers: Headers, send: Send) -> None:
    try:
        body = await answer.read_all()
    except Broken as error:
        await _send_error(send, Unanswered(500, "read_response_body_failed", f"{answer.worker.url}: {error}"))
        return
    length = (b"content-length", b"%d" % len(body))
    await _send(send, answer.status, [*_without(headers, b"content-length"), length], body)


async def _send_error(send: Send, error: Unanswered) -> None:
    kind = {500: "internal_server_error", 503: "service_unavailable"}[error.status]
    told = _json({"error": {"message": str(error), "type": kind, "code": error.code}})
    await _send(send, error.status, told.raw_headers, bytes(told.body))


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _forwarded(scope: Scope) -> Headers:
    return [(name, value) for name, value in scope["headers"] if name in FORWARDED or name.startswith(b"x-request-id-")]


def _without(headers: Headers, unwanted: bytes) -> Headers:
    return [(name, value) for name, value in headers if name != unwanted]


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
