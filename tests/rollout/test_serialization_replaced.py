"""The file of a buffer is the old one until it is the new one, whoever dies, and whoever looks at it meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold.rollout import serialization as archive

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD = {"text": "a\u2028b", "list": list(range(40)), "none": None}
NEW = {"text": "x" * 1_000, "array": [-1.5] * 40}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a [file]*.buffer"  # what stands for something in a pattern


def beside(path: Path) -> list[str]:
    """All that is in the folder but the file itself."""
    return sorted(other.name for other in path.parent.iterdir() if other != path)


def test_whoever_has_the_old_file_open_goes_on_reading_it(path: Path) -> None:
    archive.save(path, OLD)
    old = path.read_bytes()
    with path.open("rb", buffering=0) as file:
        assert file.read(10) == old[:10]
        archive.save(path, NEW)
        assert old[:10] + file.read() == old
    assert archive.load(path) == NEW


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    archive.save(path, OLD)
    before, limit = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 10, 2_000, 1 << 20, (1 << 20) + 10):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                archive.save(path, {"a": "x" * 1_000, "b": np.zeros(1 << 18)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert path.read_bytes() == before
        assert beside(path) == []


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad disk"), KeyboardInterrupt()])
def test_an_error_at_the_end_leaves_the_old_file_and_nothing_else(
    failing: str, error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.save(path, OLD)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(type(error)):
            archive.save(path, NEW)
    assert path.read_bytes() == before
    assert beside(path) == []


def test_the_file_is_on_the_disk_before_it_takes_its_place_and_the_folder_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        steps.append("folder" if os.path.samestat(os.fstat(file), path.parent.stat()) else "file")
        fsync(file)

    def replaced(old: Path, new: Path) -> Path:
        steps.append(f"replace {old.stat().st_size > 100}")
        return replace(old, new)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("pathlib.Path.replace", replaced)
    archive.save(path, NEW)
    assert steps == ["file", "replace True", "folder"]


def test_a_link_goes_on_pointing_to_the_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target"
    path.symlink_to(target)
    archive.save(path, NEW)
    assert archive.load(path) == NEW
    assert path.is_symlink()
    assert target.is_file()
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_that_is_missing_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        archive.save(tmp_path / "nowhere" / "file", NEW)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(path: Path) -> None:
    stale = path.with_name(f"{path.name}.0123456789abcdef.saving")
    live = path.with_name(f"{path.name}.fedcba9876543210.saving")
    others = [
        path.with_name(name) for name in ("x.0123456789abcdef.saving", f"{path.name}.mine.saving", f"{path.name}.1")
    ]
    for file in (stale, live, *others):
        file.write_bytes(b"torn")
    with live.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive.save(path, NEW)
        assert beside(path) == sorted(file.name for file in (live, *others))
    archive.save(path, NEW)
    assert beside(path) == sorted(file.name for file in others)


def test_a_file_that_is_taken_for_stale_before_it_is_locked_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[Path] = []

    def removed_first(file: Any, how: int) -> None:
        if not removed:
            removed.append(Path(file.name))
            removed[0].unlink()
        lock(file, how)

    monkeypatch.setattr("streamfold.rollout.atomic_file.fcntl.flock", removed_first)
    archive.save(path, NEW)
    assert archive.load(path) == NEW
    assert len(removed) == 1
    assert beside(path) == []


def test_where_there_are_no_locks_it_is_written_and_nothing_is_taken_for_stale(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name(f"{path.name}.0123456789abcdef.saving")
    other.write_bytes(b"of a living process, perhaps")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("streamfold.rollout.atomic_file.fcntl.flock", no_locks)
    archive.save(path, NEW)
    assert archive.load(path) == NEW
    assert beside(path) == [other.name]


def test_writers_and_readers_at_once_see_whole_files_only(path: Path, soak: bool) -> None:
    count = 300 if soak else 15
    archive.save(path, [0, -1] * 5_000)
    errors: list[Exception] = []

    def running(work: Iterator[None]) -> threading.Thread:
        def run() -> None:
            try:
                for _ in work:
                    pass
            except Exception as error:  # noqa: BLE001 - whatever ends a thread
                errors.append(error)

        return threading.Thread(target=run)

    def write(number: int) -> Iterator[None]:
        for turn in range(count):
            archive.save(path, [number, turn] * 5_000)
            yield

    def read() -> Iterator[None]:
        for _ in range(3 * count):
            value = archive.load(path)
            assert value == value[:2] * 5_000
            yield

    threads = [*(running(write(number)) for number in range(3)), running(read())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert beside(path) == []
