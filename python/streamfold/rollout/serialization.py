r"""The file format of :meth:`Buffer.save`: one tree of values and arrays, bit-exact, with a checksum of the whole.

A file consists of, in this order::

    streamfold buffer 1\n    the number is the version of the format
    data                     the bytes of arrays and pickles, one after the other; arrays are in C order
    index                    the tree as UTF-8 JSON
    8 bytes                  the offset of the index, an unsigned little-endian integer
    32 bytes                 SHA-256 of everything before them

The checksum is compared before anything else is read. JSON holds None, bool, finite floats, integers of 64 bits, text,
lists, and dicts whose keys are text. Everything else is an object with the single key ``$``, whose value is a list that
starts with the kind:

- ``[kind, dtype, shape, offset]``: bytes in the file that are an ``array``, a ``list`` of numbers, a ``scalar`` of
  numpy, a ``float`` that is not finite, ``bytes``, or ``text`` with lone surrogates;
- ``["tensor", dtype, shape, offset, name, shape]``: the bytes of a torch tensor, then its dtype and its shape;
- ``["image", dtype, shape, offset, mode, size]``: the pixels of a Pillow image;
- ``["int", hexadecimal]``, ``["tuple", [...]]``, ``["dict", [[key, value], ...]]``;
- ``["pickle", dtype, shape, offset, type]``: the bytes of a pickle of any other value. Only in format 2.

A file without a pickle has format 1, which earlier versions of streamfold can read. A pickle is read back only if the
caller trusts the file, and is an :class:`Opaque` otherwise: loading runs nothing that is in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import os
import pickle
import re
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from streamfold.rollout.atomic_file import replacing
from streamfold.rollout.opaque import Opaque, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Location = tuple[Any, ...]

__all__ = ["Snapshot", "UnsupportedValue", "load", "pack", "save", "unpack"]

_logger = logging.getLogger("streamfold")

_PLAIN: Final = 1
_WITH_PICKLES: Final = 2
VERSION: Final = _WITH_PICKLES

_FIRST_LINE: Final = re.compile(rb"streamfold buffer ([1-9][0-9]*)\n")
_INDEX_AT: Final = struct.Struct("<Q")
_DIGEST_SIZE: Final = 32
_CHUNK: Final = 1 << 20

_TAG: Final = "$"
_IMAGE_MODES: Final = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F")  # all but those with a palette
_PICKLE_PROTOCOL: Final = 5
# From this length on a list of numbers is smaller and faster as an array.
_MIN_ARRAY_LENGTH: Final = 32
# A dict whose keys are not all text takes four levels of JSON, and orjson writes at most 254.
_MAX_DEPTH: Final = 60
_INT64: Final = range(-(1 << 63), 1 << 63)
_NUMBERS: Final = {
    frozenset((int,)): (("<i1", "b"), ("<i4", "i"), ("<i8", "q")),
    frozenset((float,)): (("<f8", "d"),),
}


class UnsupportedValue(ValueError):
    """A value that cannot be saved.

    Attributes:
        location: the keys and indices that lead to it.
        problem: what is wrong with it, a sentence without its subject.
    """

    def __init__(self, location: Location, problem: str) -> None:
        super().__init__(f"{'.'.join(map(str, location))} {problem}")
        self.location = location
        self.problem = problem


def save(path: Path, value: Any) -> None:  # noqa: ANN401  # any tree
    """Replace the file by a tree of values, atomically and durably.

    Args:
        path: the file; symbolic links are followed. A process that has it open continues to read the old content.
        value: None, bool, int, float, str, bytes, list, tuple, dict, arrays and scalars of numpy, torch tensors and
            Pillow images, nested in each other. Values of any other type are pickled.

    Raises:
        UnsupportedValue: a value cannot be pickled, or is nested too deep.
        OSError: the file cannot be written. After either error it has its old content.
    """
    Snapshot(value).write(path)


def load(path: Path, *, trusted: bool = False) -> Any:  # noqa: ANN401  # any tree
    """Read the tree that :func:`save` wrote, in this version of the format or an earlier one.

    Args:
        path: the file.
        trusted: whether to unpickle the pickled values, which may run any code; otherwise each is an :class:`Opaque`.

    Raises:
        ValueError: the file is damaged, of another kind or of a later version, or a pickled value cannot be unpickled.
        ImportError: it holds torch tensors or images, and torch or pillow is not installed.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: give the path that save() was called with")
    with path.open("rb") as file:
        match = _FIRST_LINE.fullmatch(file.readline(64))  # of a file of another kind, not more than that
        if match is None:
            raise ValueError(f"{path} is not a buffer of streamfold, or its first line is damaged: load another file")
        version = int(match[1])
        if version not in _READERS:
            raise ValueError(
                f"{path} has format {version}, but this streamfold knows only those up to {VERSION}: "
                "load it with the streamfold that wrote it, or a later one"
            )
        reader = _READERS[version](file, path, trusted=trusted)
        value = reader.read()
    if reader.opaque:
        _logger.warning(
            "%s: %d values stay pickled (%s): load it with trusted=True if you trust its writer",
            path,
            reader.opaque.total(),
            ", ".join(sorted(reader.opaque)),
        )
    return value


