"""Samples whose call runs, and what an abort at this moment would leave of them: for reports, in case the process dies.

:func:`~streamfold.complete` notes here which call it awaits for which sample. Calls that a generate function makes in
another way are not known: nobody knows what it would write of them.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold._core import Generation
    from streamfold._types import SampleLike

__all__ = ["running", "running_tokens", "snapshot_of"]

S = TypeVar("S", bound="SampleLike")


class RunningCall(Protocol):
    """A call that is awaited for a sample."""

    @property
    def token_count(self) -> int: ...
    def snapshot(self) -> Generation: ...


class Writer(Protocol):
    """Writes what a call has generated to a copy of its sample."""

    def write_snapshot(self, generation: Generation, sample: SampleLike) -> None: ...


_running: Final[dict[int, tuple[RunningCall, Writer]]] = {}  # by the id of the sample, which need not be hashable


@contextlib.contextmanager
def running(sample: SampleLike, call: RunningCall, writer: Writer) -> Iterator[None]:
    """In this block, ``call`` runs for ``sample``."""
    key = id(sample)
    _running[key] = call, writer
    try:
        yield
    finally:
        _running.pop(key, None)


def running_tokens(sample: SampleLike) -> int:
    """How many tokens the sample's call has received that are not in the sample yet; 0 if none runs."""
    known = _running.get(id(sample))
    return 0 if known is None else known[0].token_count


def snapshot_of(sample: S) -> S:
    """A copy of the sample, with what its call has received so far, as an abort at this moment would have written it.

    The sample and its call go on undisturbed. What is written replaces lists and the metadata of the copy, which shares
    everything else with the sample.
    """
    copied = copy.copy(sample)
    if (known := _running.get(id(sample))) is not None:
        call, writer = known
        writer.write_snapshot(call.snapshot(), copied)
    return copied
