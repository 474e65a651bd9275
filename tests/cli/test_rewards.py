"""``streamfold rollout --reward``: each sample is judged once, and whatever a reward function does, the run goes on."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REWARDS = """
import asyncio, sys, numpy
calls = []
bad = set()
def length(sample):
    calls.append(sample.index)
    if sample.index in bad: raise KeyError(f"no answer for {sample.label}")
    return numpy.float32(len(sample.response))
async def later(sample):
    await asyncio.sleep(0)
    return {"score": numpy.float64(sample.label), "answer": "x", "seen": {1}}
def nothing(sample): return None
def huge(sample): return {"score": 1.0, "n": 2**70}
def bad_numbers(sample): return [float("nan"), float("nan"), float("inf"), f"answer {sample.index}"][sample.index]
def notes(sample): return {"a": sample.index * "x"}
def leaves(sample):
    if sample.index == 1: sys.exit("no model")
    return 1.0
async def leaves_later(sample):
    await asyncio.sleep(0)
    return leaves(sample)
async def cancels_itself(sample):
    if sample.index == 1:
        waited = asyncio.ensure_future(asyncio.sleep(9))
        waited.cancel()
        await waited
    return 1.0
class Closes:
    def __call__(self, sample): raise GeneratorExit
closes = Closes()
class Mute(Exception):
    def __str__(self): raise LookupError
def mute(sample): raise Mute
def sets(name, value, reward=1.0):
    def reward_function(sample):
        setattr(sample, name, value)
        return reward
    return reward_function
metadata_of_none, list_as_metadata = sets("metadata", None), sets("metadata", [])
index_of_none, other_index, other_group = sets("index", None), sets("index", 99), sets("group_index", "x")
damaged = sets("response", chr(0xD800))
mute_label, surrogate = sets("label", Mute()), sets("label", chr(0xD800))
text_as_status = sets("status", "x")
def interrupts(sample):
    if sample.index == 3: raise KeyboardInterrupt
    return 1.0
