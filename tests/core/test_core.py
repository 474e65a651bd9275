"""The compiled module tells at runtime what its stub tells."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from streamfold import _core

STUB = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
CLASSES = [name for name in _core.__all__ if inspect.isclass(getattr(_core, name))]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def stub_classes() -> dict[str, ast.ClassDef]:
    """The classes of the stub, those of this system only too."""
    parts = [STUB.body, *(node.body for node in STUB.body if isinstance(node, ast.If))]
    return {node.name: node for part in parts for node in part if isinstance(node, ast.ClassDef)}


def in_stub(name: str) -> ast.ClassDef:
    return stub_classes()[name]


def told_in_stub(name: str) -> dict[str, str | None]:
    """What the stub tells of each public member of a class, and under its own name of the class."""
    members = {node.name: ast.get_docstring(node) for node in in_stub(name).body if isinstance(node, ast.FunctionDef)}
    return {name: ast.get_docstring(in_stub(name)), **{member: members[member] for member in public(members)}}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_and_each_of_its_members_tells_at_runtime_what_its_stub_tells(name: str) -> None:
    kind = getattr(_core, name)
    told = {
        name: inspect.getdoc(kind),
        **{member: inspect.getdoc(getattr(kind, member)) for member in public(vars(kind))},
    }
    assert told == told_in_stub(name)
    assert all(told.values()), "each of them has something to tell"


def test_the_module_tells_what_its_stub_tells_and_every_class_was_looked_at() -> None:
    assert inspect.getdoc(_core) == ast.get_docstring(STUB)
    assert set(CLASSES) == set(stub_classes())
    assert {"Experts", "Generation", "Parser", "Exchange", "Reactor"} <= set(CLASSES)
