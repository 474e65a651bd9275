"""DataSource: over all restarts the trainer gets every group exactly once."""

from __future__ import annotations

import copy
import datetime as dt
import json
import logging
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback import Loopback
from streamfold.rollout.buffer import Buffer
from support.exactly import exactly
from support.host import installed, trainer
from support.host.helpers import Scripted, append, nowhere
from support.host.slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from support.host.slime.rollout.sglang_rollout import generate_rollout_async
from support.host_calls import HOSTS, Status, entry_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import SimpleNamespace

    from support.host.slime.utils.types import Sample

WORDS = ("the", "of", "and", "to", "in")


@pytest.fixture(autouse=True, params=HOSTS)
def _host(request: pytest.FixtureRequest) -> Iterator[None]:
    with installed(request.param):
        yield


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    """Five prompts in an order that changes from epoch to epoch; two samples to a group."""
    return nowhere(save=str(tmp_path), load=str(tmp_path), rollout_shuffle=True, prompt_data=list(WORDS))


def source_of(args: SimpleNamespace, *, tracks_in_flight: bool = True, loads: int | None = None) -> Any:
    source = entry_module().DataSource(args)
    source.durable.tracks_in_flight = tracks_in_flight
    if loads is not None:
        source.load(loads)
    return source


def identities(groups: list[list[Sample]]) -> list[tuple[Any, ...]]:
    return [(sample.prompt, sample.group_index, sample.index) for group in groups for sample in group]


def undisturbed(args: SimpleNamespace, count: int) -> list[tuple[Any, ...]]:
    """What slime's own source gives, from its beginning."""
    return identities(RolloutDataSource(args).get_samples(count))


def partially_done(group: list[Sample], args: Any = None) -> list[Sample]:
    """Make the first sample of a group partial, and the others finished."""
    for sample in group:
        append(sample, args, [7, 8], text="xx")
        sample.status = Status.COMPLETED
        sample.reward = 0.5
    group[0].status, group[0].reward = Status.ABORTED, None
    return group


# Where groups are.


def test_it_is_the_trainers_own_source_with_a_buffer_of_ours(args: SimpleNamespace) -> None:
    source = source_of(args)
    assert isinstance(source, RolloutDataSourceWithBuffer)
    assert type(source) is entry_module().DataSource
    assert type(source).__module__ == entry_module().__name__
    assert pickle.loads(pickle.dumps(type(source))) is type(source)
    assert isinstance(source.buffer, Buffer)
    assert len(source) == len(WORDS)
    assert identities(source.get_samples(3) + source.get_samples(9)) == undisturbed(args, 12)


def test_returned_groups_are_served_first_and_counted_meanwhile(args: SimpleNamespace) -> None:
    source = source_of(args)
    first, second, third = source.get_samples(3)
    source.add_samples([third, first])
    assert source.get_buffer_length() == 2
    again = source.get_samples(3)
    assert again[0] is third
    assert again[1] is first
    assert again[2][0].group_index == 3
    assert source.buffer.in_flight == 4
    source.done([second, *again])
    assert source.buffer.in_flight == 0


def test_a_returned_group_of_another_size_is_refused(args: SimpleNamespace) -> None:
    source = source_of(args)
    good, bad = source.get_samples(2)
    with pytest.raises(ValueError, match=r"1 samples.*is 2"):
        source.add_samples([good, bad[:1]])
    assert source.get_buffer_length() == 0
    assert source.buffer.in_flight == 2


def test_without_prompts_it_gives_returned_groups_and_then_the_trainers_own_error(args: SimpleNamespace) -> None:
    group = source_of(args).get_samples(1)[0]
    args.rollout_global_dataset = False
    source = source_of(args)
    source.add_samples([group])
    with pytest.raises(RuntimeError, match="1 groups are missing"):
        source.get_samples(2)
    assert source.get_samples(1) == [group]
    source.save(0)
    assert source_of(args, loads=0).get_buffer_length() == 1


