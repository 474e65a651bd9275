"""How much the commands print: progress without a terminal, -v and -q, and one JSON object with --json."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

from typer.main import get_command
from typer.testing import CliRunner

from streamfold.cli.main import app
from streamfold.cli.printing import output
from streamfold.loopback import Faults, Loopback
from streamfold.rollout import progress
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAYLOAD = ROOT / "examples" / "payload.json"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def rolled(engine: Loopback, folder: Path, *options: str, prompts: int = 4) -> Any:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "a{i}"}}\n' for i in range(prompts)), encoding="utf-8")
    files = ("--prompts", path, "--out", folder / "samples.jsonl")
    return run("rollout", "--url", engine.url, *files, "--max-new-tokens", "100", *options)


def test_without_a_terminal_a_rollout_prints_a_line_each_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress._LOG_SECONDS == 10
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.02)
    with Loopback(token_rate=300, stop_probability=0) as engine:
        done = rolled(engine, tmp_path)
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    told = [
        re.match(r"rollout: (\d) of 4 samples in 0:0\d, (\d) in flight, (\d+) tokens, [\d,]+/s", line) for line in lines
    ]
    assert all(told)
    assert any(match[1] == "0" and int(match[3]) > 0 for match in told if match), "before any sample has ended"
    assert told[-1] is not None
    assert told[-1].groups() == ("4", "0", "400")
    assert done.stdout == f"4 of 4 samples are in {tmp_path / 'samples.jsonl'}\n"


def test_quiet_prints_what_went_wrong_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.01)
    with Loopback(token_rate=2000) as engine:
        done = rolled(engine, tmp_path, "-q")
        assert (done.exit_code, done.output) == (0, "")
        engine.faults = Faults([{"kind": "status", "status": 400, "body": {"error": "not this one"}}])
        (tmp_path / "samples.jsonl").unlink()
        failed = rolled(engine, tmp_path, "--quiet")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert failed.stderr == "4 failed: EngineError: not this one (status 400)\n"


def test_verbose_tells_of_retries_and_more_of_it_has_times(tmp_path: Path) -> None:
    busy = Faults([{"kind": "status", "status": 503, "requests": [0, 1]}])
    told = []
    for flags in ((), ("-v",), ("-vv",)):
        with Loopback(faults=busy) as engine:
            done = rolled(engine, tmp_path, *flags)
        assert done.exit_code == 0, done.output
        (tmp_path / "samples.jsonl").unlink()
        told.append(done.stderr)
    assert [len(re.findall("status 503", text)) for text in told[:2]] == [1, 2], "one warning stands for all"
    assert len(told[1].splitlines()) == 2
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ .*status 503", told[2].splitlines()[-1])


def test_verbose_and_quiet_contradict_each_other(tmp_path: Path) -> None:
    with Loopback() as engine:
        refused = rolled(engine, tmp_path, "-v", "-q")
    assert refused.exit_code == 2
    assert "--verbose and --quiet contradict each other" in refused.stderr


def test_a_warning_is_a_line_with_its_error_and_the_log_is_left_as_it_was(capfd: Any) -> None:
    logger = logging.getLogger("streamfold")
    before = (logger.level, list(logger.handlers))
    with output():
        try:
            raise KeyError("x" * 100)
        except KeyError:
            logger.warning("it [failed]", exc_info=True)
        logger.info("unheard")
    assert (logger.level, logger.handlers) == before
    assert capfd.readouterr().err == f"it [failed]: KeyError: '{'x' * 100}'\n"


def test_every_command_can_be_quiet_and_sum_up_as_json() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]  # it is a group
        options = {option for param in command.params for option in param.opts}
        assert {"--json", "--quiet"} <= options, name


def test_a_quiet_replay_says_with_its_code_whether_the_stream_is_whole() -> None:
    streams = ROOT / "tests" / "data" / "cases"
    whole = run("replay", streams / "01-unicode-line-separators.sse", "--logprobs", "-q")
    assert (whole.exit_code, whole.output) == (0, "")
    damaged = run("replay", streams / "25-nan-literal.sse", "--logprobs", "-q")
    assert (damaged.exit_code, damaged.stdout) == (1, "")
    assert "DecodeError" in damaged.stderr


# JSON.


def test_a_rollout_is_summed_up_as_json(tmp_path: Path) -> None:
    bad = Faults([{"kind": "status", "status": 400, "requests": 1, "body": {"error": "bad"}}])
    with Loopback(faults=bad, stop_probability=0) as engine:
        done = rolled(engine, tmp_path, "--json", "--concurrency", "1")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told.pop("seconds") > 0
    assert told.pop("tokens_per_second") > 0
    assert told == {
        "out": str(tmp_path / "samples.jsonl"), "samples": 4, "finished": 3, "missing": 1, "partial": 0,
        "without_reward": 0, "interrupted": False, "failures": {"EngineError: bad (status 400)": 1}, "tokens": 300,
        "dropped_tokens": 0, "text_joined": 0, "retries": 0,
    }  # fmt: skip


def test_a_recording_is_summed_up_as_json(tmp_path: Path) -> None:
    out = tmp_path / "stream.sse"
    with Loopback() as engine:
        done = run("record", "--url", engine.url, "--payload", PAYLOAD, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    reads = told.pop("reads")
    assert reads > 0
    assert told == {
        "out": str(out), "details": str(tmp_path / "stream.json"), "status": 200, "bytes": len(out.read_bytes()),
        "end": "eof",
    }  # fmt: skip


def test_the_demo_is_summed_up_as_json(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "demo.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n{"prompt": "Hu"}\n', encoding="utf-8")
    done = run("demo", "--prompts", prompts, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["out"], told["groups"], told["tokens_lost"], told["problems"]) == (str(out), 3, 0, [])
    assert told["finished"] == told["equal"] == len(out.read_bytes().splitlines())
    assert len(told["rollouts"]) == 2


def test_serve_tells_its_address_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.loopback.serve", lambda *, on_ready, **_: on_ready("http://127.0.0.1:1"))
    assert json.loads(run("serve", "--json").stdout) == {"url": "http://127.0.0.1:1"}
