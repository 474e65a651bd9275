"""The Python of README and docs does what a reader expects of it: it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT
from support.snippets import PAGES, run, snippets

if TYPE_CHECKING:
    from pathlib import Path

WITH_PYTHON = [page for page in PAGES if snippets(page)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [snippet for snippet in snippets(page) if not snippet.is_setup and snippet.reason is None]
    assert run(page) == len(shown)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_every_python_block_compiles_and_imports_public_names(page: Path) -> None:
    for snippet in snippets(page):
        snippet.compiled({})
        assert snippet.unknown_names() == set(), snippet.line


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_every_block_is_found(page: Path) -> None:
    fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.strip().startswith("```py")]
    assert len([snippet for snippet in snippets(page) if not snippet.is_setup]) == len(fences)


def page_of(folder: Path, *parts: str) -> Path:
    page = folder / "page.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def test_a_block_that_fails_fails_its_page_at_its_line(tmp_path: Path) -> None:
    page = page_of(tmp_path, "# Page", "```python\nx = 1\n```", "```python\n\nassert x == 2\n```")
    with pytest.raises(AssertionError) as failed:
        run(page)
    assert [entry.lineno + 1 for entry in failed.traceback if str(entry.path) == str(page)] == [9]


def test_a_block_that_is_marked_is_not_run_but_compiled(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- not run: needs a GPU -->", "```python\n1 / 0\n```", "```python\nx = 1\n```")
    assert run(page) == 1
    assert [snippet.reason for snippet in snippets(page)] == ["needs a GPU", None]


def test_a_block_reaches_the_engine_that_is_served_for_its_address(tmp_path: Path) -> None:
    served = "<!-- setup\nengine = serve()\n-->"
    asks = "```python\nfrom streamfold import Client\n\nclient = Client('http://127.0.0.1:30000')\n```"
    used = (
        "```python\nmade = await client.generate([1], {'max_new_tokens': 2})\nassert engine.stats().requests == 1\n```"
    )
    assert run(page_of(tmp_path, served, asks, used)) == 2
