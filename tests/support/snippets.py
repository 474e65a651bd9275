"""Runs the Python blocks of a Markdown page, in their order, in one namespace, against loopback engines.

Comments of the page say what its reader has and the test has not:

``<!-- setup`` … ``-->``
    Code that runs where it stands. It has ``serve(port=30000, **options)``, which starts a loopback engine for
    whatever the page addresses as ``http://127.0.0.1:30000``, and ``stack``, whose callbacks run when the page ends.
``<!-- not run: reason -->``
    The next block needs what no test has. It is compiled all the same.
``<!-- needs: torch -->``
    The next block is run where that can be imported.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any

import streamfold
from streamfold.loopback import Loopback
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from types import CodeType

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PARTS = re.compile(
    r"""
      ^<!--\ setup\n (?P<setup>.*?) ^-->$
    | (?:^<!--\ (?:not\ run:\ (?P<reason>[^\n]+)|needs:\ (?P<needs>\w+))\ -->\n+)?
      ^```(?:python|py)\b[^\n]*\n (?P<body>.*?) ^```$
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Snippet:
    """Code of a page: a block that is shown, or a setup that is not."""

    place: str
    line: int
    body: str
    is_setup: bool
    reason: str | None = None

    def compiled(self, addresses: Mapping[str, str]) -> CodeType:
        """The code, with other addresses and its page's line numbers; ``await`` is allowed at its top."""
        body = re.sub(r"http://127\.0\.0\.1:\d+", lambda found: addresses.get(found[0], found[0]), self.body)
        code: CodeType = compile("\n" * (self.line - 1) + body, self.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return code

    def unknown_names(self) -> set[str]:
        """What it imports from the package that is not exported."""
        imports = (node for node in ast.walk(ast.parse(self.body)) if isinstance(node, ast.ImportFrom))
        names = {alias.name for node in imports if node.module == "streamfold" for alias in node.names}
        return names - {*streamfold.__all__, "slime", "vime", "miles", "loopback", "telemetry"}


def snippets(page: Path) -> list[Snippet]:
    """The code of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _PARTS.finditer(text):
        group = "setup" if match["setup"] is not None else "body"
        line = text.count("\n", 0, match.start(group)) + 1
        needs = match["needs"]
        reason = f"{needs} is not installed" if needs and find_spec(needs) is None else match["reason"]
        found.append(Snippet(str(page), line, match[group], group == "setup", reason))
    return found


def run(page: Path) -> int:
    """Run a page; return how many of its blocks were run.

    Blocks with ``await`` share an event loop, which does not run in between: a block may call ``asyncio.run``.
    """
    loop = asyncio.new_event_loop()
    count = 0
    with contextlib.closing(loop), contextlib.ExitStack() as stack:
        addresses: dict[str, str] = {}

        def serve(port: int = 30000, **options: Any) -> Loopback:
            engine = stack.enter_context(Loopback(**options))
            addresses[f"http://127.0.0.1:{port}"] = engine.url
            return engine

        names: dict[str, Any] = {"__name__": "__main__", "serve": serve, "stack": stack}
        try:
            for snippet in snippets(page):
                if snippet.reason is None:
                    result = eval(snippet.compiled(addresses), names)
                    if iscoroutine(result):
                        loop.run_until_complete(asyncio.wait_for(result, 60))
                    count += not snippet.is_setup
        finally:
            loop.run_until_complete(_close(names))
            loop.run_until_complete(loop.shutdown_asyncgens())
    return count


async def _close(names: dict[str, Any]) -> None:
    """Close what the page left open, as the end of a reader's process would; no task may be left then."""
    for value in names.values():
        close: Callable[[], Awaitable[None]] | None = getattr(value, "aclose", None)
        if close is not None and not isinstance(value, type):
            await close()
        if isinstance(value, streamfold.Trace):
            value.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
