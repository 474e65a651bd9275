"""The demo shows what happened, and passes over no sample that is wrong, no reward too many, no group too few."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamfold.cli import demo_job as demo
from streamfold.cli.demo import _sample_table
from streamfold.cli.main import app
from streamfold.loopback import Loopback
from streamfold.samples.sample import Sample
from support.paths import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EXAMPLE = EXAMPLES / "rollout.py"
PROMPTS = demo.read_prompts()[:16]
SEED = 4  # in the first rollout, three groups are then more than twice as long as what it waits for


@pytest.fixture(scope="module", autouse=True)
def _faster_engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "ENGINE", {**demo.ENGINE, "token_rate": 600.0, "prefill_delay": 0.0})
        yield


@pytest.fixture(scope="module")
def report() -> demo.Report:
    return demo.run(PROMPTS, seed=SEED)


def test_two_rollouts_cut_keep_resume_and_account_for_everything(report: demo.Report) -> None:
    assert report.problems == []
    first, second = report.rollouts
    done = [int(metrics["streamfold/groups/done"]) for metrics in report.rollouts]
    assert sum(done) == len(report.given) == 14
    assert first["streamfold/groups/aborted"] > 0
    assert first["streamfold/tokens/kept"] > 0
    assert second["streamfold/samples/resumed"] > 0
    assert sum(metrics["streamfold/rewards"] for metrics in report.rollouts) == len(report.finished)
    assert report.reward_calls == 1
    assert report.resumed, "none of the samples at their end was cut before"
    assert all(outcome.equal for outcome in report.outcomes)


def test_a_resumed_sample_tells_of_each_weight_version_that_made_it(report: demo.Report) -> None:
    for outcome in report.resumed:
        (before, zero, border), (after, same, end) = outcome.sample.version_spans
        assert (before, after) == ("1", "2")
        assert 0 == zero < border == same < end == len(outcome.token_ids)


def test_another_seed_makes_other_samples_of_the_same_prompts(report: demo.Report) -> None:
    def finished(of: demo.Report) -> dict[int | None, list[int]]:
        return {outcome.sample.index: outcome.token_ids for outcome in of.finished}

    these, others = finished(report), finished(demo.run(PROMPTS[:4], seed=1))
    both = these.keys() & others.keys()
    assert both
    assert all(these[index] != others[index] for index in both)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_prompts_are_enough(count: int) -> None:
    report = demo.run(PROMPTS[:count])
    assert report.problems == []
    assert report.given
    assert len(report.given) + len(report.waiting) + len(report.undrawn) == count


# What it would not pass over.


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda report: replace(report, given=report.given[1:]), "instead of each of 16 once"),
        (lambda report: replace(report, waiting=[*report.waiting, report.given[0]]), "instead of each of 16 once"),
        (lambda report: replace(report, in_flight=1), "1 in flight"),
        (lambda report: replace(report, outcomes=report.outcomes[1:]), "tokens are in no sample"),
        (
            lambda report: replace(
                report, rollouts=[{**told, "streamfold/tokens/lost": 7.0} for told in report.rollouts]
            ),
            "14 were dropped",
        ),
        (
            lambda report: replace(report, outcomes=[replace(each, judged=False) for each in report.outcomes]),
            "judged exactly once",
        ),
        (
            lambda report: replace(report, outcomes=[replace(each, equal=False) for each in report.outcomes]),
            "undisturbed",
        ),
    ],
)
def test_what_does_not_add_up_is_told(
    change: Callable[[demo.Report], demo.Report], word: str, report: demo.Report
) -> None:
    (problem,) = change(report).problems
    assert word in problem


def _lose_a_token(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    del sample.tokens[-3], sample.rollout_log_probs[-3]
    sample.response_length -= 1


def _double_a_token(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.tokens.append(sample.tokens[-1])
    sample.rollout_log_probs.append(sample.rollout_log_probs[-1])
    sample.response_length += 1


def _shift_logprobs(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs = [*sample.rollout_log_probs[1:], sample.rollout_log_probs[0]]


def _change_the_text(sample: Sample) -> None:
    sample.response += "\ufffd"


def _end_otherwise(sample: Sample) -> None:
    ends = {Sample.Status.COMPLETED: Sample.Status.TRUNCATED, Sample.Status.TRUNCATED: Sample.Status.COMPLETED}
    sample.status = ends[sample.status]


@pytest.mark.parametrize("damage", [_lose_a_token, _double_a_token, _shift_logprobs, _change_the_text, _end_otherwise])
def test_a_sample_that_is_not_as_if_undisturbed_is_found(damage: Callable[[Sample], None], report: demo.Report) -> None:
    outcome = report.finished[0]
    sample, engine = copy.deepcopy(outcome.sample), Loopback(**demo.ENGINE)
    place = (sample.index or 0) % demo.SAMPLES_PER_PROMPT
    compared = demo.compare(sample, engine, SEED + place, calls=1, judged=[sample.response])
    assert compared.equal
    assert compared.judged
    damage(sample)
    assert not demo.compare(sample, engine, SEED + place, calls=1, judged=[sample.response]).equal


@pytest.mark.parametrize("calls", [0, 2])
def test_a_reward_computed_never_or_twice_is_found(calls: int, report: demo.Report) -> None:
    sample = report.finished[0].sample
    place = (sample.index or 0) % demo.SAMPLES_PER_PROMPT
    judged = [sample.response] * calls
    assert not demo.compare(sample, Loopback(**demo.ENGINE), SEED + place, calls=1, judged=judged).judged


# The same, on an engine of one's own.


def test_the_example_runs_against_any_engine_and_resumes_what_it_cut(tmp_path: Path) -> None:
    # With this seed the first rollout has enough after 57 tokens, when two samples want more than 180 others.
    with Loopback(token_rate=200, stop_probability=1 / 100, seed=33) as engine:
        done = subprocess.run(
            [sys.executable, EXAMPLE, engine.url],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert engine.stats().running == 0
    lines = done.stdout.splitlines()
    told: list[Any] = [line for line in lines if line.startswith("rollout")]
    assert [line.partition(":")[0] for line in told] == ["rollout 0", "rollout 1"]
    assert all(" 0 tokens lost" in line for line in told)
    first, second = (int(line.split()[2]) for line in told)
    assert (first, second > 0) == (0, True)
    assert len(lines) - len(told) == 8, "two rollouts of four groups"
    assert "'aborted'" not in done.stdout
    assert done.stderr == ""


def test_the_table_of_samples_fits_into_80_columns(report: demo.Report) -> None:
    assert report.resumed
    console = Console(width=80)
    with console.capture() as capture:
        console.print(_sample_table(report.resumed))
    _, header, *rows = capture.get().splitlines()
    assert header.split() == ["prompt", "tokens", "logprob", "requests", "weights", "undisturbed"]
    assert len(rows) == len(report.resumed)
    assert all("x)" in row and row.endswith(" yes") for row in rows)


def test_samples_are_written_one_a_line(report: demo.Report, tmp_path: Path) -> None:
    demo.write(report.outcomes, tmp_path / "demo.jsonl")
    written = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_bytes().splitlines()]
    assert len(written) == len(report.finished)
    for told, outcome in zip(written, report.finished, strict=True):
        sample = outcome.sample
        assert [*told["input_ids"], *told["token_ids"]] == sample.tokens
        assert told["logprobs"] == sample.rollout_log_probs
        assert told["text"] == sample.response
        assert told["reward"] == sample.reward
        assert told["calls"] == outcome.calls


def test_training_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = CliRunner().invoke(app, ["demo", "--train"])
    assert done.exit_code == 2
    assert "--train needs transformers: pip install 'streamfold[loopback,train]'" in " ".join(done.stderr.split())


def test_training_is_refused_with_an_engine_that_takes_no_weights() -> None:
    done = CliRunner().invoke(app, ["demo", "--train", "--engine", "vllm"])
    assert done.exit_code == 2
    assert "--train is for --engine sglang" in done.stderr