"""


NO_NUMBER = "the reward of sample 0 is {'a': ''}: no value of this dict is a number"


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of reward functions in the current folder."""
    (tmp_path / "rewards_of_a_test.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    import rewards_of_a_test  # type: ignore[import-not-found]  # noqa: PLC0415  # written just now

    yield rewards_of_a_test
    sys.modules.pop("rewards_of_a_test")


def rolled(url: str, folder: Path, *options: str) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Run the command on four prompts; its result, and the lines of its output by index."""
    prompts, out = folder / "prompts.jsonl", folder / "samples.jsonl"
    prompts.write_text("".join(f'{{"prompt": "a{label}", "label": {label}}}\n' for label in range(4)))
    files = ("--url", url, "--prompts", str(prompts), "--out", str(out))
    done = CliRunner().invoke(app, ["rollout", *files, "--max-new-tokens", "6", *options])
    lines = [json.loads(line) for line in out.read_bytes().splitlines()] if out.exists() else []
    by_index = {line["index"]: line for line in lines}
    assert len(by_index) == len(lines), "one line a sample"
    return done, by_index


def test_a_reward_is_computed_once_for_each_sample_and_written_with_it(rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        for _ in range(2):
            done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:length")
            assert done.exit_code == 0, done.output
            assert all(line["reward"] == len(line["response"]) for line in lines.values())
        assert sorted(rewards.calls) == [0, 1, 2, 3]
        assert engine.stats().requests == 4


def test_a_reward_may_be_async_and_a_dict_with_notes(rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:later")
    assert done.exit_code == 0, done.output
    assert {index: line["reward"] for index, line in lines.items()} == {
        index: {"score": float(index), "answer": "x", "seen": "{1}"} for index in range(4)
    }


def test_finished_samples_of_an_earlier_run_are_judged_without_another_request(rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        _, before = rolled(engine.url, tmp_path)
        done, after = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:length")
        assert done.exit_code == 0, done.output
        assert engine.stats().requests == 4
    assert all(line["reward"] is None for line in before.values())
    assert {index: {**line, "reward": None} for index, line in after.items()} == before
    assert all(line["reward"] == len(line["response"]) for line in after.values())


def test_a_reward_that_fails_costs_its_sample_alone_which_is_judged_by_the_next_run(
    rewards: Any, tmp_path: Path
) -> None:
    rewards.bad |= {1, 2}
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:length")
        assert done.exit_code == 1
        assert "2 of 4 samples are in" in done.stdout
        assert "2 are missing, 0 of them partial, 2 of them finished without a reward" in done.stdout
        assert "1 failed: KeyError: 'no answer for 1'" in done.stderr
        assert [lines[index]["reward"] is None for index in range(4)] == [False, True, True, False]
        assert {line["status"] for line in lines.values()} <= {"completed", "truncated"}
        rewards.bad.clear()
        done, again = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:length")
        assert done.exit_code == 0, done.output
        assert engine.stats().requests == 4
    assert [again[index]["tokens"] for index in range(4)] == [lines[index]["tokens"] for index in range(4)]
    assert sorted(rewards.calls) == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", "the reward function returned None"),
        ("huge", "a sample cannot be written as JSON"),
        ("damaged", "a sample cannot be written as JSON"),
    ],
)
def test_what_is_no_reward_is_counted_and_ends_no_run(function: str, words: str, rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        done, _ = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}")
    assert done.exit_code == 1
    assert "0 of 4 samples are in" in done.stdout
    assert words in done.stderr
    assert "4 failed" in done.stderr


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (
            "bad_numbers",
            [
                "2 failed, such as sample 0: RewardError: the reward of sample 0 is nan: it must be a finite number",
                "1 failed: RewardError: the reward of sample 2 is inf: it must be a finite number",
                "1 failed: RewardError: the reward of sample 3 is 'answer 3': it must be a finite number",
            ],
        ),
        (
            "notes",
            [f"4 failed, such as sample 0: RewardError: {NO_NUMBER}"],
        ),
    ],
)
def test_rewards_that_fail_in_one_way_are_one_line_with_the_first_sample(
    function: str, lines: list[str], rewards: Any, tmp_path: Path
) -> None:
    with Loopback() as engine:
        done, _ = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}", "--concurrency", "1")
        assert [line for line in done.stderr.splitlines() if " failed" in line] == lines
        done, _ = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}", "--json")
    assert sorted(json.loads(done.stdout)["failures"].values()) == sorted(int(line[0]) for line in lines)


@pytest.mark.parametrize(
    ("function", "failed"),
    [
        ("leaves", "1 failed: RuntimeError: the reward function leaves raised SystemExit('no model')"),
        (
            "leaves_later",
            "1 failed: RuntimeError: the reward function leaves_later raised SystemExit('no model')",
        ),
        (
            "cancels_itself",
            "1 failed: RuntimeError: the reward function cancels_itself raised CancelledError()",
        ),
        ("closes", "4 failed: RuntimeError: the reward function Closes raised GeneratorExit()"),
    ],
)
def test_an_exit_of_a_reward_function_costs_its_sample_alone(
    function: str, failed: str, rewards: Any, tmp_path: Path
) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}", "--concurrency", "1")
        assert engine.stats().running == 0
    assert done.exit_code == 1
    assert failed in done.stderr
    assert [lines[index]["reward"] is None for index in range(4)] == [
        function == "closes" or index == 1 for index in range(4)
    ]


def test_a_keyboard_interrupt_of_a_reward_function_is_ctrl_c_and_all_that_has_come_is_written(
    rewards: Any, tmp_path: Path
) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:interrupts", "--concurrency", "1")
    assert done.exit_code == 130, done.output
    assert "are missing" in done.stdout
    assert "rerun the same command" in done.stdout
    assert [lines[index]["reward"] for index in range(3)] == [1.0] * 3
    assert lines[3]["reward"] is None


def test_an_error_without_a_text_is_counted_by_its_type(rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:mute", "-v")
    assert (done.exit_code, len(lines)) == (1, 4)
    assert "4 failed: Mute, whose text raised LookupError" in done.stderr


@pytest.mark.parametrize("function", ["huge", "metadata_of_none", "list_as_metadata", "mute_label", "surrogate"])
def test_a_sample_that_a_reward_function_has_spoiled_is_written_without_what_it_has_set(
    function: str, rewards: Any, tmp_path: Path
) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}")
        assert done.exit_code == 1
        assert "4 failed: a sample cannot be written as JSON" in done.stderr
        assert {index: (line["reward"], line["label"]) for index, line in lines.items()} == {
            index: (None, index) for index in range(4)
        }
        assert all(line["status"] in ("completed", "truncated") for line in lines.values())
        done, again = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:length")
        assert done.exit_code == 0, done.output
        assert engine.stats().requests == 4, "nothing was generated again"
    assert [again[index]["tokens"] for index in range(4)] == [lines[index]["tokens"] for index in range(4)]


@pytest.mark.parametrize("function", ["index_of_none", "other_index", "other_group"])
def test_a_sample_keeps_its_place_whatever_index_a_reward_function_sets(
    function: str, rewards: Any, tmp_path: Path
) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}")
        assert done.exit_code == 0, done.output
        assert [lines[index]["prompt"] for index in range(4)] == ["a0", "a1", "a2", "a3"]
        assert rolled(engine.url, tmp_path, "--reward", f"rewards_of_a_test:{function}")[0].exit_code == 0
        assert engine.stats().requests == 4


def test_a_sample_that_cannot_be_written_at_all_ends_no_run(rewards: Any, tmp_path: Path) -> None:
    with Loopback() as engine:
        done, lines = rolled(engine.url, tmp_path, "--reward", "rewards_of_a_test:text_as_status")
    assert (done.exit_code, lines) == (1, {})
    assert "failed: " in done.stderr
    assert "Traceback" not in done.stderr
