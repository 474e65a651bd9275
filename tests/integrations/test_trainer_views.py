"""What a trainer's user sees of a rollout of ours: log lines, progress bar and spans, as of the trainer's own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.host import engine, installed
from support.host.helpers import Scripted, append
from support.host.slime.observability.trace_utils import Span, spans, trace_span
from support.host.slime.rollout import sglang_rollout
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.utils.types import Sample
from support.host_calls import HOSTS, Status, entry_module
from support.host_rolls import rolled, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ["generate_rollout", "generate_rollout_async"]
LONG = "a long label " * 20


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    with installed(request.param):
        yield
        entry_module().close_rollout()


def prompts() -> list[Sample]:
    return [Sample(prompt="first", label=LONG), Sample(prompt=[{"role": "user", "content": "second"}], label="b")]


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The lines about samples, with the names of their loggers; they are forgotten."""
    found = [(record.name, record.getMessage()) for record in caplog.records if " rollout" in record.getMessage()]
    caplog.clear()
    return [(name, message) for name, message in found if message.startswith(("First rollout", "Finish rollout"))]


def indices(name: str) -> list[int | None]:
    """Of the samples that the spans of this name are of."""
    return [span.target.index for span in named(name) if isinstance(span.target, Sample)]


def named(name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


@pytest.mark.parametrize("way", WAYS)
def test_the_first_and_the_last_sample_are_logged_in_the_trainers_words_by_its_logger(
    host: None, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = scripted(Scripted(), prompt_data=prompts(), streamfold_in_flight=1)
    theirs = RolloutDataSourceWithBuffer(args)
    expected = []
    for rollout_id in range(2):
        sglang_rollout.generate_rollout(args, rollout_id, theirs)
        expected += lines(caplog)
    assert {name for name, _ in expected} == {f"{engine.current().package}.rollout.{engine.current().name}_rollout"}
    assert [message for _, message in expected] == [
        f"First rollout sample: ['firstxx'], label: {LONG[:100]}, reward: 1.0",
        f"Finish rollout: ['firstxx'], label: {LONG[:100]}, reward: 1.0",
        "First rollout sample: [\"[{'role': 'user', 'content': 'second'}]xx\"], label: b, reward: 1.0",
        "Finish rollout: [\"[{'role': 'user', 'content': 'second'}]xx\"], label: b, reward: 1.0",
    ]
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(2):
        getattr(entry_module(), way)(args, rollout_id, source)
    assert lines(caplog) == expected


def test_a_group_that_the_filter_drops_is_shown_first_but_not_last_nor_on_the_bar(
    host: None, caplog: pytest.LogCaptureFixture
) -> None:
    args = scripted(
        Scripted(), n_samples_per_prompt=2, prompt_data=["a", "b", "c"],
        dynamic_sampling_filter_path=lambda args, group: group[0].group_index == 1,
    )  # fmt: skip
    rolled(args)
    assert [message.split(",")[0] for _, message in lines(caplog)] == [
        "First rollout sample: ['axx']",
        "Finish rollout: ['bxx']",
    ]
    (bar,) = sglang_rollout.tqdm.bars
    assert (bar.desc, bar.total, bar.n, bar.closed) == ("Rollout generation", 2, 2, True)


@pytest.mark.parametrize("way", WAYS)
def test_each_rollout_has_a_bar_that_is_full_at_its_end(host: None, way: str) -> None:
    args = scripted(Scripted(), n_samples_per_prompt=2, rollout_batch_size=3, over_sampling_batch_size=5)
    source = entry_module().DataSource(args)
    for rollout_id in range(3):
        getattr(entry_module(), way)(args, rollout_id, source)
    assert [(bar.total, bar.n, bar.closed) for bar in sglang_rollout.tqdm.bars] == [(6, 6, True)] * 3


@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_that_fails_closes_its_bar_and_says_nothing_of_a_last_sample(
    host: None, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(args: Any, group: list[Sample]) -> bool:
        raise OSError("filter")

    args = scripted(Scripted(), dynamic_sampling_filter_path=fail)
    with pytest.raises(OSError, match="filter"):
        getattr(entry_module(), way)(args, 0, entry_module().DataSource(args))
    assert [message[:5] for _, message in lines(caplog)] == ["First"]
    (bar,) = sglang_rollout.tqdm.bars
    assert (bar.n, bar.closed) == (0, True)


def test_a_release_without_a_bar_works(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(sglang_rollout, "tqdm")
        groups, _ = rolled(scripted(Scripted()))
    assert len(groups) == 1


def test_on_a_terminal_there_is_one_bar_the_trainers_or_else_ours(
    host: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    rolled(scripted(Scripted()))
    assert "1/1" not in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.delattr(sglang_rollout, "tqdm")
        rolled(scripted(Scripted()))
    assert "1/1" in capfd.readouterr().err


@pytest.mark.parametrize("way", WAYS)
def test_groups_samples_and_rewards_are_spans_within_each_other(host: None, way: str) -> None:
    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        with trace_span(sample, "call"):
            append(sample, args, [7], text="x")
        sample.status = Status.COMPLETED
        return sample

    args = scripted(generate, n_samples_per_prompt=2, rollout_batch_size=2, streamfold_in_flight=2)
    output = getattr(entry_module(), way)(args, 0, RolloutDataSourceWithBuffer(args))
    entry_module().close_rollout()
    assert all(span.closed and span.error is None for span in spans)
    for group in output.samples:
        (around_group,) = [span for span in named("generate_and_rm_group") if span.target is group]
        assert (around_group.parent, around_group.attrs) == (None, {"group_size": 2})
        for sample in group:
            (around,) = [span for span in named("generate_and_rm") if span.target is sample]
            assert around.parent is around_group
            for name in ("call", "reward_model"):
                (inner,) = [span for span in named(name) if span.target is sample]
                assert inner.parent is around


def test_rewards_of_groups_and_of_samples_made_of_one_are_one_span(host: None) -> None:
    async def generate(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
        append(sample, args, [7], text="x")
        sample.status = Status.COMPLETED
        other = Sample(**{**vars(sample), "reward": None})
        return [sample, other]

    async def rewards(args: Any, samples: list[Sample]) -> list[float]:
        return [1.0] * len(samples)

    ((made,),), _ = rolled(scripted(generate, custom_rm_path=rewards))
    (span,) = named("reward_model")
    assert span.target == made
    assert span.parent is named("generate_and_rm")[0]
    spans.clear()
    ((one, two),), _ = rolled(scripted(Scripted(), custom_rm_path=rewards, group_rm=True, n_samples_per_prompt=2))
    assert named("reward_model") == []
    (span,) = named("group_reward_model")
    assert span.target == [one, two]
    assert span.parent is named("generate_and_rm_group")[0]


def test_an_aborted_sample_closes_its_spans_and_has_others_when_it_is_resumed(host: None) -> None:
    generate = Scripted({0: [(1, "hang"), (1, Status.COMPLETED)]})
    args = scripted(generate, over_sampling_batch_size=2, partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    rolled(args, source)
    assert all(span.closed and span.error is None for span in spans)
    rolled(args, source, 1)
    assert [indices(name).count(0) for name in ("generate_and_rm", "reward_model")] == [2, 1]
    assert [indices(name).count(1) for name in ("generate_and_rm", "reward_model")] == [1, 1]


def test_a_release_without_spans_works(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{engine.current().package}.observability.trace_utils.trace_span")
    rolled(scripted(Scripted()))
    assert spans == []
