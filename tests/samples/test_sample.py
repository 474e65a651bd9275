"""Samples, and merging a generation into one: ours and a host's."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Generation
from streamfold.rollout.groups import mark_start
from streamfold.samples.merging import check_ready, merge, meta_info
from streamfold.samples.metadata import TurnState, add_counts
from streamfold.samples.reset import restart
from streamfold.samples.sample import Sample
from support.exactly import exactly
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample as HostSample

if TYPE_CHECKING:
    from collections.abc import Callable

AnySample = Sample | HostSample

ARGS = nowhere(num_layers=2, moe_router_topk=1, num_experts=None)
PROMPT = [5, 6, 7]
NEVER_WRITTEN = {  # the fields that no call writes
    "group_index", "index", "prompt", "label", "session_id", "multimodal_inputs", "generate_function_path",
    "remove_sample", "train_metadata", "multimodal_train_inputs",
}  # fmt: skip
BOTH = pytest.mark.parametrize("kind", [Sample, HostSample], ids=["ours", "the host's"])


def generation(*tokens: int, finish: Any = "stop", **fields: Any) -> Generation:
    defaults: dict[str, Any] = {
        "text": "".join(chr(97 + token) for token in tokens),
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "version_spans": [("v1", 0, len(tokens))] if tokens else [],
    }
    return Generation(list(tokens), [-token / 8 for token in tokens], finish_reason=finish, **{**defaults, **fields})


def top_p(*kept: list[int]) -> tuple[list[int], list[int]]:
    return [token for ids in kept for token in ids], [0, *np.cumsum([len(ids) for ids in kept]).tolist()]


def experts(rows: int, first: int = 0) -> Any:
    return np.arange(first, first + rows * 2, dtype=np.int32).reshape(rows, 2, 1)


def arrays_as_lists(sample: AnySample) -> dict[str, Any]:
    """All fields, with arrays as lists, to be compared."""
    return {k: v.tolist() if isinstance(v, np.ndarray) else copy.deepcopy(v) for k, v in vars(sample).items()}


# merge


@BOTH
@pytest.mark.parametrize(
    ("finish", "status"), [("stop", "COMPLETED"), ("length", "TRUNCATED"), ("abort", "ABORTED"), (None, "ABORTED")]
)
def test_a_generation_is_written_with_all_its_side_data(kind: Any, finish: Any, status: str) -> None:
    sample = kind(prompt="x", tokens=list(PROMPT))
    made = generation(1, 2, finish=finish, top_p=top_p([1, 9], [2]), routed_experts=experts(4))
    merge(sample, made, ARGS)
    assert sample.tokens == [*PROMPT, 1, 2]
    assert (sample.response, sample.response_length, sample.loss_mask) == ("bc", 2, [1, 1])
    assert sample.rollout_log_probs == [-0.125, -0.25]
    assert sample.rollout_top_p_token_ids.tolist() == [1, 9, 2]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    assert sample.rollout_routed_experts.tolist() == experts(4).tolist()
    assert sample.status is kind.Status[status]
    assert sample.weight_versions == (["v1"] if finish else [])
    assert all(type(token) is int for token in sample.tokens)
    assert all(type(value) is float for value in sample.rollout_log_probs)


@BOTH
def test_a_second_generation_extends_an_aborted_one(kind: Any) -> None:
    sample = kind(tokens=list(PROMPT))
    merge(sample, generation(1, 2, finish=None, top_p=top_p([1, 9], [2]), routed_experts=experts(4)), ARGS)
    sample.loss_mask = [0, 0]
    later = generation(3, top_p=top_p([3, 8]), routed_experts=experts(5, first=50), version_spans=[("v2", 0, 1)])
    merge(sample, later, ARGS)
    assert (sample.tokens, sample.response) == ([*PROMPT, 1, 2, 3], "bcd")
    assert sample.loss_mask == [0, 0, 1]
    assert sample.rollout_log_probs == [-0.125, -0.25, -0.375]
    assert sample.rollout_top_p_token_ids.tolist() == [1, 9, 2, 3, 8]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 5]
    assert sample.rollout_routed_experts.tolist() == [*experts(4).tolist(), *experts(5, first=50)[4:].tolist()]
    assert sample.weight_versions == ["v2"]
    if kind is Sample:
        assert sample.version_spans == [("v1", 0, 2), ("v2", 2, 3)]


def test_spans_of_one_version_are_joined_over_calls() -> None:
    sample = Sample(tokens=list(PROMPT))
    merge(sample, generation(1, finish=None))
    merge(sample, generation(2, 3, version_spans=[("v1", 0, 1), ("v2", 1, 2)]))
    assert sample.version_spans == [("v1", 0, 2), ("v2", 2, 3)]


@BOTH
def test_shared_lists_are_not_changed(kind: Any) -> None:
    lists: dict[str, Any] = {
        "tokens": [*PROMPT, 1],
        "loss_mask": [1],
        "rollout_log_probs": [-0.125],
        "weight_versions": ["v0"],
    }
    given = copy.deepcopy(lists)
    sample = kind(**lists, response="b", response_length=1, status=kind.Status.ABORTED)
    merge(sample, generation(2), ARGS)
    assert lists == given
    assert sample.tokens == [*PROMPT, 1, 2]
    assert sample.weight_versions == ["v0", "v1"]


@BOTH
@pytest.mark.parametrize("finish", ["stop", None])
def test_an_empty_call_leaves_an_empty_response(kind: Any, finish: Any) -> None:
    sample = kind(tokens=list(PROMPT))
    merge(sample, generation(finish=finish), ARGS)
    assert (sample.tokens, sample.response, sample.response_length) == (PROMPT, "", 0)
    assert sample.status.name == ("COMPLETED" if finish else "ABORTED")


@BOTH
def test_an_empty_call_fits_a_response_without_logprobs_and_one_with_top_p_ids(kind: Any) -> None:
    bare = kind(tokens=[*PROMPT, 1], response_length=1, loss_mask=[1], status=kind.Status.ABORTED)
    merge(bare, generation(finish=None), ARGS)
    assert bare.rollout_log_probs is None
    rich = kind(tokens=list(PROMPT))
    merge(rich, generation(1, finish=None, top_p=top_p([1])), ARGS)
    merge(rich, generation(), ARGS)
    assert rich.rollout_top_p_token_offsets.tolist() == [0, 1]


@BOTH
@pytest.mark.parametrize(
    ("sent", "given", "expected"), [("b", "other", "b"), ("", "other", ""), (None, "other", "other"), (None, None, "")]
)
def test_the_given_text_is_used_only_if_the_engine_sent_none(
    kind: Any, sent: str | None, given: str | None, expected: str
) -> None:
    sample = kind(tokens=list(PROMPT))
    merge(sample, generation(1, text=sent), ARGS, text=given)
    assert sample.response == expected


@BOTH
def test_tokens_that_are_not_trained_on_have_a_mask_of_zeros_and_no_logprobs(kind: Any) -> None:
    sample = kind(tokens=list(PROMPT))
    merge(sample, generation(1, finish=None), ARGS)
    merge(sample, generation(2, 3), ARGS, trainable=False)
    assert sample.loss_mask == [1, 0, 0]
    assert sample.rollout_log_probs == [-0.125, 0.0, 0.0]


def with_response(kind: Any, **fields: Any) -> Any:
    made: dict[str, Any] = {
        "tokens": [*PROMPT, 1],
        "response": "b",
        "response_length": 1,
        "loss_mask": [1],
        "rollout_log_probs": [-0.125],
        "status": kind.Status.ABORTED,
    }
    return kind(**{**made, **fields})


TOP_P_FIELDS = {
    "rollout_top_p_token_ids": np.array([1], np.int32),
    "rollout_top_p_token_offsets": np.array([0, 1], np.int32),
}
MISFITS: dict[str, tuple[dict[str, Any], Generation, str]] = {
    "a short mask": ({"loss_mask": []}, generation(2), "loss_mask has 0 entries, but response_length is 1"),
    "long logprobs": ({"rollout_log_probs": [0.0] * 2}, generation(2), "rollout_log_probs has 2 entries"),
    "no logprobs before": (
        {"rollout_log_probs": None},
        generation(2),
        "1 response tokens lack log-probabilities, but the next 1 have them",
    ),
    "no logprobs now": (
        {},
        Generation([2], finish_reason="stop"),
        "1 response tokens have log-probabilities, but the next 1 lack them",
    ),
    "no top-p before": ({}, generation(2, top_p=top_p([2])), "1 response tokens lack top-p ids"),
    "no top-p now": (TOP_P_FIELDS, generation(2), "1 response tokens have top-p ids"),
    "short offsets": (
        {**TOP_P_FIELDS, "rollout_top_p_token_offsets": np.array([0], np.int32)},
        generation(2, top_p=top_p([2])),
        "rollout_top_p_token_offsets has 1 entries",
    ),
    "rows of the new tokens only": ({}, generation(2, routed_experts=experts(1)), "4 rows"),
    "a row too many": ({}, generation(2, routed_experts=experts(5)), "4 rows"),
    "experts without a shape": ({}, generation(2, routed_experts=experts(4).ravel()), "4 rows"),
    "a response longer than the sample": ({"response_length": 9}, generation(2), "there are 4 tokens in all"),
}


@BOTH
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_is_changed(kind: Any, misfit: str) -> None:
    fields, made, message = MISFITS[misfit]
    sample = with_response(kind, **fields)
    before, lists = arrays_as_lists(sample), {name: id(value) for name, value in vars(sample).items()}
    with pytest.raises(ValueError, match=message):
        merge(sample, made, ARGS)
    assert arrays_as_lists(sample) == before
    assert {name: id(value) for name, value in vars(sample).items()} == lists


@BOTH
@pytest.mark.parametrize("status", ["COMPLETED", "TRUNCATED", "FAILED"])
def test_a_finished_sample_is_not_written(kind: Any, status: str) -> None:
    sample = with_response(kind, status=kind.Status[status])
    before = arrays_as_lists(sample)
    with pytest.raises(ValueError, match=status):
        merge(sample, generation(2), ARGS)
    assert arrays_as_lists(sample) == before


@pytest.mark.parametrize("args", [None, nowhere(num_layers=1, moe_router_topk=2)], ids=["no args", "another model's"])
def test_experts_that_a_host_could_not_shape_never_reach_it(args: Any) -> None:
    sample = with_response(HostSample)
    before = arrays_as_lists(sample)
    with pytest.raises(ValueError, match="num_layers"):
        merge(sample, generation(2, routed_experts=experts(4)), args)
    assert arrays_as_lists(sample) == before


@BOTH
def test_an_exception_of_a_hosts_method_leaves_its_sample_unchanged(kind: Any) -> None:
    class Refuses(kind):  # type: ignore[misc]  # either of two
        def append_response_tokens(self, *args: Any, **values: Any) -> None:
            super().append_response_tokens(*args, **values)
            raise KeyError("something")

    sample = with_response(Refuses)
    before, tokens = arrays_as_lists(sample), sample.tokens
    with pytest.raises(KeyError):
        merge(sample, generation(2), ARGS)
    assert arrays_as_lists(sample) == before
    assert sample.tokens is tokens


@BOTH
def test_a_restarted_sample_has_the_defaults_in_every_field_and_its_copy_is_unchanged(kind: Any) -> None:
    """THUDM/slime#2092: what was left of the first try was trained on."""
    args = nowhere(num_layers=2, moe_router_topk=1, num_experts=None, sglang_speculative_algorithm="EAGLE")
    fresh = kind(prompt="x", tokens=list(PROMPT), label="y", session_id="z", metadata={"mine": 1})
    sample = copy.deepcopy(fresh)
    counts = {"spec_verify_ct": 2, "spec_accept_token_num": 1, "spec_draft_token_num": 4, "completion_tokens": 2}
    made = generation(1, 2, finish="abort", top_p=top_p([1, 9], [2]), routed_experts=experts(4), meta=counts)
    merge(sample, made, args)
    twin, before = copy.copy(sample), arrays_as_lists(sample)
    merge(sample, generation(3, top_p=top_p([3]), routed_experts=experts(5), meta=counts), args)
    assert arrays_as_lists(twin) == before
    sample.reward = 1.0
    for name in ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_top_p_log_probs"):
        if hasattr(sample, name):  # what the host has written with score centering
            setattr(sample, name, np.zeros((3, 2), np.float32))
    mark_start([sample], 4)
    TurnState(1, 1, exact_characters=2, text_joined=True).save(sample)
    add_counts(sample, lost_side_data=2)
    changed = {name for name, value in arrays_as_lists(sample).items() if value != arrays_as_lists(fresh)[name]}
    assert vars(sample).keys() - changed <= NEVER_WRITTEN
    restart(sample)
    assert arrays_as_lists(sample) == {
        **arrays_as_lists(fresh),
        "metadata": {"mine": 1, "streamfold_lost_side_data": 2, "streamfold_restarted_tokens": 3},
    }


