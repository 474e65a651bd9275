r"""The file of a buffer: one tree of plain values and arrays, restored to the bit, replaced as a whole.

What it holds, in this order (format version 1)::

    streamfold buffer 1\n    what it is; a later format has another number
    arrays                   their bytes, one after the other, in C order
    index                    the tree as UTF-8 JSON
    8 bytes                  where the index begins, an unsigned little-endian integer
    32 bytes                 SHA-256 of everything before them

The check is of the whole, so a file is loaded as it was written or not at all. No pickle: loading runs nothing that
is in it. JSON has None, bool, finite floats, integers of 64 bits, text, lists, and dicts whose keys are text. All else
is an object with the one key ``$``, whose value is a list that begins with the kind:

- ``[kind, dtype, shape, offset]``: bytes of the file, made an ``array``, a ``list`` of numbers, a ``scalar`` of numpy,
  a ``float`` that is not finite, ``bytes``, or ``text`` that has lone surrogates;
- ``["tensor", dtype, shape, offset, name, shape]``: of torch, through its bytes;
- ``["int", hexadecimal]``, ``["tuple", [...]]``, ``["dict", [[key, value], ...]]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import secrets
import struct
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from io import BufferedReader
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Place = tuple[Any, ...]

__all__ = ["Packed", "Unwritable", "load", "save"]

VERSION: Final = 1

_FIRST_LINE: Final = re.compile(rb"streamfold buffer ([1-9][0-9]*)\n")
_INDEX_AT: Final = struct.Struct("<Q")
_DIGEST_SIZE: Final = 32
_CHUNK: Final = 1 << 20

_TAG: Final = "$"
_IMAGE_MODES: Final = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F")  # a palette is no pixel
# From here on a list of numbers is smaller and faster as an array.
_LONG: Final = 32
# A dict with odd keys takes four levels of JSON, and orjson writes no more than 254.
_DEEPEST: Final = 60
_INT64: Final = range(-(1 << 63), 1 << 63)
_NUMBERS: Final = {
    frozenset((int,)): (("<i1", "b"), ("<i4", "i"), ("<i8", "q")),
    frozenset((float,)): (("<f8", "d"),),
}


class Unwritable(ValueError):
    """A value that no file can hold.

    Attributes:
        place: the keys and indices that lead to it.
        problem: what is wrong with it, a sentence without its subject.
    """

    def __init__(self, place: Place, problem: str) -> None:
        super().__init__(f"{'.'.join(map(str, place))} {problem}")
        self.place = place
        self.problem = problem


def save(path: Path, value: Any) -> None:  # noqa: ANN401  # any tree
    """Write a tree of plain values and arrays in place of what the file holds, at once and for good.

    Args:
        path: the file; links are followed. Whoever has it open goes on reading what it held.
        value: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, and torch tensors,
            inside each other.

    Raises:
        Unwritable: there is something else in it.
        OSError: the disk is full, or gone. After both errors the file is what it was.
    """
    Packed(value).write(path)


def load(path: Path) -> Any:  # noqa: ANN401  # any tree
    """Read the tree that :func:`save` wrote, of this version of the format or an earlier one.

    Raises:
        ValueError: the file is damaged, of something else, or of a later version.
        ImportError: it holds torch tensors, and torch is not installed.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: give the path that save() was called with")
    with path.open("rb") as file:
        # Of anything else that somebody names, not more than a line.
        match = _FIRST_LINE.fullmatch(file.readline(64))
        if match is None:
            raise ValueError(f"{path} is no buffer of streamfold, or its beginning is damaged: load another file")
        version = int(match[1])
        if version not in _READERS:
            raise ValueError(
                f"{path} has format {version}, but this streamfold knows only those up to {VERSION}: "
                "load it with the streamfold that wrote it, or a later one"
            )
        return _READERS[version](file, path)


