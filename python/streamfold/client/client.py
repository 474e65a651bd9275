"""The client: it starts calls, bounds how many run, and ends them."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import httpx
import numpy as np
import orjson

from streamfold._core import Generation, Parser, __version__
from streamfold.client.abort_signal import AbortSignal
from streamfold.client.attempt import Attempt
from streamfold.client.call import Call, RetryLog
from streamfold.client.control import EngineControl
from streamfold.client.limits import Limits, Retries, Slots, Timeouts, check_seconds
from streamfold.client.transport import chosen
from streamfold.client.urls import base_url as normalised
from streamfold.client.urls import bearer
from streamfold.engines.base import RequestOptions, token_array
from streamfold.engines.detect import ENGINES, detect
from streamfold.engines.sglang import Sglang

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from streamfold._core import Experts
    from streamfold._types import Tokenizer
    from streamfold.engines.base import EngineSpec, TokenIds

__all__ = ["Client", "Running"]

_STARTS = 64  # in one pass of the event loop: a start costs up to a millisecond of CPU


@dataclass(frozen=True)
class Running:
    """What one call was doing when it was looked at.

    Attributes:
        rid: the request id of its current try.
        engine: the base URL that it was sent to.
        age: seconds since its start, waits for a slot and pauses included.
        token_count: tokens so far.
        tokens_per_second: tokens per second since the request of the current try was sent.
        ttft: seconds from the sending to the first token; None before it.
        last_event: seconds since the last event that brought a token; None before it.
        tries: tries begun; 0 while it waits for its first slot.
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
    """All that is bound to one event loop, from the first use of a client to its ``aclose``."""

    loop: asyncio.AbstractEventLoop
    control: EngineControl
    slots: Slots
    calls: dict[str, Call] = field(default_factory=dict)  # by the id of the current try
    pumps: set[asyncio.Task[None]] = field(default_factory=set)
    closing: asyncio.Task[None] | None = None


