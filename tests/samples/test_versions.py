"""Which weights have generated which tokens of a sample: no generated token is without a span."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Buffer, Generation
from streamfold.samples.merging import merge, meta_info
from streamfold.samples.sample import Sample
from streamfold.samples.versions import cover, versions_of
from support.completing import SOON, answers, completed, sample_of, truncated
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample as HostSample
from support.replay import DONE, stream
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from pathlib import Path

    from support.speaking import Speech

PROMPT = [5, 6, 7]


def generation(count: int, *spans: tuple[str | None, int, int], finish: Any = "stop", **fields: Any) -> Generation:
    return Generation([8] * count, [-0.5] * count, finish_reason=finish, version_spans=[*spans], **fields)


def merged(*generations: Generation) -> Sample:
    sample = Sample(tokens=[*PROMPT])
    for each in generations:
        merge(sample, each)
    return sample


# What a call tells.


def test_a_sample_that_was_cut_under_one_version_and_finished_under_another_has_both() -> None:
    sample = merged(generation(20, ("A", 0, 20), finish=None), generation(40, ("B", 0, 40)))
    assert sample.version_spans == [("A", 0, 20), ("B", 20, 60)]


def test_where_no_version_is_known_there_is_a_span_without_one() -> None:
    sample = merged(generation(20, finish=None), generation(40, ("B", 0, 40)))
    assert sample.version_spans == [(None, 0, 20), ("B", 20, 60)]
    assert merged(generation(2, ("A", 1, 2))).version_spans == [(None, 0, 1), ("A", 1, 2)]
    assert merged(*(generation(n, finish=None) for n in (2, 0, 3))).version_spans == [(None, 0, 5)]


def test_neighbours_of_one_version_are_one_span_and_those_of_no_version_too() -> None:
    sample = merged(
        *(generation(2, finish=None), generation(1, finish=None), generation(1, ("A", 0, 1), finish=None)),
        generation(3, ("A", 0, 2), ("B", 2, 3)),
    )
    assert sample.version_spans == [(None, 0, 3), ("A", 3, 6), ("B", 6, 7)]


def test_all_versions_of_a_call_are_listed_in_order_and_those_that_are_not_known_are_not() -> None:
    assert merged(generation(4, ("A", 0, 1), ("B", 1, 3), ("A", 3, 4))).weight_versions == ["A", "B", "A"]
    assert merged(generation(4, ("A", 0, 1), ("A", 2, 3))).weight_versions == ["A"]
    assert merged(generation(4)).weight_versions == []
    assert merged(generation(4, meta={"weight_version": "C"})).weight_versions == ["C"]
    two = merged(generation(2, ("A", 0, 1), ("B", 1, 2), finish="abort"), generation(2, ("B", 0, 1), ("C", 1, 2)))
    assert two.weight_versions == ["A", "B", "B", "C"], "of each call"


def test_a_host_s_sample_gets_the_latest_version_of_a_call_as_from_its_own_code() -> None:
    sample = HostSample(tokens=[*PROMPT])
    merge(sample, generation(4, ("A", 0, 1), ("B", 1, 3)), nowhere())
    assert sample.weight_versions == ["B"]
    assert "version_spans" not in meta_info(generation(4, ("A", 0, 1)))
    assert meta_info(generation(4, ("A", 0, 1)))["weight_version"] == "A"
    assert "weight_version" not in meta_info(generation(4))


# What others write.


def saved_and_loaded(sample: Sample, path: Path) -> Any:
    buffer = Buffer()
    buffer.put([[sample]])
    buffer.save(path)
    again = Buffer()
    again.load(path)
    ((found,),) = again.take(1)
    return found


def test_a_tool_s_tokens_have_no_span() -> None:
    sample = merged(generation(2, ("A", 0, 2)))
    sample.append_response_tokens(tokens=[1, 2, 3], trainable=False)
    sample.status = Sample.Status.PENDING
    merge(sample, generation(2))
    assert sample.version_spans == [("A", 0, 2), (None, 5, 7)]


def test_tokens_that_are_generated_and_not_trained_on_have_their_version() -> None:
    sample = Sample(tokens=[*PROMPT])
    merge(sample, generation(2, ("A", 0, 2)), trainable=False)
    assert (sample.version_spans, sample.loss_mask) == ([("A", 0, 2)], [0, 0])


def test_tokens_that_are_appended_without_spans_have_no_known_version() -> None:
    sample = Sample(tokens=[*PROMPT])
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "A"}
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-0.5] * 2, meta_info=meta)
    assert (sample.version_spans, sample.weight_versions) == ([(None, 0, 2)], ["A"])


def test_a_partial_sample_of_an_earlier_release_gets_the_span_that_it_lacks_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    old = Sample(
        tokens=[*PROMPT, 1, 2, 3, 4],
        response_length=4,
        loss_mask=[1, 1, 0, 1],
        rollout_log_probs=[-0.5] * 4,
        status=Sample.Status.ABORTED,
    )
    sample: Any = saved_and_loaded(old, tmp_path / "buffer")
    merge(sample, generation(2, ("B", 0, 2)))
    assert sample.version_spans == [(None, 0, 2), (None, 3, 4), ("B", 4, 6)]


def test_spans_without_a_version_survive_json_and_a_buffer(tmp_path: Path) -> None:
    sample = merged(generation(2, ("A", 1, 2)))
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    for found in (again, saved_and_loaded(sample, tmp_path / "buffer")):
        assert found.version_spans == [(None, 0, 1), ("A", 1, 2)]


def test_spans_cover_what_the_mask_says_was_generated() -> None:
    assert cover([], []) == []
    assert cover([], [0, 0]) == []
    assert cover([], [1, 0, 1]) == [(None, 0, 1), (None, 2, 3)]
    assert cover([("A", 1, 2), ("A", 2, 3), (None, 3, 4)], [1] * 6) == [(None, 0, 1), ("A", 1, 3), (None, 3, 6)]
    assert cover([("A", 0, 2)], [0, 0, 1]) == [("A", 0, 2), (None, 2, 3)]
    assert versions_of([(None, 0, 1), ("A", 1, 2), (None, 2, 3), ("A", 3, 4), ("B", 4, 5)]) == ["A", "B"]


# From engines.


@pytest.mark.parametrize("speech", [VLLM], ids=repr)  # which tells them with its terminal event alone
async def test_a_truncated_call_of_vllm_leaves_a_span_without_a_version(speech: Speech) -> None:
    first = truncated(speech.event([10], 1), speech.event([11], 2))
    second = stream(speech.part([12, 13], prompt=5, finish="stop", version="4"), DONE)
    async with speech.replay(answers(first, second)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert sample.version_spans == [(None, 0, 2), ("4", 2, 4)]
    assert sample.weight_versions == ["4"]


async def test_an_engine_that_tells_no_versions_leaves_one_span_over_all_calls(speech: Speech) -> None:
    first = truncated(speech.event([10], 1))
    second = stream(speech.part([12, 13], prompt=4, finish="stop"), DONE)
    async with speech.replay(answers(first, second)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert (sample.version_spans, sample.weight_versions) == ([(None, 0, 3)], [])


@pytest.mark.parametrize("speech", [SGLANG], ids=repr)
async def test_a_version_that_changes_within_a_call_is_listed_before_the_last(speech: Speech) -> None:
    events = [speech.event([10], 1, version="3"), speech.event([10, 11], 2, "stop", version="4")]
    async with speech.replay(stream(*events, DONE)) as engine, speech.client(engine.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert (sample.version_spans, sample.weight_versions) == ([("3", 0, 1), ("4", 1, 2)], ["3", "4"])
