"""What a run is asked for and what it has: prompts in, samples out, both as JSON lines.

:class:`Plan` names the samples that a file of prompts asks for. :class:`Journal` writes each of them down as it ends,
and knows them again after an interruption.
"""

from __future__ import annotations

import copy
import fcntl
import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import orjson

from streamfold.samples.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from io import FileIO
    from pathlib import Path

    from typing_extensions import Self

    Encode = Callable[["str | list[dict[str, Any]]"], list[int]]

__all__ = ["Journal", "Plan", "read_samples"]

_ENDED: Final = ("completed", "truncated")
_BEGIN: Final = b'{"group_index":'
_ARRAYS: Final = {
    "tokens": np.int32,
    "loss_mask": np.int8,
    "rollout_log_probs": np.float64,
    "rollout_top_p_token_ids": np.int32,
    "rollout_top_p_token_offsets": np.int32,
    "rollout_routed_experts": np.int32,
}
_LISTS: Final = ("tokens", "loss_mask", "rollout_log_probs")


class Plan:
    """The samples that a file of prompts asks for, by their index: ``n`` for each prompt, side by side.

    Each line of the file is a JSON object with ``input_ids``, or with ``prompt`` (or ``text``), or with both: the ids
    are what the engine is given. ``label`` goes to the sample's label, all other keys to its metadata. Equal lines are
    prompts of their own.

    Args:
        path: the file; lines end at LF, blank ones are passed over.
        sampling_params: for every sample; kept in its ``metadata["sampling_params"]``.
        n: samples for each prompt.
        seed: gives sample ``index`` the ``sampling_seed`` ``seed + index``.
        encode: turns a prompt that has no ids (a text, or the messages of a chat) into ids; None: it stays a text.

    Raises:
        ValueError: a line is no such object; the message names it. Or a parameter cannot be written as JSON.
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
            raise ValueError(f"at least one sample for each prompt, please, not {n}")
        self._n = n
        self._seed = seed
        with path.open("rb") as file:  # in binary, as a text may hold what Python takes for the end of a line
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
        if not lines:
            raise ValueError(f"{path} holds no prompt")
        self._prompts = [_read_prompt(line, f"{path}, line {number}", encode) for number, line in lines]
        try:
            self._params = orjson.loads(orjson.dumps(sampling_params))  # as it will be read again
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
    def texts(self) -> int:
        """How many prompts have no ids."""
        return sum(not prompt.tokens for prompt in self._prompts)


# What a rollout itself writes to a sample's metadata.
_OWN_NOTES = frozenset({"sampling_params", "resumed", "restarted_tokens", "lost_side_data", "text_joined"})


def _read_prompt(line: bytes, place: str, encode: Encode | None) -> Sample:
    try:
        told = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f'{place}: an object like {{"prompt": "..."}} or {{"input_ids": [1, 2]}} was expected')
    ids, text = told.pop("input_ids", None), told.pop("text", None)
    prompt = told.pop("prompt", text)
    if ids is not None and not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise ValueError(f"{place}: input_ids must be a list of at least one integer")
    if ids is None:
        if not prompt or not isinstance(prompt, (str, list)):
            raise ValueError(f"{place}: there is neither a prompt (or text) nor input_ids")
        if encode is None and not isinstance(prompt, str):
            raise ValueError(f"{place}: the messages of a chat need a tokenizer, whose template makes a prompt of them")
    metadata = told.pop("metadata", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{place}: metadata must be an object")
    if taken := sorted(_OWN_NOTES & (metadata.keys() | told.keys())):
        raise ValueError(f"{place}: {', '.join(taken)} is a note of the rollout's own: name it otherwise")
    return Sample(
        prompt=prompt or "",
        tokens=ids or (encode(prompt) if encode else []),
        label=told.pop("label", None),
        metadata={**metadata, **told},
    )


class Journal:
    """A file of samples, one JSON object a line, that survives the death of its writer.

    A line is in the file as soon as its sample has ended. A partial sample has a line as well; the one that it gets
    later takes its place, and the old one goes when the journal is closed, or opened the next time. A last line that
    was torn is cut off. Two writers at once are refused. For :func:`read_samples` it is a file like any other.

    Args:
        path: the file; it is made if it is not there.
        plan: what its samples must be of.
        arrays: ``"lists"`` puts all that is one per token in the line; ``"npz"`` into ``NAME.arrays/INDEX-….npz``,
            which is complete before the line that names it in ``metadata["arrays"]``.

    Attributes:
        finished: indices of the samples that are at their end.
        partial: those that were cut, by index.

    Raises:
        ValueError: a line is damaged, or of another plan.
        OSError: the file cannot be written, or somebody else is writing it.
    """

    def __init__(self, path: Path, plan: Plan, arrays: Literal["lists", "npz"] = "lists") -> None:
        self.finished: set[int] = set()
        self.partial: dict[int, Sample] = {}
        self._path = path
        self._folder = path.with_name(f"{path.name}.arrays")
        self._npz = arrays == "npz"
        self._places: dict[int, tuple[int, int]] = {}  # where each sample's latest line begins, and its length
        self._arrays: dict[int, str] = {}  # the file that this line names
        self._size = 0  # of all lines, superseded ones included
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
            self._file.close()  # which may be another one by now

    def write(self, sample: Sample) -> None:
        """Write a sample down, one that is at its end or a partial one.

        Raises:
            OSError: the disk is full, or gone; the file holds what it held before.
        """
        index = sample.index
        if index is None:
            raise ValueError("the sample has no index: only samples of the plan can be written down")
        told, old = self._told(sample, index), self._arrays.get(index)
        line = orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)
        try:
            _append(self._file, line)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._note(told, len(line), sample)
        if old is not None:
            (self._path.parent / old).unlink(missing_ok=True)

    def _told(self, sample: Sample, index: int) -> dict[str, Any]:
        metadata = {key: value for key, value in sample.metadata.items() if key != "arrays"}
        if not self._npz:
            return {**sample.to_dict(), "metadata": metadata}
        self._folder.mkdir(exist_ok=True)
        # A fresh name: until the line is there, the old line goes with the old arrays.
        file = self._folder / f"{index:06d}-{uuid.uuid4().hex[:8]}.npz"
        bare = copy.copy(sample)
        arrays: dict[str, Any] = {}
        for name, dtype in _ARRAYS.items():
            if (values := getattr(sample, name)) is not None:
                arrays[name] = np.asarray(values, dtype)
            setattr(bare, name, None)
        np.savez(file, **arrays)
        metadata["arrays"] = f"{self._folder.name}/{file.name}"
        told = {key: value for key, value in bare.to_dict().items() if key not in _ARRAYS}
        return {**told, "metadata": metadata}

    def _note(self, told: Mapping[str, Any], length: int, sample: Sample | None = None) -> None:
        """Take note of the line that comes next in the file."""
        index = told["index"]
        self._places[index] = self._size, length
        self._size += length
        self._arrays.pop(index, None)
        if "arrays" in told["metadata"]:
            self._arrays[index] = told["metadata"]["arrays"]
        self.partial.pop(index, None)
        if told["status"] in _ENDED:
            self.finished.add(index)
        elif sample is not None:
            self.partial[index] = sample

    def _scan(self, plan: Plan) -> None:
        """Read what an earlier run has left."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{self._path}, line {number}"
                if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                    self._file.truncate(self._size)  # its writer was killed
                    return
                try:
                    told = orjson.loads(line)
                    sample = self._check(told, plan)
                except (orjson.JSONDecodeError, KeyError, TypeError, OSError) as error:
                    raise ValueError(
                        f"{place} is no sample of a rollout, or damaged ({error!r}): mend it, or write to another file"
                    ) from None
                except ValueError as error:
                    raise ValueError(f"{place}: {error}. Write to another file, or move this one away") from None
                self._note(told, len(line), sample)

    def _check(self, told: dict[str, Any], plan: Plan) -> Sample | None:
        """See that a line is of this plan; the sample, if it is a partial one."""
        index = told["index"]
        if not 0 <= index < len(plan):
            raise ValueError(f"it holds sample {index}, but there are {len(plan)} to make")
        wanted = plan[index]
        given = {"group_index": wanted.group_index, "prompt": wanted.prompt}
        differing = [name for name, value in given.items() if told[name] != value]
        if told["metadata"]["sampling_params"] != wanted.metadata["sampling_params"]:
            differing.append("sampling_params")
        sample = None
        if told["status"] not in _ENDED or not wanted.prompt:
            sample = _sample(told, self._path.parent)
            if sample.tokens[: len(sample.tokens) - sample.response_length] != wanted.tokens:
                differing.append("the prompt's ids")
        if differing:
            raise ValueError(f"it is of another run: {', '.join(differing)} differ")
        return sample

    def _tidy(self) -> None:
        """Remove superseded lines, and arrays that no line names; make the rest safe from a loss of power."""
        if sum(length for _, length in self._places.values()) < self._size:
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
        places, size = sorted(self._places.items(), key=lambda item: item[1]), 0
        copied: dict[int, tuple[int, int]] = {}
        with self._path.open("rb") as file:
            for index, (start, length) in places:
                file.seek(start)
                _append(target, file.read(length))
                copied[index] = size, length
                size += length
        self._places, self._size = copied, size


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a journal, each once, in the order in which they ended; arrays beside it included.

    Raises:
        ValueError, KeyError: a line is no sample of a journal.
        OSError: the file, or an array beside it, cannot be read.
    """
    places: dict[int, int] = {}
    with path.open("rb") as file:
        start = 0
        for line in file:
            if line.endswith(b"\n"):  # otherwise its writer is at it, or was killed
                places[orjson.loads(line)["index"]] = start
            start += len(line)
        for start in sorted(places.values()):
            file.seek(start)
            yield _sample(orjson.loads(file.readline()), path.parent)


def _sample(told: dict[str, Any], folder: Path) -> Sample:
    """The sample of one line."""
    beside = told["metadata"].get("arrays")
    if beside is None:
        return Sample.from_dict(told)
    with np.load(folder / beside) as arrays:
        found = {name: arrays[name] for name in _ARRAYS if name in arrays}
    return Sample.from_dict({**told, **{n: a.tolist() if n in _LISTS else a for n, a in found.items()}})


def _open(path: Path) -> FileIO:
    """Open a file for this process alone, to append to it."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file: what is written down has to be read again")
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened = os.fstat(file.fileno())
            # A run that was just ending may have put another file in its place before it let go of this one.
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