def pack(value: Any) -> npt.NDArray[np.uint8]:  # noqa: ANN401  # any tree
    """One array ``[bytes]`` with what :func:`save` writes, without the checksum: for another process of the same user.

    Raises:
        UnsupportedValue: as :func:`save`.
    """
    return Snapshot(value).to_array()


def unpack(packed: npt.NDArray[np.uint8]) -> Any:  # noqa: ANN401  # any tree
    """The tree that :func:`pack` was given; its arrays are copies, which may be written.

    Pickled values are unpickled, so the array must come from a process that is trusted.
    """
    return _PickleReader(io.BytesIO(packed.data), Path("a packed tree"), trusted=True).read_tree(len(packed))


class Snapshot:
    """A tree as it is at this moment, which may be written later and in another thread. Arrays are not copied.

    Raises:
        UnsupportedValue: as :func:`save`.
    """

    def __init__(self, value: Any) -> None:  # noqa: ANN401  # any tree
        self._version = _PLAIN
        self._parts: list[memoryview] = []
        self._size = len(self._first_line)
        self._encoders: dict[type, Callable[[Any, Location], Any]] = {
            type(None): lambda value, _location: value,
            bool: lambda value, _location: value,
            int: lambda value, _location: value if value in _INT64 else {_TAG: ["int", hex(value)]},
            float: lambda value, _location: value if math.isfinite(value) else self._array("float", np.array(value)),
            str: lambda value, _location: value if _is_utf8(value) else self._text(value),
            bytes: lambda value, _location: self._bytes("bytes", value),
            list: self._list,
            tuple: lambda value, location: {_TAG: ["tuple", self._items(value, location)]},
            dict: self._dict,
            np.ndarray: self._numpy,
            Opaque: lambda value, _location: self._pickled(value),
        }
        index = orjson.dumps(self._encode(value, ()))
        self._put(_INDEX_AT.pack(self._put(index)))
        self._parts.insert(0, memoryview(self._first_line))

    def write(self, path: Path) -> None:
        """Replace the file, atomically and durably; raises ``OSError`` as :func:`save`."""
        digest = hashlib.sha256()
        with replacing(path.resolve()) as file:
            for part in self._parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = bytes(part[start : start + _CHUNK])  # a copy: the file and the digest must get the same
                    file.write(chunk)
                    digest.update(chunk)
            file.write(digest.digest())

    def to_array(self) -> npt.NDArray[np.uint8]:
        """All bytes of the file but its checksum."""
        return np.frombuffer(b"".join(self._parts), np.uint8)

    @property
    def _first_line(self) -> bytes:
        return b"streamfold buffer %d\n" % self._version

    def _put(self, data: bytes | memoryview) -> int:
        """Append bytes; returns their offset."""
        start = self._size
        self._parts.append(memoryview(data))
        self._size += len(data)
        return start

    def _encode(self, value: Any, location: Location) -> Any:  # noqa: ANN401  # any value to JSON
        return self._encoders.get(type(value), self._other)(value, location)

    def _other(self, value: Any, location: Location) -> Any:  # noqa: ANN401  # any value to JSON
        encoded = None
        if isinstance(value, np.generic):
            return self._numpy(value, location)
        if (torch := sys.modules.get("torch")) is not None and type(value) is torch.Tensor:
            encoded = self._tensor(value, torch)
        elif (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
            encoded = self._image(value)
        return self._pickle(value, location) if encoded is None else encoded

    def _list(self, value: list[Any], location: Location) -> Any:  # noqa: ANN401  # JSON
        array = _number_array(value)
        return self._items(value, location) if array is None else self._array("list", array)

    def _items(self, values: list[Any] | tuple[Any, ...], location: Location) -> list[Any]:
        _check_depth(location)
        return [self._encode(item, (*location, position)) for position, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], location: Location) -> Any:  # noqa: ANN401  # JSON
        _check_depth(location)
        if _TAG not in value and all(type(key) is str and _is_utf8(key) for key in value):
            return {key: self._encode(item, (*location, key)) for key, item in value.items()}
        pairs = [
            [self._encode(key, (*location, key)), self._encode(item, (*location, key))] for key, item in value.items()
        ]
        return {_TAG: ["dict", pairs]}

    def _numpy(self, value: Array | np.generic, location: Location) -> Any:  # noqa: ANN401  # JSON
        # Dtypes with objects or fields cannot be made of their name, nor can those without a size.
        if value.dtype.hasobject or not value.dtype.itemsize or np.dtype(value.dtype.str) != value.dtype:
            return self._pickle(value, location)
        return self._array("array" if isinstance(value, np.ndarray) else "scalar", np.asarray(value))

    def _array(self, kind: str, array: Array) -> dict[str, list[Any]]:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return {_TAG: [kind, array.dtype.str, array.shape, self._put(raw.data)]}

    def _text(self, value: str) -> dict[str, list[Any]]:
        return self._bytes("text", value.encode("utf-8", "surrogatepass"))

    def _bytes(self, kind: str, value: bytes) -> dict[str, list[Any]]:
        return self._array(kind, np.frombuffer(value, np.uint8))

    def _tensor(self, value: Any, torch: Any) -> dict[str, list[Any]] | None:  # noqa: ANN401  # torch is optional
        try:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError):  # a sparse one
            return None
        encoded = self._array("tensor", flat)
        encoded[_TAG] += [str(value.dtype).removeprefix("torch."), list(value.shape)]
        return encoded

    def _image(self, value: Any) -> dict[str, list[Any]] | None:  # noqa: ANN401  # Pillow is optional
        if value.mode not in _IMAGE_MODES:
            return None
        encoded = self._bytes("image", value.tobytes())
        encoded[_TAG] += [value.mode, list(value.size)]
        return encoded

    def _pickle(self, value: Any, location: Location) -> dict[str, list[Any]]:  # noqa: ANN401  # any value
        try:
            data = pickle.dumps(value, _PICKLE_PROTOCOL)
        except Exception as error:
            raise UnsupportedValue(
                location,
                f"is of type {type_name(type(value))}, which can neither be saved nor pickled ({error}): make it None, "
                "bool, int, float, str, bytes, list, tuple, dict, an array of numpy, or something that can be pickled",
            ) from error
        return self._pickled(Opaque(type_name(type(value)), data))

    def _pickled(self, value: Opaque) -> dict[str, list[Any]]:
        self._version = _WITH_PICKLES
        encoded = self._bytes("pickle", value.data)
        encoded[_TAG].append(value.type_name)
        return encoded


