"""Is a sample finished? Decided by the name of its status, as each host has an enum of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from streamfold._types import SampleLike

__all__ = ["is_final", "is_finished"]

# FAILED is set by the generate functions of hosts.
_FINAL: Final = ("COMPLETED", "TRUNCATED", "FAILED")


def is_finished(sample: SampleLike) -> bool:
    """Whether a sample, ours or a host's, has its final status. A finished sample is never generated again."""
    return is_final(sample.status.name)


def is_final(name: str) -> bool:
    """Whether the status with this name is final."""
    return name in _FINAL
