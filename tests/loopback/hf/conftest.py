"""Tiny random models, made once: torch and transformers are imported by the first test that needs one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.hf_reference import Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("transformers") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="transformers is not installed: make test-torch"))


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Sums are the same in each run only if one thread adds them."""
    import torch  # noqa: PLC0415 - only where it is installed

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def moe(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A mixture of experts, one of whose layers is dense."""
    from support import hf_reference  # noqa: PLC0415 - as above

    return hf_reference.make_moe(tmp_path_factory.mktemp("moe"), seed=1)


@pytest.fixture(scope="session")
def trained(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same architecture with other weights."""
    from support import hf_reference  # noqa: PLC0415 - as above

    return hf_reference.make_moe(tmp_path_factory.mktemp("trained"), seed=2)
