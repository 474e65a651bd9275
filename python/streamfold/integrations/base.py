"""What the adapters for trainers share: what a trainer is to them, settings, and clients.

There is one client for each event loop and router.

Settings are attributes of the host's ``args`` or environment variables; attributes win. For time-outs ``none`` (in YAML
``null``) stands for no limit.

================================== =============================== ========== ========================================
attribute                          variable                        default    meaning
================================== =============================== ========== ========================================
``streamfold_resume``              STREAMFOLD_RESUME               continue   after a stream broke off: ``continue``
                                                                              from the tokens that came, ``restart``
                                                                              without them, or ``raise``
``streamfold_tries``               STREAMFOLD_TRIES                60         requests for one call while no token has
                                                                              come, and resumes of one sample
``streamfold_timeout_connect``     STREAMFOLD_TIMEOUT_CONNECT      10         seconds to open a connection
``streamfold_timeout_first_token`` STREAMFOLD_TIMEOUT_FIRST_TOKEN  600        seconds from the request to its first
                                                                              token: queue and prefill
``streamfold_timeout_next_token``  STREAMFOLD_TIMEOUT_NEXT_TOKEN   300        seconds from one token to the next
``streamfold_drain``               STREAMFOLD_DRAIN                2          seconds that an abort waits for routed
                                                                              experts and top-p ids, which come last
``streamfold_concurrency``         STREAMFOLD_CONCURRENCY          4096       requests at once, to each router; each
                                                                              holds one socket
``streamfold_max_event_bytes``     STREAMFOLD_MAX_EVENT_BYTES      1073741824 bytes in one event; more is an error
================================== =============================== ========== ========================================
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, cast, get_args

from streamfold.client.abort_signal import AbortSignal
from streamfold.client.client import Client
from streamfold.client.limits import Limits, Retries, Timeouts
from streamfold.samples.completion import Resume

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sized
    from contextlib import AbstractContextManager
    from types import ModuleType

    from streamfold._core import Experts, Generation
    from streamfold.samples.completion import Extra

__all__ = [
    "Host",
    "Seat",
    "address",
    "has_any",
    "notes_of",
    "resume_policy",
    "seat",
    "setting",
]

Args: TypeAlias = Any  # the host's own; releases differ, so what may be missing is read with getattr
Value: TypeAlias = Any  # of a setting
HostSample: TypeAlias = Any  # likewise the host's own

log = logging.getLogger("streamfold")

_NO_LIMIT: Final = ("none", "null", "")
_UNSET: Final = object()
_GRACE_SECONDS: Final = 5.0  # besides the drain: for streams to end that an abort of whole servers has reached


def setting(args: Args, name: str, default: Value) -> Value:
    """One of the settings above, named without its prefix."""
    value = getattr(args, f"streamfold_{name}", _UNSET)
    if value is _UNSET:
        value = os.environ.get(f"STREAMFOLD_{name.upper()}", default)
    return None if isinstance(value, str) and value.lower() in _NO_LIMIT else value


def resume_policy(args: Args) -> Resume:
    """What to do after a stream broke off.

    Raises:
        ValueError: the setting is none of the three words.
    """
    policy = setting(args, "resume", "continue")
    if policy not in get_args(Resume):
        raise ValueError(f"streamfold_resume must be one of {', '.join(get_args(Resume))}, not {policy!r}")
    return cast("Resume", policy)


def address(host: str, port: int) -> str:
    """The URL of a router that is told as host and port; a bare IPv6 address gets its brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def notes_of(sample: HostSample) -> dict[str, Any]:
    """A sample's metadata, which may be shared: replace it, never change it."""
    return getattr(sample, "metadata", None) or {}


def has_any(inputs: Sized | None) -> bool:
    """Whether there are any images, or other inputs of a sample; an array of them has no truth value."""
    return inputs is not None and len(inputs) > 0


