"""A buffer holds values of any type: those that the format does not know are pickled, and not unpickled by default."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import pickle
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from streamfold.rollout import serialization
from streamfold.rollout.buffer import Buffer, Opaque
from streamfold.samples.sample import Sample
from support.paths import DATA

VERSION_1 = DATA / "buffers" / "version-1.buffer"


class Color(Enum):
    RED = 1


class Word(str, Enum):
    HELLO = "hello"


class Level(IntEnum):
    HIGH = 2


class Access(Flag):
    READ = 1
    WRITE = 2


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Items(list[int]):
    pass


class Array(np.ndarray[Any, Any]):
    pass


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Judgement:
    score: float
    words: tuple[str, ...]


VALUES: list[Any] = [
    Color.RED,
    Word.HELLO,
    Level.HIGH,
    Access.READ | Access.WRITE,
    Text("a"),
    Number(7),
    Items([1, 2]),
    Items(range(100)),
    Point(1, 0.5),
    Judgement(0.5, ("a", "b")),
    Counter("abca"),
    OrderedDict(b=1, a=2),
    defaultdict(int, a=1),
    UserDict(a=1),
    deque([1, 2], maxlen=4),
    {1, 2},
    frozenset({1, 2}),
    range(1, 9, 2),
    slice(1, 2),
    Ellipsis,
    1 + 2j,
    bytearray(b"ab"),
    Path("a/b"),
    PurePosixPath("/c"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc),
    dt.timedelta(seconds=1.5),
    Decimal("1.10"),
    Fraction(1, 3),
    np.dtype("<f4"),
    Sample,
    len,
    NotImplementedError,
]


def named(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:30]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


def saved(value: Any, path: Path) -> Any:
    """A buffer's file with the value as a label, in metadata, and as a key in metadata if it can be one."""
    sample = Sample(group_index=0, index=0, label=value, metadata={"deep": [{"value": value}], "other": (1, 0.5)})
    if type(value).__hash__ is not None and not isinstance(value, slice):
        sample.metadata["keys"] = {value: 1}
    buffer = Buffer([[sample]])
    buffer.take(1)
    buffer.save(path)
    return sample


def loaded(path: Path, *, trusted: bool) -> Sample:
    buffer = Buffer([[Sample()]])
    buffer.load(path, trusted=trusted)
    ((sample,),) = buffer.take(1)
    return sample


def format_of(path: Path) -> bytes:
    return path.read_bytes().partition(b"\n")[0]


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_of_any_type_comes_back_equal_and_of_the_same_type_if_the_file_is_trusted(
    value: Any, path: Path
) -> None:
    sample = saved(value, path)
    assert format_of(path) == b"streamfold buffer 2"
    found = loaded(path, trusted=True)
    assert vars(found) == vars(sample)
    for each in (found.label, found.metadata["deep"][0]["value"], *found.metadata.get("keys", ())):
        assert type(each) is type(value)
        assert each == value


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_otherwise_the_value_stays_pickled_and_is_saved_again_unchanged(value: Any, path: Path) -> None:
    sample = saved(value, path)
    found = loaded(path, trusted=False)
    assert isinstance(found.label, Opaque)
    assert found.label.type_name == f"{type(value).__module__}.{type(value).__qualname__}"
    assert found.metadata["deep"][0]["value"] == found.label
    assert found.metadata["other"] == (1, 0.5)
    again = path.with_name("again")
    buffer = Buffer([[found]])
    buffer.take(1)
    buffer.save(again)
    assert vars(loaded(again, trusted=False)) == vars(found)
    assert vars(loaded(again, trusted=True)) == vars(sample)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "array", [np.array([None, "a", {1}]), np.zeros(2, [("a", "i4")]), np.ma.masked_array([1, 2], [True, False])]
)
def test_an_array_whose_dtype_the_format_does_not_hold_is_pickled(array: Any, path: Path) -> None:
    saved(array, path)
    found = loaded(path, trusted=True).label
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_a_subclass_of_an_array_comes_back_as_one(path: Path) -> None:
    saved(np.arange(3).view(Array), path)
    assert type(loaded(path, trusted=True).label) is Array


@pytest.mark.parametrize("scalar", [np.bool_(True), np.float32(0.1), np.str_("é"), np.datetime64("2026-01-02")])
def test_a_scalar_of_numpy_needs_no_pickle(scalar: Any, path: Path) -> None:
    sample = saved(scalar, path)
    assert format_of(path) == b"streamfold buffer 1"
    assert type(loaded(path, trusted=False).label) is type(scalar)
    assert vars(loaded(path, trusted=False)) == vars(sample)


def test_a_file_without_pickles_has_format_1_which_earlier_versions_read(path: Path) -> None:
    old = Buffer(iter([[Sample(group_index=index)] for index in range(7)]))
    old.load(VERSION_1)
    old.save(path)
    assert format_of(path) == b"streamfold buffer 1"
    assert format_of(VERSION_1) == b"streamfold buffer 1"
    assert b'"pickle"' not in path.read_bytes()


