"""Tests that need a Rust toolchain: the benchmarks' server is a Rust program."""

from __future__ import annotations

import os
import shutil

import pytest

needs_cargo = pytest.mark.skipif(
    shutil.which(os.environ.get("CARGO", "cargo")) is None, reason="cargo is missing: install a toolchain with rustup"
)
