"""The dynamic filter: what a rollout says that ends short because of it, and verdicts that are none."""

from __future__ import annotations

from typing import Any

import pytest

from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from support.rollouts import Scripted, bounded, everywhere, groups_of, nothing_left, rollout


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_rollout_that_ends_short_says_how_many_groups_were_dropped_and_why(
    pooled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def ends(verdict: Any) -> str:
        caplog.clear()
        source = Buffer(groups_of(6))
        made = rollout(Scripted(), groups=6, filter=verdict)
        if pooled:
            async with Pool(made, source) as pool:
                await bounded(pool.next(6))
        else:
            await bounded(made.run(source))
        return next(line for line in caplog.messages if "ran out" in line)

    assert (await ends(lambda _group: (False, "all rewards equal"))).endswith("; 6 groups dropped: all rewards equal")
    mixed = await ends(lambda group: (False, "too easy" if group[0].group_index else "too hard"))
    assert mixed.endswith("; 6 groups dropped: 5 too easy, 1 too hard")


@pytest.mark.parametrize("what", ["nothing", "no verdict but a reason", "a coroutine"])
async def test_a_filter_that_returns_no_verdict_is_refused_by_name_and_nothing_is_lost(what: str) -> None:
    async def later() -> bool:
        return True

    def keep(_group: Any) -> Any:
        return {"nothing": None, "no verdict but a reason": (None, "why")}[what] if what != "a coroutine" else later()

    source = Buffer(groups_of(5))
    async with nothing_left():
        with pytest.raises(TypeError, match=r"^the filter returned (None|a coroutine: it is async); it must return"):
            await bounded(rollout(Scripted(), groups=2, over_sampling=4, filter=keep).run(source))
    assert source.in_flight == 0
    assert everywhere(source) == [0, 1, 2, 3]
