"""Without torch, or without a model: what the error says, and that nobody else imports torch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from streamfold.loopback import Config

if TYPE_CHECKING:
    from pathlib import Path

# The others seem to be there, whether they are or not: it takes ten seconds to import them.
WITHOUT = """
import sys, types
for other in ("safetensors", "torch", "transformers"):
    sys.modules[other] = types.ModuleType(other)
sys.modules[{name!r}] = None
from streamfold.loopback import Config
try:
    Config(model="hf:.")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["torch", "transformers", "safetensors"])
def test_a_missing_package_is_an_error_that_names_the_extra(name: str) -> None:
    code = WITHOUT.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"a model of a directory needs {name}: pip install 'streamfold[hf]'" in done.stdout


def test_a_mock_engine_imports_no_torch() -> None:
    code = "import sys; from streamfold.loopback import Engine, Config; Engine(Config()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("model", ["", "hf", "moe", "HF:path"])
def test_an_unknown_model_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match='model must be "mock" or "hf:" and the path'):
        Config(model=model)


def test_batch_invariance_is_for_a_real_model() -> None:
    with pytest.raises(ValueError, match="batch_invariant must be left out"):
        Config(batch_invariant=True)


@pytest.mark.torch
def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no directory"):
        Config(model=f"hf:{tmp_path / 'missing'}")
    with pytest.raises(ValueError, match=r"config\.json"):
        Config(model=f"hf:{tmp_path}")
