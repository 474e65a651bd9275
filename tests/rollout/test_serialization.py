"""The file of a buffer: every value comes back to the bit, and whatever is damaged or of something else is refused."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from streamfold.rollout import serialization as archive
from support.exactly import exactly

if TYPE_CHECKING:
    from pathlib import Path

# Decorators run before pytest's options are there to be asked.
SOAK = "--soak" in sys.argv or os.environ.get("STREAMFOLD_SOAK", "0") not in ("", "0")
pytestmark = pytest.mark.timeout(7_200 if SOAK else 120)

SMALL = {"text": "a\u2028b", "list": list(range(40)), "array": np.arange(6.0).reshape(2, 3), "none": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a [file]*.buffer"  # what stands for something in a pattern


def again(value: Any, path: Path) -> Any:
    archive.save(path, value)
    return archive.load(path)


def beside(path: Path) -> list[str]:
    """All that is in the folder but the file itself."""
    return sorted(other.name for other in path.parent.iterdir() if other != path)


def double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


# Values.

NANS = [double(0x7FF8_0000_0000_0000), double(0xFFF8_0000_0000_0001), double(0x7FFF_FFFF_FFFF_FFFF)]
FLOATS = [0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1, float("inf"), float("-inf"), *NANS]


@pytest.mark.parametrize(
    "value",
    [
        [None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**5000],
        FLOATS,
        FLOATS * 8,
        ["", "é", "\u2028\x85\0", "😀", "\ud800", "a\udfff", "\ud83d\ude00"],
        [b"", b"\xff\0", b"x" * 100],
        [[], (), {}, [[]], ([], ()), [()], ((1, (2.0,)), {"a": (3,)})],
        {"b": 1, "a": 2, "": 3, "$": 4, "é": 5},
        {1: "int", "1": "text", None: 0, False: 1, (1, (2, b"x")): 2, -0.5: 3, "\ud800": 4},
        {"$": ["int", "ff"]},
        [list(range(n)) for n in (31, 32, 33)],
        [
            [1] * 40,
            [-128] * 40,
            [128] * 40,
            [-129] * 40,
            [2**31] * 40,
            [-(2**31)] * 40,
            [2**63] * 40,
            [2**70, *[0] * 40],
        ],
        [[True] * 40, [1, True] * 20, [1, 1.0] * 20, [None, 1] * 20, ["1"] * 40, [1.0] * 40, [b"1"] * 40],
    ],
    ids=[
        "integers",
        "floats",
        "long floats",
        "text",
        "bytes",
        "containers",
        "keys",
        "odd keys",
        "tag",
        "lengths",
        "integer lists",
        "mixed lists",
    ],
)
def test_plain_values_come_back_to_the_bit(value: Any, path: Path) -> None:
    assert exactly(again(value, path)) == exactly(value)


@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "i1",
        "u1",
        "<i2",
        "<i4",
        ">i4",
        "<i8",
        "<u8",
        "<f2",
        "<f4",
        ">f4",
        "<f8",
        "<c16",
        "S3",
        "<U2",
        "<M8[ms]",
        "V5",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (3, 2, 2)])
def test_arrays_keep_dtype_byte_order_and_shape(dtype: str, shape: tuple[int, ...], path: Path) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 128, size, np.uint8)
    array = raw.view(dtype).reshape(shape)
    found = again([array, array.T, array[..., ::2] if shape else array, array.flat[0] if array.size else None], path)
    assert exactly(found[0]) == exactly(array)
    assert exactly(found[1]) == exactly(array.T)
    if shape:
        assert exactly(found[2]) == exactly(array[..., ::2])
    assert exactly(found[3]) == exactly(array.flat[0] if array.size else None)


def test_arrays_belong_to_whoever_loads_them(path: Path) -> None:
    array = np.arange(6, dtype=np.int32)
    array.flags.writeable = False
    first, second = again([array, array], path)
    assert first.flags.writeable
    assert first.flags.owndata or first.base.flags.owndata
    first += 1
    assert second.tolist() == list(range(6))


def test_scalars_of_numpy_stay_what_they_are(path: Path) -> None:
    value = [np.float64(-0.0), np.float32("nan"), np.int64(7), np.bool_(True), np.str_("é"), {"a": np.uint8(255)}]
    assert exactly(again(value, path)) == exactly(value)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.lists(st.integers(-300, 300), min_size=30, max_size=40)
    | st.lists(st.floats(), min_size=30, max_size=40)
    | arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$"), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(
    max_examples=20_000 if SOAK else 150,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=TREES)
def test_any_tree_comes_back_to_the_bit(path: Path, value: Any) -> None:
    assert exactly(again(value, path)) == exactly(value)


@pytest.mark.torch
def test_tensors_come_back_on_the_cpu_with_dtype_and_shape(path: Path) -> None:
    import torch  # noqa: PLC0415 - only where it is installed

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        for shape in ((), (0,), (5,), (2, 3, 4)):
            tensor = torch.ones(shape).mul(3).to(dtype)
            (found,) = again([tensor], path)
            assert (found.dtype, found.shape, found.device.type) == (dtype, tensor.shape, "cpu")
            assert torch.equal(found, tensor)
    grown = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert again({"a": grown}, path)["a"].tolist() == grown.tolist()
    archive.save(path, {"a": torch.eye(3).to_sparse()})
    assert archive.load(path, trusted=True)["a"].to_dense().tolist() == torch.eye(3).tolist()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            threading.Lock(),
            r"is of type _thread\.lock, which can neither be saved nor pickled \(cannot",
        ),
        ({1, lambda: 2}, r"is of type builtins\.set, which .* make it None, bool"),
        (np.array([lambda: 1]), r"is of type numpy\.ndarray, which"),
    ],
)
def test_what_cannot_be_pickled_is_refused_by_its_location(value: Any, problem: str, path: Path) -> None:
    archive.save(path, SMALL)
    with pytest.raises(archive.UnsupportedValue, match=rf"a\.1\.b {problem}") as caught:
        archive.save(path, {"a": [0, {"b": value}]})
    assert caught.value.location == ("a", 1, "b")
    assert exactly(archive.load(path)) == exactly(SMALL)
    assert beside(path) == []


def nested(depth: int, kind: str) -> Any:
    value: Any = np.zeros(1)
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {1: value}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_the_depth_is_limited_and_what_holds_itself_is_refused(kind: str, path: Path) -> None:
    deepest = nested(61, kind)
    assert exactly(again(deepest, path)) == exactly(deepest)
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(62, kind), endless):
        with pytest.raises(archive.UnsupportedValue, match="more than 60 deep, or contains itself"):
            archive.save(path, value)
    assert exactly(archive.load(path)) == exactly(deepest)


# Damage.


def test_each_flipped_bit_is_refused(path: Path) -> None:
    archive.save(path, SMALL)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"is damaged|not a buffer of streamfold|has format"):
                archive.load(path)


def test_a_cut_or_lengthened_file_is_refused_wherever_it_was_cut(path: Path) -> None:
    archive.save(path, SMALL)
    whole = path.read_bytes()
    for damaged in [*(whole[:size] for size in range(len(whole))), whole + b"\0", whole + whole, b"\0" * len(whole)]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is (damaged|not a buffer of streamfold).*load"):
            archive.load(path)


@pytest.mark.parametrize(
    "other", [b"", b"\n", b"{}\n", b"PK\x03\x04", b"\x80\x04\x95", b"streamfold buffer \n", b"x" * 99]
)
def test_a_file_of_something_else_is_refused(other: bytes, path: Path) -> None:
    path.write_bytes(other)
    with pytest.raises(ValueError, match="not a buffer of streamfold, or its first line is damaged"):
        archive.load(path)


def test_a_later_format_is_refused_by_its_number(path: Path) -> None:
    path.write_bytes(b"streamfold buffer 12\n" + b"whatever that may be")
    with pytest.raises(ValueError, match="has format 12, but this streamfold knows only those up to 2: load it with"):
        archive.load(path)


def test_what_is_not_a_file_is_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        archive.load(path)
    os.mkfifo(path)
    for what in (path, path.parent):
        with pytest.raises(ValueError, match="is not a file: give the path that"):
            archive.load(what)


def test_the_format_is_what_is_written_down_of_it(path: Path) -> None:
    archive.save(path, {"a": [7] * 32, "b": b"xyz"})
    whole = path.read_bytes()
    body, digest = whole[:-32], whole[-32:]
    assert digest == hashlib.sha256(body).digest()
    (start,) = struct.unpack("<Q", body[-8:])
    assert body[:start] == b"streamfold buffer 1\n" + b"\7" * 32 + b"xyz"
    assert orjson.loads(body[start:-8]) == {
        "a": {"$": ["list", "|i1", [32], 20]},
        "b": {"$": ["bytes", "|u1", [3], 52]},
    }


# Images, which hosts keep beside a prompt.


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "I", "F"])
def test_an_image_comes_back_pixel_for_pixel(mode: str, path: Path) -> None:
    picture = Image.linear_gradient("L").resize((5, 3)).convert(mode)
    found = again({"images": [picture]}, path)["images"][0]
    assert (found.mode, found.size, found.tobytes()) == (picture.mode, picture.size, picture.tobytes())


def test_an_image_with_a_palette_is_pickled(path: Path) -> None:
    picture = Image.linear_gradient("L").convert("P")
    archive.save(path, {"images": [picture]})
    assert archive.load(path, trusted=True)["images"] == [picture]
