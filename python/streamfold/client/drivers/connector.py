"""Connector: opens a connection to a server, from its name to the end of the TLS handshake."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamfold.client.drivers.base import Failure
from streamfold.client.drivers.descriptors import HINT, DescriptorQueue, Reserve, is_shortage
from streamfold.client.drivers.pacing import RATE
from streamfold.client.drivers.resolver import Resolver
from streamfold.client.drivers.turns import Turns

if TYPE_CHECKING:
    import asyncio

    from streamfold.client.drivers.sockets import Address, Connection, Sockets
    from streamfold.client.urls import Origin

__all__ = ["Connector", "Opened", "Opening"]

# RFC 8305, section 5: the delay after which the next address is tried beside the ones under way.
_STAGGER_SECONDS = 0.25

# A Unix socket whose backlog is full refuses at once, unlike TCP.
_FULL_BACKLOG_SECONDS = 0.02


class Opened(NamedTuple):
    """An open connection.

    Attributes:
        connection: what carries exchanges.
        is_reserved: whether it has a descriptor of the reserve, which is not for calls.
    """

    connection: Connection
    is_reserved: bool


OnOpened = Callable[[Opened | Failure], None]


class Connector:
    """Opens connections of one driver. Look-ups, turns and the wait for descriptors are shared on the event loop.

    Args:
        loop: the event loop that all calls are made in.
        sockets: opens the sockets.
        make_room: called when no descriptor is free: closes a connection that is not in use, if there is one.
        rate: new connections to an address, in one second.
        reserve: the descriptors for requests that are no calls.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: Sockets,
        make_room: Callable[[], None],
        *,
        rate: float = RATE,
        reserve: Reserve | None = None,
    ) -> None:
        self.loop = loop
        self.sockets = sockets
        self.make_room = make_room
        self.rate = rate
        self.reserve: Reserve = Reserve() if reserve is None else reserve
        self.shared: Shared = Shared.of(loop)

    def open(self, origin: Origin, timeout: float | None, on_opened: OnOpened, *, is_control: bool) -> Opening:
        """Begin to open a connection. ``on_opened`` is not called before this returns.

        Args:
            origin: the server.
            timeout: seconds for everything but the wait for a turn; None for no limit.
            on_opened: gets the connection, or why there is none.
            is_control: whether it goes before calls, and may use the reserve of descriptors.
        """
        self.reserve.fill()
        opening = Opening(self, origin, timeout, on_opened, is_control=is_control)
        opening.begin()
        return opening

    def closed(self, opened: Opened) -> None:
        """A connection was closed, as far as the caller is concerned: its descriptor may take a moment."""
        if opened.is_reserved:
            self.reserve.take_back()

    def freed(self) -> None:
        """A descriptor is free: fill the reserve, then let who waits for one try again."""
        if not self.shared.descriptors.is_waited_for_first:
            self.reserve.fill()
        self.shared.descriptors.freed()

    def close(self) -> None:
        """Close the reserve. Idempotent."""
        self.reserve.close()


