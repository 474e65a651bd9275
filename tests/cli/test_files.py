"""No command writes over a file of the user's: not over what it reads, nor over what it has not written itself."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOWHERE = "http://127.0.0.1:9"
PROMPT = b'{"prompt": "Hi"}\n'


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def same(path: Path, other: Path) -> Path:
    del other
    return path


def by_dots(path: Path, other: Path) -> Path:
    del other
    return path.parent / "." / ".." / path.parent.name / path.name


def symlink(path: Path, other: Path) -> Path:
    other.symlink_to(path)
    return other


def hard_link(path: Path, other: Path) -> Path:
    os.link(path, other)
    return other


each_link = pytest.mark.parametrize("link", [same, by_dots, symlink, hard_link])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@each_link
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "LINK"), "--out writes a file of its own, but LINK is that of --prompts: give another file"),
        (("--out", "out", "--trace", "LINK"), "--trace writes a file of its own, but LINK is that of --prompts"),
    ],
)
def test_prompts_are_neither_samples_nor_a_trace(
    link: Callable[[Path, Path], Path], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(PROMPT)
    linked = link(prompts, tmp_path / "linked")
    before = contents(tmp_path)
    places = {"LINK": linked, "out": tmp_path / "out.jsonl"}
    done = run("rollout", "--url", NOWHERE, "--prompts", prompts, *(places.get(each, each) for each in options))
    assert (done.exit_code, words.replace("LINK", str(linked)) in done.stderr) == (2, True), done.output
    assert contents(tmp_path) == before


def test_samples_and_trace_that_are_not_there_yet_are_two_files(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_bytes(PROMPT)
    done = run("rollout", "--url", NOWHERE, "--prompts", prompts, "--out", out, "--trace", by_dots(out, out))
    assert (done.exit_code, "is that of --out" in done.stderr) == (2, True), done.output
    assert contents(tmp_path) == {"prompts.jsonl": PROMPT}


def test_prompts_are_not_where_samples_are_rewritten(tmp_path: Path) -> None:
    prompts = tmp_path / "out.jsonl.new"
    prompts.write_bytes(PROMPT)
    done = run("rollout", "--url", NOWHERE, "--prompts", prompts, "--out", tmp_path / "out.jsonl")
    assert (done.exit_code, "is that of --prompts" in done.stderr) == (2, True), done.output
    assert contents(tmp_path) == {"out.jsonl.new": PROMPT}


NO_TRACES = [b"notes", b"[1, 2]", b'[\n{"a": 1}\n]\n', b'{"traceEvents": []}', b"\0"]


@pytest.mark.parametrize("content", NO_TRACES)
def test_a_trace_takes_no_other_files_place(content: bytes, tmp_path: Path) -> None:
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "notes"
    prompts.write_bytes(PROMPT)
    trace.write_bytes(content)
    for command in (("rollout", "--url", NOWHERE, "--prompts", prompts), ("demo",)):
        done = run(*command, "--out", tmp_path / "out.jsonl", "--trace", trace)
        assert (done.exit_code, "the file there is not a trace" in done.stderr) == (2, True), done.output
        assert str(trace) in done.stderr
    assert contents(tmp_path) == {"prompts.jsonl": PROMPT, "notes": content}


@each_link
def test_a_picture_takes_the_place_of_a_picture_alone(link: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(b"[\n\n]\n")
    linked = link(trace, tmp_path / "linked")
    done = run("trace", trace, "--png", linked)
    assert (done.exit_code, "--png writes a file of its own" in done.stderr) == (2, True), done.output
    (other := tmp_path / "notes.md").write_bytes(b"# Notes\n")
    done = run("trace", trace, "--png", other)
    assert (done.exit_code, f"--png {other}: the file there is not a PNG" in done.stderr) == (2, True), done.output
    assert (trace.read_bytes(), other.read_bytes()) == (b"[\n\n]\n", b"# Notes\n")
    for _ in range(2):
        assert run("trace", trace, "--png", tmp_path / "trace.png").exit_code == 0


@pytest.mark.parametrize("name", ["stream.sse", "stream.json"])
@pytest.mark.parametrize("content", [b"notes", b"{}", b'{"request": {}, "engine": "sglang"}'])
def test_a_recording_takes_the_place_of_a_recording_alone(name: str, content: bytes, tmp_path: Path) -> None:
    payload, out = tmp_path / "payload.json", tmp_path / "stream.sse"
    payload.write_text(json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}))
    with Loopback() as engine:
        asked = ("record", "--url", engine.url, "--payload", payload, "--out", out)
        for _ in range(2):
            assert run(*asked).exit_code == 0
        for path in (out, tmp_path / "stream.json"):
            path.unlink()
        (tmp_path / name).write_bytes(content)
        before, requests = contents(tmp_path), engine.stats().requests
        done = run(*asked)
        assert (done.exit_code, f"{tmp_path / name} is not of a recording" in done.stderr) == (2, True), done.output
        assert engine.stats().requests == requests
    assert contents(tmp_path) == before


@each_link
def test_a_payload_is_no_recording(link: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    payload = tmp_path / "payload.json"
    payload.write_text("{}")
    linked = link(payload, tmp_path / "linked")
    done = run("record", "--url", NOWHERE, "--payload", payload, "--out", linked)
    assert (done.exit_code, "must be three different files" in done.stderr) == (2, True), done.output
    assert payload.read_text() == "{}"


@pytest.mark.parametrize("content", [PROMPT, b"notes\n", b'{"group_index": 0, "index": 0, "metadata": {}}\n'])
def test_a_demo_takes_the_place_of_a_demo_alone(content: bytes, tmp_path: Path) -> None:
    out = tmp_path / "demo.jsonl"
    out.write_bytes(content)
    done = run("demo", "--out", out)
    assert (done.exit_code, f"--out {out}: the file there is not of a demo" in done.stderr) == (2, True), done.output
    (plot := tmp_path / "demo.png").write_bytes(content)
    done = run("demo", "--train", "--out", out)
    assert (done.exit_code, f"--out {plot}: the file there is not a plot" in done.stderr) == (2, True), done.output
    done = run("demo", "--prompts", out, "--out", out)
    assert (done.exit_code, "is that of --prompts" in done.stderr) == (2, True), done.output
    assert contents(tmp_path) == {"demo.jsonl": content, "demo.png": content}
