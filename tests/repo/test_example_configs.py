"""The files that plug the package into a trainer: they name what exists, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from streamfold.integrations import base as hosts
from streamfold.integrations import rollout as host_rollout
from support.host_calls import HOSTS
from support.paths import EXAMPLES

of_each = pytest.mark.parametrize("host", HOSTS)


def defaults(document: str | None) -> dict[str, str]:
    """The table of settings in a module's docstring."""
    return dict(re.findall(r"^``(streamfold_\w+)`` +\w+ +(\S+)", document or "", re.MULTILINE))


@of_each
def test_the_settings_are_those_of_the_adapter_with_their_defaults(host: str) -> None:
    text = (EXAMPLES / host / "streamfold.yaml").read_text(encoding="utf-8")
    given = dict(re.findall(r"^(\w+): (\S+)", text, re.MULTILINE))
    assert given
    assert given == {name: defaults(hosts.__doc__).get(name) for name in given}
    rollouts = dict(re.findall(r"^# (\w+): (\S+)", text, re.MULTILINE))
    assert {name: value.replace("null", "none") for name, value in rollouts.items()} == defaults(host_rollout.__doc__)


@of_each
def test_the_command_line_names_a_function_that_exists_and_hands_on_what_it_is_given(host: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))", encoding="utf-8")
    told = subprocess.run(
        [EXAMPLES / host / "run.sh", "--hf-checkpoint", "a b"],
        env={**os.environ, host.upper(): str(tmp_path)}, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    options = json.loads(told.stdout)
    module, _, name = options[options.index("--custom-generate-function-path") + 1].rpartition(".")
    assert module == f"streamfold.{host}"
    assert getattr(import_module(module), name).abort_mode == "request"
    assert Path(options[options.index("--custom-config-path") + 1]) == EXAMPLES / host / "streamfold.yaml"
    assert options[-2:] == ["--hf-checkpoint", "a b"]


@of_each
def test_every_function_that_the_readme_names_exists(host: str) -> None:
    text = (EXAMPLES / host / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"streamfold\.{host}\.(\w+)", text))
    assert named == {"generate_streaming", "generate_rollout", "generate_rollout_async", "DataSource"}
    module = import_module(f"streamfold.{host}")
    assert all(callable(getattr(module, name)) for name in named - {"DataSource"})  # that one needs the trainer