class Packed:
    """A tree as it is at this moment, which may be written later and in another thread. Arrays are not copied.

    Raises:
        Unwritable: as :func:`save`.
    """

    def __init__(self, value: Any) -> None:  # noqa: ANN401  # any tree
        self._parts: list[memoryview] = []
        self._size = 0
        self._put(b"streamfold buffer %d\n" % VERSION)
        index = orjson.dumps(self._encode(value, ()))
        self._put(_INDEX_AT.pack(self._put(index)))

    def write(self, path: Path) -> None:
        """Write it in place of what the file holds; raises ``OSError`` as :func:`save`."""
        digest = hashlib.sha256()
        with _replacing(path.resolve()) as file:
            for part in self._parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = bytes(part[start : start + _CHUNK])  # so that both take the same, whatever others do
                    file.write(chunk)
                    digest.update(chunk)
            file.write(digest.digest())

    def _put(self, data: bytes | memoryview) -> int:
        """Append bytes; gives where they begin."""
        start = self._size
        self._parts.append(memoryview(data))
        self._size += len(data)
        return start

    def _encode(self, value: Any, place: Place) -> Any:  # noqa: ANN401  # any tree
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value in _INT64 else {_TAG: ["int", hex(value)]}
        if kind is float:
            return value if math.isfinite(value) else self._array("float", np.array(value))
        if kind is str:
            return value if _is_text(value) else self._bytes("text", value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return self._bytes("bytes", value)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, place)
        if len(place) > _DEEPEST:
            raise Unwritable(place, f"is nested more than {_DEEPEST} deep, or holds itself")
        if kind is list:
            packed = _packed(value)
            return self._items(value, place) if packed is None else self._array("list", packed)
        if kind is tuple:
            return {_TAG: ["tuple", self._items(value, place)]}
        if kind is dict:
            return self._dict(value, place)
        if (torch := sys.modules.get("torch")) is not None and kind is torch.Tensor:
            return self._tensor(value, place, torch)
        if (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
            return self._image(value, place)
        raise Unwritable(
            place,
            f"is of type {kind.__module__}.{kind.__qualname__}, but what can be saved is None, bool, int, float, str, "
            "bytes, list, tuple, dict, numpy arrays, torch tensors and Pillow's images: make it one of these",
        )

    def _items(self, values: list[Any] | tuple[Any, ...], place: Place) -> list[Any]:
        return [self._encode(item, (*place, position)) for position, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], place: Place) -> Any:  # noqa: ANN401  # any tree
        if _TAG not in value and all(type(key) is str and _is_text(key) for key in value):
            return {key: self._encode(item, (*place, key)) for key, item in value.items()}
        pairs = [[self._encode(key, (*place, key)), self._encode(item, (*place, key))] for key, item in value.items()]
        return {_TAG: ["dict", pairs]}

    def _numpy(self, value: Array | np.generic, place: Place) -> Any:  # noqa: ANN401  # JSON
        # Objects and fields do not come back from the name of their dtype, nor does what has no size.
        if value.dtype.hasobject or not value.dtype.itemsize or np.dtype(value.dtype.str) != value.dtype:
            raise Unwritable(place, f"is of dtype {value.dtype}, which cannot be saved: make it plain numbers or text")
        return self._array("array" if isinstance(value, np.ndarray) else "scalar", np.asarray(value))

    def _array(self, kind: str, array: Array) -> Any:  # noqa: ANN401  # JSON
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return {_TAG: [kind, array.dtype.str, array.shape, self._put(raw.data)]}

    def _bytes(self, kind: str, value: bytes) -> Any:  # noqa: ANN401  # JSON
        return self._array(kind, np.frombuffer(value, np.uint8))

    def _tensor(self, value: Any, place: Place, torch: Any) -> Any:  # noqa: ANN401  # torch is optional
        try:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError) as error:
            raise Unwritable(place, f"is a tensor whose bytes cannot be had ({error}): make it a dense one") from None
        tagged = self._array("tensor", flat)
        tagged[_TAG] += [str(value.dtype).removeprefix("torch."), list(value.shape)]
        return tagged

    def _image(self, value: Any, place: Place) -> Any:  # noqa: ANN401  # Pillow is optional
        if value.mode not in _IMAGE_MODES:
            raise Unwritable(place, f"is an image of mode {value.mode}, whose pixels are not all: convert it to RGB")
        tagged = self._bytes("image", value.tobytes())
        tagged[_TAG] += [value.mode, list(value.size)]
        return tagged


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: lone surrogates cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _packed(values: list[Any]) -> Array | None:
    """A long list of nothing but int, or nothing but float, as an array of the first dtype that holds it."""
    if len(values) < _LONG:
        return None
    for dtype, code in _NUMBERS.get(frozenset(map(type, values)), ()):
        # Half the time of what numpy takes to make an array of a list.
        with contextlib.suppress(struct.error):
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype)
    return None