def test_what_the_engine_did_not_report_is_left_out() -> None:
    complete = meta_info(
        generation(1, prompt_tokens=None, cached_tokens=None, version_spans=[], meta={"spec_verify_ct": None})
    )
    assert complete == {"completion_tokens": 1, "finish_reason": {"type": "stop"}}
    aborted = meta_info(generation(1, finish=None, cached_tokens=0, meta={"spec_verify_ct": 3, "e2e_latency": 1.5}))
    assert aborted == {
        "completion_tokens": 1,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "v1",
        "spec_verify_ct": 3,
    }


def test_counts_of_the_calls_are_added_up() -> None:
    sample, host = Sample(tokens=list(PROMPT)), HostSample(tokens=list(PROMPT))
    for kind in (sample, host):
        merge(kind, generation(1, finish="abort"), ARGS)
        merge(kind, generation(2, prompt_tokens=4, cached_tokens=None), ARGS)
    assert (sample.prompt_tokens, sample.cached_tokens) == (7, 2)
    assert host.prefix_cache_info.to_dict() == {"cached_tokens": 2, "total_prompt_tokens": 7}


@BOTH
def test_only_pending_and_aborted_samples_are_ready(kind: Any) -> None:
    check_ready(kind())
    check_ready(with_response(kind))
    with pytest.raises(ValueError, match="COMPLETED"):
        check_ready(with_response(kind, status=kind.Status.COMPLETED))


