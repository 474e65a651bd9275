"""``streamfold rollout`` as people run it: in a process of its own, interrupted, killed and started again."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.cli.journal import read_samples
from streamfold.loopback import Loopback
from streamfold.samples.sample import Sample
from support.commands import ENVIRONMENT, SECONDS
from support.paths import ROOT
from support.replay import DONE, Replay, Request, answer_json, event, stream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from support.commands import Commands
    from support.replay import Step

    Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
    RunBeside: TypeAlias = Callable[..., Awaitable[subprocess.CompletedProcess[str]]]

LINES = ["Say\u2028it\x85again.", "用一句话", "Say\u2028it\x85again.", "A 🐎"]
BUDGET = 120


def arguments_of(url: str, prompts: Path, out: Path, *options: str) -> list[str]:
    return ["rollout", "--url", url, "--prompts", str(prompts), "--out", str(out), *options]


def command(url: str, prompts: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "streamfold", *arguments_of(url, prompts, out, *options)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **more}


@pytest.fixture
def rollout(commands: Commands) -> Run:
    """Run ``streamfold rollout`` to its end."""

    def run(url: str, prompts: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return commands.run(arguments_of(url, prompts, out, *options))

    return run


@pytest.fixture
def rolled(rollout: Run) -> RunBeside:
    """The same against a server of this process's own event loop."""

    async def run(engine: Replay, prompts: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(rollout, engine.url, prompts, out, *options)

    return run


def interrupted(number: signal.Signals, when: Callable[[], bool], *arguments: Any) -> tuple[int, str, str]:
    """Run it, and send a signal once something is so."""
    pipe, deadline = subprocess.PIPE, time.monotonic() + SECONDS
    with subprocess.Popen(command(*arguments), env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            while not when():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "it never came true"
                time.sleep(0.002)
            process.send_signal(number)
            told, wrong = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return process.returncode, told, wrong


def with_ids(engine: Loopback, path: Path, texts: Sequence[str] = LINES) -> Path:
    """A file of prompts with text and ids."""
    rows = ({"prompt": text, "input_ids": engine.tokenizer.encode(text)} for text in texts)
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def by_index(out: Path) -> dict[int, Sample]:
    samples = list(read_samples(out))
    found = {sample.index: sample for sample in samples if sample.index is not None}
    assert len(found) == len(samples)
    return found


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The whole lines, however Python would split them."""
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]] if out.exists() else []


def has_lines(out: Path, least: int) -> bool:
    return len(lines_of(out)) >= least


def asked(engine: Loopback) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in engine.seen() if seen.path.endswith("/generate")]


def check_equal(engine: Loopback, sample: Sample, text: str, *, ids: bool = True) -> None:
    prompt, params = engine.tokenizer.encode(text), sample.metadata["sampling_params"]
    expected = engine.undisturbed(prompt, params, return_logprob=True)
    assert sample.prompt == text
    assert sample.tokens == (prompt if ids else []) + expected.token_ids
    assert sample.rollout_log_probs == expected.logprobs
    assert expected.finish is not None
    assert sample.status.value == {"stop": "completed", "length": "truncated"}[expected.finish["type"]]
    if "streamfold_text_joined" not in sample.metadata:
        assert sample.response == engine.tokenizer.decode(expected.token_ids)


@pytest.mark.parametrize("arrays", ["lists", "npz"])
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
def test_every_sample_is_the_undisturbed_one_and_none_is_asked_for_twice(
    rollout: Run, ids: bool, arrays: str, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    with Loopback(stop_probability=1 / 60, incremental=True, stream_interval=7) as engine:
        prompts = with_ids(engine, tmp_path / "prompts.jsonl")
        if not ids:
            written = "".join(f"{json.dumps({'text': text}, ensure_ascii=False)}\n" for text in LINES)
            prompts.write_text(written, encoding="utf-8")
        options = ("-n", "3", "--seed", "5", "--max-new-tokens", str(BUDGET), "--top-p", "0.9", "--arrays", arrays)
        for _ in range(2):
            done = rollout(engine.url, prompts, out, *options)
            assert done.returncode == 0, done.stderr
            assert "12 of 12 samples are in" in done.stdout
            samples = by_index(out)
            assert sorted(samples) == list(range(12))
            for index, sample in samples.items():
                assert sample.metadata["sampling_params"]["sampling_seed"] == 5 + index
                check_equal(engine, sample, LINES[index // 3], ids=ids)
        assert engine.stats().requests == 12
    assert len({tuple(sample.tokens) for sample in samples.values()}) == 12
    assert len(lines_of(out)) == 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_keeps_all_that_has_come_and_goes_on_from_there(
    rollout: Run, number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    with Loopback(token_rate=150, stop_probability=1 / 80, keep_requests=1000) as engine:
        prompts = with_ids(engine, tmp_path / "prompts.jsonl")
        eos = str(engine.tokenizer.eos_token_id)
        options = ["-n", "4", "--seed", "1", "--max-new-tokens", str(BUDGET), "--concurrency", "8"]
        options += ["--eos-token-id", eos]
        code, told, wrong = interrupted(number, lambda: len(lines_of(out)) >= 3, engine.url, prompts, out, *options)
        assert code == 130, wrong
        assert "are missing" in told
        assert "Traceback" not in wrong
        assert engine.stats().running == 0
        kept = by_index(out)
        partial = {i: s for i, s in kept.items() if s.status is Sample.Status.ABORTED}
        assert partial
        assert all(0 < sample.response_length < BUDGET for sample in partial.values())
        first = asked(engine)
        assert len(first) < 16

        assert rollout(engine.url, prompts, out, *options).returncode == 0
        then = [request["input_ids"] for request in asked(engine)[len(first) :]]
        finished = len(kept) - len(partial)
        assert len(then) <= 16 - finished
        assert [ids for ids in then if ids in [sample.tokens for sample in partial.values()]]
        samples = by_index(out)
        assert sorted(samples) == list(range(16))
        for index, sample in samples.items():
            check_equal(engine, sample, LINES[index // 4])
        for index, cut in partial.items():
            assert samples[index].tokens[: len(cut.tokens)] == cut.tokens
    assert len(lines_of(out)) == 16


def test_partial_samples_of_text_prompts_are_resumed_if_the_engine_sends_the_ids_of_prompts(
    rollout: Run, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in LINES), encoding="utf-8")
    options = ["-n", "2", "--max-new-tokens", str(BUDGET), "--temperature", "0", "--prompt-token-ids"]
    with Loopback(token_rate=150, stop_probability=0, keep_requests=1000) as engine:

        def has_tokens() -> bool:
            return engine.stats().tokens > 100

        code, _, wrong = interrupted(signal.SIGINT, has_tokens, engine.url, prompts, out, *options)
        assert code == 130, wrong
        partial = by_index(out)
        assert partial
        first = len(asked(engine))
        assert rollout(engine.url, prompts, out, *options).returncode == 0
        resumed = [request.get("input_ids") for request in asked(engine)[first:]]
        for index, sample in by_index(out).items():
            check_equal(engine, sample, LINES[index // 2])
            assert "streamfold_restarted_tokens" not in sample.metadata
        assert all(sample.tokens in resumed for sample in partial.values())


OF_THE_LOOPBACK = """
from streamfold.loopback.core.tokenizer import MockTokenizer
class AutoTokenizer:
    @staticmethod
    def from_pretrained(name): return MockTokenizer(512)
"""


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_the_summary_says_how_many_texts_were_joined_without_a_tokenizer(has_tokenizer: bool, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    (tmp_path / "transformers.py").write_text(OF_THE_LOOPBACK, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with Loopback(token_rate=150, stop_probability=0, piece_probability=0.9) as engine:
        prompts = with_ids(engine, tmp_path / "prompts.jsonl")
        options = ["--max-new-tokens", str(BUDGET)]
        code, _, wrong = interrupted(
            signal.SIGINT, lambda: engine.stats().tokens > 100, engine.url, prompts, out, *options
        )
        assert (code, "was joined" in wrong) == (130, False), wrong
        cut = len(by_index(out))
        assert cut
        expected = {
            index: engine.undisturbed(sample.tokens[: -sample.response_length], sample.metadata["sampling_params"])
            for index, sample in by_index(out).items()
        }
        options += ["--tokenizer", "any"] * has_tokenizer
        told, environ = command(engine.url, prompts, out, *options), environment(PYTHONPATH=path)
        done = subprocess.run(told, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
    joined = [sample for sample in by_index(out).values() if "streamfold_text_joined" in sample.metadata]
    assert len(joined) == (0 if has_tokenizer else cut)
    for index, whole in expected.items():
        sample = by_index(out)[index]
        assert sample.tokens[-sample.response_length :] == whole.token_ids
        if has_tokenizer:
            assert sample.response == engine.tokenizer.decode(whole.token_ids)
    assert (f"the text of {cut} samples was joined from several calls" in done.stderr) == (not has_tokenizer)
    assert ("with the model's --tokenizer the text is exact" in done.stderr) == (not has_tokenizer)


@pytest.mark.parametrize("arrays", ["lists", "npz"])
def test_a_killed_run_loses_only_what_was_in_flight(rollout: Run, arrays: str, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    with Loopback(token_rate=300, stop_probability=1 / 80, keep_requests=1000) as engine:
        prompts = with_ids(engine, tmp_path / "prompts.jsonl")
        options = ("-n", "5", "--seed", "2", "--max-new-tokens", str(BUDGET), "--concurrency", "4", "--arrays", arrays)
        for enough in (3, 8):
            reached = functools.partial(has_lines, out, enough)
            code, _, _ = interrupted(signal.SIGKILL, reached, engine.url, prompts, out, *options)
            assert code == -signal.SIGKILL
        with out.open("ab") as file:
            file.write(b'{"group_index":1,"ind')  # as if it had been killed in the middle of a line
        finished, before = len(by_index(out)), engine.stats().requests
        assert finished >= 8

        done = rollout(engine.url, prompts, out, *options)
        assert done.returncode == 0, done.stderr
        assert engine.stats().requests - before == 20 - finished
        samples = by_index(out)
        assert sorted(samples) == list(range(20))
        for index, sample in samples.items():
            check_equal(engine, sample, LINES[index // 5])
    assert len(lines_of(out)) == 20


def test_side_data_survives_an_interruption(rollout: Run, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    with Loopback(token_rate=200, stop_probability=0) as engine:
        prompts = with_ids(engine, tmp_path / "prompts.jsonl")
        custom = '{"custom_params": {"return_top_p_token_ids": true}, "max_new_tokens": 80}'
        options = ["--seed", "3", "--experts", "4,2,16,uint8", "--sampling-params", custom, "--top-p", "0.9"]
        options += ["--arrays", "npz"]
        code, _, wrong = interrupted(
            signal.SIGINT, lambda: engine.stats().tokens > 100, engine.url, prompts, out, *options
        )
        assert code == 130, wrong
        assert {sample.status for sample in read_samples(out)} == {Sample.Status.ABORTED}
        assert rollout(engine.url, prompts, out, *options).returncode == 0
        for index, sample in by_index(out).items():
            prompt, params = engine.tokenizer.encode(LINES[index]), sample.metadata["sampling_params"]
            expected = engine.undisturbed(prompt, params, return_logprob=True, return_routed_experts=True)
            assert sample.tokens == prompt + expected.token_ids
            assert sample.rollout_routed_experts is not None
            assert sample.rollout_routed_experts.astype("<i4").tobytes() == expected.routed_experts
            assert sample.rollout_top_p_token_ids is not None
            assert expected.top_p is not None
            assert sample.rollout_top_p_token_ids.tolist() == [token for kept in expected.top_p for token in kept]
    assert len(list(tmp_path.glob("samples.jsonl.arrays/*"))) == len(LINES)


async def test_failures_are_counted_and_shown_and_only_they_are_asked_for_again(
    rolled: RunBeside, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text("".join(f'{{"input_ids": [{first}, 6, 7]}}\n' for first in (1, 2, 3)), encoding="utf-8")
    whole = stream(event([10, 11], 2, "stop"), DONE)
    busy = iter([answer_json({"error": "busy"}, status=503)])

    def some(request: Request) -> Sequence[Step]:
        first = request.json["input_ids"][0]
        if first == 1:
            return answer_json({"error": "this one is bad"}, status=400)
        return next(busy, whole) if first == 2 else whole

    async with Replay(some) as engine:
        failed = await rolled(engine, prompts, out, "--concurrency", "1")
        assert failed.returncode == 1
        assert "2 of 3 samples are in" in failed.stdout
        assert "1 failed: EngineError: this one is bad (status 400)" in failed.stderr
        assert [request.json["input_ids"][0] for request in engine.generates] == [1, 2, 2, 3]
        assert engine.most_open == 1
        engine.routes["/generate"] = whole
        assert (await rolled(engine, prompts, out)).returncode == 0
        assert [request.json["input_ids"][0] for request in engine.generates[4:]] == [1]
    assert [sample.tokens for sample in by_index(out).values()] == [[i, 6, 7, 10, 11] for i in (2, 3, 1)]


async def test_an_engine_that_is_not_there_is_tried_so_often_and_told(rollout: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    async with Replay() as engine:
        url = engine.url
    done = await asyncio.to_thread(rollout, url, prompts, out, "--tries", "2")
    assert done.returncode == 1
    assert "0 of 1 samples" in done.stdout
    assert "1 failed: EngineError: no reply from" in done.stderr


async def test_what_is_asked_for_is_what_the_options_say(rolled: RunBeside, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    async with Replay(stream(event([10], 1, "stop", logprobs=False), DONE)) as engine:
        done = await rolled(
            engine, prompts, out, "--temperature", "0.5", "--top-p", "0.9", "--top-k", "20", "--stop", "x", "--stop",
            "\u2028", "--no-logprobs", "--api-key", "secret", "--sampling-params",
            '{"temperature": 1, "min_p": 0.1, "max_new_tokens": 9}', "--extra", '{"lora_path": "math", "priority": 2}',
            "--header", "X-Mine=a=b", "--header", "X-Other=",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (request,) = engine.generates
    told = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "stop": ["x", "\u2028"], "min_p": 0.1, "max_new_tokens": 9}
    assert request.json["sampling_params"] == told
    assert request.json["text"] == "Hi"
    assert request.json["return_logprob"] is False
    assert request.headers["authorization"] == "Bearer secret"
    assert (request.json["lora_path"], request.json["priority"]) == ("math", 2)
    assert (request.headers["x-mine"], request.headers["x-other"]) == ("a=b", "")
    (sample,) = read_samples(out)
    assert (sample.metadata["sampling_params"], sample.rollout_log_probs) == (told, None)


def test_a_budget_of_zero_is_a_run_without_a_request(rollout: Run, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    with Loopback() as engine:
        done = rollout(engine.url, ROOT / "examples" / "prompts.jsonl", out, "--max-new-tokens", "0")
        assert done.returncode == 0, done.stderr
        assert engine.stats().connections == 0
    assert {sample.status for sample in read_samples(out)} == {Sample.Status.TRUNCATED}
    assert len(by_index(out)) == 32


FAKE = """
class AutoTokenizer:
    eos_token_id = 9
    @classmethod
    def from_pretrained(cls, name): return cls()
    def encode(self, text, add_special_tokens=True): return [1] * add_special_tokens + list(text.encode())
    def decode(self, ids, skip_special_tokens): return bytes(ids).decode()
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
"""


async def test_a_tokenizer_makes_ids_of_texts_and_chats_and_tells_the_end(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    chat = {"prompt": [{"role": "user", "content": "Ho"}]}
    prompts.write_text('{"prompt": "Hi"}\n' + json.dumps(chat) + "\n", encoding="utf-8")
    (tmp_path / "transformers.py").write_text(FAKE, encoding="utf-8")

    def aborted(request: Request) -> Sequence[Step]:
        return stream(event([9], 1, "abort", prompt_tokens=len(request.json["input_ids"])), DONE)

    async with Replay(aborted) as engine:
        options = ("--tokenizer", "any", "--concurrency", "1")
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = await asyncio.to_thread(
            subprocess.run, command(engine.url, prompts, out, *options),
            env=environment(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1"), capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ids = [request.json["input_ids"] for request in engine.generates]
    assert ids == [[1, *b"Hi"], list(b"<user>Ho<assistant>")]
    assert [sample.status for sample in read_samples(out)] == [Sample.Status.COMPLETED] * 2


def test_images_of_prompts_are_sent_with_each_of_their_samples_or_refused(rollout: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "image_data": "http://there/a.png"},
        {"prompt": "b", "image_data": ["x", "y"]},
        {"prompt": "c"},
    ]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    with Loopback() as engine:
        for _ in range(2):
            done = rollout(engine.url, prompts, out, "--max-new-tokens", "4", "-n", "2")
            assert done.returncode == 0, done.stderr
        sent = sorted((body["text"], body.get("image_data")) for body in asked(engine))
    assert sent == [(text, images) for text, images in (("a", ["http://there/a.png"]), ("b", ["x", "y"]), ("c", None))
                    for _ in range(2)]  # fmt: skip
    assert by_index(out)[0].multimodal_inputs == {"images": ["http://there/a.png"]}
    lines[0]["image_data"] = "http://there/another.png"
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    done = rollout("http://127.0.0.1:9", prompts, out, "--max-new-tokens", "4", "-n", "2")
    assert (done.returncode, "image_data differ" in done.stderr) == (2, True), done.stderr
    out = tmp_path / "others.jsonl"
    done = rollout("http://127.0.0.1:9", prompts, out, "--engine", "vllm-completions")
    assert (done.returncode, "2 prompts have image_data" in done.stderr) == (2, True), done.stderr
    prompts.write_text('{"prompt": "a", "image_data": 3}\n', encoding="utf-8")
    done = rollout("http://127.0.0.1:9", prompts, out)
    assert (done.returncode, "line 1: image_data must be" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--sampling-params", "{"), "is not JSON"),
        (("--sampling-params", "[1]"), "a JSON object"),
        (("--experts", "4,2"), "have no input_ids"),
        (("--experts", "2"), "LAYERS,TOP_K"),
        (("--url", "ftp://x"), "http or https"),
        (("--seed", str(2**64)), "cannot be sent"),
        (("--sampling-params", '{"temperature": NaN}'), "NaN is not valid JSON"),
        (("--sampling-params", '{"sampling_seed": 99999999999999999999}'), "cannot be sent"),
        (("--sampling-params", '{"stop": "\\ud800"}'), "cannot be sent"),
        (("--api-key", "a\nb"), "the API key"),
        (("--extra", "{"), "--extra is not JSON"),
        (("--extra", "[]"), "--extra must be a JSON object"),
        (("--extra", '{"priority": NaN}'), "--extra is not JSON: NaN is not valid JSON"),
        (("--extra", '{"text": "x"}'), "--extra: extra must not hold text"),
        (("--extra", '{"sampling_params": {}}'), "--extra: extra must not hold sampling_params"),
        (("--header", "X-Mine"), "--header X-Mine is not NAME=VALUE"),
        (("--header", "Content-Length=3"), "--header Content-Length=3: "),
        (("--header", "X Mine=3"), "--header X Mine=3: "),
        (("--out", "/dev/null"), "not a regular file"),
        (("--prompts", __file__), "line 1 is not JSON"),
        (("--out", str(ROOT / "examples" / "prompts.jsonl")), "another file"),
        (("--out", "no/such/folder/out.jsonl"), "No such file"),
        (("--concurrency", "0"), "concurrency"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    rollout: Run, options: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    examples = ROOT / "examples" / "prompts.jsonl"
    before = examples.read_bytes()
    done = rollout("http://127.0.0.1:9", examples, tmp_path / "samples.jsonl", *options)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert examples.read_bytes() == before
    assert [path for path in tmp_path.iterdir() if path.stat().st_size] == []


def test_a_vllm_server_that_auto_has_found_out_is_not_asked_for_texts(rollout: Run, tmp_path: Path) -> None:
    prompts, out = ROOT / "examples" / "prompts.jsonl", tmp_path / "samples.jsonl"
    with Loopback(engine="vllm") as engine:
        done = rollout(engine.url, prompts, out, "--engine", "auto")
        assert done.returncode == 2
        assert "32 prompts have none: use --tokenizer, or --engine vllm-completions" in done.stderr
        assert engine.stats().requests == 0
        done = rollout(engine.url, prompts, out, "--engine", "vllm-completions", "--max-new-tokens", "5")
        assert done.returncode == 0, done.stderr


async def test_a_response_of_no_tokens_is_there_and_not_asked_for_again(rolled: RunBeside, tmp_path: Path) -> None:
    """verl-project/verl-omni#497: an answer that stops at once is an answer."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text('{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    async with Replay(stream(event([], 0, "stop"), DONE)) as engine:
        for _ in range(2):
            done = await rolled(engine, prompts, out)
            assert done.returncode == 0, done.stderr
            assert "1 of 1 samples are in" in done.stdout
        assert len(engine.generates) == 1
    assert [sample.status for sample in read_samples(out)] == [Sample.Status.COMPLETED]
