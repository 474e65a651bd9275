"""What a buffer holds outlives its process: every sample to the bit, and the last save whenever it is killed."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest

from streamfold.rollout.atomic_file import save_error
from streamfold.rollout.buffer import Buffer
from streamfold.rollout.groups import prompt_groups
from streamfold.samples.sample import Sample
from support.exactly import exactly
from support.host.slime.utils.types import Sample as HostSample
from support.paths import DATA

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Group: TypeAlias = list[Any]  # of our samples or a host's, and elements that are lists of them

VERSION_1 = DATA / "buffers" / "version-1.buffer"


def full(index: int) -> Sample:
    """A partial sample with something in every field."""
    return Sample(
        group_index=index // 2,
        index=index,
        prompt=[{"role": "user", "content": "a\u2028b\ud83d"}],
        tokens=[5, 6, *range(100, 140)],
        multimodal_inputs={"images": [b"\x89PNG\0"], "sizes": [(640, 480)]},
        response="é😀" * 20,
        response_length=40,
        label={"answer": "42"},
        reward=-0.0,
        loss_mask=[0] * 20 + [1] * 20,
        rollout_log_probs=[-0.0, float("nan"), float("-inf"), *[-0.1 * i for i in range(37)]],
        rollout_top_p_token_ids=np.arange(80, dtype=np.int32),
        rollout_top_p_token_offsets=np.arange(0, 82, 2, dtype=np.int32),
        rollout_routed_experts=np.arange(41 * 6, dtype=np.int32).reshape(41, 3, 2),
        weight_versions=["7", "8"],
        version_spans=[("7", 0, 15), ("8", 15, 40)],
        prompt_tokens=4,
        cached_tokens=1,
        status=Sample.Status.ABORTED,
        metadata={"start_rollout_id": 3, "tuple": (1, None), "streamfold_resumed": 2, "score": np.float32(0.5)},
        generate_function_path="some.module.generate",
        session_id="abc",
        remove_sample=True,
    )


def groups() -> list[Group]:
    """One with everything, one fanned out, one that has not begun, one of empty lists where others have None."""
    odd = full(3)
    odd.rollout_routed_experts = np.zeros((0, 3, 2), np.uint8)  # another dtype than the field's, and no rows
    empty = Sample(group_index=3, index=6, loss_mask=[], rollout_log_probs=[], metadata={"": []}, reward={"a": 1.5})
    return [[full(0), full(1)], [[full(2), odd], [odd]], [Sample(group_index=2, index=4)], [empty]]


def loaded(path: Path, sample_type: Any = Sample) -> Buffer:
    buffer = Buffer([], sample_type=sample_type)
    buffer.load(path)
    return buffer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


# Samples.


def test_every_field_of_our_samples_comes_back_to_the_bit(path: Path) -> None:
    buffer = Buffer(groups())
    buffer.put(buffer.take(4)[2:])
    buffer.save(path)
    assert exactly(loaded(path).take(4)) == exactly(groups())


def test_groups_in_flight_are_saved_as_they_are_at_that_moment(path: Path) -> None:
    buffer = Buffer([[Sample(group_index=0, tokens=[1])]])
    ((sample,),) = buffer.take(1)
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.5, -0.25], text="Hi")
    buffer.save(path)
    sample.append_response_tokens(tokens=[4], log_probs=[-0.125], text="!")
    ((found,),) = loaded(path).take(1)
    assert (found.tokens, found.response, found.rollout_log_probs) == ([1, 2, 3], "Hi", [-0.5, -0.25])
    assert sample.tokens == [1, 2, 3, 4]


def test_what_was_taken_down_is_written_later_as_it_was_whatever_became_of_it_meanwhile(path: Path) -> None:
    buffer = Buffer(groups())
    taken: list[Group] = [*buffer.take(4)]
    write = buffer.saving(path)
    assert not path.exists()
    buffer.done([taken[0]])
    sample = taken[1][1][0]
    for values in (sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.weight_versions):
        values.clear()
    sample.metadata["more"] = sample.response = ""
    del taken[2:]
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert exactly(loaded(path).take(4)) == exactly(groups())


def test_notes_of_others_under_names_that_were_ours_come_back_as_they_were(path: Path) -> None:
    """Only files of earlier versions are read under the old names."""
    notes = {"resumed": 2, "restarted_tokens": 1, "lost_side_data": 3, "failures": 4, "text_joined": True}
    buffer = Buffer()
    buffer.put([[Sample(group_index=0, metadata=dict(notes))]])
    buffer.save(path)
    ((found,),) = loaded(path).take(1)
    assert found.metadata == notes


def test_a_save_changes_nothing_in_the_samples(path: Path) -> None:
    buffer = Buffer(groups())
    taken = buffer.take(4)
    before = exactly(taken)
    buffer.save(path)
    assert exactly(taken) == before


def test_a_sample_whose_lengths_disagree_and_what_others_added_to_it_come_back_too(path: Path) -> None:
    buffer = Buffer()
    broken: Any = Sample(group_index=0, tokens=[1, 2], response_length=1, loss_mask=[1, 1, 1])
    broken.note = ("theirs", 1)
    buffer.put([[broken]])
    buffer.save(path)
    assert exactly(loaded(path).take(1)) == exactly([[broken]])


def test_samples_of_a_host_go_through_their_own_to_dict_and_from_dict(path: Path) -> None:
    sample = HostSample(
        group_index=0,
        index=1,
        prompt="Hi",
        tokens=[1, 2],
        response_length=1,
        rollout_log_probs=[float("nan")],
        rollout_routed_experts=np.arange(6, dtype=np.int32).reshape(1, 3, 2),
        train_metadata={"pixels": np.ones((2, 2), np.float16)},
        status=HostSample.Status.TRUNCATED,
    )
    sample.spec_info.spec_verify_ct = 4
    sample.__dict__["theirs"] = [np.int64(5)]
    buffer = Buffer([[sample, HostSample(group_index=0, index=2)]], sample_type=HostSample)
    taken = buffer.take(1)
    buffer.save(path)
    found: list[Group] = [*loaded(path, HostSample).take(1)]
    assert type(found[0][0]) is HostSample
    assert exactly([vars(each) for each in found[0]]) == exactly([vars(each) for each in taken[0]])


def test_a_file_of_version_1_can_be_read_for_ever() -> None:
    buffer = Buffer(iter([[Sample(group_index=index)] for index in range(7)]))
    buffer.load(VERSION_1)
    assert (len(buffer), buffer.position) == (4, 5)
    *found, new = buffer.take(5)
    assert exactly(found) == exactly(groups())
    assert new[0].group_index == 5


# Errors.


def note(value: Any) -> Callable[[Sample], None]:
    def change(sample: Sample) -> None:
        sample.metadata["notes"] = [0, {"deep": value}]

    return change


def endless(sample: Sample) -> None:
    sample.metadata["self"] = sample.metadata


def wrong_status(sample: Any) -> None:
    sample.status = "unheard of"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            note(threading.Lock()),
            r"\(in_flight\[0\]\[1\]\): metadata\['notes'\]\[1\]\['deep'\] is of type _thread.lock, which can neither",
        ),
        (note({lambda: 1}), r"\(in_flight\[0\]\[1\]\): metadata\['notes'\]\[1\]\['deep'\] is of type builtins.set"),
        (note(np.array([lambda: 1])), r"\['deep'\] is of type numpy.ndarray, which can neither"),
        (
            endless,
            r"metadata\['self'\]\['self'\]\['self'\]\['self'\]... is nested more than 60 deep, or contains",
        ),
        (wrong_status, r"cannot be saved \(ValueError\(.*unheard of.*: correct it, or pass its group to done"),
    ],
)
def test_what_cannot_be_written_is_named_by_sample_and_field_and_the_old_file_stays(
    change: Callable[[Sample], None], problem: str, path: Path
) -> None:
    buffer = Buffer(groups())
    taken = buffer.take(2)
    buffer.save(path)
    before = path.read_bytes()
    change(taken[0][1])
    with pytest.raises(ValueError, match=f"sample 1 of group 0 .*{problem}"):
        buffer.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert buffer.in_flight == 2


def test_the_place_of_a_fanned_out_sample_is_told_as_well(path: Path) -> None:
    buffer = Buffer()
    buffer.put([[full(0)], [[full(2)], [full(2), full(3)]]])
    taken: list[Group] = [*buffer.take(2)]
    taken[1][1][1].label = threading.Lock()
    with pytest.raises(ValueError, match=r"sample 3 of group 1 \(in_flight\[1\]\[1\]\[1\]\): label is of type"):
        buffer.save(path)


def test_a_sample_of_another_type_than_the_buffer_restores_is_refused_when_it_is_saved(path: Path) -> None:
    class Special(Sample):
        pass

    for sample, sample_type in ((HostSample(), Sample), (Sample(), HostSample), (Special(), Sample)):
        buffer = Buffer(sample_type=sample_type)
        buffer.put([[sample]])
        with pytest.raises(
            ValueError, match=r"sample None of group None is of type .*Buffer\(source, sample_type=\.\.\.\)"
        ):
            buffer.save(path)
    assert not path.exists()


def test_a_file_of_other_samples_is_refused_and_the_buffer_stays_as_it_was(path: Path) -> None:
    class Stricter(HostSample):
        @classmethod
        def from_dict(cls, data: Any) -> HostSample:
            raise KeyError("mandatory")

    theirs = Buffer([[HostSample(group_index=0)]], sample_type=HostSample)
    theirs.take(1)
    theirs.save(path)
    for sample_type, problem in (
        (Sample, r"holds samples of type support\.host\.slime\..*\.Sample, but this buffer makes streamfold\.Sample"),
        (Stricter, r"holds a sample of type .* from which .*Stricter cannot be made \(KeyError\('mandatory'\)\)"),
    ):
        buffer = Buffer(groups(), sample_type=sample_type)
        buffer.put(buffer.take(3)[:1])
        with pytest.raises(ValueError, match=problem):
            buffer.load(path)
        assert (len(buffer), buffer.in_flight, buffer.position) == (1, 2, 3)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda whole: whole[:-1], "is damaged"),
        (lambda whole: whole[:100] + b"\xff" + whole[101:], "is damaged"),
        (lambda whole: b"PK\3\4" + whole, "not a buffer of streamfold"),
        (lambda whole: whole.replace(b"buffer 1\n", b"buffer 3\n"), "has format 3"),
        (lambda _: b"", "not a buffer of streamfold"),
    ],
)
def test_a_file_that_is_refused_leaves_the_buffer_as_it_was(
    damage: Callable[[bytes], bytes], problem: str, path: Path
) -> None:
    path.write_bytes(damage(VERSION_1.read_bytes()))
    buffer = Buffer(groups())
    taken = buffer.take(3)
    buffer.put(taken[:1])
    with pytest.raises(ValueError, match=problem):
        buffer.load(path)
    assert (len(buffer), buffer.in_flight, buffer.position) == (1, 2, 3)
    served = buffer.take(9)
    assert served[0] is taken[0]
    assert exactly(served[1:]) == exactly(groups()[3:])


# Killed at any moment.

# Goes on from the file, if there is one, and saves for ever. Each step takes all and four more, is done with two, and
# leaves one in flight, with which it is done after the save. It tells what it is going to save, and when that is done.
CHILD = """
import itertools, json, os, sys
from pathlib import Path
from streamfold.rollout.buffer import Buffer
from streamfold.samples.sample import Sample

