"""Runs a command beside processes that keep all cores busy: ``python tests/support/busy.py 10 pytest -n 3``.

A test that depends on how fast the machine is fails in it. Used by ``make soak``.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # not beyond its parent


@contextmanager
def _busy() -> Iterator[None]:
    """One process that computes for as long as the block runs."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    count, *command = arguments
    with ExitStack() as stack:
        for _ in range(int(count)):
            stack.enter_context(_busy())
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