class Shared:
    """What all connectors of an event loop share. It lives as long as one of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.resolver: Resolver = Resolver(loop)
        self.turns: Turns = Turns(loop)
        self.descriptors: DescriptorQueue = DescriptorQueue(loop)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Shared:
        """The one of ``loop``."""
        known = _SHARED.get(loop)
        shared = None if known is None else known()
        if shared is None:
            shared = cls(loop)
            _SHARED[loop] = weakref.ref(shared)
        return shared


# By weak references on both sides: what is shared refers to its loop.
_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Shared]] = weakref.WeakKeyDictionary()


class Opening:
    """A connection that is being opened."""

    def __init__(
        self, connector: Connector, origin: Origin, timeout: float | None, on_opened: OnOpened, *, is_control: bool
    ) -> None:
        self._connector = connector
        self._shared = connector.shared
        self._loop = connector.loop
        self._origin = origin
        self._timeout = timeout
        self._on_opened = on_opened
        self._is_control = is_control
        self._lent = 0  # descriptors of the reserve
        self._is_settled = False
        self._untried: list[Address] = []
        self._attempts: dict[Address, Callable[[], None]] = {}  # what cancels them
        self._pauses: dict[Address, Callable[[], None]] = {}  # the same, of those that wait for a descriptor
        self._errors: dict[Address, OSError] = {}
        self._cancel_wait: Callable[[], None] | None = None  # for the look-up, or a turn
        self._stagger: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = timeout  # seconds, while the timer rests
        self._state = "its name is still being looked up"

    @property
    def is_waiting(self) -> bool:
        """Whether nothing has been opened yet: another connection may be used in its place."""
        return not self._is_settled and not self._attempts

    def begin(self) -> None:
        """Find the addresses, and try the first."""
        self._resume_timer()
        try:
            addresses = self._shared.resolver.known(self._origin)
        except OSError as error:
            handle = self._loop.call_soon(self._found, error)
            self._cancel_wait = handle.cancel
            return
        if addresses is None:
            self._cancel_wait = self._shared.resolver.look_up(self._origin, self._found)
        else:
            self._found(addresses)

    def cancel(self) -> None:
        """Stop: ``on_opened`` is not called afterwards. Idempotent."""
        self._is_settled = True
        for handle in (self._stagger, self._timer):
            if handle is not None:
                handle.cancel()
        cancels = [*self._attempts.values(), *self._pauses.values()]
        if self._cancel_wait is not None:
            cancels.append(self._cancel_wait)
        had_descriptors = bool(self._attempts)
        self._attempts, self._pauses, self._cancel_wait, self._stagger, self._timer = {}, {}, None, None, None
        for cancel in cancels:
            cancel()
        self._connector.reserve.take_back(self._lent)
        self._lent = 0
        if had_descriptors and self._shared.descriptors.is_waited_for and not self._loop.is_closed():
            self._loop.call_soon(self._connector.freed)

    # Addresses, one after another.

    def _found(self, result: Sequence[Address] | OSError) -> None:
        self._cancel_wait = None
        if isinstance(result, OSError):
            name = self._origin.host
            self._fail(f"no connection: the name {name!r} could not be looked up: {_text(result)}", result)
            return
        self._untried = list(result)
        self._try_next()

    def _try_next(self) -> None:
        """Begin with the next address when it is its turn, while the others go on."""
        if self._stagger is not None:
            self._stagger.cancel()
            self._stagger = None
        address = self._untried.pop(0)
        turns, rate = self._shared.turns, self._connector.rate
        if turns.take(address, rate):
            self._on_turn(address)
            return
        if not (self._attempts or self._pauses):
            self._rest_timer()
        self._cancel_wait = turns.wait(address, rate, partial(self._on_turn, address), first=self._is_control)

    def _on_turn(self, address: Address) -> None:
        self._cancel_wait = None
        self._resume_timer()
        if self._untried:
            self._stagger = self._loop.call_later(_STAGGER_SECONDS, self._try_next)
        if self._shared.descriptors.is_waited_for and not self._is_control:
            self._wait_for_descriptor(address, again=False)
        else:
            self._attempt(address, again=False)

    def _attempt(self, address: Address, *, again: bool) -> None:
        self._pauses.pop(address, None)
        if not again:  # else that is what the time has gone into
            self._state = "the server does not answer"
        on_done = partial(self._on_done, address, self._loop.time(), again)
        self._attempts[address] = self._connector.sockets.open(address, self._origin, on_done)

    def _on_done(self, address: Address, began: float, again: bool, result: Connection | OSError) -> None:  # noqa: FBT001  # bound by partial
        del self._attempts[address]
        if not isinstance(result, OSError):
            self._shared.turns.opened(address, self._connector.rate, began)
            is_reserved, self._lent = self._lent > 0, max(0, self._lent - 1)
            self.cancel()
            self._on_opened(Opened(result, is_reserved))
            if again:  # there may be more where its descriptor came from
                self._shared.descriptors.freed()
        elif is_shortage(result):
            self._on_shortage(address, again=again)
        elif result.errno == errno.EAGAIN and address.family == socket.AF_UNIX:
            handle = self._loop.call_later(_FULL_BACKLOG_SECONDS, partial(self._attempt, address, again=False))
            self._pauses[address] = handle.cancel
        else:
            self._on_error(address, result)

    def _on_error(self, address: Address, error: OSError) -> None:
        self._errors[address] = error
        self._shared.resolver.forget(self._origin)
        if self._shared.descriptors.is_waited_for:
            self._connector.freed()
        if self._cancel_wait is not None:  # the next address waits for its turn
            if not (self._attempts or self._pauses):
                self._rest_timer()
        elif self._untried:
            self._try_next()
        elif not (self._attempts or self._pauses):
            self._fail(f"no connection: {_summary(self._errors)}", error)

    # Descriptors.

    def _on_shortage(self, address: Address, *, again: bool) -> None:
        if self._is_control and self._connector.reserve.lend():
            self._lent += 1
            self._attempt(address, again=False)
            return
        self._wait_for_descriptor(address, again=again)
        self._connector.make_room()

    def _wait_for_descriptor(self, address: Address, *, again: bool) -> None:
        self._state = f"too many open files: {HINT}"
        retry = partial(self._attempt, address, again=True)
        self._pauses[address] = self._shared.descriptors.wait(retry, first=self._is_control, again=again)

    # The timeout. It rests while all that is waited for is a turn.

    def _resume_timer(self) -> None:
        if self._timer is None and self._left is not None:
            self._timer = self._loop.call_later(self._left, self._expire)

    def _rest_timer(self) -> None:
        if self._timer is not None:
            self._left = max(0.0, self._timer.when() - self._loop.time())
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self._shared.resolver.forget(self._origin)
        message = f"no connection within {self._timeout:g} s: {self._state}"
        if self._errors:
            message += f" ({_summary(self._errors)})"
        self._fail(message, None, timed_out=True)

    def _fail(self, message: str, cause: OSError | None, *, timed_out: bool = False) -> None:
        self.cancel()
        retryable = not isinstance(cause, ssl.SSLCertVerificationError)  # it will not be known later either
        self._on_opened(Failure(message, retryable=retryable, timed_out=timed_out, is_unconnected=True, cause=cause))


def _summary(errors: dict[Address, OSError]) -> str:
    """What the errors say; with the addresses if they differ."""
    texts = {address: _text(error) for address, error in errors.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{address.host}: {text}" for address, text in texts.items())


def _text(error: OSError) -> str:
    """The words of the system for an error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not accepted: {error.verify_message or error}"
    if isinstance(error, (ssl.SSLError, socket.gaierror)):  # their numbers are others than errno's
        return error.strerror or str(error)
    if error.errno:
        return os.strerror(error.errno)
    return str(error) or "the server closed the connection"
