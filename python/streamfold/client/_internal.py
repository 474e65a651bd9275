"""What samples, rollouts, trainer adapters and the CLI need of a client, and its users do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from streamfold.client.abort_signal import AbortSignal

if TYPE_CHECKING:
    from streamfold._core import Experts
    from streamfold._types import Tokenizer
    from streamfold.client.limits import Retries, Timeouts
    from streamfold.client.observer import Observer
    from streamfold.engines.base import EngineSpec

__all__ = ["ClientInternals", "HasInternals", "HasTotals", "Totals", "internals_of", "totals_of"]


@dataclass
class ClientInternals:
    """A client's settings, its engine, and the signal of its ``abort_all``.

    Attributes:
        engine: None with ``engine="auto"``, before the server was asked.
        timeouts: of each try.
        retries: of each call and each sample.
        experts: the shape of routed experts; None: they are not requested.
        tokenizer: the tokenizer that the client was given.
        header_names: in lower case, of the headers that the client was given for each request.
        observers: are told of all its calls.
        abort_signal: set by the next ``abort_all`` or ``aclose``, and then replaced: hold on to it while you work.
    """

    engine: EngineSpec | None
    timeouts: Timeouts
    retries: Retries
    experts: Experts | None
    tokenizer: Tokenizer | None
    header_names: frozenset[str] = frozenset()
    observers: tuple[Observer, ...] = ()
    abort_signal: AbortSignal = field(default_factory=AbortSignal)

    @property
    def engine_spec(self) -> EngineSpec:
        """Engine-specific behaviour.

        Raises:
            RuntimeError: with ``engine="auto"``, before the server was asked.
        """
        if self.engine is None:
            raise RuntimeError('engine="auto": enter `async with client`, or `await client.discover()` first')
        return self.engine

    def signal_abort(self) -> None:
        """Set :attr:`abort_signal`, and replace it for the work that starts from now on."""
        signal, self.abort_signal = self.abort_signal, AbortSignal()
        signal.set()


class HasInternals(Protocol):
    """A client, or a test's stand-in for one."""

    def __client_internals__(self) -> ClientInternals:
        """Return the client's internals."""


def internals_of(client: HasInternals) -> ClientInternals:
    """The internals of ``client``."""
    return client.__client_internals__()


@dataclass(frozen=True)
class Totals:
    """All running calls of a client in a few numbers, at a tenth of what ``Client.running`` costs.

    Attributes:
        calls: how many run, or wait for a slot or a retry.
        tokens: that they have received.
        slowest_age: seconds since the oldest of them was started; None: there is none.
        slowest_tokens: what that one has received.
    """

    calls: int = 0
    tokens: int = 0
    slowest_age: float | None = None
    slowest_tokens: int = 0


class HasTotals(Protocol):
    """A client, or a test's stand-in for one."""

    def __client_totals__(self) -> Totals:
        """Return the totals of the calls that run."""


def totals_of(client: HasTotals) -> Totals:
    """The totals of the calls of ``client`` that run."""
    return client.__client_totals__()
