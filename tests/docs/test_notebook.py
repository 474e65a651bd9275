"""The notebook runs from its first cell to its last, in the kernel that Jupyter uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from support.paths import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the kernel stays: neither the file of its connection nor its history."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")


async def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    await NotebookClient(notebook, timeout=60, kernel_name="python3", resources=resources).async_execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert printed.count("4 groups") == 2
    assert printed.count(" 0 tokens lost") == 2


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            assert "asyncio.run" not in cell.source
