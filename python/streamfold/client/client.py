"""Client: sends generation requests to one inference engine or router, limits how many run, and aborts them."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import httpx
import numpy as np
import orjson

from streamfold._core import Generation, __version__
from streamfold.client._internal import ClientInternals
from streamfold.client.abort_signal import AbortSignal
from streamfold.client.attempt import Attempt
from streamfold.client.call import Call
from streamfold.client.control import EngineControl
from streamfold.client.limits import Limits, Retries, Slots, Timeouts, check_seconds
from streamfold.client.request import CallRequest
from streamfold.client.runner import CallRunner, RetryLog
from streamfold.client.transport import transport_factory
from streamfold.client.urls import bearer, normalize_base_url
from streamfold.engines.base import RequestOptions, token_array
from streamfold.engines.detect import ENGINES, detect
from streamfold.engines.sglang import Sglang

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from streamfold._core import Experts
    from streamfold._types import Tokenizer
    from streamfold.engines.base import TokenIds

__all__ = ["Client", "Running"]

_STARTS_PER_PASS = 64  # of the event loop: a start costs up to a millisecond of CPU


@dataclass(frozen=True)
class Running:
    """A snapshot of one running call, from :attr:`Client.running`.

    Attributes:
        rid: request id of its current try.
        engine: base URL that the request was sent to.
        age: seconds since the start, waits for a slot and retry pauses included.
        token_count: tokens received so far.
        tokens_per_second: tokens per second since the current try's request was sent.
        ttft: time to first token: seconds from sending the current try's request. None before the first token.
        last_event: seconds since the last event that brought a token. None before the first.
        tries: tries so far, the current one included; 0 while the call waits for its first slot.
    """

    rid: str
    engine: str
    age: float
    token_count: int
    tokens_per_second: float
    ttft: float | None
    last_event: float | None
    tries: int


@dataclass
class _Session:
    """All that is bound to one event loop, from a client's first use to its ``aclose``."""

    loop: asyncio.AbstractEventLoop
    control: EngineControl
    slots: Slots
    calls: dict[str, CallRunner] = field(default_factory=dict)  # by the request id of the current try
    pumps: set[asyncio.Task[None]] = field(default_factory=set)
    closing: asyncio.Task[None] | None = None

    def new_rid(self, rid: str | None) -> str:
        """A caller's request id, checked; None: a new one."""
        if rid is None:
            return uuid.uuid4().hex
        if not rid:
            raise ValueError("rid must not be empty: an engine takes an abort of the empty id for an abort of all")
        if rid in self.calls:
            raise ValueError(f"rid {rid!r} is in use by a running call: give each call its own, or none")
        return rid

    def start(self, runner: CallRunner, request: CallRequest) -> None:
        pump = runner.start(request.with_rid)
        self.pumps.add(pump)
        pump.add_done_callback(self.pumps.discard)