def source():
    for index in itertools.count():
        yield [Sample(group_index=index, tokens=[index] * 500, rollout_log_probs=[-0.5] * 500)]

path, log = map(Path, sys.argv[1:])
while sys.stdin.readline():  # a process for each line: an import takes a second
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
else:
    sys.exit()
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
buffer = Buffer(source())
if path.exists():
    buffer.load(path)
flying = []
while True:
    taken = buffer.take(len(buffer) + 4)
    for (sample,) in taken:
        sample.metadata["steps"] = sample.metadata.get("steps", 0) + 1
    over = [sample.group_index for (sample,) in flying + taken[-2:]]
    flying, back = taken[-3:-2], taken[:-3]
    buffer.done(taken[-2:])
    buffer.put(back)
    held = {sample.group_index: sample.metadata["steps"] for (sample,) in flying + back}
    print(json.dumps({"position": buffer.position, "held": held, "over": over}), flush=True)
    buffer.save(path)
    print("saved", flush=True)
    buffer.done(flying)
"""


def killed(starter: subprocess.Popen[str], log: Path, after: float) -> list[str]:
    """Let a child go on until it has saved once, and some seconds more; what it told until it was killed."""
    assert starter.stdin is not None
    assert starter.stdout is not None
    log.write_bytes(b"")
    print(file=starter.stdin, flush=True)
    child = int(starter.stdout.readline())
    try:
        while b"saved" not in log.read_bytes():
            os.kill(child, 0)  # an error if it has failed
            time.sleep(0.002)
        time.sleep(after)
    finally:
        os.kill(child, signal.SIGKILL)
    assert starter.stdout.readline() == "ended\n"
    return log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 16))])
def test_a_process_that_is_killed_leaves_its_last_save_or_the_one_it_was_at(seed: int, tmp_path: Path) -> None:
    path, log = tmp_path / "saved" / "buffer", tmp_path / "log"
    path.parent.mkdir()
    command = [sys.executable, "-c", CHILD, str(path), str(log)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # one thread alone can be forked without a warning
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        check_kills(starter, path, log, random.Random(seed))


def check_kills(starter: subprocess.Popen[str], path: Path, log: Path, chance: random.Random) -> None:
    """Start, kill and look twenty times."""
    over: set[int] = set()  # handed to the trainer before what is in the file
    torn = 0
    for _ in range(20):
        lines = killed(starter, log, after=chance.uniform(0, 0.05))
        states = [json.loads(line) for line in lines if line != "saved"]
        saves = lines.count("saved")
        buffer = loaded(path)
        position, samples = buffer.position, [sample for (sample,) in buffer.take(len(buffer))]
        assert all(sample.tokens == [sample.group_index] * 500 for sample in samples)
        held = {str(sample.group_index): sample.metadata["steps"] for sample in samples}
        (at,) = [
            number
            for number in range(saves - 1, len(states))
            if (states[number]["position"], states[number]["held"]) == (position, held)
        ]
        # None missing and none twice, counted from the first process on.
        told = [index for state in states[: at + 1] for index in state["over"]]
        assert sorted([*over, *told, *map(int, held)]) == list(range(position))
        over.update(told)
        left = [other for other in path.parent.iterdir() if other != path]
        assert len(left) <= 1, "what the process before had left is gone"
        torn += len(left)
    assert torn > 0, "no process was killed in the middle of a save"


def test_a_save_that_fails_names_the_file_and_what_to_do_and_leaves_the_old_one(tmp_path: Path) -> None:
    buffer, path = Buffer(prompt_groups([Sample(tokens=[1] * 4000)], 2)), tmp_path / "buffer"
    buffer.save(path)
    before = path.read_bytes()
    buffer.put(buffer.take(1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: raise the limit of file sizes .*buffer'") as failed:
            buffer.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert failed.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["buffer"]
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="create its folder first"):
        buffer.save(tmp_path / "no" / "buffer")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space on that disk"),
        (errno.EDQUOT, "free space on that disk"),
        (errno.EROFS, "a folder that this user can write"),
        (errno.EACCES, "a folder that this user can write"),
    ],
)
def test_what_can_be_done_about_a_failed_save_is_said_once(number: int, advice: str, tmp_path: Path) -> None:
    error = save_error(OSError(number, os.strerror(number)), tmp_path / "buffer")
    assert (error.errno, error.filename, type(error)) == (number, str(tmp_path / "buffer"), type(OSError(number, "")))
    assert str(error).count(advice) == str(save_error(error, tmp_path / "buffer")).count(advice) == 1
