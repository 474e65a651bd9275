"""Cheap truths about the tree: verbs, arrows between modules, sizes, versions, and what must not be written down."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

import streamfold
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
# Setting up is not for a test to run: it fetches what is being tested.
SETUP = (r"git clone \S+", r"cd \S+", r"pip install .*", r"python3? -m pip install .*")


def tracked() -> list[Path]:
    """Files that are committed or would be."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def recipes() -> dict[str, str]:
    """The Makefile's verbs, each with its prerequisites and its recipe."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^([a-z][a-z-]*):.*\n(?:\t.*\n)*", text, re.MULTILINE)}


def verbs_of_ci() -> set[str]:
    """The verbs that .ci/run calls, with those that they call."""
    known = recipes()
    found: set[str] = set()
    waiting = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    while waiting:
        verb = waiting.pop()
        found.add(verb)
        needed = known[verb].splitlines()[0].partition(":")[2].partition("##")[0].split()
        waiting += [other for other in needed if other in known and other not in found]
    return found


def code_blocks(document: str, *languages: str) -> list[str]:
    """The fenced blocks of a document at the root, if it is there."""
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"no {document}")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def commands(document: str) -> list[str]:
    """The commands that a document's shell blocks tell the reader to type, comments and output apart."""
    blocks = code_blocks(document, "sh", "bash", "shell", "console")
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/index.md", ".ci/run", ".github/workflows/ci.yml"]
)
def test_every_verb_that_is_named_exists(document: str) -> None:
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"no {document}")
    named = set(re.findall(r"(?:^|`|run: )make ([a-z][a-z-]*)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named, "no verb found: has the spelling changed?"
    assert named <= set(recipes())


def test_help_tells_every_verb() -> None:
    told = {verb for verb, recipe in recipes().items() if "##" in recipe.splitlines()[0]}
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony
    assert told == set(phony[1].split()) - {"FORCE"}


def test_ci_runs_the_tests_the_lints_and_the_demo() -> None:
    assert {"lint", "test", "test-torch", "docs", "demo"} <= verbs_of_ci()


@pytest.mark.parametrize("document", ["README.md", *DOCS])
def test_every_command_of_the_documents_is_run_by_ci_or_by_a_test(document: str) -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))

    def is_run(command: str) -> bool:
        words = command.split()
        if words[0] == "make":
            return set(words[1:]) <= verbs_of_ci()
        if words[0] == "streamfold":
            return words[1] in verbs_of_ci() or re.search(rf"[\"']{re.escape(words[1])}[\"']", tests) is not None
        return command in tests or any(re.fullmatch(pattern, command) for pattern in SETUP)

    assert [command for command in commands(document) if not is_run(command)] == []


def test_no_source_file_is_longer_than_500_lines() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked()
        if path.suffix in {".py", ".pyi", ".rs"}
    }
    assert lengths
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_no_tracked_file_names_a_registry_or_a_place_on_someones_machine() -> None:
    # In pieces, as this file is tracked too.
    registries = (
        "py" + "pi.org",
        "pythonhosted" + ".org",
        "index.crates" + ".io",
        "static.crates" + ".io",
        "pytorch" + ".org",
    )
    places = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "../sha" + "red", "artifac" + "tory")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        for word in registries + places
        if word.encode() in path.read_bytes()
    ]
    assert found == []


def test_the_version_is_said_once() -> None:
    cargo = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    said = re.findall(r'^version = "(.*)"$', cargo, re.MULTILINE)
    assert len(said) == 1
    assert streamfold.__version__ == version("streamfold") == said[0]
    for manifest in (ROOT / "rust").glob("*/Cargo.toml"):
        if manifest.parent.name != "fuzz":
            assert "version.workspace = true" in manifest.read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert said[0] in sections[:2], "the changelog's first section, or the one below Unreleased, is this version's"