# Our own sample.


def test_a_tools_tokens_are_written_between_those_of_calls() -> None:
    sample = Sample(tokens=list(PROMPT))
    merge(sample, generation(1, finish=None, top_p=top_p([1, 9])))
    sample.append_response_tokens(tokens=[50, 51], trainable=False, text="tool")
    merge(sample, generation(2, top_p=top_p([2])))
    assert (sample.tokens, sample.response) == ([*PROMPT, 1, 50, 51, 2], "btoolc")
    assert sample.loss_mask == [1, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.125, 0.0, 0.0, -0.25]
    assert sample.rollout_top_p_token_offsets is not None
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 2, 2, 3]
    sample.check()


@pytest.mark.parametrize(
    "changed",
    [
        {"log_probs": None},
        {"log_probs": [-1.0, -1.0]},
        {"meta_info": {"top_p_token_ids": [2], "top_p_token_offsets": [0, 1]}},
        {"meta_info": {"top_p_token_ids": [2]}},
        {"meta_info": {"routed_experts": experts(2)}},
        {"meta_info": {"finish_reason": {"type": "elsewhere"}}},
    ],
    ids=["no logprobs", "two logprobs", "late top-p ids", "no offsets", "two rows", "an unknown end"],
)
def test_append_response_tokens_is_atomic(changed: dict[str, Any]) -> None:
    sample = with_response(Sample)
    before = arrays_as_lists(sample)
    with pytest.raises(ValueError, match=r"."):
        sample.append_response_tokens(tokens=[2], **{"log_probs": [-0.25], **changed})
    assert arrays_as_lists(sample) == before


