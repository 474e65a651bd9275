"""The command line, run as people run it: in a process of its own, against real HTTP."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold.cli import demo_job as demo
from streamfold.cli.main import app
from streamfold.cli.recording import Recording
from streamfold.errors import StreamTruncated
from streamfold.loopback import Config, Faults, Loopback, undisturbed
from support.loopback_http import until
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from streamfold.samples.sample import Sample
    from support.commands import Commands

    Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

PAYLOAD = ROOT / "examples" / "payload.json"
ROW = re.compile(r"^(.*?\S) {2,}([\d,]+ +[\d,]+)$", re.MULTILINE)  # of the demo's table of rollouts


@pytest.fixture
def streamfold(commands: Commands) -> Run:
    """Run ``streamfold`` to its end."""

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return commands.run(arguments, cwd=cwd)

    return run


def few_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    return path


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """``streamfold serve`` on a free port; its URL. Ended as Ctrl-C ends it, with 0."""
    command = [sys.executable, "-m", "streamfold", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0


def test_help_teaches_every_command(streamfold: Run) -> None:
    told = streamfold("--help")
    assert told.returncode == 0
    for command in ("demo", "serve", "rollout", "record", "replay"):
        assert command in told.stdout
        assert streamfold(command, "--help").returncode == 0


def test_the_demo_shows_its_rollouts_and_writes_what_it_got(streamfold: Run, tmp_path: Path) -> None:
    done = streamfold("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {name: [int(each.replace(",", "")) for each in row.split()] for name, row in ROW.findall(done.stdout)}
    assert shown["groups done: given to the trainer"] == [14, 14]
    assert shown["tokens lost"] == [0, 0]
    assert shown["  calls per sample, at most"] == [1, 1]
    assert shown["groups aborted: not needed any more"][0] > 0
    assert shown["tokens kept of aborted samples"][0] > 0
    assert shown["  of which resumed from their tokens"][1] > 0
    samples = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_bytes().splitlines()]
    assert f"{len(samples)} of {len(samples)} finished samples equal the undisturbed generation" in done.stdout
    assert len(samples) == sum(shown["rewards computed"]) >= 2 * 28
    assert all(sample["equal"] and len(sample["token_ids"]) == len(sample["logprobs"]) for sample in samples)
    assert {sample["prompt"] for sample in samples} <= set(demo.read_prompts())
    resumed = [sample for sample in samples if sample["calls"] > 1]
    assert resumed
    assert {version for sample in resumed for version, _, _ in sample["version_spans"]} == {"1", "2"}
    assert "examples/rollout.py" in done.stdout


def test_the_demo_takes_other_prompts_and_names_the_line_that_is_none(streamfold: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi [/bold]"}\n{"prompt": "Ho"}\n', encoding="utf-8")
    out = tmp_path / "samples.jsonl"
    done = streamfold("demo", "--incremental", "--seed", "3", "--prompts", prompts, "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 finished samples" in done.stdout
    assert "Hi [/bold]" in done.stdout
    assert len(out.read_bytes().splitlines()) == 4
    for text, place in (('{"prompt": "Hi"}\n{"text": "Ho"}\n', "line 2"), ("", "is empty")):
        prompts.write_text(text, encoding="utf-8")
        failed = CliRunner().invoke(app, ["demo", "--prompts", str(prompts), "--out", str(tmp_path / "none.jsonl")])
        assert failed.exit_code == 2
        assert place in " ".join(failed.output.split())
    assert not (tmp_path / "none.jsonl").exists()


def test_a_demo_whose_samples_differ_says_so_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = demo.compare

    def wrong(sample: Sample, *arguments: Any, **named: Any) -> demo.Outcome:
        if sample.index == 1:
            sample.tokens[-1] ^= 1
        return right(sample, *arguments, **named)

    monkeypatch.setattr(demo, "ENGINE", {**demo.ENGINE, "token_rate": 600.0})
    monkeypatch.setattr(demo, "compare", wrong)
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo.jsonl")])
    assert done.exit_code == 1
    assert "FAILED: samples [1] differ from their undisturbed generation" in done.output
    assert "Why it matters" not in done.output
    samples = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_bytes().splitlines()]
    assert [sample["index"] for sample in samples if not sample["equal"]] == [1]


def test_serve_answers_until_it_is_interrupted() -> None:
    with serving("--incremental", "--token-rate", "0") as url:
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "stream_and_resume.py", url],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "kept " in done.stdout
        assert "resumed" in done.stdout


def test_the_example_of_a_stop_by_a_rule_keeps_the_budget_of_thought_and_answers() -> None:
    with serving("--token-rate", "300") as url:
        done = run_example("stop_by_rule.py", url)
    prompt, end = list(b"How many stations has the line? <think>"), 261
    params = {"temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    config = Config()
    thought = undisturbed(config, prompt, {**params, "max_new_tokens": 48}).token_ids
    answer = undisturbed(
        config, [*prompt, *thought, end], {**params, "max_new_tokens": 24, "ignore_eos": False}
    ).token_ids
    stopped, answered = done.splitlines()
    assert stopped == "stopped after 48 tokens of thought"
    assert answered.endswith(f": {config.tokenizer.decode(answer)!r}")


def test_the_example_of_a_screen_shows_the_whole_text() -> None:
    with serving("--token-rate", "300") as url:
        done = run_example("stream_text.py", url)
    config = Config()
    prompt = config.tokenizer.encode("A story that is told word by word.")
    params = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 7}
    ids = undisturbed(config, prompt, params).token_ids
    assert done.startswith(f"{config.tokenizer.decode(ids)}\n{len(ids)} tokens, the first one after ")


def run_example(name: str, url: str) -> str:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, url], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_record_saves_the_very_bytes_and_replay_reads_them(streamfold: Run, tmp_path: Path) -> None:
    out = tmp_path / "stream.sse"
    with Loopback(token_rate=200, seed=3) as engine:
        done = streamfold("record", "--url", engine.url, "--payload", PAYLOAD, "--out", out)
        assert done.returncode == 0, done.stderr
        prompt = engine.tokenizer.encode(json.loads(PAYLOAD.read_bytes())["text"])
        expected = engine.undisturbed(prompt, json.loads(PAYLOAD.read_bytes())["sampling_params"])
    saved = Recording.load(out)
    assert saved.status == 200
    assert saved.end == "eof"
    assert b"".join(saved.parts()) == saved.body
    assert len(saved.reads) > 1
    assert [at for at, _ in saved.reads] == sorted(at for at, _ in saved.reads)
    generation, error = saved.replay(saved.parser())
    assert error is None
    assert generation.token_ids.tolist() == expected.token_ids
    shown = streamfold("replay", out)
    assert shown.returncode == 0
    assert f"{len(expected.token_ids)}" in shown.stdout


@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm-completions"])
def test_record_of_each_engine_names_the_command_that_reads_it(streamfold: Run, engine: str, tmp_path: Path) -> None:
    payload, out = tmp_path / "payload.json", tmp_path / "[bold] stream.sse"
    params = {"max_tokens": 8, "logprobs": 1, "temperature": 0, "ignore_eos": True}
    requests: dict[str, dict[str, Any]] = {
        "sglang": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True},
        "vllm": {"token_ids": [1, 2], "sampling_params": params},
        "vllm-completions": {"prompt": [1, 2], "return_token_ids": True, **params},
    }
    payload.write_text(json.dumps(requests[engine]), encoding="utf-8")
    with Loopback(engine="sglang" if engine == "sglang" else "vllm") as server:
        done = streamfold("record", "--url", server.url, "--engine", engine, "--payload", payload, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HTTP 200" in done.stdout
    _, *command = shlex.split(done.stdout.strip().rpartition("To parse it: ")[2])
    shown = streamfold(*command)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    facts = dict(re.findall(r"^(\S.*?) {2,}(.*\S)", shown.stdout, re.MULTILINE))
    assert facts["tokens"] == "8"
    assert facts["finish reason"] == "length"
    assert facts["logprobs"].count(",") == 7


def test_replay_of_bytes_alone_says_what_to_tell_it(streamfold: Run, tmp_path: Path) -> None:
    alone = tmp_path / "alone.sse"
    alone.write_bytes((DATA / "cases" / "13-done-without-finish.sse").read_bytes())
    told = streamfold("replay", alone)
    assert "--logprobs" in told.stdout
    assert "--dialect" in told.stdout
    assert "--dialect" not in streamfold("replay", alone, "--dialect", "sglang").stdout


def test_replay_shows_the_bytes_around_an_error(streamfold: Run) -> None:
    case = DATA / "cases" / "25-nan-literal.sse"
    shown = streamfold("replay", case, "--logprobs")
    assert shown.returncode == 1
    assert "DecodeError" in shown.stderr
    place, mark = shown.stderr.splitlines()[-2:]
    body = case.read_bytes()
    assert place[mark.index("^") :].startswith("NaN")
    assert int(mark.split()[-1]) == body.index(b"NaN")


def test_replay_tells_of_a_stream_that_was_cut(streamfold: Run) -> None:
    shown = streamfold("replay", DATA / "cases" / "13-done-without-finish.sse", "--logprobs")
    assert shown.returncode == 1
    assert "StreamTruncated" in shown.stderr
    assert "the stream is truncated" in shown.stdout


def test_record_of_an_engine_that_is_not_there_says_so(streamfold: Run, tmp_path: Path) -> None:
    done = streamfold("record", "--url", "http://127.0.0.1:9", "--payload", PAYLOAD, "--out", tmp_path / "none.sse")
    assert done.returncode == 1
    assert "no reply from http://127.0.0.1:9" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [400, 401, 404, 503])
def test_record_of_a_refusal_keeps_it_and_fails(streamfold: Run, status: int, tmp_path: Path) -> None:
    refusal = Faults([{"kind": "status", "status": status, "body": {"error": "not [/today]"}}])
    with Loopback(faults=refusal) as engine:
        done = streamfold("record", "--url", engine.url, "--payload", PAYLOAD, "--out", tmp_path / "stream.sse")
    assert done.returncode == 1
    assert f"the engine refused the request with HTTP {status}" in done.stderr
    assert "not [/today]" in done.stderr
    saved = Recording.load(tmp_path / "stream.sse")
    assert (saved.status, b"not [/today]" in saved.body) == (status, True)


def test_record_sends_the_api_key_of_the_environment(
    streamfold: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Loopback(api_key="s3cret") as engine:
        arguments = ("record", "--url", engine.url, "--payload", PAYLOAD, "--out", tmp_path / "stream.sse")
        monkeypatch.setenv("STREAMFOLD_API_KEY", "s3cret")
        assert streamfold(*arguments).returncode == 0
        monkeypatch.delenv("STREAMFOLD_API_KEY")
        assert streamfold(*arguments).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_recording_that_is_interrupted_keeps_what_has_come(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "stream.sse"
    with Loopback(token_rate=200, faults=Faults([{"kind": "silence", "after_events": 20}])) as engine:
        command = [sys.executable, "-m", "streamfold", "record", "--url", engine.url, "--payload", str(PAYLOAD)]
        with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: engine.faults.done["silence"] == 1)
                process.send_signal(number)
                told, _ = process.communicate(timeout=20)
            finally:
                process.kill()
    assert process.returncode == 0
    assert "ended by an interrupt" in told
    saved = Recording.load(out)
    assert sum(size for _, size in saved.reads) == len(saved.body)
    generation, error = saved.replay(saved.parser())
    assert isinstance(error, StreamTruncated)
    assert len(generation.token_ids) == 20


@pytest.mark.parametrize("out", ["payload.sse", "payload.json", "stream.json"])
def test_a_recording_never_takes_the_place_of_its_payload_or_of_what_tells_of_it(
    streamfold: Run, out: str, tmp_path: Path
) -> None:
    payload = tmp_path / "payload.json"
    payload.write_bytes(PAYLOAD.read_bytes())
    done = streamfold("record", "--url", "http://127.0.0.1:9", "--payload", payload, "--out", tmp_path / out)
    assert done.returncode == 2
    assert "must be three different files" in done.stderr
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("payload.json", PAYLOAD.read_bytes())]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_in_one_line(streamfold: Run, tmp_path: Path) -> None:
    with Loopback() as engine:
        done = streamfold("record", "--url", engine.url, "--payload", PAYLOAD, "--out", "/dev/full")
    assert done.returncode == 2
    assert "/dev/full cannot be written: [Errno 28]" in done.stderr
    assert "free space on that disk, or save to another one" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    failed = CliRunner().invoke(app, ["demo", "--prompts", str(few_prompts(tmp_path)), "--out", "/dev/full"])
    assert failed.exit_code == 2
    assert "/dev/full cannot be written: [Errno 28]" in failed.output


@pytest.mark.parametrize(
    "beside",
    [
        "{", "\xff", "[]", '{"request": [1]}', '{"status": "200"}', '{"headers": 4}', '{"end": 7}', '{"reads": 5}',
        '{"engine": 4}', '{"engine": "tgi"}', '{"engine": []}',
        '{"reads": [[1]]}', '{"reads": [[0.1, -5]]}', '{"reads": [[0.1, "k"]]}', '{"reads": [[null, 1]]}',
    ],
)  # fmt: skip
def test_what_stands_beside_a_stream_and_does_not_tell_of_it_is_named(beside: str, tmp_path: Path) -> None:
    stream = tmp_path / "stream.sse"
    stream.write_bytes(b"data: [DONE]\n\n")
    stream.with_suffix(".json").write_bytes(beside.encode("latin-1"))
    with pytest.raises(ValueError, match=r"stream\.json does not describe a recording"):
        Recording.load(stream)


def test_what_tells_of_a_stream_may_be_anything_that_is_not_needed(tmp_path: Path) -> None:
    stream = tmp_path / "stream.json"
    stream.write_bytes(b"data: [DONE]\n\n")
    assert Recording.load(stream) == Recording(b"data: [DONE]\n\n")
    stream.write_bytes(b'{"request": {"routed_experts_start_len": "2"}, "kind": 7}')
    stream.rename(tmp_path / "other.json")
    (tmp_path / "other.sse").write_bytes(b"")
    Recording.load(tmp_path / "other.sse").parser()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("replay", DATA / "cases" / "01-unicode-line-separators.sse", "--dialect", "sgl"), "dialect"),
        (("replay", DATA / "cases" / "47-routed-experts-good.sse", "--experts", "2"), "LAYERS,TOP_K"),
        (("record", "--url", "ftp://x", "--payload", PAYLOAD, "--out", "x.sse"), "http or https"),
        (("record", "--url", "http://x", "--payload", __file__, "--out", "x.sse"), "not JSON"),
        (("record", "--url", "http://x", "--payload", PAYLOAD, "--api-key", "a\nb"), "the API key"),
        (("record", "--url", "http://x", "--payload", PAYLOAD, "--out", "no/folder/x.sse"), "there is no folder"),
        (("demo", "--out", "no/folder/x.jsonl"), "there is no folder"),
        (("serve", "--port", "0", "--wire", "latest"), "version"),
        (("serve", "--port", "0", "--model", "moe"), "model must be"),
        (("serve", "--port", "65536"), "65535"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    streamfold: Run, arguments: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    done = streamfold(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