def test_an_earlier_version_refuses_a_file_with_pickles_by_its_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Color.RED, path)
    readers = {1: serialization._READERS[1]}
    monkeypatch.setattr(serialization, "_READERS", readers)
    with pytest.raises(ValueError, match="has format 2, but this streamfold knows only those up to"):
        loaded(path, trusted=True)


# Files of unknown writers.


class Hostile:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_runs_code_is_not_run_unless_the_file_is_trusted(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    sample = Sample(group_index=0, metadata={"value": Hostile(folder)})
    Buffer().saving(path)
    buffer = Buffer()
    buffer.put([[sample]])
    buffer.save(path)
    found = loaded(path, trusted=False)
    assert found.metadata["value"].type_name == f"{__name__}.Hostile"
    for harmless in (repr(found), pickle.dumps(found), str(found.metadata), hash(found.metadata["value"])):
        assert harmless
    buffer.load(path)
    buffer.save(path)
    assert not folder.exists()
    loaded(path, trusted=True)
    assert folder.exists()


HOSTILE_INDEXES = {
    "bytes behind the data": {"$": ["bytes", "|u1", [256], 1_000_000]},
    "more bytes than there are": {"$": ["list", "|i1", [1 << 40], 0]},
    "a negative shape": {"$": ["list", "|i1", [-8], 0]},
    "a negative offset": {"$": ["bytes", "|u1", [1], -1]},
    "the same bytes for many values": [{"$": ["list", "|i1", [16], 0]}] * 4,
    "an unknown kind": {"$": ["module", "os"]},
    "no kind": {"$": []},
    "a shape that is none": {"$": ["bytes", "|u1", "x", 0]},
    "an unknown dtype": {"$": ["bytes", "nonsense", [1], 0]},
}


@pytest.mark.parametrize("index", HOSTILE_INDEXES.values(), ids=HOSTILE_INDEXES)
def test_an_index_that_streamfold_never_writes_is_refused_before_memory_is_taken(index: Any, path: Path) -> None:
    data = b"streamfold buffer 1\n" + bytes(16)
    body = data + orjson.dumps({"value": index}) + len(data).to_bytes(8, "little")
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(ValueError, match="was not written by streamfold"):
        serialization.load(path, trusted=False)


def test_a_pickle_in_a_file_that_claims_format_1_is_not_run(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    serialization.save(path, {"value": Hostile(folder)})
    body = path.read_bytes()[:-32].replace(b"buffer 2\n", b"buffer 1\n")
    path.write_bytes(body + hashlib.sha256(body).digest())
    for trusted in (False, True):
        with pytest.raises(ValueError, match="was not written by streamfold"):
            serialization.load(path, trusted=trusted)
    assert not folder.exists()


def test_nothing_of_a_damaged_file_is_unpickled(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    serialization.save(path, {"value": Hostile(folder), "more": "text"})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|not a buffer of streamfold|has format"):
            serialization.load(path, trusted=True)
    assert not folder.exists()


def test_a_value_that_cannot_be_unpickled_is_named_and_the_buffer_stays_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Judgement(1.0, ()), path)
    monkeypatch.delitem(globals(), "Judgement")
    buffer = Buffer()
    buffer.put([[Sample(group_index=9)]])
    with pytest.raises(ValueError, match=rf"type {__name__}\.Judgement that cannot be unpickled here \(AttributeError"):
        buffer.load(path, trusted=True)
    assert [sample.group_index for (sample,) in buffer.take(2)] == [9]
    buffer.load(path)
    assert len(buffer) == 1


# What is shown.


def test_an_opaque_value_is_small_to_look_at_and_survives_pickling() -> None:
    value = Opaque("some.Type", b"x" * 10_000)
    assert repr(value) == "<Opaque some.Type, 10000 bytes>"
    assert pickle.loads(pickle.dumps(value)) == value
    assert len({value, Opaque("some.Type", b"x" * 10_000), Opaque("some.Type", b"y")}) == 2


def test_values_that_stay_pickled_are_counted_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(Color.RED, path)
    loaded(path, trusted=True)
    assert not caplog.records
    loaded(path, trusted=False)
    assert f"3 values stay pickled ({__name__}.Color): load it with trusted=True" in caplog.text


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 1, (i for i in range(3)), open(os.devnull)])  # noqa: SIM115, PTH123
def test_what_cannot_be_pickled_is_named_by_sample_and_field(value: Any, path: Path) -> None:
    buffer = Buffer([[Sample(group_index=5, index=11, metadata={"notes": [Counter(), value]})]])
    buffer.take(1)
    with pytest.raises(
        ValueError,
        match=r"sample 11 of group 5 \(in_flight\[0\]\[0\]\): metadata\['notes'\]\[1\] is of type .* nor pickled",
    ):
        buffer.save(path)
    assert not path.exists()


def test_a_pickle_is_stored_apart_from_the_index(path: Path) -> None:
    serialization.save(path, {"a": Decimal(1)})
    body = path.read_bytes()[:-32]
    data = pickle.dumps(Decimal(1), 5)
    start = len(b"streamfold buffer 2\n")
    assert body.startswith(b"streamfold buffer 2\n" + data)
    assert orjson.loads(body[start + len(data) : -8]) == {
        "a": {"$": ["pickle", "|u1", [len(data)], start, "decimal.Decimal"]}
    }