@pytest.mark.parametrize("offsets", [[0, 1], [0, 2, 2], [1, 1, 1], [0, 2, 1]])
def test_top_p_offsets_start_at_zero_never_decrease_and_end_at_the_number_of_ids(offsets: list[int]) -> None:
    meta = {"top_p_token_ids": [7], "top_p_token_offsets": offsets}
    sample = Sample(tokens=list(PROMPT))
    with pytest.raises(ValueError, match="top_p_token_offsets"):
        sample.append_response_tokens(tokens=[1, 2], log_probs=[0.0, 0.0], meta_info=meta)


@pytest.mark.parametrize(
    "written", [lambda a: a.tolist(), lambda a: a, lambda a: a.tobytes()], ids=["list", "array", "bytes"]
)
@pytest.mark.parametrize("prefix", ["top_p", "top_p_kept"])
def test_top_p_arrays_of_any_encoding_are_copied(written: Callable[[Any], Any], prefix: str) -> None:
    ids, offsets = (np.array(values, np.int32) for values in ([7, 8], [0, 2]))
    meta = {f"{prefix}_token_ids": written(ids), f"{prefix}_token_offsets": written(offsets)}
    sample = Sample(tokens=list(PROMPT))
    sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=meta)
    assert sample.rollout_top_p_token_ids is not None
    assert sample.rollout_top_p_token_ids.tolist() == [7, 8]
    sample.rollout_top_p_token_ids[0] = 9
    assert ids[0] == 7


