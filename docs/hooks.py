"""Hooks of mkdocs.

What the pages link to outside ``docs/``, such as an example, is a part of the site: the same link works in both. And
Sphinx's roles in docstrings become links.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_FOR_TESTS = re.compile(r"^<!-- (?:setup|not run:|needs:).*?-->$\n*", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>([^<]+)</code>")
_LITERAL = re.compile(r"<p>::</p>\n?|\s+::(?=</p>)|(?<=:):(?=</p>)")  # Sphinx's mark of a block of code


def _target(page: File, link: str) -> str:
    """The path below the root of what a page links to; pages from outside ``docs/`` are where they are there."""
    folder = "" if page.generated_by else "docs/"
    return normpath(f"{folder}{page.src_uri}/../{link}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` that pages link to, and what those link to, each at its path below the root."""
    root = Path(config.config_file_path).parent
    waiting = list(files.documentation_pages())
    for page in waiting:
        for link in _LINK.findall(Path(page.abs_src_path or "").read_text(encoding="utf-8")):
            path = _target(page, link)
            if not path.startswith("docs/") and path not in files.src_uris and (root / path).is_file():
                added = File.generated(config, path, abs_src_path=str(root / path))
                files.append(added)
                waiting += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # mkdocs's
    """Lead links that leave ``docs/`` to the copies: one step up less. Leave out what only tests need."""

    def led(match: re.Match[str]) -> str:
        is_inside = page.file.generated_by or _target(page.file, match[1]).startswith("docs/")
        return match[1] if is_inside else match[1].replace("../", "", 1)

    return _LINK.sub(led, _FOR_TESTS.sub("", markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # mkdocs's
    """Docstrings name things as Sphinx does: make links of full names, and code of the others."""
    return _LITERAL.sub("", _ROLE.sub(_named, html))


def _named(match: re.Match[str]) -> str:
    name = match[1].lstrip("~")
    shown = f"<code>{name.rpartition('.')[2] if match[1].startswith('~') else name}</code>"
    is_full = name.startswith("streamfold.")
    return f'<autoref optional identifier="{name}">{shown}</autoref>' if is_full else shown
