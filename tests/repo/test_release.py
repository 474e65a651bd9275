"""What is released, and from what: pinned actions, tests before publishing, a whole sdist, no links to nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def tracked(folder: str) -> list[Path]:
    """Files of a folder that are committed or would be."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def in_sdist() -> set[Path]:
    """What is in the sdist beside the crates: the package, and what pyproject.toml adds."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'path = "([^"]+)", format = "sdist"', text)
    assert patterns
    return {path for pattern in (*patterns, "python/**/*.py") for path in ROOT.glob(pattern)}


def job(workflow: str, name: str) -> str:
    """The text of a job."""
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
    found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found, name
    return found[1]


def needs(name: str) -> set[str]:
    """The jobs of a release that must have succeeded before one of them."""
    found = re.search(r"^    needs: (.*)$", job("release", name), re.MULTILINE)
    direct = set(re.findall(r"[\w-]+", found[1])) if found else set()
    return direct.union(*(needs(other) for other in direct))


# Workflows.


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_of_a_workflow_is_pinned_to_a_commit_and_its_version_is_said(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert used
    assert [action for action in used if not PINNED.fullmatch(action) and not action.startswith("./")] == []


def test_one_action_has_one_version_everywhere() -> None:
    used = {action for path in WORKFLOWS for action in re.findall(r"uses: (\w.*)", path.read_text(encoding="utf-8"))}
    assert len({action.partition("@")[0] for action in used}) == len(used)


def test_nothing_is_published_before_the_tests_and_the_demo_of_each_wheel() -> None:
    assert {"tests", "wheels", "sdist", "smoke", "smoke-musl"} <= needs("publish")
    assert "publish" in needs("release")
    assert "uses: ./.github/workflows/ci.yml" in job("release", "tests")
    built = set(re.findall(r"\{ name: ([\w.-]+),", job("release", "wheels")))
    tried = set(re.findall(r"\{ name: ([\w.-]+),", job("release", "smoke") + job("release", "smoke-musl")))
    assert len(built) >= 8
    assert built | {"sdist"} == tried
    for name in ("smoke", "smoke-musl"):
        assert "streamfold demo" in job("release", name)


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path: Path) -> None:
    found = re.search(r"run: (awk .*)$", job("release", "release"), re.MULTILINE)
    assert found
    changelog = "# Changelog\n\n## [1.2.0] - x\n\nnew\n\n### Added\n\n- a\n\n## [1.1.0] - y\n\nold\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    for tag, notes in (("v1.2.0", "\nnew\n\n### Added\n\n- a\n\n"), ("v1.1.0", "\nold\n"), ("v1.2", None)):
        made = subprocess.run(
            ["bash", "-c", found[1]], cwd=tmp_path, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False
        )
        assert (made.returncode == 0) == (notes is not None)
        if notes is not None:
            assert (tmp_path / "notes.md").read_text(encoding="utf-8") == notes


# What is in the sdist.


def test_every_example_is_in_the_sdist() -> None:
    examples = {path for path in tracked("examples") if path.is_file()}
    assert examples
    assert sorted(str(path.relative_to(ROOT)) for path in examples - in_sdist()) == []


def test_every_file_that_a_document_links_to_is_there_and_in_the_sdist() -> None:
    documents = [path for path in tracked(".") if path.suffix == ".md" and "tests" not in path.parts]
    assert ROOT / "README.md" in documents
    missing = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if re.match(r"\w+:", target):
                continue
            path = (document.parent / target).resolve()
            inside = in_sdist() | {each for each in in_sdist() for each in each.parents}
            if not path.exists() or path not in inside:
                missing.append(f"{document.relative_to(ROOT)}: {target}")
    assert missing == []


def test_no_link_of_the_examples_points_out_of_their_folder() -> None:
    folder = (ROOT / "examples").resolve()
    for path in tracked("examples"):
        assert folder in path.resolve().parents, path
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8")):
                assert re.match(r"\w+:", target) or folder in (path.parent / target).resolve().parents, (path, target)


@pytest.mark.parametrize(
    ("packaged", "example"),
    [("prompts.jsonl", "prompts.jsonl"), ("training/prompts.jsonl", "tiny_moe/prompts.jsonl")],
    ids=["demo", "training"],
)
def test_the_prompts_of_the_examples_are_those_of_the_demo(packaged: str, example: str) -> None:
    """The wheel has no examples, and the examples run without the package's files: both have their own."""
    packages = (ROOT / "python" / "streamfold" / packaged).read_bytes()
    assert packages.count(b"\n") == 32
    assert (ROOT / "examples" / example).read_bytes() == packages


# Where it does not run.


def test_windows_is_told_at_once_that_it_is_not_supported() -> None:
    code = "import sys; sys.platform = 'win32'; import streamfold"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    *_, last = failed.stderr.strip().splitlines()
    assert last.startswith("ImportError: streamfold does not support Windows")
    assert "WSL" in last
