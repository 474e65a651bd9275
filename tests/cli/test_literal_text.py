"""Texts of users, of models and of paths are printed as they are: nothing in them is taken for markup."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold.cli.console import console, errors, fail
from streamfold.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ("[/INST]", "[INST] x [/INST]", "[bold]x[/bold]", "\\[/INST]", "[/]", "[link=x]y", ":smile:", "[x", "]")


def stream(text: str) -> bytes:
    """SGLang's stream of one token, with a text wherever an engine may send one."""
    meta: dict[str, Any] = {
        "id": text,
        "finish_reason": {"type": "stop", "matched": text},
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "weight_version": text,
        text: text,
    }
    event = {"text": text, "output_ids": [7], "meta_info": meta}
    return b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("text", TEXTS)
def test_replay_prints_every_text_of_a_stream_as_it_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "stream.sse").write_bytes(stream(text))
    shown = CliRunner().invoke(app, ["replay", "--no-logprobs", str(tmp_path / "stream.sse")], env={"COLUMNS": "300"})
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.stdout.splitlines()]
    rows = {name.strip(): value for name, _, value in (line.partition("  ") for line in lines)}
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["matched"] == text
    assert rows["text"] == json.dumps(text)
    assert rows["versions"] == f"{text} [0, 1)"
    assert f"meta.{text}" in shown.stdout


@pytest.mark.parametrize("text", TEXTS)
def test_both_consoles_and_the_errors_print_text_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.print(text, style="bold")
    errors.print(text, style="red")
    with pytest.raises(SystemExit):
        fail(text)
    shown = capsys.readouterr()
    assert shown.out == f"{text}\n"
    assert shown.err == f"{text}\nstreamfold: {text}\n"


@pytest.mark.parametrize("text", TEXTS)
def test_a_path_or_an_address_in_an_error_is_printed_as_it_is(text: str, tmp_path: Path) -> None:
    payload = tmp_path / "payload.json"
    payload.write_text("{}", encoding="utf-8")
    arguments = ["--payload", str(payload), "--out", str(tmp_path / text / "stream.sse")]
    told = CliRunner().invoke(app, ["record", "--url", "http://127.0.0.1:9", *arguments])
    assert told.exit_code == 2
    assert "".join(f"{text}/stream.sse: there is no folder".split()) in "".join(told.output.split())
