"""Progress: what one try of a call has received so far, and when."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from streamfold._core import Durations
from streamfold.client.timings import Timings

if TYPE_CHECKING:
    import numpy.typing as npt

    from streamfold._core import Generation
    from streamfold.client.drivers.base import Exchange

__all__ = ["Progress"]


class Progress:
    """What a try has received: of its exchange while it runs, then of its generation. Times are ``time.monotonic()``.

    Attributes:
        started_at: infinite until then.
        sent_at: when the request left; infinite until then.
    """

    def __init__(self) -> None:
        self.started_at: float = math.inf
        self.sent_at: float = math.inf
        self._exchange: Exchange | None = None
        self._generation: Generation | None = None

    def _note_start(self) -> None:
        self.started_at = time.monotonic()

    def _note_sent(self) -> None:
        self.sent_at = time.monotonic()

    @property
    def token_count(self) -> int:
        """Tokens received so far."""
        if self._generation is not None:
            return len(self._generation.token_ids)
        return 0 if self._exchange is None else self._exchange.token_count

    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far: int32 ``[n]``."""
        if self._generation is not None:
            ids: npt.NDArray[np.int32] = self._generation.token_ids.copy()
            return ids
        return np.empty(0, np.int32) if self._exchange is None else self._exchange.token_ids()

    @property
    def first_token_at(self) -> float:
        """When the first token was read; infinite until then."""
        return math.inf if self._exchange is None else self._exchange.first_token_at

    @property
    def last_token_at(self) -> float:
        """When the latest token was read; infinite until the first."""
        return math.inf if self._exchange is None else self._exchange.last_token_at

    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, and how many reads brought them."""
        return (Durations(), 0) if self._exchange is None else self._exchange.gaps()

    def timings(self, called_at: float) -> Timings | None:
        """The timings of a call that was started ``called_at`` and whose last try this is. None: nothing was sent."""
        if self.sent_at == math.inf:
            return None
        queued, connect = self.started_at - called_at, self.sent_at - self.started_at
        first_token_at = self.first_token_at
        if first_token_at == math.inf:
            return Timings(queued, connect)
        ttft, latency = first_token_at - self.sent_at, self.last_token_at - self.sent_at
        behind, (gaps, reads) = self.token_count - 1, self.gaps()
        return Timings(
            queued=queued,
            connect=connect,
            ttft=ttft,
            latency=latency,
            tpot=(latency - ttft) / behind if behind > 0 else None,
            itl_mean=gaps.sum / gaps.count if gaps.count else None,
            itl_p99=gaps.quantile(0.99),
            resolution=gaps.sum / (reads - 1) if reads > 1 else None,
        )