def _check_depth(location: Location) -> None:
    if len(location) > _MAX_DEPTH:
        raise UnsupportedValue(location, f"is nested more than {_MAX_DEPTH} deep, or contains itself")


def _is_utf8(value: str) -> bool:
    """Whether a text can be written as UTF-8: one with lone surrogates cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number_array(values: list[Any]) -> Array | None:
    """An array of the first dtype that holds a long list of only int, or only float; None for any other list."""
    if len(values) < _MIN_ARRAY_LENGTH:
        return None
    for dtype, code in _NUMBERS.get(frozenset(map(type, values)), ()):
        # Takes half the time of np.array(values).
        with contextlib.suppress(struct.error):
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype)
    return None


class _LoadError(ValueError):
    """A message for the user, as of :func:`load`."""


class _Reader:
    """Reads a file of format 1."""

    def __init__(self, file: io.BufferedIOBase, path: Path, *, trusted: bool) -> None:
        self._file = file
        self._path = path
        self._trusted = trusted
        self._data_end = 0  # where the arrays end
        self._unread = 0  # bytes of them that no value has used
        self.opaque: Counter[str] = Counter()  # types of values that were not unpickled

    def read(self) -> Any:  # noqa: ANN401  # any tree
        """The tree, after the checksum was compared."""
        end = os.fstat(self._file.fileno()).st_size - _DIGEST_SIZE
        self._check(end)
        return self.read_tree(end)

    def read_tree(self, end: int) -> Any:  # noqa: ANN401  # any tree
        """The tree, in the bytes before ``end``."""
        self._file.seek(end - _INDEX_AT.size)
        try:
            (self._data_end,) = _INDEX_AT.unpack(self._file.read(_INDEX_AT.size))
            self._unread = self._data_end
            self._file.seek(self._data_end)
            return self._decode(orjson.loads(self._file.read(end - _INDEX_AT.size - self._data_end)))
        except _LoadError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
            struct.error,
        ) as error:
            raise _LoadError(
                f"{self._path} was not written by streamfold ({error!r}): load another file, or start without it"
            ) from error

    def _check(self, end: int) -> None:
        digest, left = hashlib.sha256(), max(0, end)
        self._file.seek(0)
        while left and (chunk := self._file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        if self._file.read() != digest.digest():
            raise _LoadError(
                f"{self._path} is damaged (its checksum is wrong): load an earlier copy, or start without it"
            )

    def _decode(self, value: Any) -> Any:  # noqa: ANN401  # JSON to any value
        if type(value) is list:
            return [self._decode(item) for item in value]
        if type(value) is not dict:
            return value
        if _TAG not in value:
            return {key: self._decode(item) for key, item in value.items()}
        kind, *fields = value[_TAG]
        return self._decode_tagged(kind, fields)

    def _decode_tagged(self, kind: str, fields: list[Any]) -> Any:  # noqa: ANN401  # any value
        if kind == "int":
            return int(fields[0], 16)
        if kind == "tuple":
            return tuple(self._decode(fields[0]))
        if kind == "dict":
            return {self._decode(key): self._decode(item) for key, item in fields[0]}
        array = self._array(*fields[:3])
        if kind == "tensor":
            return self._tensor(array, *fields[3:])
        return self._image(array, *fields[3:]) if kind == "image" else _FROM_ARRAY[kind](array)

    def _array(self, dtype: str, shape: list[int], offset: int) -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._unread -= size  # each byte is written for one value
        if min(shape, default=0) < 0 or not 0 <= offset <= offset + size <= self._data_end or self._unread < 0:
            raise _LoadError(
                f"{self._path} was not written by streamfold ({size} bytes at {offset} are not in its data): "
                "load another file, or start without it"
            )
        raw = np.empty(size, np.uint8)
        self._file.seek(offset)
        self._file.readinto(raw.data)
        return raw.view(dtype).reshape(shape)

    def _tensor(self, array: Array, dtype: str, shape: list[int]) -> Any:  # noqa: ANN401  # torch is optional
        try:
            import torch  # noqa: PLC0415  # slow, and only needed here
        except ImportError:
            raise ImportError(f"{self._path} holds torch tensors: pip install 'streamfold[torch]'") from None
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[...] = array
        return tensor

    def _image(self, array: Array, mode: str, size: list[int]) -> Any:  # noqa: ANN401  # Pillow is optional
        try:
            from PIL import Image  # noqa: PLC0415  # slow, and only needed here
        except ImportError:
            raise ImportError(f"{self._path} holds images: install pillow to load it") from None
        return Image.frombytes(mode, (size[0], size[1]), array.tobytes())


class _PickleReader(_Reader):
    """Reads a file of format 2."""

    def _decode_tagged(self, kind: str, fields: list[Any]) -> Any:  # noqa: ANN401  # any value
        if kind != "pickle":
            return super()._decode_tagged(kind, fields)
        data, name = self._array(*fields[:3]).tobytes(), fields[3]
        if not self._trusted:
            self.opaque[name] += 1
            return Opaque(name, data)
        try:
            return pickle.loads(data)  # noqa: S301  # the caller trusts the file
        except Exception as error:
            raise _LoadError(
                f"{self._path} holds a value of type {name} that cannot be unpickled here ({error!r}): "
                "load the file with the code that saved it, or without trusted=True to keep such values pickled"
            ) from error


_FROM_ARRAY: Final[Mapping[str, Callable[[Array], Any]]] = {
    "array": lambda array: array,
    "list": lambda array: array.tolist(),
    "scalar": lambda array: array[()],
    "float": lambda array: array.item(),
    "bytes": lambda array: array.tobytes(),
    "text": lambda array: array.tobytes().decode("utf-8", "surrogatepass"),
}
# A new format gets a new number, and a reader beside the old ones.
_READERS: Final[Mapping[int, type[_Reader]]] = {_PLAIN: _Reader, _WITH_PICKLES: _PickleReader}
