"""The help and the options of the command line: what they show, what they read, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from streamfold import Timeouts
from streamfold.cli.main import app
from streamfold.cli.options import reward_option, timeouts_option
from streamfold.loopback import Loopback
from support.paths import DATA

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]  # it is a group


def shown(*arguments: object, columns: int = 80, **more: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(columns)}, **more)


# Help.


@pytest.mark.parametrize("command", COMMANDS)
def test_at_80_columns_every_option_is_named_whole_and_no_line_is_longer(command: str) -> None:
    told = shown(command, "--help").output
    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    names = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    assert names
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", told)] == []
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= 80


def test_the_list_of_commands_tells_each_of_them_in_a_whole_sentence() -> None:
    told = shown("--help").output.partition("Commands:\n")[2]
    lines = dict(line.split(maxsplit=1) for line in told.splitlines() if line.strip())
    assert sorted(lines) == COMMANDS
    assert [line for line in lines.values() if not line.endswith(".") or line.endswith("...")] == []


def test_the_examples_of_serve_can_be_copied_whole() -> None:
    told = shown("serve", "--help").output
    for line in ("""curl -N --json '{"text": "Hi", "stream": true}' localhost:30000/generate""", "localhost:30000/v1/"):
        assert any(line in shown_line for shown_line in told.splitlines())
    assert "[bold]" not in told


# Errors.


@pytest.mark.parametrize(
    "arguments",
    [
        ("rollout", "--url", "http://x", "--prompts", DATA / "README.md", "--out", "/tmp/x", "--engine", "sgl"),
        ("replay", DATA / "cases" / "47-routed-experts-good.sse", "--experts", "2,of_so_many,that,the,line,is,long"),
        ("serve", "--wire", "0.6.0"),
        ("serve", "--incremental", "--wire", "0.5.10"),
    ],
)
def test_an_error_is_one_line_however_narrow_the_window_is(arguments: tuple[object, ...]) -> None:
    refused = shown(*arguments, columns=40)
    assert refused.exit_code == 2
    *before, message = refused.stderr.splitlines()
    assert len(message) > 40
    assert all(line.startswith(("Usage:", "Try")) or not line for line in before)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        (("--wire", "0.5.24"), "0.5.10 on, and is known up to 0.5.23"),
        (("--wire", "0.5.9"), "0.5.10 on, and is known up to 0.5.23"),
        (("--wire", "0.5.10", "--incremental"), "0.5.11 on, and is known up to 0.5.23"),
        (("--wire", "0.34", "--engine", "vllm"), "0.20 on, and is known up to 0.33"),
        (("--wire", "1.0", "--engine", "vllm"), "0.20 on, and is known up to 0.33"),
    ],
)
def test_serve_refuses_a_version_that_it_does_not_know_and_names_those_it_does(
    options: tuple[str, ...], known: str
) -> None:
    refused = shown("serve", "--port", "0", *options)
    assert refused.exit_code == 2
    assert known in refused.stderr
    assert f"got version {options[1]!r}" in refused.stderr


# Options that are more than a word.


def test_each_field_of_the_timeouts_has_an_option() -> None:
    params = get_command(app).commands["rollout"].params  # type: ignore[attr-defined]
    options = {param.name.removeprefix("timeout_") for param in params if param.name.startswith("timeout_")}
    assert options == {field.name for field in dataclasses.fields(Timeouts)}


def test_timeouts_that_are_not_given_are_the_default_ones_and_none_is_no_limit() -> None:
    unset = timeouts_option(connect=None, first_token=None, next_token=None, drain=None)
    assert unset == Timeouts()
    assert type(unset.first_token) is type(Timeouts().first_token), "it is extended if requests wait at the engine"
    given = timeouts_option(connect="none", first_token="60", next_token="0.5", drain="0")
    assert given == Timeouts(connect=None, first_token=60.0, next_token=0.5, drain=0.0)
    assert type(given.first_token) is float


@pytest.mark.parametrize(
    ("name", "text"),
    [("connect", "-1"), ("first_token", "soon"), ("next_token", "nan"), ("next_token", "inf"), ("drain", "none")],
)
def test_a_timeout_that_is_no_time_is_named_by_its_option(name: str, text: str) -> None:
    option = f"--timeout-{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"^{option} must be a number of seconds.*; not {text}$"):
        timeouts_option(**{name: text})


def test_a_reward_is_imported_from_the_current_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("class Of:\n    @staticmethod\n    def it(sample): return 1.0\nx = 3\n")
    (tmp_path / "bad_rewards.py").write_text("def f(:")
    (tmp_path / "leaving_rewards.py").write_text("import sys\nsys.exit('no model')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    function = reward_option("my_rewards:Of.it")
    assert function is not None
    assert function(None) == 1.0  # type: ignore[arg-type]
    for text, words in (
        ("my_rewards", "is not MODULE:FUNCTION"),
        (":f", "is not MODULE:FUNCTION"),
        ("my_rewards:x", "my_rewards cannot be called: x"),
        ("my_rewards:Of.other", "my_rewards has no Of.other"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad_rewards:f", "SyntaxError: "),
        ("leaving_rewards:f", "SystemExit: no model"),
    ):
        with pytest.raises(ValueError, match=f"^--reward {text}.*{re.escape(words)}"):
            reward_option(text)
    assert sys.path == [str(tmp_path), *before]
    sys.modules.pop("my_rewards")


def test_a_reward_function_may_import_what_lies_beside_it_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calling_rewards.py").write_text(
        "def late(_sample):\n    import beside_rewards as b\n    return b.ONE\n"
    )
    (tmp_path / "beside_rewards.py").write_text("ONE = 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = reward_option("calling_rewards:late")
    assert function is not None
    assert function(None) == 1.0  # type: ignore[arg-type]
    del sys.modules["calling_rewards"], sys.modules["beside_rewards"]


# Standard input and JSON.


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./nope", "--tokenizer ./nope: there is no such folder"),
        ("owner/nope", "--tokenizer owner/nope cannot be loaded: OSError: no such repository"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_told_with_the_option_and_its_name(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(name: str) -> None:
        raise OSError("Repo id must use alphanumeric chars" if name.startswith(".") else "no such repository")

    fake = types.SimpleNamespace(AutoTokenizer=types.SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    files = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "samples.jsonl")
    refused = shown("rollout", "--url", "http://127.0.0.1:9", *files, "--tokenizer", name)
    assert refused.exit_code == 2
    assert told in refused.stderr


def test_prompts_come_from_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    lines = '{"prompt": "a"}\n\n{"prompt": "b"}\n'
    with Loopback() as engine:
        arguments = ("rollout", "--url", engine.url, "--prompts", "-", "--out", out, "--max-new-tokens", "4")
        done = shown(*arguments, input=lines)
        assert done.exit_code == 0, done.output
        assert engine.stats().requests == 2
        refused = shown(*arguments, input="{\n")
        assert refused.exit_code == 2
        assert "standard input, line 1 is not JSON" in refused.stderr
    assert sorted(json.loads(line)["prompt"] for line in out.read_bytes().splitlines()) == ["a", "b"]


def test_replay_gives_the_whole_stream_as_json(tmp_path: Path) -> None:
    payload, stream = tmp_path / "payload.json", tmp_path / "stream.sse"
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    payload.write_text(json.dumps({"input_ids": [1, 2], "sampling_params": params, "return_logprob": True}))
    with Loopback() as engine:
        done = shown("record", "--url", engine.url, "--payload", payload, "--out", stream)
        assert done.exit_code == 0, done.output
        expected = engine.undisturbed([1, 2], params, return_logprob=True)
    replayed = shown("replay", stream, "--json", columns=40)
    assert replayed.exit_code == 0
    told = json.loads(replayed.stdout)
    assert (told["token_ids"], told["logprobs"]) == (expected.token_ids, expected.logprobs)
    assert (told["tokens"], told["finish_reason"], told["error"]) == (20, "length", None)
    assert told["bytes"] == len(stream.read_bytes())


def test_replay_of_a_damaged_stream_has_the_error_in_its_json() -> None:
    case = DATA / "cases" / "25-nan-literal.sse"
    replayed = shown("replay", case, "--logprobs", "--json")
    assert replayed.exit_code == 1
    told = json.loads(replayed.stdout)
    assert (told["error"]["type"], told["error"]["kind"]) == ("DecodeError", "json")
    assert told["error"]["offset"] == case.read_bytes().index(b"NaN")
    assert told["tokens"] == len(told["token_ids"]) == 1
