"""The training loop end to end, in small: over-sampling, partial samples, new weights after each step, the report."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import runpy
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from streamfold import Sample
from streamfold.cli.main import app
from streamfold.training import loop, task, trainer
from streamfold.training.config import TrainConfig
from streamfold.training.loop import StepReport, train
from streamfold.training.loss import clipped_loss
from streamfold.training.report import HEADER, as_markdown, plot_rewards, row_of
from streamfold.training.trainer import StepStats
from support.paths import EXAMPLES, ROOT
from support.training import MODES, SHAPE, engine, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

pytestmark = pytest.mark.torch

TINY = EXAMPLES / "tiny_moe"
SMALL = TrainConfig(steps=4, groups=3, over_sampling=5, n_samples=2, max_new_tokens=24, bucket_bytes=1 << 19)
# Three groups are done when the second three requests are; then the third three have just begun.
ENGINE: dict[str, Any] = {"batch_invariant": False, "max_running_requests": 3, "token_rate": 100.0}


def trained(path: Path, config: TrainConfig, **options: Any) -> list[StepReport]:
    with engine(path, **{**ENGINE, **options}) as server:
        return asyncio.run(train(server.url, path, task.read_prompts(), config))


@pytest.mark.parametrize("mode", MODES, ids=["cumulative", "incremental"])
def test_a_run_trains_on_whole_groups_and_resumes_what_it_aborted_with_new_weights(
    tiny: Path, mode: dict[str, Any]
) -> None:
    reports = trained(tiny, SMALL, **mode)
    assert [report.step for report in reports] == [0, 1, 2, 3]
    assert {report.samples for report in reports} == {6}
    assert {report.buckets for report in reports} == {reports[0].buckets}
    assert reports[0].buckets > 3
    assert sum(report.aborted for report in reports) > 0
    assert sum(report.resumed for report in reports) > 0
    assert reports[0].versions == 1
    assert max(report.versions for report in reports[1:]) > 1, "no sample has tokens of two versions"
    assert all(math.isfinite(report.stats.grad_norm) for report in reports)
    assert reports[0].stats.ratio == pytest.approx(1, abs=1e-5)
    assert reports[0].stats.gap < 1e-5
    shown = [row_of(report) for report in reports]
    assert {len(line) for line in shown} == {len(HEADER)}


def test_without_aborts_the_same_seeds_give_the_same_run_in_both_stream_modes(tiny: Path) -> None:
    config = TrainConfig(steps=2, groups=2, over_sampling=2, n_samples=2, max_new_tokens=8, seed=3, top_p=0.9)
    first, second = (trained(tiny, config, batch_invariant=True, **mode) for mode in MODES)
    for one, other in zip(first, second, strict=True):
        assert (one.tokens, one.reward) == (other.tokens, other.reward)
        assert abs(one.stats.grad_norm - other.stats.grad_norm) < 1e-6
        assert one.stats.gap < 1e-5, "the weights of trainer and engine differ"


@pytest.mark.parametrize("mask_offpolicy", [False, True])
def test_tokens_of_older_weights_are_clipped_or_not_trained_on_at_all(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, *, mask_offpolicy: bool
) -> None:
    batches: list[dict[str, torch.Tensor]] = []

    def noting(log_probs: torch.Tensor, batch: dict[str, torch.Tensor], *, clip: float) -> Any:
        batches.append(batch)
        return clipped_loss(log_probs, batch, clip=clip)

    monkeypatch.setattr(trainer, "clipped_loss", noting)
    monkeypatch.setattr(loop, "reward", lambda sample: float(sample.index % 2))  # a random model is rarely right
    reports = trained(tiny, dataclasses.replace(SMALL, mask_offpolicy=mask_offpolicy))
    older = 0
    for batch in batches:
        newest = batch["version_index"].amax(dim=1, keepdim=True)
        older += int((batch["loss_mask"].bool() & (batch["version_index"] < newest)).sum())
        assert batch["loss_mask"].any(dim=1).all()
    assert max(report.versions for report in reports) > 1, "no sample has tokens of two versions"
    assert (older == 0) == mask_offpolicy
    if not mask_offpolicy:
        assert max(report.stats.clipped for report in reports) > 0


def test_groups_whose_rewards_are_all_equal_give_no_gradient(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "reward", lambda _sample: 1.0)
    (report,) = trained(tiny, dataclasses.replace(SMALL, steps=1))
    assert report.reward == 1
    assert report.stats.grad_norm == 0


@pytest.mark.parametrize("name", ["steps", "epochs", "bucket_bytes"])
def test_a_setting_below_1_is_refused_by_its_name(name: str) -> None:
    changed: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        dataclasses.replace(SMALL, **changed)


# The task.


def test_the_reward_is_the_share_of_characters_that_the_label_asks_for() -> None:
    cases = [("digits", "12a4 ", 0.75), ("capitals", "AB c\n", 2 / 3), ("digits", " ", 0.0), ("capitals", "Ä¹", 0.0)]
    for label, response, expected in cases:
        assert task.reward(Sample(label=label, response=response)) == pytest.approx(expected)


def test_prompts_with_an_unknown_label_are_refused_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "digits"}\n{"prompt": "b", "label": "vowels"}\n')
    with pytest.raises(ValueError, match="line 2: the label is 'vowels', not one of digits, capitals"):
        task.read_prompts(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: not a JSON object like"),
        ('{"prompt": "a"}', "line 1: not a JSON object like"),
        ('{"label": "digits"}', "line 1: not a JSON object like"),
        ("[1]", "line 1: not a JSON object like"),
        ('{"prompt": "a", "label": []}', "line 1: the label is"),
        (" \n", "holds no prompt"),
    ],
)
def test_what_is_no_prompt_of_the_task_is_named_by_its_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        task.read_prompts(path)


def test_prompts_of_the_task_may_have_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": "digits"}\r\n\r\n')
    assert task.read_prompts(path) == [{"prompt": "a", "label": "digits"}]


def test_the_prompts_of_the_example_are_those_of_the_package() -> None:
    assert (TINY / "prompts.jsonl").read_bytes() == (
        ROOT / "python" / "streamfold" / "training" / "prompts.jsonl"
    ).read_bytes()


# What is shown.


def report(step: int, reward: float) -> StepReport:
    stats = StepStats(loss=0.5, grad_norm=0.25, ratio=1.0, clipped=0.0, gap=1e-7, gap_without_replay=float("nan"))
    return StepReport(step, 8, 64, 2, 3, reward, stats, 9, 1.25, (1.0, 0.5, 0.25))


def test_the_table_and_the_plot_have_every_step(tmp_path: Path) -> None:
    reports = [report(step, step / 10) for step in range(4)]
    lines = as_markdown(reports).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2] == "| 1 | 8 | 64 | 2 | 3 | 0.000 | 0.2500 | 1.00000 | 9 | 1.25 | 1.0e-07 | nan | 1.8 |"
    assert {line.count("|") for line in lines} == {14}
    plot_rewards({"seed 0": reports, "seed 1": reports[:2]}, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


# The commands.


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs a script of the example, in this process, which has torch; gives the lines that it prints."""

    def run(script: str, *options: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
        runpy.run_path(str(TINY / script), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_the_example_makes_its_model_trains_it_and_writes_table_and_plot(
    tmp_path: Path, printed: Callable[..., list[str]]
) -> None:
    small = {"steps": 2, "groups": 2, "over-sampling": 3, "n-samples": 2, "max-new-tokens": 6, "top-p": 0.9}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    lines = printed("train.py", *options, "--out", tmp_path / "run")
    assert lines[:2] == ["seed 0", HEADER]
    assert lines[-1].startswith("mean reward")
    assert (tmp_path / "run" / "seed-0.md").read_text().splitlines()[-1] == lines[-1]
    assert (tmp_path / "run" / "reward.png").stat().st_size > 1000


def test_the_difference_that_replay_makes_is_measured(printed: Callable[..., list[str]]) -> None:
    """A trainer in float32 chooses other experts than an engine in bfloat16."""
    lines = printed("measure_replay.py", "--repeat", 1, "--max-new-tokens", 12)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:2] for row in rows] == [[dtype, way] for dtype in ("float32", "bfloat16") for way in ("yes", "no")]
    exact, _, replayed, own = (float(row[2]) for row in rows)
    assert exact < 1e-5
    assert replayed < own, "the experts of the engine are not nearer than the trainer's own"


def test_the_demo_trains_and_draws_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfold.training.config.TrainConfig", lambda steps: dataclasses.replace(SMALL, steps=steps))
    done = CliRunner().invoke(app, ["demo", "--train", "--steps", "2", "--out", str(tmp_path / "learned.jsonl")])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].rstrip() == HEADER
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "6"], ["2", "6"]]
    assert [path.name for path in tmp_path.iterdir()] == ["learned.png"]


def test_the_model_of_the_example_is_made_without_a_download(tmp_path: Path, printed: Callable[..., list[str]]) -> None:
    assert printed("make_model.py", tmp_path / "model", "--dtype", "bfloat16") == [str(tmp_path / "model")]
    made = load(tmp_path / "model")
    assert sum(weight.numel() for weight in made.parameters()) < 1_000_000
    shape = made.config
    assert (shape.num_hidden_layers, shape.num_experts_per_tok, shape.num_experts) == SHAPE
