"""The files of ``streamfold rollout``: prompts in, samples out, both with one JSON object per line.

:class:`Plan` lists the samples that a file of prompts asks for. :class:`Journal` writes each of them when it ends, and
reads them again when the command is rerun.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import sys
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

import numpy as np
import orjson

from streamfold.cli.prompts import numbered_lines, read_prompt
from streamfold.engines.base import check_finite
from streamfold.rollout.atomic_file import save_error
from streamfold.samples.metadata import rename_old_keys
from streamfold.samples.sample import Sample
from streamfold.samples.status import is_final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO
    from pathlib import Path

    from typing_extensions import Self

    from streamfold.cli.prompts import Encode

__all__ = ["Journal", "Plan", "read_samples"]

_LINE_START: Final = b'{"group_index":'
_LINE_OPTIONS: Final = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_ARRAYS: Final = {
    "tokens": np.int32,
    "loss_mask": np.int8,
    "rollout_log_probs": np.float64,
    "rollout_top_p_token_ids": np.int32,
    "rollout_top_p_token_offsets": np.int32,
    "rollout_routed_experts": None,  # as they are
}
_LISTS: Final = ("tokens", "loss_mask", "rollout_log_probs")


class Plan:
    """The samples to generate for a file of prompts: sample ``index`` is of prompt ``index // n``.

    Each line of the file is a JSON object with ``input_ids``, ``prompt`` (or ``text``), or both; then the engine gets
    the ids. ``image_data``, a string or a list of them, are the prompt's images, ``label`` becomes the sample's label,
    all other keys its metadata. Equal lines are separate prompts.

    Args:
        path: the file; lines end at LF, blank lines are ignored. ``-``: standard input.
        sampling_params: of every sample; saved in its ``metadata["sampling_params"]``.
        n: samples per prompt.
        seed: sample ``index`` gets ``sampling_seed = seed + index``.
        encode: turns a prompt without ids (a text, or the messages of a chat) into ids; None: the engine gets the text.

    Raises:
        ValueError: a line is anything else; the message names it. Or a parameter cannot be written as JSON.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        sampling_params: Mapping[str, Any],
        *,
        n: int = 1,
        seed: int | None = None,
        encode: Encode | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1 (at least one sample per prompt), not {n}")
        self._n = n
        self._seed = seed
        is_stdin = str(path) == "-"
        name = "standard input" if is_stdin else str(path)
        # not as text: Python would also split lines at U+2028 and others
        with _standard_input() if is_stdin else path.open("rb") as file:
            lines = list(numbered_lines(file))
        if not lines:
            raise ValueError(f"{name} holds no prompt")
        self._prompts = [read_prompt(line, f"{name}, line {number}", encode) for number, line in lines]
        try:
            # in the form in which they will be read again
            self._params = orjson.loads(orjson.dumps(check_finite(sampling_params)))
            orjson.dumps([seed, (seed or 0) + len(self)])
        except TypeError as error:
            raise ValueError(f"the sampling parameters cannot be sent: {error}") from None

    def __len__(self) -> int:
        return len(self._prompts) * self._n

    def __getitem__(self, index: int) -> Sample:
        prompt = self._prompts[index // self._n]
        params = dict(self._params)
        if self._seed is not None:
            params["sampling_seed"] = self._seed + index
        metadata = {**prompt.metadata, "sampling_params": params}
        return replace(prompt, index=index, group_index=index // self._n, tokens=list(prompt.tokens), metadata=metadata)

    @property
    def images(self) -> int:
        """Number of prompts with images."""
        return sum(prompt.multimodal_inputs is not None for prompt in self._prompts)

    @property
    def texts(self) -> int:
        """Number of prompts without ids."""
        return sum(not prompt.tokens for prompt in self._prompts)


def _standard_input() -> contextlib.AbstractContextManager[BinaryIO]:
    if sys.stdin is None:  # it was closed before the process began
        raise ValueError("--prompts -: standard input is closed")
    return contextlib.nullcontext(sys.stdin.buffer)


class Journal:
    """A file of samples, one JSON object per line, that can be reopened after its writer was killed.

    A sample is written when it ends, also a partial one. A later line of the same sample replaces the earlier one,
    which is removed when the journal is closed or reopened. An incomplete last line is removed. Only one process can
    open it for writing; :func:`read_samples` can read it at any time.

    Args:
        path: the file; it is created if it does not exist.
        plan: that the samples must belong to.
        arrays: ``"lists"`` puts per-token data in the line; ``"npz"`` in ``NAME.arrays/INDEX-….npz``, which is complete
            before the line that names it in ``metadata["arrays"]``.
        needs_reward: whether a sample is not finished before it has a reward.

    Attributes:
        finished: indices of the finished samples.
        partial: the other samples of the file, by index: partial ones, and those that lack a reward.

    Raises:
        ValueError: a line is damaged, or belongs to another plan.
        OSError: the file cannot be written, or another process is writing it.
    """

    def __init__(
        self, path: Path, plan: Plan, arrays: Literal["lists", "npz"] = "lists", *, needs_reward: bool = False
    ) -> None:
        self.finished: set[int] = set()
        self.partial: dict[int, Sample] = {}
        self._path = path
        self._folder = path.with_name(f"{path.name}.arrays")
        self._npz = arrays == "npz"
        self._needs_reward = needs_reward
        self._lines: dict[int, tuple[int, int]] = {}  # offset and length of each sample's latest line
        self._arrays: dict[int, str] = {}  # the .npz file that this line names
        self._size = 0  # of all lines, including replaced ones
        self._file = _open(path)
        try:
            self._scan(plan)
            self._tidy()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._tidy()
        finally:
            self._file.close()  # _tidy may have replaced it

    def write(self, sample: Sample) -> None:
        """Append a finished or partial sample.

        Raises:
            OSError: the file cannot be written; it has its old content. The message names it, and says what to do.
        """
        index = sample.index
        if index is None:
            raise ValueError("the sample has no index: only samples of the plan can be written")
        try:
            fields, old = self._encode(sample, index), self._arrays.get(index)
            line = orjson.dumps(fields, _plain, _LINE_OPTIONS)
            _append(self._file, line)
        except OSError as error:
            self._file.truncate(self._size)
            raise save_error(error, self._path) from error
        self._add_line(fields, len(line), sample)
        if old is not None:
            (self._path.parent / old).unlink(missing_ok=True)

    def _encode(self, sample: Sample, index: int) -> dict[str, Any]:
        metadata = {key: value for key, value in sample.metadata.items() if key != "arrays"}
        if not self._npz:
            return {**sample.to_dict(), "metadata": metadata}
        self._folder.mkdir(exist_ok=True)
        # A new name: until the new line is written, the old line needs the old file.
        file = self._folder / f"{index:06d}-{uuid.uuid4().hex[:8]}.npz"
        bare = copy.copy(sample)
        arrays: dict[str, Any] = {}
        for name, dtype in _ARRAYS.items():
            if (values := getattr(sample, name)) is not None:
                arrays[name] = np.asarray(values, dtype)
            setattr(bare, name, None)
        np.savez(file, **arrays)
        metadata["arrays"] = f"{self._folder.name}/{file.name}"
        fields = {key: value for key, value in bare.to_dict().items() if key not in _ARRAYS}
        return {**fields, "metadata": metadata}

    def _add_line(self, fields: Mapping[str, Any], length: int, sample: Sample | None = None) -> None:
        """Register the next line of the file."""
        index = fields["index"]
        self._lines[index] = self._size, length
        self._size += length
        self._arrays.pop(index, None)
        if "arrays" in fields["metadata"]:
            self._arrays[index] = fields["metadata"]["arrays"]
        self.partial.pop(index, None)
        if self._is_finished(fields):
            self.finished.add(index)
        elif sample is not None:
            self.partial[index] = sample

    def _scan(self, plan: Plan) -> None:
        """Read the lines of earlier runs."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                location = f"{self._path}, line {number}"
                if not line.endswith(b"\n") and line[: len(_LINE_START)] == _LINE_START[: len(line)]:
                    self._file.truncate(self._size)  # its writer was killed
                    return
                try:
                    fields = orjson.loads(line)
                    sample = self._check(fields, plan)
                except (orjson.JSONDecodeError, KeyError, TypeError, OSError) as error:
                    raise ValueError(
                        f"{location} is not a sample of a rollout, or damaged ({error!r}): correct it, or write to "
                        "another file"
                    ) from None
                except ValueError as error:
                    raise ValueError(f"{location}: {error}. Write to another file, or move this one away") from None
                self._add_line(fields, len(line), sample)

    def _check(self, fields: dict[str, Any], plan: Plan) -> Sample | None:
        """Check that a line belongs to the plan; returns the sample if it is a partial one."""
        index = fields["index"]
        if not 0 <= index < len(plan):
            raise ValueError(f"it is sample {index}, but the plan has {len(plan)} samples")
        planned = plan[index]
        expected = {"group_index": planned.group_index, "prompt": planned.prompt}
        differing = [name for name, value in expected.items() if fields[name] != value]
        if fields.get("multimodal_inputs") != planned.multimodal_inputs:
            differing.append("image_data")
        if fields["metadata"]["sampling_params"] != planned.metadata["sampling_params"]:
            differing.append("sampling_params")
        sample = None
        if not self._is_finished(fields) or not planned.prompt:
            sample = _decode(fields, self._path.parent)
            sample.metadata = rename_old_keys(sample.metadata, others=planned.metadata)
            prompt_ids = sample.tokens[: len(sample.tokens) - sample.response_length]
            # Without planned ids those of the sample are the engine's own, for the same text.
            if prompt_ids != planned.tokens and (planned.tokens or not planned.prompt):
                differing.append("the prompt's ids")
        if differing:
            raise ValueError(f"it is of another run: {', '.join(differing)} differ")
        return sample

    def _is_finished(self, fields: Mapping[str, Any]) -> bool:
        has_reward = not self._needs_reward or fields.get("reward") is not None
        return has_reward and is_final(Sample.Status(fields["status"]).name)

    def _tidy(self) -> None:
        """Remove replaced lines, and .npz files that no line names; synchronize the file to the disk."""
        if sum(length for _, length in self._lines.values()) < self._size:
            new = self._path.with_name(f"{self._path.name}.new")
            new.unlink(missing_ok=True)
            target = _open(new)
            try:
                self._copy_latest(target)
                os.fsync(target.fileno())
                new.replace(self._path)
            except BaseException:
                target.close()
                raise
            self._file.close()
            self._file = target
        os.fsync(self._file.fileno())
        named = set(self._arrays.values())
        for arrays in self._folder.glob("*-????????.npz"):
            if f"{self._folder.name}/{arrays.name}" not in named:
                arrays.unlink()

    def _copy_latest(self, target: FileIO) -> None:
        lines, size = sorted(self._lines.items(), key=lambda item: item[1]), 0
        copied: dict[int, tuple[int, int]] = {}
        with self._path.open("rb") as file:
            for index, (start, length) in lines:
                file.seek(start)
                _append(target, file.read(length))
                copied[index] = size, length
                size += length
        self._lines, self._size = copied, size


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a journal, in the order in which they were written, with the data of their .npz files.

    Raises:
        ValueError, KeyError: a line is not a sample of a journal.
        OSError: the file, or an .npz file, cannot be read.
    """
    starts: dict[int, int] = {}
    with path.open("rb") as file:
        start = 0
        for line in file:
            if line.endswith(b"\n"):  # otherwise it is being written, or its writer was killed
                starts[orjson.loads(line)["index"]] = start
            start += len(line)
        for start in sorted(starts.values()):
            file.seek(start)
            yield _decode(orjson.loads(file.readline()), path.parent)


def _plain(value: object) -> object:
    """A value that a reward function has set, as JSON can hold it: a number of numpy or torch, or its text."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else str(value)


def _decode(fields: dict[str, Any], folder: Path) -> Sample:
    """The sample of a line."""
    file = fields["metadata"].get("arrays")
    if file is None:
        return Sample.from_dict(fields)
    with np.load(folder / file) as arrays:
        found = {name: arrays[name] for name in _ARRAYS if name in arrays}
    return Sample.from_dict({**fields, **{n: a.tolist() if n in _LISTS else a for n, a in found.items()}})


def _open(path: Path) -> FileIO:
    """Open and lock a file to append to it."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file: its samples could not be read again")
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened = os.fstat(file.fileno())
            # Another run may have replaced the file between open and lock, as its last act.
            if path.exists() and os.path.samestat(opened, path.stat()):
                return file
        except OSError as error:
            file.close()
            raise OSError(f"{path} is being written by another run ({error.strerror})") from None
        file.close()


def _append(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
