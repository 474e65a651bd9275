"""Helpers that slime keeps in ``slime.utils.misc``."""

from __future__ import annotations

import base64
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt


class SingletonMeta(type):
    """One instance of a class, regardless of later arguments."""

    _instances: dict[type, object] = {}  # noqa: RUF012  # ClassVar has no meaning on a metaclass

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def forget() -> None:
        SingletonMeta._instances.clear()


def load_function(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """Import a function by its dotted path."""
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def decode_int32_meta_array(meta_info: Mapping[str, Any], *keys: str) -> npt.NDArray[np.int32] | None:
    """Read the first of some keys, flat: base64 text and bytes hold int32, all else numbers. None: none is there."""
    value = next((meta_info[key] for key in keys if key in meta_info), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(bytearray(value), np.int32)
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    return np.array(value, np.int32).reshape(-1)