def _function_at(path: str) -> Any:  # noqa: ANN401  # whatever is there
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class Host(ABC):
    """A trainer that imports us: where its own things are, and what it does in a way of its own. Has no state.

    Attributes:
        package: its name, and that of our module for it.
        engine: what it generates with. Its options that concern the engine begin with that name.
        session_policy: the router's policy under which ``session_header`` keeps the calls of a sample together.
        session_header: likewise.
        seed: its sampling parameter for a seed.
        aborts_silently: whether the engine may end a stream without a finish reason when the host has aborted it.
    """

    package: ClassVar[str]
    engine: ClassVar[Literal["sglang", "vllm"]]
    session_policy: ClassVar[str]
    session_header: ClassVar[str]
    seed: ClassVar[str]
    aborts_silently: ClassVar[bool] = False

    # Where its things are.

    def module(self, name: str) -> ModuleType:
        """One of its modules. They are imported in functions: they are there in the host alone."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def rollout(self) -> Any:  # noqa: ANN401  # a module, whose names a type checker cannot know
        """Its module that generates: ``GenerateState`` and so on."""
        return self.module(f"rollout.{self.engine}_rollout")

    def find(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Something that not every release has; None if this one does not."""
        try:
            return getattr(self.module(module), name, None)
        except ModuleNotFoundError:
            return None

    def load(self, path: str) -> Callable[..., Any]:
        """The function at a dotted path, found as the host finds it."""
        load = self.find("utils.misc", "load_function") or _function_at
        function: Callable[..., Any] = load(path)
        return function

    def option(self, args: Args, name: str, *default: Value) -> Value:
        """An option that concerns the engine; ``name`` is without the engine's."""
        return getattr(args, f"{self.engine}_{name}", *default)

    def model(self, args: Args, sample: HostSample) -> tuple[str, str] | None:
        """The model to ask, where there are several: its name and its router's address. None: the usual one.

        Raises:
            ValueError: no router is known for the model that is named.
        """
        routers = self.option(args, "model_routers", None)
        name = notes_of(sample).get("model_name") or setting(args, "model", None)
        if not routers or not name:
            return None
        if name not in routers:
            raise ValueError(f"no router for the model {name!r}; {self.engine}_model_routers has {', '.join(routers)}")
        ip, port = routers[name]
        return name, address(ip, port)

    @property
    def generator(self) -> str:
        """The dotted path of our generate function for it."""
        return f"streamfold.{self.package}.generate_streaming"

    # What it does its own way.

    def experts_dtype(self, count: int | None) -> Literal["int32", "uint8"]:
        """How routed experts are asked for, if a layer has so many of them; where the reply tells, that counts."""
        del count
        return "int32"

    def params(self, args: Args, sample: HostSample, given: Mapping[str, Any], *, evaluation: bool) -> dict[str, Any]:
        """The sampling parameters of a sample, as :func:`~streamfold.samples.completion.complete` takes them."""
        del args, sample, evaluation
        return dict(given)

    @abstractmethod
    async def besides(
        self, args: Args, sample: HostSample, seat: Seat, headers: Mapping[str, str], aborted: AbortSignal
    ) -> Extra | None:
        """What a sample's requests hold besides ids and parameters: images, for one.

        Returns:
            None: the host has begun to abort before it was known.
        """

    @abstractmethod
    def traced(self, generation: Generation) -> dict[str, Any]:
        """What is told of a generation, as the host's builder of span attributes takes it."""

    # Its spans.

    def span(self, sample: HostSample, name: str, **attrs: Any) -> AbstractContextManager[Any]:  # noqa: ANN401
        """A span on the host's trace; nothing if it has no such thing."""
        trace_span = self._traced_by("trace_span")
        if trace_span is None:
            return contextlib.nullcontext()
        span: AbstractContextManager[Any] = trace_span(sample, f"{self.engine}_{name}", attrs=attrs)
        return span

    def describe(self, span: object, generation: Generation) -> None:
        """Let a span tell what a call brought, if it came to an end."""
        build = self._traced_by(f"build_{self.engine}_meta_trace_attrs")
        update = getattr(span, "update", None)
        if build is None or update is None or generation.finish_reason is None:
            return
        try:
            update(build(self.traced(generation)))
        except Exception:  # its trace is not worth a sample
            log.exception("the span of a call could not be described")

    def _traced_by(self, name: str) -> Any:  # noqa: ANN401
        """One of its helpers for spans, which newer and older releases have in different places."""
        found = (self.find(module, name) for module in ("observability.trace_utils", "utils.trace_utils"))
        return next((helper for helper in found if helper is not None), None)


