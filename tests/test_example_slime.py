"""The files that plug the package into slime: they name what exists, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

from streamfold import hosts

EXAMPLE = Path(__file__).parent.parent / "examples" / "slime"


def test_the_settings_are_those_of_the_adapter_with_their_defaults() -> None:
    table = dict(re.findall(r"^``(streamfold_\w+)`` +\w+ +(\S+)", hosts.__doc__ or "", re.MULTILINE))
    text = (EXAMPLE / "streamfold.yaml").read_text(encoding="utf-8")
    given = dict(re.findall(r"^(\w+): (\S+)", text, re.MULTILINE))
    assert given
    assert given == {name: table.get(name) for name in given}


def test_the_command_line_names_a_function_that_exists_and_hands_on_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))", encoding="utf-8")
    told = subprocess.run(
        [EXAMPLE / "run.sh", "--hf-checkpoint", "a b"],
        env={**os.environ, "SLIME": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    options = json.loads(told.stdout)
    module, _, name = options[options.index("--custom-generate-function-path") + 1].rpartition(".")
    assert getattr(import_module(module), name).abort_mode == "request"
    assert Path(options[options.index("--custom-config-path") + 1]) == EXAMPLE / "streamfold.yaml"
    assert options[-2:] == ["--hf-checkpoint", "a b"]
