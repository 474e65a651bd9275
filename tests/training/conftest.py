"""A tiny model, made once, and one thread of torch, so that a sum is the same each time."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDED = ("torch", "transformers", "safetensors", "matplotlib")

# The tests import torch at their top, and so cannot even be collected without it.
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch  # noqa: PLC0415 - only where it is installed

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    from support.training import make  # noqa: PLC0415 - only where torch is installed

    return make(tmp_path_factory.mktemp("tiny"))
