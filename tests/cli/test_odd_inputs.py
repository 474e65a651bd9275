"""Closed and full streams, odd files and odd numbers: a command answers them in one line, without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold.cli.demo_job import read_prompts
from streamfold.cli.journal import Plan
from streamfold.cli.main import app
from streamfold.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

NOWHERE = "http://127.0.0.1:9"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def shell(redirection: str, arguments: Sequence[object], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a redirection of a shell."""
    command = [sys.executable, "-W", "error", "-m", "streamfold", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        env={**os.environ, "HTTP_PROXY": NOWHERE, **variables},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def prompts_of(folder: Path, content: bytes = b'{"prompt": "Hi"}\n') -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content)
    return path


# Streams.


def test_a_closed_standard_input_is_named(tmp_path: Path) -> None:
    done = shell("<&-", ["rollout", "--url", NOWHERE, "--prompts", "-", "--out", tmp_path / "out.jsonl"])
    assert (done.returncode, done.stderr) == (2, "streamfold: --prompts -: standard input is closed\n")
    assert list(tmp_path.iterdir()) == []


@needs_full
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["rollout", "--help"]])
def test_a_full_standard_output_is_named(arguments: list[str]) -> None:
    done = shell(">/dev/full", arguments)
    assert done.returncode == 1
    assert done.stderr == "streamfold: standard output cannot be written: No space left on device\n"


@needs_full
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_the_samples_are_there_whatever_becomes_of_the_summary(
    redirection: str, options: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with Loopback() as engine:
        files = ["--url", engine.url, "--prompts", prompts_of(tmp_path), "--out", out]
        done = shell(redirection, ["rollout", *files, "--max-new-tokens", "4", *options])
    assert "Traceback" not in done.stderr
    assert done.returncode == ("full" in redirection)
    assert [json.loads(line)["index"] for line in out.read_bytes().splitlines()] == [0]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"COLUMNS": "40"}, {"COLUMNS": "no"}])
def test_an_error_is_one_line_whatever_the_terminal_is_like(variables: dict[str, str], tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, b"{")
    done = shell("", ["rollout", "--url", NOWHERE, "--prompts", prompts, "--out", tmp_path / "o"], **variables)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{prompts}, line 1 is not JSON" in done.stderr


# Files.


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "content",
    [BOM + b'{"prompt": "Hi"}\n\n{"prompt": "Ho"}', b'\r\n{"prompt": "Hi"}\r\n \r\n{"prompt": "Ho"}\r\n'],
)
def test_prompts_may_have_a_byte_order_mark_and_any_ends_of_lines(content: bytes, tmp_path: Path) -> None:
    path = prompts_of(tmp_path, content)
    plan = Plan(path, {})
    assert [plan[index].prompt for index in range(len(plan))] == ["Hi", "Ho"]
    assert read_prompts(path) == ["Hi", "Ho"]


def test_a_byte_order_mark_within_the_file_is_no_json(tmp_path: Path) -> None:
    path = prompts_of(tmp_path, b'{"prompt": "Hi"}\n' + BOM + b'{"prompt": "Ho"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        Plan(path, {})


def test_what_can_be_read_but_not_written_again_is_refused_before_it_is_generated(tmp_path: Path) -> None:
    deep = b"[" * 500 + b"]" * 500
    for key in (b"note", b"label"):
        path = prompts_of(tmp_path, b'{"prompt": "Hi", "%b": %b}\n' % (key, deep))
        with pytest.raises(ValueError, match="line 1: it is nested too deep"):
            Plan(path, {})


@pytest.mark.parametrize("content", [b"", b"\n \r\n", BOM])
def test_a_file_without_prompts_is_named_by_each_command(content: bytes, tmp_path: Path) -> None:
    path = prompts_of(tmp_path, content)
    for command, words in ((("rollout", "--url", NOWHERE), "holds no prompt"), (("demo",), "is empty")):
        done = run(*command, "--prompts", path, "--out", tmp_path / "out")
        assert (done.exit_code, words in done.stderr) == (2, True), done.output


@needs_full
def test_a_picture_on_a_full_disk_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(b"[\n\n]\n")
    done = run("trace", trace, "--png", "/dev/full")
    assert (done.exit_code, "/dev/full cannot be written: [Errno 28]" in done.stderr) == (2, True), done.output


# Numbers.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", "inf"), "sampling_params['temperature'] is inf: JSON has no such number"),
        (("--sampling-params", '{"min_p": 1e999}'), "sampling_params['min_p'] is inf"),
        (("--sampling-params", '{"custom_params": {"a": {"b": -1e999}}}'), "['custom_params']['a']['b'] is -inf"),
        (("--extra", '{"priority": 1e999}'), "--extra: extra['priority'] is inf"),
    ],
)
def test_a_number_that_json_would_make_null_of_is_refused(options: tuple[str, str], words: str, tmp_path: Path) -> None:
    files = ("--prompts", prompts_of(tmp_path), "--out", tmp_path / "out.jsonl")
    done = run("rollout", "--url", NOWHERE, *files, *options)
    assert (done.exit_code, words in done.stderr) == (2, True), done.output
    assert not (tmp_path / "out.jsonl").exists()
