"""What the package imports is declared in pyproject.toml, and the bounds there are those that are tested."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from support.lowest import declared, lowest
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = ROOT / "python" / "streamfold"
# Used only on values of their own types, which nobody has without them.
OPTIONAL = {"torch", "PIL"}
IN_NOTEBOOKS = {"IPython"}  # where it was imported before
IN_TRANSFORMERS = {"tokenizers"}  # which requires it
# By the extra: the one module that imports it, the name there, and the distribution.
OF_EXTRAS = {
    "otel": ("telemetry/otel.py", "opentelemetry", "opentelemetry-api"),
    "plot": ("cli/waterfall.py", "matplotlib", "matplotlib"),
    "prometheus": ("telemetry/prometheus.py", "prometheus_client", "prometheus-client"),
}


def imported(path: Path) -> Iterator[str]:
    """The packages that a module imports, anywhere, except for the type checker alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        waiting += ast.iter_child_nodes(node)


# The extra that a folder, or the module of a command, needs.
NEEDED = {"hf": "hf", "loopback": "loopback", "ray": "ray", "training": "train", "demo_train.py": "train"}


def needed_extra(path: Path) -> str | None:
    """The extra without which a module cannot be imported."""
    return next((extra for part, extra in NEEDED.items() if part in path.relative_to(PACKAGE).parts), None)


@pytest.mark.parametrize(
    ("extra", "used"),
    [("hf", "transformers"), ("loopback", "h11"), ("ray", "ray"), ("train", "tokenizers"), (None, "httpx")],
)
def test_every_package_that_is_imported_is_declared_where_it_is_needed(extra: str | None, used: str) -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if needed_extra(path) == extra]
    names = {name for path in paths for name in imported(path)} - sys.stdlib_module_names - {"streamfold"}
    assert names >= {used}
    known = declared("dependencies") | (declared(extra) if extra else {})
    of_extras = set() if extra else {name for _, name, _ in OF_EXTRAS.values()}
    assert names - OPTIONAL - IN_NOTEBOOKS - IN_TRANSFORMERS - known.keys() == of_extras


@pytest.mark.parametrize("extra", OF_EXTRAS)
def test_a_package_of_an_extra_is_imported_in_one_module_alone(extra: str) -> None:
    module, name, distribution = OF_EXTRAS[extra]
    paths = [path for path in PACKAGE.rglob("*.py") if needed_extra(path) is None]
    importing = {path.relative_to(PACKAGE).as_posix() for path in paths if name in imported(path)}
    assert importing == {module}
    (bounds,) = declared(extra).values()
    assert declared(extra) == {distribution: bounds}
    tested = declared("test")
    assert tested.get(distribution, tested.get("opentelemetry-sdk")) == bounds


def test_what_several_extras_require_has_the_same_bounds_in_all_of_them() -> None:
    extras = [declared(name) for name in ("hf", "torch", "train")]
    for name in extras[0]:
        assert {bounds[name] for bounds in extras if name in bounds} == {extras[0][name]}


def test_the_tests_run_under_the_newest_uvicorn_that_the_loopback_extra_allows() -> None:
    bound = re.search(r"<0\.(\d+)$", declared("loopback")["uvicorn"])
    assert bound, "uvicorn's internals are used: it needs an upper bound"
    assert int(version("uvicorn").split(".")[1]) == int(bound[1]) - 1
    assert declared("test")["uvicorn"] == declared("loopback")["uvicorn"]


def test_every_requirement_of_the_package_is_tested_at_its_lower_bound() -> None:
    pinned = dict(line.split("==") for line in lowest("dependencies", "loopback") if "==" in line)
    known = declared("dependencies") | declared("loopback")
    assert {name for name, bounds in known.items() if bounds} == pinned.keys()
    assert all(known[name].startswith(f">={version}") for name, version in pinned.items())
