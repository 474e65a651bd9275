"""The documentation as readers see it: built without a warning, whole, and served by nobody else."""

from __future__ import annotations

import fcntl
import html
import os
import re
import subprocess
import sys
from posixpath import normpath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest

from repo.test_public_names import EXPORTED
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site was built, once for all workers of pytest."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(folder)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, str]:
    """The pages of the site, by their paths."""
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in html_files(folder)}


def build(folder: Path) -> None:
    """Build it without a warning; what fails leaves no folder."""
    made = folder.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    made.rename(folder)


def html_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.html"))


@pytest.mark.parametrize("module", EXPORTED)
def test_every_exported_name_has_an_entry_in_the_reference(site: dict[str, str], module: str) -> None:
    reference = "".join(text for path, text in site.items() if path.startswith("reference/"))
    entries = set(re.findall(r'<h[2-4] id="(streamfold[^"]*)"', reference))
    assert {f"{module}.{name}" for name in EXPORTED[module].split()} - entries == set()


def test_no_page_fetches_anything_from_another_server(site: dict[str, str]) -> None:
    fetching = r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^">\s]+)'
    assert len(site) > 20
    assert {path: found for path, text in site.items() if (found := re.findall(fetching, text))} == {}


def test_no_markup_of_docstrings_is_shown_as_it_was_written(site: dict[str, str]) -> None:
    """Sphinx's roles, and its mark of a block of code."""
    left = {
        path: re.findall(r":(?:class|func|meth|mod|data|attr|exc):|::</p>|<p>:</p>", text)
        for path, text in site.items()
    }
    assert {path: found for path, found in left.items() if found} == {}


def test_no_page_has_the_code_that_only_tests_need(site: dict[str, str]) -> None:
    assert [path for path, text in site.items() if "<!-- setup" in text or "<!-- needs" in text] == []


def test_every_page_of_the_docs_is_in_the_navigation(site: dict[str, str]) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r'<a href="([^"#]+\.html)"[^>]*class="md-nav__link', site["index.html"]))
    assert pages - listed == {"index.html"} - listed


def test_every_link_and_every_picture_of_the_site_leads_somewhere(site: dict[str, str], folder: Path) -> None:
    ids = {path: set(re.findall(r'\s(?:id|name)="?([^"\s>]+)', text)) for path, text in site.items()}
    lost = []
    for path, text in site.items():
        if path == "404.html":  # served at any address: its links are those of a server's root
            continue
        for link in re.findall(r'\s(?:href|src)="([^"]*)"', text):
            address = urlsplit(html.unescape(link))
            if address.scheme or address.netloc:
                continue
            target = normpath(f"{path}/../{unquote(address.path)}") if address.path else path
            target = f"{target}/index.html" if (folder / target).is_dir() else target
            is_there = (folder / target).is_file()
            if not is_there or (address.fragment and unquote(address.fragment) not in ids.get(target, ())):
                lost.append(f"{path}: {link}")
    assert lost == []


def test_no_table_and_no_block_of_code_is_shown_as_it_was_written(site: dict[str, str]) -> None:
    shown = re.compile(r"<p>[^<]*(?:^\|.*\||```|^!!! )", re.MULTILINE)
    assert [f"{path}: {found}" for path, text in site.items() for found in shown.findall(text)] == []


def test_no_page_of_the_reference_is_empty(site: dict[str, str]) -> None:
    for path, text in site.items():
        if path.startswith("reference/"):
            assert "doc-signature" in text, path
            assert len(re.sub(r"<[^>]*>", " ", text.partition("<article")[2]).split()) > 100, path
