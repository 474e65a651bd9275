"""Reads ``radon cc --json`` and fails on functions that are too complex: ``make lint`` calls it.

No function of the package may have a cyclomatic complexity above 20, and no public one above 10.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MOST = 20
MOST_PUBLIC = 10


def too_complex(report: dict[str, list[dict[str, Any]]]) -> list[str]:
    found = []
    for path, blocks in sorted(report.items()):
        for block in blocks:
            if block["type"] == "class":
                continue  # an average over its methods, which are listed themselves
            name = ".".join(filter(None, (block.get("classname"), block["name"])))
            is_public = not any(part.startswith("_") for part in name.split("."))
            limit = MOST_PUBLIC if is_public else MOST
            if block["complexity"] > limit:
                found.append(f"{path}:{block['lineno']}: {name} has complexity {block['complexity']}, at most {limit}")
    return found


if __name__ == "__main__":
    problems = too_complex(json.load(sys.stdin))
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.exit(bool(problems))
