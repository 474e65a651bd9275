"""Rewards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from support.host.slime.utils.misc import load_function

if TYPE_CHECKING:
    from types import SimpleNamespace

    from support.host.slime.utils.types import Sample


async def async_rm(args: SimpleNamespace, sample: Sample) -> float:
    """Ask ``args.custom_rm_path``, called as ``await f(args, sample)``; without it every response is worth 1."""
    if args.custom_rm_path is None:
        return 1.0
    reward: float = await load_function(args.custom_rm_path)(args, sample)
    return reward


async def batched_async_rm(args: SimpleNamespace, samples: list[Sample]) -> list[float]:
    """Ask it once for all of them, called as ``await f(args, samples)``, which gives a list."""
    if args.custom_rm_path is None:
        return await asyncio.gather(*(async_rm(args, sample) for sample in samples))
    rewards: list[float] = await load_function(args.custom_rm_path)(args, samples)
    return rewards