class _Reader:
    """Makes the tree of the JSON again."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self._file = file
        self._path = path

    def decode(self, value: Any) -> Any:  # noqa: ANN401  # any tree
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        if _TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        kind, *told = value[_TAG]
        if kind == "int":
            return int(told[0], 16)
        if kind == "tuple":
            return tuple(self.decode(told[0]))
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in told[0]}
        array = self._array(*told[:3])
        if kind == "tensor":
            return self._tensor(array, *told[3:])
        return self._image(array, *told[3:]) if kind == "image" else _FROM_ARRAY[kind](array)

    def _array(self, dtype: str, shape: list[int], offset: int) -> Array:
        raw = np.empty(math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
        self._file.seek(offset)
        self._file.readinto(raw.data)
        return raw.view(dtype).reshape(shape)

    def _tensor(self, array: Array, dtype: str, shape: list[int]) -> Any:  # noqa: ANN401  # torch is optional
        try:
            import torch  # noqa: PLC0415  # slow, and not needed otherwise
        except ImportError:
            raise ImportError(f"{self._path} holds torch tensors: install torch to load it") from None
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[...] = array
        return tensor

    def _image(self, array: Array, mode: str, size: list[int]) -> Any:  # noqa: ANN401  # Pillow is optional
        try:
            from PIL import Image  # noqa: PLC0415  # likewise
        except ImportError:
            raise ImportError(f"{self._path} holds images: install pillow to load it") from None
        return Image.frombytes(mode, (size[0], size[1]), array.tobytes())


_FROM_ARRAY: Final[Mapping[str, Callable[[Array], Any]]] = {
    "array": lambda array: array,
    "list": lambda array: array.tolist(),
    "scalar": lambda array: array[()],
    "float": lambda array: array.item(),
    "bytes": lambda array: array.tobytes(),
    "text": lambda array: array.tobytes().decode("utf-8", "surrogatepass"),
}


def _read_1(file: BufferedReader, path: Path) -> Any:  # noqa: ANN401  # any tree
    end = os.fstat(file.fileno()).st_size - _DIGEST_SIZE
    digest, left = hashlib.sha256(), max(0, end)
    file.seek(0)
    while left and (chunk := file.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    if file.read() != digest.digest():
        raise ValueError(f"{path} is damaged (its check does not fit): load an earlier copy, or start without it")
    file.seek(end - _INDEX_AT.size)
    (start,) = _INDEX_AT.unpack(file.read(_INDEX_AT.size))
    file.seek(start)
    index = orjson.loads(file.read(end - _INDEX_AT.size - start))
    return _Reader(file, path).decode(index)


# A new format gets a new number and a reader beside the old ones.
_READERS: Final[Mapping[int, Callable[[BufferedReader, Path], Any]]] = {1: _read_1}


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside the old one, that takes its place, and outlasts a loss of power, if the block ends well."""
    _remove_stale(path)
    file, beside = _beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _beside(path: Path) -> tuple[BinaryIO, Path]:
    """A fresh file, locked as long as it is open: so others know that its writer lives."""
    while True:
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.saving")
        file = beside.open("xb", buffering=_CHUNK)
        with contextlib.suppress(OSError):  # no locks here: then nobody can take ours for stale either
            fcntl.flock(file, fcntl.LOCK_EX)
        if beside.exists():
            return file, beside
        file.close()  # another process saw it in the moment before the lock


def _remove_stale(path: Path) -> None:
    """Remove what killed processes have left, and nothing that a living one writes."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.saving")
    for beside in [name for name in path.parent.iterdir() if ours.fullmatch(name.name)]:
        # Renamed by now, locked, or not ours to remove.
        with contextlib.suppress(OSError), beside.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            beside.unlink()
