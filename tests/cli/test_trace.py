"""``streamfold trace``, and the traces that other commands write."""

from __future__ import annotations

import gc
import json
import sys
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.cli.waterfall import Row, Waterfall, read_trace
from streamfold.loopback import Loopback
from support.traces import args_of, lines, phases, records

if TYPE_CHECKING:
    from pathlib import Path

RUNNER = CliRunner()


def record(kind: str, name: str, ts: float, tid: int = 1, **more: object) -> dict[str, object]:
    return {"ph": kind, "name": name, "ts": ts, "pid": 1, "tid": tid, **more}


def written(path: Path, *found: dict[str, object], end: str = "\n]\n") -> Path:
    path.write_text("[\n" + "\n,".join(map(json.dumps, found)) + end, encoding="utf-8")
    return path


def test_spans_are_paired_and_one_without_an_end_reaches_to_the_last_record(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.json",
        record("M", "thread_name", 0.0, args={"name": "sample 1"}),
        record("B", "call", 1e6),
        record("B", "queue", 1e6),
        record("E", "queue", 2e6),
        record("B", "tokens", 2e6),
        record("i", "resume", 2.5e6, s="t"),
        record("X", "reward", 3e6, tid=2, dur=1e6),
        end='\n,{"ph": "E", "na',
    )
    waterfall = Waterfall.of(read_trace(path))
    first, second = waterfall.rows
    spans = [("queue", 1.0, 2.0), ("call", 1.0, 4.0), ("tokens", 2.0, 4.0)]
    assert first == Row("sample 1", spans, [("resume", 2.5)])
    assert second == Row("", [("reward", 3.0, 4.0)], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "does not begin with a bracket"),
        ('[\n{"ph": 1}\n]\n', "line 2: not a record"),
        ("[\nnull\n]\n", "line 2: not a record"),
        ('[\n{"a\n,{}\n]', "line 2: not a record"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    result = RUNNER.invoke(app, ["trace", str(path), "--png", str(tmp_path / "trace.png")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "trace.png").exists()


def test_a_rollout_writes_a_trace_that_becomes_a_picture(tmp_path: Path) -> None:
    prompts, out, trace, png = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "trace.json", "trace.png"))
    prompts.write_text('{"input_ids": [5, 6]}\n{"input_ids": [5, 7]}\n', encoding="utf-8")
    with Loopback(stop_probability=0) as engine:
        asked = ["rollout", "--url", engine.url, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8"]
        assert RUNNER.invoke(app, [*asked, "--trace", str(trace)]).exit_code == 0
    whole = phases("queue", "connect", "prefill", "tokens")
    assert lines(records(trace)) == {"sample 0": whole, "sample 1": whole}
    result = RUNNER.invoke(app, ["trace", str(trace), "--png", str(png)])
    assert result.exit_code == 0
    assert "2 samples" in result.output
    with Image.open(png) as picture:
        assert picture.width > 500
        colors = picture.convert("RGB").getcolors(1 << 20) or []
    assert {(66, 146, 198), (253, 174, 107)} <= {color for _, color in colors}, "tokens and prefill"


def test_rewards_of_a_rollout_are_in_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out, trace = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "trace.json"))
    prompts.write_text('{"input_ids": [5, 6]}\n', encoding="utf-8")
    (tmp_path / "judge_of_traces.py").write_text("def judge(sample):\n    return 2.5\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Loopback(stop_probability=0) as engine:
        asked = ["rollout", "--url", engine.url, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8"]
        result = RUNNER.invoke(app, [*asked, "--trace", str(trace), "--reward", "judge_of_traces:judge"])
    assert result.exit_code == 0
    found = records(trace)
    assert lines(found) == {"sample 0": [*phases("queue", "connect", "prefill", "tokens"), "=reward"]}
    assert args_of(found, "X", "reward") == [{"reward": 2.5}]


def test_an_empty_trace_is_a_picture_too(tmp_path: Path) -> None:
    path, png = written(tmp_path / "trace.json"), tmp_path / "trace.png"
    assert RUNNER.invoke(app, ["trace", str(path), "--png", str(png)]).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = written(tmp_path / "trace.json", record("X", "reward", 3e6, dur=1e6))
    result = RUNNER.invoke(app, ["trace", str(path), "--png", str(tmp_path / "trace.png")])
    assert result.exit_code == 2
    assert "streamfold[plot]" in result.stderr


def test_a_trace_that_cannot_be_written_ends_the_command_before_it_begins(tmp_path: Path) -> None:
    out = tmp_path / "demo.jsonl"
    result = RUNNER.invoke(app, ["demo", "--out", str(out), "--trace", str(tmp_path / "missing" / "trace.json")])
    assert result.exit_code == 2
    assert "missing/trace.json" in result.stderr.replace("\n", "")
    assert not out.exists()


@pytest.mark.parametrize(
    "refused",
    [("--url", "ftp://127.0.0.1"), ("--max-new-tokens", "5"), ("--header", "x"), ("--timeout-drain", "x")],
    ids=lambda refused: refused[0],
)
def test_a_run_that_is_refused_leaves_the_trace_of_the_run_before(tmp_path: Path, refused: tuple[str, str]) -> None:
    prompts, out, trace = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "trace.json"
    prompts.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    with Loopback(token_rate=0) as engine:
        arguments = [
            "rollout",
            "--url",
            engine.url,
            "--prompts",
            str(prompts),
            "--out",
            str(out),
            "--trace",
            str(trace),
        ]
        result = RUNNER.invoke(app, [*arguments, "--max-new-tokens", "4"])
        assert result.exit_code == 0, result.output
        before = trace.read_bytes()
        assert RUNNER.invoke(app, [*arguments, "--max-new-tokens", "4", *refused]).exit_code == 2
    gc.collect()  # what has failed may hold the trace in its traceback
    assert trace.read_bytes() == before
    assert phases("queue", "connect", "prefill", "tokens") in lines(records(trace)).values()


@pytest.mark.parametrize("name", ["prompts.jsonl", "out.jsonl"])
def test_a_trace_never_takes_the_place_of_the_prompts_or_the_samples(tmp_path: Path, name: str) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    arguments = ["rollout", "--url", "http://127.0.0.1:9", "--prompts", str(prompts), "--out", str(out)]
    result = RUNNER.invoke(app, [*arguments, "--trace", str(tmp_path / name)])
    assert (result.exit_code, prompts.read_text(encoding="utf-8")) == (2, '{"prompt": "Hi"}\n')
    assert "--trace writes a file of its own" in result.stderr