def test_a_sample_survives_a_round_trip_through_json() -> None:
    sample = Sample(prompt="x", tokens=list(PROMPT), index=3, group_index=1, metadata={"k": [1]}, session_id="s")
    merge(sample, generation(1, 2, top_p=top_p([1, 9], [2]), routed_experts=experts(4)))
    sample.reward = 0.5
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert arrays_as_lists(again) == arrays_as_lists(sample)
    assert again.rollout_routed_experts is not None
    assert again.rollout_routed_experts.dtype == np.int32
    assert again.status is Sample.Status.COMPLETED
    assert exactly(Sample.from_dict({})) == exactly(Sample())


def test_samples_are_compared_by_identity_even_with_arrays() -> None:
    sample = Sample(tokens=[*PROMPT, 1], response_length=1, rollout_routed_experts=experts(3))
    twin = copy.deepcopy(sample)
    assert sample == sample  # noqa: PLR0124
    assert sample != twin
    assert [twin, sample].index(sample) == 1
    assert len({sample, twin, sample}) == 2


@pytest.mark.parametrize("n", [0, 2, 32_000])
def test_the_repr_of_a_sample_of_any_size_has_at_most_three_lines(n: int) -> None:
    sample = Sample(
        prompt="x" * n,
        tokens=[*PROMPT, *range(n)],
        index=7,
        response="once\n" * n,
        response_length=n,
        reward={f"part{i}": i / 3 for i in range(n)} or None,
        metadata={"notes": list(range(n))},
    )
    if n:
        sample.loss_mask, sample.rollout_log_probs = [1] * n, [-0.125] * n
        sample.rollout_routed_experts = np.zeros((n + 2, 2, 1), np.int32)
        sample.status = Sample.Status.COMPLETED
    text = repr(sample)
    assert len(text.splitlines()) == (3 if n else 2)
    assert all(len(line) <= 220 for line in text.splitlines())
    assert f"index=7, status={sample.status.name}, tokens=3 prompt + {n} response, reward=" in text
    if n:
        assert f"loss_mask=[{n}], rollout_log_probs=[{n}], rollout_routed_experts=[{n + 2}, 2, 1]" in text
        assert "response='once\\nonce" in text


def test_the_repr_of_a_reward_has_one_line() -> None:
    sample = Sample(reward=np.zeros((2, 2)))  # type: ignore[arg-type]  # a reward function may return anything
    assert len(repr(sample).splitlines()) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask has 1"),
        ({"rollout_log_probs": [0.0] * 3}, "rollout_log_probs has 3"),
        ({"response_length": 6}, "5 tokens in all"),
        ({"response_length": -1}, "response_length is -1"),
        ({"rollout_top_p_token_offsets": [0, 1]}, "rollout_top_p_token_offsets has 2"),
        ({"rollout_top_p_token_ids": None}, "go together"),
        ({"rollout_top_p_token_ids": [1]}, "end at 1"),
        ({"rollout_routed_experts": [[[0]]] * 5}, "5 rows"),
        ({"status": "finished"}, "finished"),
        ({"theirs": 1}, "no theirs"),
    ],
)
def test_a_dictionary_that_is_not_a_sample_is_refused(changed: dict[str, Any], message: str) -> None:
    sample = Sample(tokens=list(PROMPT))
    merge(sample, generation(1, 2, top_p=top_p([1, 9], [2]), routed_experts=experts(4)))
    with pytest.raises(ValueError, match=message):
        Sample.from_dict({**sample.to_dict(), **changed})
