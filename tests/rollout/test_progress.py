"""What is shown of a run while it lasts: in a terminal, in a notebook, and in the log, with the tokens of its calls."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from streamfold import Buffer, Client, Pool, Rollout, RolloutConfig, Sample, prompt_groups
from streamfold.loopback import Loopback
from streamfold.rollout import progress
from streamfold.rollout.progress import ProgressView, RunState
from support.loopback_http import PROMPT
from support.replay import until

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE = re.compile(r"(\d+)(?: of (\d+))? groups in (\S+), (\d+) in flight, ([\d,]+) tokens, ([\d,]+)/s(.*)")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, with a line each 20 ms instead of each 10 s."""
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.02)
    with caplog.at_level(logging.INFO, logger="streamfold.progress"):
        yield caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "streamfold.progress"]


def groups(count: int) -> Buffer:
    return Buffer(prompt_groups([Sample(prompt="", tokens=[*PROMPT, i]) for i in range(count)], 2))


def config(**options: Any) -> RolloutConfig:
    params = {"max_new_tokens": 300, "ignore_eos": True}
    return RolloutConfig(**{"groups": 2, "sampling_params": params, "partial_rollout": True, **options})


async def test_without_a_terminal_lines_tell_the_tokens_of_running_calls(often: pytest.LogCaptureFixture) -> None:
    with Loopback(token_rate=200, stop_probability=1 / 60) as engine:
        params = {"max_new_tokens": 400, "min_new_tokens": 20, "temperature": 1.0}
        async with Client(engine.url) as client:
            result = await Rollout(client, config(over_sampling=4, sampling_params=params)).run(groups(4), 7)
    told = [LINE.fullmatch(line.removeprefix("rollout 7: ")) for line in lines(often)]
    assert all(told)
    first = [match for match in told if match and match[1] == "0"]
    assert any(int(match[5].replace(",", "")) > 0 for match in first), "tokens come before any sample ends"
    assert any(re.search(r"slowest 0:0\d with \d+ tokens", match[7]) for match in first)
    last = told[-1]
    assert last is not None
    assert (last[1], last[2], last[4]) == ("2", "2", "0")
    assert re.search(r", [2-4] aborted", last[7]), "of the other two groups, those that ran"
    assert int(last[5].replace(",", "")) == result.metrics["streamfold/tokens/generated"]
    numbers = [int(match[5].replace(",", "")) for match in told if match]
    assert numbers == sorted(numbers)


async def test_a_run_that_is_over_before_the_first_line_is_due_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback() as engine, caplog.at_level(logging.INFO, logger="streamfold.progress"):
        async with Client(engine.url) as client:
            await Rollout(client, config(sampling_params={"max_new_tokens": 2})).run(groups(2))
    assert lines(caplog) == []


async def test_progress_false_is_silent(often: pytest.LogCaptureFixture, capfd: Any) -> None:
    with Loopback(token_rate=2000) as engine:
        async with Client(engine.url) as client:
            await Rollout(client, config(progress=False)).run(groups(2))
    assert lines(often) == []
    assert capfd.readouterr() == ("", "")


async def test_a_pool_logs_lines_while_it_is_open(often: pytest.LogCaptureFixture) -> None:
    with Loopback(token_rate=2000) as engine:
        async with Client(engine.url) as client, Pool(Rollout(client, config()), groups(8)) as pool:
            await pool.next(2)
            await until(
                lambda: any(line.startswith("pool: ") and not line.startswith("pool: 0") for line in lines(often))
            )
            pool.metrics()
    assert all(LINE.fullmatch(line.removeprefix("pool: ")) for line in lines(often))
    left = len(lines(often))
    await asyncio.sleep(0.06)
    assert len(lines(often)) == left, "nothing after it is closed"


# The view itself.


def state(done: int = 0, tokens: int = 0, **counts: int) -> RunState:
    return RunState(done=done, in_flight=3, tokens=tokens, counts=counts)


async def test_in_a_terminal_a_bar_and_a_line_are_drawn_and_redrawn() -> None:
    shown, terminal = [state()], io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    with ProgressView("rollout [/0]", "groups", 4, lambda: shown[0], console=console):
        await until(lambda: "0/4" in terminal.getvalue())
        shown[0] = state(3, 1234, aborted=2, failed=0)
        await until(lambda: "3/4" in terminal.getvalue())
    drawn = terminal.getvalue()
    assert "rollout [/0]" in drawn
    assert "3 in flight, 1,234 tokens" in drawn
    assert "2 aborted" in drawn
    assert "failed" not in drawn, "counts of nothing are left out"
    assert "ETA 0:0" in drawn


async def test_in_a_notebook_one_line_is_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[dict[str, str]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        place = len(outputs)
        outputs.append(data)

        def update(data: dict[str, str], *, raw: bool) -> None:
            outputs[place] = data

        return SimpleNamespace(update=update)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    shown = [state()]
    with ProgressView("rollout 0", "groups", 4, lambda: shown[0]):
        await until(lambda: "0 of 4 groups" in outputs[0]["text/plain"])
        shown[0] = state(4, 99)
    assert [
        data["text/plain"].startswith("rollout 0: 4 of 4 groups, 3 in flight, 99 tokens, ") for data in outputs
    ] == [True]
    shell.kernel = None  # IPython in a terminal
    with ProgressView("rollout 0", "groups", 4, lambda: shown[0], console=Console(file=io.StringIO())):
        pass
    assert len(outputs) == 1


async def test_where_the_trainer_has_a_bar_only_lines_are_logged(often: pytest.LogCaptureFixture) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True)
    with ProgressView("rollout 0", "groups", 4, state, draws=False, console=console):
        await until(lambda: lines(often))
    assert terminal.getvalue() == ""


async def test_tokens_between_the_end_of_their_call_and_their_sample_are_not_missing() -> None:
    shown, terminal = [state(tokens=50)], io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    with ProgressView("rollout 0", "groups", 4, lambda: shown[0], console=console):
        await until(lambda: " 50 tokens" in terminal.getvalue())
        shown[0] = state(1, tokens=30)
        await until(lambda: "1/4" in terminal.getvalue())
    assert " 30 tokens" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (3599, "59:59"), (3727, "1:02:07")]
)
def test_times_are_shown_as_clocks_show_them(seconds: float, shown: str) -> None:
    assert progress._clock(seconds) == shown


async def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.time = lambda: clock.now
    view = ProgressView("rollout 0", "groups", None, state)
    view._loop = clock  # type: ignore[assignment]
    view._seen.append((0.0, 0))
    rates = []
    for clock.now, tokens in ((5.0, 500), (10.0, 1000), (15.0, 1000), (20.0, 1000), (30.0, 1000), (40.0, 200)):
        rates.append(view._rate(tokens))
    assert rates == [100.0, 100.0, 50.0, 0.0, 0.0, 20.0], "a pool has counted anew at the end"
