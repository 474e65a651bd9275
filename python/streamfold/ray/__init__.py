"""Rollouts by many processes, on Ray: :class:`RolloutWorkers`, with the extra ``ray``."""

from __future__ import annotations

try:
    import ray as _ray
except ImportError as _error:
    raise ImportError("streamfold.ray needs ray: pip install 'streamfold[ray]'", name="ray") from _error

from streamfold.ray.workers import RolloutWorkers

__all__ = ["RolloutWorkers"]

del _ray
