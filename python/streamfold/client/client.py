"""Client: sends generation requests to one inference engine or router, limits how many run, and aborts them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import orjson

from streamfold._core import Generation, __version__
from streamfold.client._internal import ClientInternals, Totals
from streamfold.client.abort_signal import AbortSignal
from streamfold.client.arguments import check_kind, check_mapping
from streamfold.client.call import Call
from streamfold.client.drivers.choose import driver_factory
from streamfold.client.fields import with_fields
from streamfold.client.limits import Limits, Retries, Timeouts, check_seconds
from streamfold.client.observer import Observation, Observer, all_observers, subject_of_context
from streamfold.client.request import CallRequest
from streamfold.client.runner import CallRunner, RetryLog
from streamfold.client.session import Session
from streamfold.client.side_data import MissingSideData
from streamfold.client.urls import BaseUrl, bearer
from streamfold.engines.base import RequestOptions, common_extra
from streamfold.engines.detect import ENGINES, detect
from streamfold.engines.sglang import Sglang
from streamfold.engines.token_ids import token_array

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    import httpx
    from typing_extensions import Self

    from streamfold._core import Experts
    from streamfold._types import Tokenizer
    from streamfold.client.drivers.base import Fields
    from streamfold.client.session import Running
    from streamfold.client.trace import Trace
    from streamfold.engines.base import EngineSpec, TokenIds

__all__ = ["Client"]

_logger = logging.getLogger("streamfold")
_TIMEOUTS = "Timeouts(first_token=120)"
_BODY_HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}  # nobody may replace them


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
        headers: added to every request; a call's own come before them. ``Host``, ``Content-Length`` and others that
            belong to HTTP itself are refused.
        extra: added to the JSON object of every request, for what is no sampling parameter: a LoRA adapter (SGLang
            ``lora_path``, vLLM ``model``), ``priority``, ``cache_salt``. A call's own ``extra`` comes before it.
        api_key: sent as a bearer token.
        timeouts: for each phase of a try.
        retries: how often a call that fails before its first token is retried, and the pauses in between.
        limits: how many calls run at once, and the longest event.
        experts: the shape of routed experts. If given, every call requests them.
        vocab_size: if given, prompts with larger ids are refused here; some servers crash on them.
        clamped: for a logprob that is the engine's stand-in for minus infinity: ``"raise"`` a ``DecodeError``, or
            ``"keep"`` and count it.
        transport: ``"direct"``: sockets of its own, which keep and reuse connections. ``"httpx"``, or your own httpx
            transport, for proxies and tests. Your own carries all requests; its pool must have room for all calls and
            their aborts.
        ssl_context: for ``https``, for example with a private certificate authority. None: the usual authorities. Your
            own transport has its own.
        trace: what the calls do is written to it, see :class:`~streamfold.Trace`.
        observers: are told of the phases and the end of each call, see :mod:`streamfold.telemetry`.

    Raises:
        ValueError: ``engine``, ``transport`` or ``clamped`` is unknown, ``base_url``, ``api_key`` or a header is
            invalid, or ``extra`` holds a prompt or a key that the client sets itself.
        TypeError: an argument is of another kind, or ``extra`` cannot be written as JSON.
    """

    def __init__(
        self,
        base_url: str,
        *,
        engine: Literal["sglang", "vllm", "vllm-completions", "auto"] = "sglang",
        tokenizer: Tokenizer | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # immutable
        retries: Retries = Retries(),  # noqa: B008  # immutable
        limits: Limits = Limits(),  # noqa: B008  # immutable
        experts: Experts | None = None,
        vocab_size: int | None = None,
        clamped: Literal["raise", "keep"] = "raise",
        transport: Literal["direct", "httpx"] | httpx.AsyncBaseTransport = "direct",
        ssl_context: ssl.SSLContext | None = None,
        trace: Trace | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        if engine not in ENGINES and engine != "auto":
            raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}, auto")
        if clamped not in ("raise", "keep"):
            raise ValueError(f'clamped must be "raise" or "keep", not {clamped!r}')
        check_kind("base_url", base_url, str, '"http://10.0.0.1:30000"')
        check_kind("timeouts", timeouts, Timeouts, _TIMEOUTS)
        check_kind("retries", retries, Retries, "Retries(tries=10)")
        check_kind("limits", limits, Limits, "Limits(calls=512)")
        self._base_url = BaseUrl.parse(base_url)
        self._vocab_size = vocab_size
        fields: Fields = (("Accept", "*/*"), ("User-Agent", f"streamfold/{__version__}"))
        if api_key is not None:
            fields = (*fields, ("Authorization", bearer(api_key)))
        self._fields = with_fields(with_fields(fields, headers), _BODY_HEADERS)
        spec = None if engine == "auto" else ENGINES[engine]()
        self._extra = common_extra(extra, spec)
        self._limits = limits
        self._clamped: Literal["raise", "keep"] = clamped
        self._new_driver = driver_factory(transport, ssl_context, limits.calls)
        self._internals = ClientInternals(
            engine=spec,
            timeouts=timeouts,
            retries=retries,
            experts=experts,
            tokenizer=tokenizer,
            header_names=frozenset(name.lower() for name in headers or ()),
            observers=_checked_observers(trace, observers),
        )
        self._retry_log = RetryLog()
        self._warned_params: set[str] = set()
        self._missing = MissingSideData()
        self._session: Session | None = None

    def __client_internals__(self) -> ClientInternals:
        """For the layers above: see :mod:`streamfold.client._internal`."""
        return self._internals

    def __client_totals__(self) -> Totals:
        """For the layers above too: what :attr:`running` tells, summed up."""
        return self._session.totals() if self._session else Totals()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client cannot be pickled or copied, since it belongs to one process and event loop: pass on what makes "
            f"it, as functools.partial(Client, {self.base_url!r}, engine={self.engine!r}), and make one in each process"
        )

    # Settings and state.

    def __repr__(self) -> str:
        running = len(self._session.calls) if self._session else 0
        return f"<Client of {self.engine} at {self._base_url}: {running} running>"

    @property
    def base_url(self) -> str:
        """The normalized address, without a trailing slash."""
        return str(self._base_url)

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
        return self._session.running(self.base_url) if self._session else []

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
        timeouts: Timeouts | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Call:
        """Start one call on the running event loop and return it; its request is sent when a slot is free.

        Args:
            input_ids: the prompt's token ids: a list, tuple or integer array. None: ``extra`` holds the prompt (text,
                images), and the engine reports its length.
            sampling_params: the engine's own. Read now, never changed. With ``max_new_tokens`` 0 the call gives an
                empty generation with finish reason ``"length"``, and no request is sent.
            rid: request id of the first try. None, and for each retry: 32 new hex digits. Engines abort by prefix, so
                give ids of equal length. One that is in use at the engine fails the call.
            logprobs: whether to request the logprob of each sampled token.
            top_p: whether to request the ids that each token was sampled from (top-p replay).
            prompt_token_ids: whether to request the prompt's token ids, for prompts that are text (SGLang 0.5.13, vLLM
                0.30; ``vllm-completions`` always sends them). SGLang repeats them in each event.
            experts_start: first position whose routed experts are requested. The generation's start there, also if the
                engine ignores that and sends all of them.
            headers: added to this call's requests.
            extra: added to the request's JSON object.
            timeouts: for this call's tries. None: the client's.
            aborted: your own flag. While it is true no request leaves, and a request that has just left is aborted as
                by :meth:`Call.abort`. It is read right before and right after each send, and during retry pauses.

        Raises:
            ValueError: an argument is invalid; the message says which.
            TypeError: an argument is of another kind, such as a text for token ids, or cannot be written as JSON.
            RuntimeError: no event loop is running, the client is bound to another one, or it is being closed.
        """
        check_mapping("sampling_params", sampling_params, '{"max_new_tokens": 1024}')
        if extra is not None:
            check_mapping("extra", extra, '{"priority": 1}')
        if timeouts is not None:
            check_kind("timeouts", timeouts, Timeouts, _TIMEOUTS)
        session = self._bound()
        options = RequestOptions(
            rid=session.new_rid(rid),
            logprobs=logprobs,
            top_p=top_p,
            prompt_token_ids=prompt_token_ids,
            experts=self._internals.experts,
            experts_start=experts_start,
            extra={**self._extra, **(extra or {})},
        )
        request = self._request(input_ids, sampling_params, options, headers, timeouts or self._internals.timeouts)
        request.given_rid = rid
        runner = session.runner(
            request,
            None if aborted is None else AbortSignal.of(aborted),
            retries=self._internals.retries,
            retry_log=self._retry_log,
            missing=self._missing,
            observation=self._observation(),
        )
        if request.budget == 0:
            none = np.empty(0)
            runner.end_with(Generation(none, none if logprobs else None, finish_reason="length"))
        else:
            session.start(runner)
        return Call(runner)

    def _observation(self) -> Observation | None:
        told = all_observers(self._internals.observers)
        return Observation(told, subject_of_context()) if told else None

    def _request(
        self,
        input_ids: TokenIds | None,
        sampling_params: Mapping[str, Any],
        options: RequestOptions,
        headers: Mapping[str, str] | None,
        timeouts: Timeouts,
    ) -> CallRequest:
        engine = self._internals.engine_spec
        ids = None if input_ids is None else token_array(input_ids, self._vocab_size)
        if not 0 <= options.experts_start <= (2**31 if ids is None else len(ids)):
            raise ValueError(f"experts_start must be a position in the prompt, not {options.experts_start}")
        budget = engine.budget(sampling_params)
        self._warn_of_unknown(engine, sampling_params)
        payload = engine.payload(ids, sampling_params, options)
        if named := engine.headers(options.rid):
            with_fields((), named)  # a caller's id may be none that a header can hold
        return CallRequest(
            engine=engine,
            base_url=self._base_url,
            fields=with_fields(with_fields(self._fields, headers), _BODY_HEADERS) if headers else self._fields,
            body=orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS),
            options=options,
            side_data=engine.side_data(sampling_params, options),
            prompt_len=None if ids is None else len(ids),
            budget=budget,
            drain=timeouts.drain if engine.asks_side_data(payload) else min(timeouts.drain, engine.abort_drain),
            timeouts=timeouts,
            clamped=self._clamped,
            max_event_bytes=self._limits.max_event_bytes,
        )

    def _warn_of_unknown(self, engine: EngineSpec, sampling_params: Mapping[str, Any]) -> None:
        for name in engine.unknown_params(sampling_params):
            if name not in self._warned_params:
                self._warned_params.add(name)
                _logger.warning(
                    "%s has no sampling parameter %r in any release known here, and may refuse it, fail or ignore it",
                    engine.name,
                    name,
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
        timeouts: Timeouts | None = None,
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
            timeouts=timeouts,
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

        With several API servers, vLLM's abort reaches the requests of one of them only. Where requests stay after
        three aborts, the engine is paused (``mode=abort``, which ends them) and resumed at once; requests that arrive
        in between wait, which the log says. An engine that somebody else has paused, or that does not tell, is never
        paused or resumed.

        Args:
            seconds: the longest time this may take; a resume may take longer. An engine that cannot be reached, and a
                router that does not list its engines, are tried again for as long.

        Returns:
            Whether every engine was seen idle. False if any was not, or if the router did not say which engines there
            are: the log says which, and why. Nothing is raised.
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
        engine = await detect(control.request, self.base_url, control.workers)
        self._internals.engine = control.engine = engine
        return engine.name

    async def workers(self) -> list[str]:
        """Base URLs of the engines: those that a router lists, otherwise the client's own."""
        return await self._bound().control.workers()

    async def load(self) -> int:
        """Requests that run or wait on the engine, or on all engines of the router: those of other clients too.

        Engines that the router lists and that cannot be reached are left out, which the log says. vLLM's ``/load`` is
        read where ``/metrics`` tells no load (``--disable-log-stats``); it counts only with
        ``--enable-server-load-tracking``, so its 0 is believed only after it has said more; it counts what
        one API server holds.

        Raises:
            EngineError: no engine can be reached, or one that can be does not report its load.
        """
        return await self._bound().control.load()

    # Its life.

    async def aclose(self) -> None:
        """Abort all calls without draining and close every connection. The client may be used again afterwards.

        No task and no socket is left, and every abort was posted to each engine that answers. This takes at most the
        connect timeout while a connection is being opened, about 10 s if an engine accepts connections and answers
        nothing, and 30 s for the posts of aborts; the log names an engine that did not get them.
        """
        self._internals.signal_abort()
        session = self._session
        if session is None:
            return
        if session.loop.is_closed():  # it took everything along but the sockets
            self._session = None
            session.abandon()
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

    def _bound(self) -> Session:
        """The session on the running event loop, opened on first use."""
        session = self._session
        if session is None:
            session = self._session = self._open()
        self._check_loop(session)
        if session.closing is not None:
            raise RuntimeError(
                "the client is being closed: use it again after `await client.aclose()`, or create another one"
            )
        return session

    @staticmethod
    def _check_loop(session: Session) -> None:
        if session.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this client is in use on another event loop: create one client per loop (and per process), or "
                "`await client.aclose()` on the old loop first"
            )

    def _open(self) -> Session:
        engine = self._internals.engine or Sglang()
        return Session(self.base_url, engine, self._new_driver(), self._fields, self._limits.calls)

    async def _close(self, session: Session) -> None:
        try:
            await session.aclose()
        finally:
            self._session = None


def _checked_observers(trace: Trace | None, observers: Iterable[Observer]) -> tuple[Observer, ...]:
    if trace is not None:
        check_kind("trace", trace, Observer, 'Trace("trace.json")')
    given = tuple(observers)
    for observer in given:
        check_kind("each of observers", observer, Observer, "PrometheusCollector()")
    return given if trace is None else (trace, *given)
