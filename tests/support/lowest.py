"""Prints the lowest versions that pyproject.toml allows, as requirements for pip; used by ``make test-lowest``.

Run it as ``python tests/support/lowest.py``. A requirement without a lower bound is printed as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def declared(name: str) -> dict[str, str]:
    """The requirements of a list of pyproject.toml: name and bounds."""
    listed = re.search(rf"^{name} = \[(.*?)\]", PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if listed is None:
        raise LookupError(f"pyproject.toml has no list {name}")
    found = re.findall(r'"([\w-]+)([^"]*)"', re.sub(r"#.*", "", listed[1]))
    return {package.lower(): bounds for package, bounds in found}


def lowest(*lists: str) -> list[str]:
    """The requirements of some lists, each with its lower bound alone."""
    bounds = {package: bound for name in lists for package, bound in declared(name).items()}
    pinned = {package: re.match(r">=([\w.]+)", bound) for package, bound in bounds.items()}
    return [package if least is None else f"{package}=={least[1]}" for package, least in sorted(pinned.items())]


# Not required by pyproject.toml: newer releases of click warn of names that the oldest typer imports.
OF_THAT_TIME = ("click<8.3",)

if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in (*lowest("dependencies", "loopback", "test"), *OF_THAT_TIME)))