class Client:
    """Asks one inference engine, or the engines behind one router, for generations.

    A client makes nothing until it is used, so it may be made before a fork and outside an event loop. Its first use
    binds it to the running loop, :meth:`aclose` frees it again. Environment variables (proxies, ``NO_PROXY``) do
    not affect it, redirects are not followed, and no cookies are kept.

    Args:
        base_url: the engine's or router's address, with or without a path: ``http://10.0.0.1:30000``, ``[::1]:30000``.
        engine: how it is spoken to: ``"sglang"``, ``"vllm"`` (its token endpoint), ``"vllm-completions"``, ``"auto"``:
            the server is asked, on entering ``async with`` or by :meth:`discover`.
        tokenizer: kept for those who write samples, as :attr:`tokenizer`; the client itself needs none.
        headers: sent with every request, in addition to those that the client needs.
        api_key: sent as a bearer token.
        timeouts: how long each phase of a try may last.
        retries: how often a call that fails before its first token is tried, and the pauses in between.
        limits: how much may be done at once.
        experts: how routed experts are written; given, every call asks for them.
        vocab_size: one more than the largest id that the engine takes. Some servers die of others; given, they are
            refused here.
        clamped: what to do with a logprob that is the engine's stand-in for minus infinity: ``"raise"`` a
            ``DecodeError``, or ``"keep"`` and count it.
        transport: ``"httpx"``, or a transport of your own, for TLS with a private authority
            (``httpx.AsyncHTTPTransport(verify=context, limits=httpx.Limits(max_keepalive_connections=0))``), Unix
            sockets or tests. It carries all requests, and its own pool must not be what they wait for.

    Raises:
        ValueError: an unknown ``engine``, ``transport`` or ``clamped``, or an address or a key that is none.
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
        self._base = normalised(base_url)
        self._engine = None if engine == "auto" else ENGINES[engine]()
        self._vocab_size = vocab_size
        self._headers = httpx.Headers({"Accept": "*/*", "User-Agent": f"streamfold/{__version__}"})
        if api_key is not None:
            self._headers["Authorization"] = bearer(api_key)
        self._headers.update(headers)
        self._tokenizer = tokenizer
        self._timeouts = timeouts
        self._retries = retries
        self._limits = limits
        self._experts = experts
        self._clamped: Literal["raise", "keep"] = clamped
        self._transport = chosen(transport, limits.calls)
        self._retry_log = RetryLog()
        self._abort_signal = AbortSignal()
        self._session: _Session | None = None

    @property
    def base_url(self) -> str:
        """The address in its normal form, without a trailing slash."""
        return self._base

    @property
    def experts(self) -> Experts | None:
        """How routed experts are written; None: they are not asked for."""
        return self._experts

    @property
    def retries(self) -> Retries:
        """How often something is asked for again that failed for a while."""
        return self._retries

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was given."""
        return self._tokenizer

    @property
    def running(self) -> list[Running]:
        """The calls that have not ended, those that wait for a slot or a next try included, oldest first."""
        calls = self._session.calls.values() if self._session else ()
        return [
            Running(
                rid=call.rid,
                engine=self._base,
                age=call.age,
                token_count=call.token_count,
                tokens_per_second=call.tokens_per_second,
                ttft=call.ttft,
                last_event=call.last_event,
                tries=call.tries,
            )
            for call in sorted(calls, key=lambda call: call.started)  # a retried one has moved to the registry's end
        ]

    def start(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        top_p: bool = False,
        experts_start: int = 0,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Call:
        """Start one call on the running event loop, at once or as soon as a slot is free, and return.

        Args:
            input_ids: the prompt: a list, tuple or integer array of token ids. None: it is in ``extra`` (text, images);
                its length is then taken from the engine's word.
            sampling_params: as the engine has them. Read now, never changed. A budget (``max_new_tokens``) of 0
                gives an empty generation with finish reason ``"length"``, without a request.
            rid: the request id of the first try. None: a new one of 32 hex digits, as each later try has. Engines
                match ids by prefix when they abort, so ids of your own should be of one length.
            logprobs: whether to ask for the log-probability of each sampled token.
            top_p: whether to ask for the ids that sampling could choose from (top-p replay).
            experts_start: the first position whose routed experts are asked for.
            headers: further headers of this request.
            extra: further keys of the request's JSON object.
            aborted: a host's own flag. It is looked at right before each try is sent, and right after: once it is
                True, no request leaves, and one that has just left is aborted as by :meth:`Call.abort`.

        Raises:
            ValueError: something asked for makes no sense; the message says what.
            TypeError: a value cannot be written as JSON.
            RuntimeError: no event loop is running, the client is bound to another one, or it is being closed.
        """
        session = self._bound()
        if rid is None:
            rid = uuid.uuid4().hex
        elif not rid:
            raise ValueError("rid must not be empty: an engine takes an abort of the empty id for an abort of all")
        elif rid in session.calls:
            raise ValueError(f"rid {rid!r} is in use by a call that runs: give each call its own, or none")
        engine = self.engine_spec
        ids = None if input_ids is None else token_array(input_ids, self._vocab_size)
        if not 0 <= experts_start <= (2**31 if ids is None else len(ids)):
            raise ValueError(f"experts_start must be a position in the prompt, not {experts_start}")
        budget = engine.budget(sampling_params)
        asked = RequestOptions(
            rid=rid,
            logprobs=logprobs,
            top_p=top_p,
            experts=self._experts,
            experts_start=experts_start,
            extra=extra,
        )
        payload = engine.payload(ids, sampling_params, asked)
        body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        merged = self._with(headers)
        prompt_len = None if ids is None else len(ids)
        first = rid

        def attempt(rid: str) -> Attempt:
            parser = Parser(
                engine.dialect,
                logprobs=logprobs,
                experts=self._experts,
                prompt_len=prompt_len,
                experts_start=experts_start,
                clamped=self._clamped,
                max_new_tokens=budget,
                max_event_bytes=self._limits.max_event_bytes,
            )
            return Attempt(rid, parser, transport=self._transport(), control=session.control, timeouts=self._timeouts)

        def request(rid: str) -> httpx.Request:
            named = merged.copy()
            named.update(engine.headers(rid))  # in place of a caller's own: of two of a name servers take the first
            return httpx.Request(
                "POST",
                self._base + engine.path,
                headers=named,
                content=body if rid == first else engine.rename(body, first, rid),
                extensions={"timeout": {"connect": self._timeouts.connect}},  # the other phases are Attempt's
            )

        call = Call(
            rid,
            attempt,
            retries=self._retries,
            slots=session.slots,
            calls=session.calls,
            drain=self._timeouts.drain if engine.asks_side_data(payload) else 0.0,
            host_abort=AbortSignal.of(aborted),
            retry_log=self._retry_log,
        )
        if budget == 0:
            none = np.empty(0)
            call.answer(Generation(none, none if logprobs else None, finish_reason="length"))
            return call
        pump = call.run(request)
        session.pumps.add(pump)
        pump.add_done_callback(session.pumps.discard)
        return call

    async def generate(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        logprobs: bool = True,
        top_p: bool = False,
        experts_start: int = 0,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Generation:
        """Start a call as :meth:`start` does, and await it. Cancelling this aborts the call.

        Raises:
            StreamfoldError: the call failed; ``.partial`` holds what had been received.
        """
        return await self.start(
            input_ids,
            sampling_params,
            rid=rid,
            logprobs=logprobs,
            top_p=top_p,
            experts_start=experts_start,
            headers=headers,
            extra=extra,
            aborted=aborted,
        )

    async def abort_all(self) -> None:
        """Abort every call that has not ended, as :meth:`Call.abort` does, and wait until all have.

        Drains that are under way are left alone. Other clients of the same engine are not affected. Samples that are
        being completed are not asked for again, whatever their last call came to.
        """
        self._signal_abort()
        calls = list(self._bound().calls.values())
        for call in calls:
            if not call.aborting:
                call.abort_soon()
        await Call.wait(calls)

    async def abort_engines(self, seconds: float = 30.0) -> bool:
        """End every request on the engine, or on all of the router's engines; anybody's, not only ours.

        Each engine is told to end all, and its load is looked at, over and over until it has no request left. Calls
        of this client that run there end with finish reason ``"abort"``; those that wait for a slot or for another
        try are not on an engine, and go on: give them ``aborted=``, or call :meth:`abort_all` as well.

        Args:
            seconds: how long to go on at most.

        Returns:
            Whether all engines that answer are idle. One that is dead, deaf or does not tell its load is logged, and
            nothing is raised.
        """
        check_seconds("seconds", seconds, optional=False)
        return await self._bound().control.abort_all(seconds)

    @property
    def engine(self) -> str:
        """What the server is: see the argument of that name; ``"auto"`` until it has been found out."""
        return "auto" if self._engine is None else self._engine.name

    async def discover(self) -> str:
        """Ask the server what it is, as for ``engine="auto"``; :attr:`engine` from now on.

        Raises:
            EngineError: it cannot be reached, does not let us in, or is none of those that are known.
        """
        control = self._bound().control
        self._engine = control.engine = await detect(control.ask, self._base, control.workers)
        return self._engine.name

    @property
    def retried(self) -> int:
        """How many requests have been made again since the client was made, each before its call's first token."""
        return self._retry_log.count

    async def workers(self) -> list[str]:
        """Base URLs of the engines: what a router lists, otherwise the client's own."""
        return await self._bound().control.workers()

    async def load(self) -> int:
        """How many requests run or wait on the engine, or on all of the router's engines; anybody's, not only ours.

        Raises:
            EngineError: an engine could not be reached, or did not say.
        """
        return await self._bound().control.load()

    async def aclose(self) -> None:
        """Abort what runs, without draining, and close every connection. The client can be used again afterwards.

        Ends when nothing is left: at the latest after the connect time-out, if an engine that takes no connection
        is being waited for, or after some ten seconds, if one takes them and answers nothing.
        """
        self._signal_abort()
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
        if self._engine is None:
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

    @property
    def abort_signal(self) -> AbortSignal:
        """Set by the next :meth:`abort_all` or :meth:`aclose`; after that there is another one."""
        return self._abort_signal

    def _signal_abort(self) -> None:
        ended, self._abort_signal = self._abort_signal, AbortSignal()
        ended.set()

    @property
    def engine_spec(self) -> EngineSpec:
        """The engine's engine_spec, as far as those above a client have to know them.

        Raises:
            RuntimeError: with ``engine="auto"``, before the server was asked.
        """
        if self._engine is None:
            raise RuntimeError('engine="auto": enter `async with client`, or `await client.discover()` first')
        return self._engine

    def _bound(self) -> _Session:
        """The session on the running loop, made on first use."""
        session = self._session
        if session is None:
            session = self._session = self._open(asyncio.get_running_loop())
        self._check_loop(session)
        if session.closing is not None:
            raise RuntimeError(
                "the client is being closed; use it again after `await client.aclose()`, or make another"
            )
        return session

    @staticmethod
    def _check_loop(session: _Session) -> None:
        if session.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this client is in use on another event loop: make one client per loop (and per process), or "
                "`await client.aclose()` on the old loop first"
            )

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Session:
        control = EngineControl(self._base, self._engine or Sglang(), self._with(None), self._transport())
        return _Session(loop, control, Slots(self._limits.calls, per_pass=_STARTS))

    async def _close(self, session: _Session) -> None:
        for call in list(session.calls.values()):
            call.abort_soon(drain=0.0)
        try:
            while session.pumps:
                await asyncio.wait(session.pumps)
            await session.control.aclose()
        finally:
            self._session = None