class Client:
    """Sends generation requests to one inference engine, or to the engines behind one router.

    Creating a client opens nothing, so it may be created before a fork and outside an event loop. Its first use binds
    it to the running event loop until :meth:`aclose`. It ignores environment variables (proxies, ``NO_PROXY``),
    follows no redirects and keeps no cookies.

    Args:
        base_url: the engine's or router's address: ``http://10.0.0.1:30000``, ``[::1]:30000``, ``https://host/path``.
        engine: ``"sglang"``, ``"vllm"`` (its token endpoint), ``"vllm-completions"``, or ``"auto"``: ask the server
            on entering ``async with``, or by :meth:`discover`.
        tokenizer: turns ids into text for ``complete()`` and rollouts. The client itself needs none.
        headers: added to every request.
        api_key: sent as a bearer token.
        timeouts: for each phase of a try.
        retries: how often a call that fails before its first token is retried, and the pauses in between.
        limits: how many calls run at once, and the longest event.
        experts: the shape of routed experts. If given, every call requests them.
        vocab_size: if given, prompts with larger ids are refused here; some servers crash on them.
        clamped: for a logprob that is the engine's stand-in for minus infinity: ``"raise"`` a ``DecodeError``, or
            ``"keep"`` and count it.
        transport: ``"httpx"``, or your own transport for a private certificate authority
            (``httpx.AsyncHTTPTransport(verify=context, limits=httpx.Limits(max_keepalive_connections=0))``), Unix
            sockets or tests. It carries all requests; its pool must have room for all calls and their aborts.

    Raises:
        ValueError: ``engine``, ``transport`` or ``clamped`` is unknown, or ``base_url`` or ``api_key`` is invalid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        engine: Literal["sglang", "vllm", "vllm-completions", "auto"] = "sglang",
        tokenizer: Tokenizer | None = None,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # immutable
        retries: Retries = Retries(),  # noqa: B008  # immutable
        limits: Limits = Limits(),  # noqa: B008  # immutable
        experts: Experts | None = None,
        vocab_size: int | None = None,
        clamped: Literal["raise", "keep"] = "raise",
        transport: Literal["httpx"] | httpx.AsyncBaseTransport = "httpx",
    ) -> None:
        if engine not in ENGINES and engine != "auto":
            raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}, auto")
        if clamped not in ("raise", "keep"):
            raise ValueError(f'clamped must be "raise" or "keep", not {clamped!r}')
        self._base_url = normalize_base_url(base_url)
        self._vocab_size = vocab_size
        self._headers = httpx.Headers({"Accept": "*/*", "User-Agent": f"streamfold/{__version__}"})
        if api_key is not None:
            self._headers["Authorization"] = bearer(api_key)
        self._headers.update(headers)
        self._limits = limits
        self._clamped: Literal["raise", "keep"] = clamped
        self._new_transport = transport_factory(transport, limits.calls)
        self._internals = ClientInternals(
            engine=None if engine == "auto" else ENGINES[engine](),
            timeouts=timeouts,
            retries=retries,
            experts=experts,
            tokenizer=tokenizer,
        )
        self._retry_log = RetryLog()
        self._session: _Session | None = None

    def __client_internals__(self) -> ClientInternals:
        """For the layers above: see :mod:`streamfold.client._internal`."""
        return self._internals

    # Settings and state.

    def __repr__(self) -> str:
        running = len(self._session.calls) if self._session else 0
        return f"<Client of {self.engine} at {self._base_url}: {running} running>"

    @property
    def base_url(self) -> str:
        """The normalized address, without a trailing slash."""
        return self._base_url

    @property
    def engine(self) -> str:
        """The kind of server, as the argument ``engine``; ``"auto"`` until :meth:`discover` has asked it."""
        engine = self._internals.engine
        return "auto" if engine is None else engine.name

    @property
    def experts(self) -> Experts | None:
        """The shape of routed experts; None: they are not requested."""
        return self._internals.experts

    @property
    def retries(self) -> Retries:
        """How often failures are retried, and after which pauses."""
        return self._internals.retries

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was given."""
        return self._internals.tokenizer

    @property
    def retried(self) -> int:
        """Retries since the client was created. A retry repeats a request that failed before its first token."""
        return self._retry_log.count

    @property
    def running(self) -> list[Running]:
        """A snapshot of each call that has not ended, oldest first; calls that wait for a slot or a retry too."""
        calls = self._session.calls.values() if self._session else ()
        return [
            Running(
                rid=call.rid,
                engine=self._base_url,
                age=call.age,
                token_count=call.token_count,
                tokens_per_second=call.tokens_per_second,
                ttft=call.ttft,
                last_event=call.last_event,
                tries=call.tries,
            )
            for call in sorted(calls, key=lambda call: call.started_at)  # a retry moves a call to the registry's end
        ]

    # Calls.

    def start(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        top_p: bool = False,
        prompt_token_ids: bool = False,
        experts_start: int = 0,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Call:
        """Start one call on the running event loop and return it; its request is sent when a slot is free.

        Args:
            input_ids: the prompt's token ids: a list, tuple or integer array. None: ``extra`` holds the prompt (text,
                images), and the engine reports its length.
            sampling_params: the engine's own. Read now, never changed. With ``max_new_tokens`` 0 the call gives an
                empty generation with finish reason ``"length"``, and no request is sent.
            rid: request id of the first try. None, and for each retry: 32 new hex digits. Engines abort by prefix, so
                give ids of equal length.
            logprobs: whether to request the logprob of each sampled token.
            top_p: whether to request the ids that each token was sampled from (top-p replay).
            prompt_token_ids: whether to request the prompt's token ids, for prompts that are text (SGLang 0.5.13, vLLM
                0.30; ``vllm-completions`` always sends them). SGLang repeats them in each event.
            experts_start: first position whose routed experts are requested.
            headers: added to this call's requests.
            extra: added to the request's JSON object.
            aborted: your own flag. While it is true no request leaves, and a request that has just left is aborted as
                by :meth:`Call.abort`. It is read right before and right after each send, and during retry pauses.

        Raises:
            ValueError: an argument is invalid; the message says which.
            TypeError: a value cannot be written as JSON.
            RuntimeError: no event loop is running, the client is bound to another one, or it is being closed.
        """
        session = self._bound()
        options = RequestOptions(
            rid=session.new_rid(rid),
            logprobs=logprobs,
            top_p=top_p,
            prompt_token_ids=prompt_token_ids,
            experts=self._internals.experts,
            experts_start=experts_start,
            extra=extra,
        )
        request = self._request(input_ids, sampling_params, options, headers)
        runner = self._runner(session, request, AbortSignal.of(aborted))
        if request.budget == 0:
            none = np.empty(0)
            runner.end_with(Generation(none, none if logprobs else None, finish_reason="length"))
        else:
            session.start(runner, request)
        return Call(runner)

    def _request(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        options: RequestOptions,
        headers: Mapping[str, str] | None,
    ) -> CallRequest:
        engine = self._internals.engine_spec
        ids = None if input_ids is None else token_array(input_ids, self._vocab_size)
        if not 0 <= options.experts_start <= (2**31 if ids is None else len(ids)):
            raise ValueError(f"experts_start must be a position in the prompt, not {options.experts_start}")
        budget = engine.budget(sampling_params)
        payload = engine.payload(ids, sampling_params, options)
        return CallRequest(
            engine=engine,
            url=self._base_url + engine.path,
            headers=self._with(headers),
            body=orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS),
            options=options,
            prompt_len=None if ids is None else len(ids),
            budget=budget,
            drain=self._internals.timeouts.drain if engine.asks_side_data(payload) else 0.0,
            connect_timeout=self._internals.timeouts.connect,
            clamped=self._clamped,
            max_event_bytes=self._limits.max_event_bytes,
        )

    def _runner(self, session: _Session, request: CallRequest, host_abort: AbortSignal) -> CallRunner:
        def make_attempt(rid: str) -> Attempt:
            return Attempt(
                rid,
                request.parser(),
                transport=self._new_transport(),
                control=session.control,
                timeouts=self._internals.timeouts,
            )

        return CallRunner(
            request.options.rid,
            make_attempt,
            retries=self._internals.retries,
            slots=session.slots,
            registry=session.calls,
            drain=request.drain,
            host_abort=host_abort,
            retry_log=self._retry_log,
        )

    async def generate(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        top_p: bool = False,
        prompt_token_ids: bool = False,
        experts_start: int = 0,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Generation:
        """Start a call as :meth:`start` does, and await it. Cancelling this aborts the call.

        Raises:
            StreamfoldError: the call failed; ``.partial`` holds what was received.
        """
        return await self.start(
            input_ids,
            sampling_params,
            rid=rid,
            logprobs=logprobs,
            top_p=top_p,
            prompt_token_ids=prompt_token_ids,
            experts_start=experts_start,
            headers=headers,
            extra=extra,
            aborted=aborted,
        )

    # Aborts.

    async def abort_all(self) -> None:
        """Abort every call of this client as :meth:`Call.abort` does, and wait until all have ended.

        Samples that ``complete()`` works on are not resumed. Drains that have started continue. Other clients of the
        same engine are not affected.
        """
        self._internals.signal_abort()
        calls = list(self._bound().calls.values())
        for call in calls:
            if not call.aborting:
                call.abort_soon()
        await CallRunner.wait(calls)

    async def abort_engines(self, seconds: float = 30.0) -> bool:
        """Abort every request on the engine, or on all engines of the router: those of other clients too.

        Each engine gets abort requests, and its load is read, until it is idle. Calls of this client that run there
        end with finish reason ``"abort"``. Calls that wait for a slot or a retry are on no engine and continue: use
        ``aborted=``, or :meth:`abort_all` as well.

        Args:
            seconds: the longest time this may take.

        Returns:
            Whether all engines that answer are idle. An engine that does not answer or does not report its load is
            logged; nothing is raised.
        """
        check_seconds("seconds", seconds, optional=False)
        return await self._bound().control.abort_all(seconds)

    # The server.

    async def discover(self) -> str:
        """Ask the server which engine it is, as for ``engine="auto"``, and return its name. Sets :attr:`engine`.

        Raises:
            EngineError: it cannot be reached, refuses access, or is no known engine.
        """
        control = self._bound().control
        engine = await detect(control.request, self._base_url, control.workers)
        self._internals.engine = control.engine = engine
        return engine.name

    async def workers(self) -> list[str]:
        """Base URLs of the engines: those that a router lists, otherwise the client's own."""
        return await self._bound().control.workers()

    async def load(self) -> int:
        """Requests that run or wait on the engine, or on all engines of the router: those of other clients too.

        Raises:
            EngineError: an engine cannot be reached, or does not report its load.
        """
        return await self._bound().control.load()

    # Its life.

    async def aclose(self) -> None:
        """Abort all calls without draining and close every connection. The client may be used again afterwards.

        No task and no socket is left. This takes at most the connect timeout while a connection is being opened, and
        about 10 s if an engine accepts connections and answers nothing.
        """
        self._internals.signal_abort()
        session = self._session
        if session is None:
            return
        if session.loop.is_closed():  # it took everything along
            self._session = None
            return
        self._check_loop(session)
        if session.closing is None:
            session.closing = session.loop.create_task(self._close(session))
        await asyncio.shield(session.closing)

    async def __aenter__(self) -> Self:
        if self._internals.engine is None:
            try:
                await self.discover()
            except BaseException:  # there will be no exit, and the next entry may be on another loop
                await self.aclose()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _with(self, headers: Mapping[str, str] | None) -> httpx.Headers:
        merged = self._headers.copy()
        merged.update(headers)
        merged.update({"Accept-Encoding": "identity", "Content-Type": "application/json"})
        return merged

    def _bound(self) -> _Session:
        """The session on the running event loop, opened on first use."""
        session = self._session
        if session is None:
            session = self._session = self._open(asyncio.get_running_loop())
        self._check_loop(session)
        if session.closing is not None:
            raise RuntimeError(
                "the client is being closed: use it again after `await client.aclose()`, or create another one"
            )
        return session

    @staticmethod
    def _check_loop(session: _Session) -> None:
        if session.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this client is in use on another event loop: create one client per loop (and per process), or "
                "`await client.aclose()` on the old loop first"
            )

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Session:
        engine = self._internals.engine or Sglang()
        control = EngineControl(self._base_url, engine, self._with(None), self._new_transport())
        return _Session(loop, control, Slots(self._limits.calls, per_pass=_STARTS_PER_PASS))

    async def _close(self, session: _Session) -> None:
        for call in list(session.calls.values()):
            call.abort_soon(drain=0.0)
        try:
            while session.pumps:
                await asyncio.wait(session.pumps)
            await session.control.aclose()
        finally:
            self._session = None
