"""``sys.exit()`` in a function of a user is an error of that function; Ctrl-C goes its way."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import StreamfoldError
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.pool import Pool
from streamfold.rollout.user_code import UserCode
from support.rollouts import Scripted, bounded, endless, everywhere, groups_of, nothing_left, rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

BOTH_LOOPS = True

EXITS = [SystemExit(3), GeneratorExit("x")]
each_exit = pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)


def raises(error: BaseException) -> Any:
    raise error


def raising(error: BaseException, way: str) -> Any:
    """A reward function, or a generate function, that raises in this way."""

    async def awaited(*_args: Any, **_kwargs: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    class Judge:
        async def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
            raise error

    def called(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    def made(*args: Any, **kwargs: Any) -> Any:
        return awaited(*args, **kwargs)

    return {"awaited": awaited, "called": called, "made": made, "method": Judge()}[way]


each_way = pytest.mark.parametrize("way", ["awaited", "called", "made", "method"])


def check(error: BaseException | None, words: str, cause: BaseException) -> None:
    assert isinstance(error, RuntimeError)
    assert (words in str(error), repr(cause) in str(error)) == (True, True), error
    assert error.__cause__ is cause


@each_exit
@each_way
async def test_an_exit_of_a_reward_function_is_the_failure_of_its_sample(error: BaseException, way: str) -> None:
    reward, source = raising(error, way), Buffer(groups_of(3))
    async with nothing_left():
        with pytest.raises(StreamfoldError) as caught:
            await bounded(rollout(Scripted(), groups=1, reward=reward, max_failures=0).run(source))
        names = {"awaited": "raising.<locals>.awaited", "called": "called", "made": "made", "method": "Judge"}
        check(caught.value.__cause__, f"{names[way]} raised", error)
        assert str(caught.value.__cause__).startswith("the reward function ")
    assert everywhere(source) == [0]


@each_exit
@each_way
async def test_an_exit_of_a_generate_function_is_the_failure_of_its_sample(error: BaseException, way: str) -> None:
    source = Buffer(groups_of(3))
    async with nothing_left():
        with pytest.raises(StreamfoldError) as caught:
            await bounded(rollout(raising(error, way), groups=1, max_failures=0).run(source))
        check(caught.value.__cause__, "the generate function raising.<locals>.", error)
    assert everywhere(source) == [0]


async def test_the_other_groups_of_the_rollout_are_finished() -> None:
    class Leaving(Scripted):
        async def __call__(self, sample: Any, params: dict[str, Any], **more: Any) -> Any:
            if sample.group_index == 1:
                sys.exit("the environment is away")
            return await super().__call__(sample, params, **more)

    result = await bounded(rollout(Leaving(), groups=4, max_failure_rate=1.0).run(Buffer(endless())))
    assert [group[0].group_index for group in result.groups] == [0, 2, 3, 4]


async def _cancelled() -> float:
    raise asyncio.CancelledError


async def _cancels_its_task() -> float:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return 1.0


@pytest.mark.parametrize("work", [_cancelled, _cancels_its_task])
@pytest.mark.parametrize("where", ["thread", "event loop"])
async def test_a_cancel_of_the_reward_functions_own_is_no_cancel_of_the_rollout(
    work: Callable[[], Coroutine[Any, Any, float]], where: str
) -> None:
    def in_thread(_sample: Any) -> float:
        return asyncio.run(work())

    async def in_loop(_sample: Any) -> float:
        return await work()

    reward: Any = in_thread if where == "thread" else in_loop
    async with nothing_left():
        with pytest.raises(StreamfoldError) as caught:
            await bounded(rollout(Scripted(), groups=1, reward=reward, max_failures=0).run(Buffer(groups_of(1))))
    assert "raised CancelledError" in str(caught.value.__cause__)


@each_exit
async def test_an_exit_when_a_sample_is_truncated_is_the_failure_of_that_sample(error: BaseException) -> None:
    class Endless(Scripted):
        async def truncate(self, _sample: Any, _params: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            raise error

    script = Endless(dict.fromkeys(range(4), (2, "hang")))
    with pytest.raises(StreamfoldError) as caught:
        await bounded(
            rollout(script, groups=1, sample_seconds=0.01, max_failures=0, sample_retries=0).run(Buffer(groups_of(1)))
        )
    check(caught.value.__cause__, "truncate raised", error)


@each_exit
@pytest.mark.parametrize("which", ["filter", "sample_filter"])
async def test_an_exit_of_a_filter_ends_rollout_and_pool_with_an_error_and_no_group_is_lost(
    error: BaseException, which: str
) -> None:
    words = {"filter": "the filter raised", "sample_filter": "the sample filter raised"}[which]
    trainer = rollout(Scripted(), groups=2, **{which: lambda _groups: raises(error)})
    source = Buffer(groups_of(8))
    async with nothing_left():
        with pytest.raises(RuntimeError) as caught:
            await bounded(trainer.run(source))
        check(caught.value, words, error)
        in_pool = Buffer(groups_of(2))
        with pytest.raises(RuntimeError) as caught:
            async with Pool(trainer, in_pool) as pool:
                await bounded(pool.next(1))
        check(caught.value, words, error)
    assert everywhere(source) == [0, 1]
    assert everywhere(in_pool) == [0, 1]


@each_exit
@pytest.mark.parametrize("method", ["get_samples", "add_samples"])
async def test_an_exit_of_the_source_ends_a_rollout_with_an_error(error: BaseException, method: str) -> None:
    source = Buffer(groups_of(4))
    setattr(source, method, lambda _argument: raises(error))
    options = {"groups": 1, "over_sampling": 2, "partial_rollout": True}
    with pytest.raises(RuntimeError) as caught:
        await bounded(rollout(Scripted({2: (2, "hang")}), **options).run(source))
    check(caught.value, f"{method} of the source Buffer raised", error)


@each_exit
async def test_an_exit_of_on_abort_ends_no_abort(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    trainer = rollout(Scripted(), groups=1, on_abort=lambda: raises(error))
    result = await bounded(trainer.run(Buffer(endless())))
    assert len(result.groups) == 1
    assert "the abort continues" in caplog.text


@pytest.mark.parametrize("way", ["awaited", "called"])
@pytest.mark.parametrize("which", ["reward", "generate"])
def test_a_keyboard_interrupt_ends_the_loop_as_ctrl_c_does_and_every_group_is_returned(which: str, way: str) -> None:
    source = Buffer(groups_of(4))
    function = raising(KeyboardInterrupt(), way)
    trainer = rollout(function, groups=2) if which == "generate" else rollout(Scripted(), groups=2, reward=function)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(trainer.run(source))
    assert everywhere(source) == [0, 1]


async def test_a_coroutine_that_is_closed_while_it_waits_stays_silent() -> None:

    async def works() -> None:
        with UserCode("the reward function", works):
            await asyncio.Event().wait()

    work = works()
    work.send(None)
    work.close()  # raises if it answers anything but that it is closed
