"""What the pages quote is what the package says and what was measured."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.+)`$", TROUBLESHOOTING, re.MULTILINE)


def python_texts() -> Iterator[str]:
    """The strings of the package, with … for what is put into them."""
    for path in (ROOT / "python" / "streamfold").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def rust_texts() -> Iterator[str]:
    """The strings of the core."""
    for path in (ROOT / "rust").glob("*/src/**/*.rs"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"), re.DOTALL):
            yield re.sub(r"\\\n\s*", "", text).replace('\\"', '"')


class Messages:
    """What the package can say. Both a text of it and a message of the page have … for what differs."""

    def __init__(self) -> None:
        found = (*python_texts(), *rust_texts())
        self._texts = {re.sub(r"\{[^{}]*\}|%(?:s|r|d|g|\.\df)", "…", text).replace("`", "…") for text in found}
        templates = (text for text in self._texts if "…" in text and len(text.replace("…", "")) >= 16)
        self._templates = [re.compile(pattern_of(text)) for text in templates]

    def have(self, message: str) -> bool:
        pattern = re.compile(pattern_of(message))
        shown = message.replace("…", "x")
        return any(pattern.search(text) for text in self._texts) or any(
            template.fullmatch(shown) for template in self._templates
        )


def pattern_of(text: str) -> str:
    return ".*".join(map(re.escape, re.split("…+", text)))


@pytest.fixture(scope="module")
def messages() -> Messages:
    return Messages()


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_of_the_troubleshooting_is_one_of_the_package(messages: Messages, message: str) -> None:
    assert messages.have(message)


def test_a_message_that_the_package_does_not_have_is_noticed(messages: Messages) -> None:
    for message in ("no second token within … s (Timeouts)", "the sample was …: only PENDING ones can be written"):
        assert not messages.have(message)


def test_every_heading_of_the_troubleshooting_is_a_message() -> None:
    assert len(MESSAGES) > 30
    assert TROUBLESHOOTING.count("\n### ") == len(MESSAGES) == len(set(MESSAGES))


def test_every_figure_of_the_comparison_was_measured() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8").partition("\n## By figures\n")[2]
    measured = set(re.findall(r"[\d,.]*\d", (ROOT / "benches" / "RESULTS.md").read_text(encoding="utf-8")))
    figures = re.findall(r"(?<=\| )[\d,]*\d(?:\.\d+)?(?= (?:ms )?\|)", page)
    assert len(figures) > 40
    assert [figure for figure in figures if figure not in measured] == []