@dataclass(eq=False)
class Seat:
    """Where calls to one router are made from, in one event loop."""

    client: Client
    timeouts: Timeouts
    ends: set[int] = field(default_factory=set)  # tokens at which the engine was seen to stop
    _closes: AsyncGenerator[None, None] | None = None  # kept for the loop, which closes it at its own end
    _users: int = 0
    _state: Any = None
    _abort: AbortSignal = field(default_factory=AbortSignal)
    _unsubscribe: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _abort_all: asyncio.Task[None] | None = None

    def abort_signal(self, state: Any) -> AbortSignal:  # noqa: ANN401  # the host's own
        """The host's flag ``state.aborted``: one signal for all calls that are made from here."""
        if self._state is not state:
            self._state, self._abort = state, AbortSignal(lambda: state.aborted)
        return self._abort

    @contextlib.contextmanager
    def watched(self, abort: AbortSignal) -> Iterator[None]:
        """End what is left of our calls a while after the host has begun to abort.

        A host that aborts whole servers waits for every stream to end. A request that reached its engine just after
        the sweep may run, or wait, for ever.
        """
        self._users += 1
        if self._unsubscribe is None:
            self._unsubscribe = abort.subscribe(lambda: self._start_timer(abort))
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unsubscribe()
                self._unsubscribe = None
                for pending in (self._timer, self._abort_all):
                    if pending is not None:
                        pending.cancel()

    def _start_timer(self, abort: AbortSignal) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.timeouts.drain + _GRACE_SECONDS, self._abort_rest, abort)

    def _abort_rest(self, abort: AbortSignal) -> None:
        if abort.is_set():
            self._abort_all = asyncio.get_running_loop().create_task(self.client.abort_all())


_seats: dict[asyncio.AbstractEventLoop, dict[object, Seat]] = {}


async def seat(host: Host, args: Args, url: str, experts: Experts | None = None) -> Seat:
    """The running loop's client for this router, made on first use and closed with the loop.

    Raises:
        ValueError: a setting is none, or ``url`` no address.
    """
    loop = asyncio.get_running_loop()
    if loop not in _seats:
        for gone in [other for other in list(_seats) if other.is_closed()]:
            _seats.pop(gone, None)
        _seats[loop] = {}
    limits, timeouts, retries = _limits(args), _timeouts(args), Retries(tries=_number(args, "tries", 60, int) or 1)
    key = (host.engine, url, limits, timeouts, retries, experts)
    found = _seats[loop].get(key)
    if found is None:
        client = Client(url, engine=host.engine, timeouts=timeouts, limits=limits, retries=retries, experts=experts)
        closes = _closing(loop, client)
        await closes.__anext__()  # which makes it known to the loop, and waits for nothing
        found = _seats[loop][key] = Seat(client, timeouts, _closes=closes)
    return found


async def _closing(loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
    # asyncio.run and its like end by closing the loop's asynchronous generators.
    try:
        yield
    finally:
        _seats.pop(loop, None)
        await client.aclose()


def _number(args: Args, name: str, default: float | None, kind: type[float] = float) -> Value:
    value = setting(args, name, default)
    try:
        return None if value is None else kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"streamfold_{name} must be a number, or none; not {value!r}") from None


def _timeouts(args: Args) -> Timeouts:
    usual = Timeouts()
    return Timeouts(
        connect=_number(args, "timeout_connect", usual.connect),
        first_token=_number(args, "timeout_first_token", usual.first_token),
        next_token=_number(args, "timeout_next_token", usual.next_token),
        drain=_number(args, "drain", usual.drain),
    )


def _limits(args: Args) -> Limits:
    usual = Limits()
    at_once = _number(args, "concurrency", usual.calls, int)
    longest = _number(args, "max_event_bytes", usual.max_event_bytes, int)
    if at_once is None or longest is None:
        raise ValueError("streamfold_concurrency and streamfold_max_event_bytes must be numbers: they need a limit")
    return Limits(at_once, longest)