def test_without_prompts_it_gives_the_blank_samples_of_a_trainer_that_gives_them(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blank(self: RolloutDataSourceWithBuffer, num_samples: int) -> list[list[Sample]]:
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        return groups + RolloutDataSource.get_samples(self, num_samples - len(groups))

    monkeypatch.setattr(RolloutDataSourceWithBuffer, "get_samples", blank)
    args.rollout_global_dataset = False
    source = source_of(args)
    first, second = source.get_samples(2)
    assert identities([first, second]) == [("", group, 2 * group + i) for group in (0, 1) for i in (0, 1)]
    source.add_samples([first])
    again, third = source.get_samples(2)
    assert again is first, "those that wait come first"
    assert [sample.group_index for sample in third] == [2, 2]
    source.done([first])
    source.save(0)
    resumed = source_of(args, loads=0)
    assert sorted(group[0].group_index for group in resumed.get_samples(3)) == [1, 2, 3], "each group once"


def test_the_buffers_filter_chooses_among_those_that_wait_and_what_it_drops_is_forgotten(args: SimpleNamespace) -> None:
    def choose(args: Any, rollout_id: Any, buffer: list[list[Sample]], count: int) -> list[list[Sample]]:
        """The last one, while the first is dropped."""
        buffer.pop(0)
        return [buffer.pop()]

    args.buffer_filter_path = choose
    source = source_of(args)
    groups = source.get_samples(4)
    source.add_samples(groups)
    taken = source.get_samples(2)
    assert [group[0].group_index for group in taken] == [3, 4], "what was not chosen waits on"
    assert (source.get_buffer_length(), source.buffer.in_flight) == (2, 2)
    source.save(0)
    again = source_of(args, loads=0)
    assert sorted(g[0].group_index for g in again.buffer.take(len(again.buffer))) == [1, 2, 3, 4]


def test_a_filter_that_raises_leaves_the_buffer_as_it_was(args: SimpleNamespace) -> None:
    def broken(args: Any, rollout_id: Any, buffer: list[Any], count: int) -> Any:
        buffer.clear()
        raise LookupError

    args.buffer_filter_path = broken
    source = source_of(args)
    source.add_samples(groups := source.get_samples(2))
    with pytest.raises(LookupError):
        source.get_samples(1)
    assert source.buffer.take(2) == groups


# Restarts.


def test_a_restart_gives_first_what_was_in_flight_or_waited_and_then_the_next_prompts(
    args: SimpleNamespace,
) -> None:
    source = source_of(args)
    groups = source.get_samples(8)
    source.done(groups[:3])
    source.add_samples([partially_done(groups[4]), partially_done(groups[6])])
    source.save(5)
    before = [exactly(copy.deepcopy(vars(s))) for i in (3, 5, 7, 4, 6) for s in groups[i]]
    again = source_of(args, loads=5)
    got = again.get_samples(9)
    assert [exactly(vars(sample)) for group in got[:5] for sample in group] == before
    assert identities(got[5:]) == undisturbed(args, 12)[8 * 2 :]
    assert [group[0].group_index for group in got[5:]] == [8, 9, 10, 11]


def test_metadata_of_any_type_is_itself_again_after_a_restart(args: SimpleNamespace) -> None:
    source = source_of(args)
    (group,) = source.get_samples(1)
    partially_done(group)[0].metadata = {"since": dt.date(2026, 1, 2), "counts": Counter("aab")}
    source.add_samples([group])
    source.save(0)
    (again,) = source_of(args, loads=0).get_samples(1)
    assert again[0].metadata == {"since": dt.date(2026, 1, 2), "counts": Counter("aab")}


@pytest.mark.parametrize("fate", ["missing", "older", "later", "damaged"])
def test_our_file_is_enough_if_the_trainers_own_was_lost(
    args: SimpleNamespace, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The two files differ if the process dies between their writes."""
    theirs = Path(args.save) / "rollout" / "global_dataset_state_dict_1.pt"
    caplog.set_level(logging.WARNING)
    earlier = RolloutDataSource(args)
    earlier.get_samples({"older": 3, "later": 19}.get(fate, 0))
    source = source_of(args)
    groups = source.get_samples(7)
    source.done(groups[:6])
    source.save(1)
    if fate == "missing":
        theirs.unlink()
    elif fate == "damaged":
        theirs.write_text(theirs.read_text()[:20])
    else:
        earlier.save(1)
    got = source_of(args, loads=1).get_samples(6)
    assert identities(got) == undisturbed(args, 12)[6 * 2 :]
    assert "ours" in caplog.text


def test_a_run_that_started_with_the_trainers_own_source_resumes_with_ours(
    args: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = RolloutDataSourceWithBuffer(args)
    theirs.get_samples(7)
    theirs.save(1)
    source = source_of(args, loads=1)
    assert "streamfold_buffer_1" in caplog.text
    groups = source.get_samples(2)
    source.save(2)
    again = source_of(args, loads=2).get_samples(3)
    assert identities(groups) == identities(again[:2]) == undisturbed(args, 10)[14:18]
    assert identities(again[2:]) == undisturbed(args, 10)[18:]


def test_without_a_checkpoint_it_starts_at_the_first_prompt(
    args: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    assert identities(source_of(args, loads=-1).get_samples(2)) == undisturbed(args, 2)
    args.load = None
    assert identities(source_of(args, loads=3).get_samples(2)) == undisturbed(args, 2)
    assert caplog.text == ""


def test_a_damaged_file_of_ours_is_refused(args: SimpleNamespace) -> None:
    source_of(args).save(0)
    path = Path(args.save) / "rollout" / "streamfold_buffer_0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        source_of(args, loads=0)


def test_groups_delivered_after_the_saved_rollout_are_not_lost(args: SimpleNamespace) -> None:
    """An asynchronous trainer asks for the next rollout before it has saved the last one."""
    source = source_of(args)
    first, second, waits = source.get_samples(3)
    source.add_samples([waits])
    for rollout_id, group in enumerate([first, second]):
        source.done([group])
        source.durable.delivered([group], rollout_id)
    source.save(0)
    assert (source.get_buffer_length(), source.buffer.in_flight) == (1, 0), "a save changes nothing"
    source.save(1)
    for rollout_id, left in ((0, [1, 2]), (1, [2])):
        again = source_of(args, loads=rollout_id)
        assert sorted(g[0].group_index for g in again.buffer.take(len(again.buffer))) == left


# With rollout functions.


async def test_with_the_trainers_own_rollout_function_nothing_counts_as_in_flight(args: SimpleNamespace) -> None:
    vars(args).update(custom_generate_function_path=Scripted(), over_sampling_batch_size=4)
    source = entry_module().DataSource(args)
    await generate_rollout_async(args, 0, source)
    assert source.buffer.in_flight == 0
    source.save(0)
    (group,) = source_of(args, loads=0).get_samples(1)
    assert group[0].group_index == 4


def test_with_ours_every_group_is_somewhere_after_each_rollout_and_each_restart(args: SimpleNamespace) -> None:
    script: dict[int, list[Any]] = {
        index: [(index % 3, "hang"), (1, Status.COMPLETED)] for index in range(200) if index % 5 == 3
    }
    vars(args).update(custom_generate_function_path=Scripted(script), over_sampling_batch_size=5, partial_rollout=True)
    source = entry_module().DataSource(args)
    given: list[int] = []
    for rollout_id in range(12):
        if rollout_id % 3 == 2:
            source = source_of(args, loads=rollout_id - 1)
        output = entry_module().generate_rollout(args, rollout_id, source)
        given += [group[0].group_index for group in output.samples]
        assert source.buffer.in_flight == 0
        source.save(rollout_id)
    waiting = [group[0].group_index for group in source.buffer.take(len(source.buffer))]
    assert sorted(given + waiting) == list(range(source.buffer.position))
    assert len(given) == 24


# Killed.


class Trainer:
    """Processes that train one after the other, each from the last checkpoint."""

    def __init__(self, folder: Path, engine: Loopback, **how: Any) -> None:
        self._folder = folder
        self._plan = {"folder": str(folder), "url": engine.url, "vocabulary": engine.config.vocab_size, **how}

    def run(self, *, rounds: int = 99, killed_after: float | None = None, dies: list[Any] | None = None) -> None:
        """Train until it is killed or dies, or has done all the rounds."""
        plan = json.dumps({**self._plan, "rounds": rounds, "dies": dies})
        command = [sys.executable, "-W", "error", str(Path(trainer.__file__)), plan]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
            if killed_after is not None:
                time.sleep(killed_after)
                process.kill()
            _, errors = process.communicate(timeout=60)
        expected = 0 if dies is None and killed_after is None else -signal.SIGKILL
        assert process.returncode == expected, errors

    @property
    def last_saved(self) -> int:
        return max([entry["saved"] for entry in trainer.entries(self._folder) if "saved" in entry], default=-1)

    def check(self) -> None:
        """Every group that was ever drawn was given to the trainer once, or waits."""
        given: dict[int, list[int]] = {}
        entries = trainer.entries(self._folder)
        for entry in entries:
            if "given" in entry:
                given[entry["rollout"]] = entry["given"]  # what was not saved is trained again
        assert list(given) == list(range(len(given)))
        assert all(len(groups) == 3 for groups in given.values())
        found = [index for groups in given.values() for index in groups]
        assert sorted(found + entries[-1]["waiting"]) == list(range(entries[-1]["position"]))


@pytest.mark.parametrize("_host", ["slime"], indirect=True)
@pytest.mark.parametrize("how", [{}, {"ahead": True}, {"pooled": True, "ahead": True}], ids=["", "ahead", "pooled"])
def test_over_all_restarts_of_a_trainer_every_group_is_delivered_once(
    tmp_path: Path, how: dict[str, Any], soak: bool
) -> None:
    """It is killed in the middle of a rollout, of our file, between ours and slime's own, and at any moment."""
    chance = random.Random(7)
    with Loopback(token_rate=2000, stop_probability=1 / 30, seed=3, incremental=True) as engine:
        life = Trainer(tmp_path, engine, **how)
        life.run(dies=["reward", 17])
        for moment in ["ours", "slime's"]:
            before = life.last_saved
            life.run(dies=[moment, 3])
            assert life.last_saved > before
        for _ in range(40 if soak else 1):
            life.run(killed_after=chance.uniform(0, 0.5))
        life.run(rounds=life.last_saved + 3)
    life.check()
    assert not list((tmp_path / "rollout").glob("*.saving")), "the next save clears away what a killed one has left"
