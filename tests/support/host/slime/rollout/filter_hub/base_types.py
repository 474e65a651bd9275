"""The result of a dynamic filter, which may also be True or False."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """``keep_when_insufficient``: keep it all the same, if without it there were too few groups for the rollout."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
