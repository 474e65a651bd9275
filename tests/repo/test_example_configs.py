"""The files that plug the package into a trainer: they name what exists, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from streamfold.integrations import settings
from support.host_calls import HOSTS
from support.paths import EXAMPLES, ROOT


@pytest.mark.parametrize(("host", "scopes"), [*((host, ()) for host in HOSTS), ("miles", ("all",))])
def test_the_example_config_has_every_setting_that_is_used_with_its_default(
    host: str, scopes: tuple[settings.Scope, ...]
) -> None:
    text = (EXAMPLES / host / "streamfold.yaml").read_text(encoding="utf-8")
    assert text.endswith(f"\n\n{settings.config_file(*scopes)}")


def test_the_page_of_settings_ends_with_their_table() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{settings.markdown_table()}")


@pytest.mark.parametrize(("option", "text"), [([], settings.markdown_table()), (["yaml"], settings.config_file())])
def test_the_module_prints_both(option: list[str], text: str) -> None:
    command = [sys.executable, "-W", "error", "-m", settings.__name__, *option]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == text


@pytest.mark.parametrize("host", [*HOSTS, "miles"])
def test_the_command_line_names_a_function_that_exists_and_hands_on_what_it_is_given(host: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))", encoding="utf-8")
    run = subprocess.run(
        [EXAMPLES / host / "run.sh", "--hf-checkpoint", "a b"],
        env={**os.environ, host.upper(): str(tmp_path)}, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    options = json.loads(run.stdout)
    module, _, name = options[options.index("--custom-generate-function-path") + 1].rpartition(".")
    assert module == f"streamfold.{host}"
    assert getattr(getattr(import_module(module), name), "abort_mode", None) == ("request" if host in HOSTS else None)
    assert Path(options[options.index("--custom-config-path") + 1]) == EXAMPLES / host / "streamfold.yaml"
    assert options[-2:] == ["--hf-checkpoint", "a b"]


NAMED = {
    **{host: {"generate_streaming", "generate_rollout", "generate_rollout_async", "DataSource"} for host in HOSTS},
    "miles": {"generate_streaming", "generate_streaming_legacy"},
}


@pytest.mark.parametrize("host", NAMED)
def test_every_function_that_the_readme_names_exists(host: str) -> None:
    text = (EXAMPLES / host / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"streamfold\.{host}\.(\w+)", text))
    assert named == NAMED[host]
    module = import_module(f"streamfold.{host}")
    assert all(callable(getattr(module, name)) for name in named - {"DataSource"})  # that one needs the trainer
