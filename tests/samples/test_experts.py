"""Routed experts of samples: ours keep the engine's dtype, a host's get its own; padded rows stay padded rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Buffer, Generation
from streamfold.samples.experts import padded_rows, signed_experts
from streamfold.samples.merging import merge
from streamfold.samples.reset import rewind
from streamfold.samples.sample import Sample
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample as HostSample

if TYPE_CHECKING:
    from pathlib import Path

ARGS = nowhere(num_layers=2, moe_router_topk=2, num_experts=None)
PROMPT = [5, 6, 7]
DTYPES = [np.int32, np.uint8, np.uint16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def mark(dtype: Any) -> int:
    return -1 if dtype is np.int32 else int(np.iinfo(dtype).max)


def experts(rows: int, dtype: Any, *padded: int) -> Any:
    """Some experts, the last one too; the rows ``padded`` are padding."""
    array = (np.arange(rows * 4) % 7).astype(dtype).reshape(rows, 2, 2)
    if dtype is not np.int32:
        array[:, 1, 0] = mark(dtype)
    array[[*padded]] = mark(dtype)
    return array


def generation(tokens: int, array: Any, padded: int = 0, finish: Any = "stop") -> Generation:
    ids = [8] * tokens
    return Generation(ids, [-0.5] * tokens, finish_reason=finish, routed_experts=array, padded_rows=padded)


def merged(kind: Any, *generations: Generation) -> Any:
    sample = kind(tokens=[*PROMPT])
    for each in generations:
        merge(sample, each, ARGS)
    return sample


@each_dtype
def test_our_sample_keeps_the_engine_s_dtype_and_its_padded_rows(dtype: Any) -> None:
    array = experts(4, dtype, 0, 2)
    sample = merged(Sample, generation(2, array, 2))
    assert sample.rollout_routed_experts.dtype == dtype
    assert sample.rollout_routed_experts.tolist() == array.tolist()
    assert sample.padded_rows == 2
    assert merged(Sample, generation(2, experts(4, dtype))).padded_rows == 0
    assert Sample().padded_rows == 0


@each_dtype
def test_a_host_s_sample_gets_int32_where_padded_rows_are_minus_one(dtype: Any) -> None:
    array = experts(4, dtype, 0, 2)
    sample = merged(HostSample, generation(2, array, 2))
    wanted = array.astype(np.int32)
    wanted[[0, 2]] = -1
    assert sample.rollout_routed_experts.dtype == np.int32
    assert sample.rollout_routed_experts.tolist() == wanted.tolist()
    assert (sample.rollout_routed_experts[1] == array[1]).all(), "an expert 255 of a real row stays one"


@each_dtype
@pytest.mark.parametrize("kind", [Sample, HostSample], ids=["ours", "the host's"])
def test_new_rows_go_behind_those_that_are_kept(kind: Any, dtype: Any) -> None:
    first, later = experts(4, dtype, 1), experts(3, dtype, 0)
    sample = merged(kind, generation(2, first, 1, finish="abort"), generation(3, later, 1))
    rows = signed_experts(np.concatenate([first, later]))
    assert sample.rollout_routed_experts.dtype == (dtype if kind is Sample else np.int32)
    assert signed_experts(sample.rollout_routed_experts).tolist() == rows.tolist()
    assert padded_rows(sample.rollout_routed_experts).tolist() == [False, True, False, False, True, False, False]


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("later", DTYPES)
def test_rows_of_two_dtypes_become_int32_where_padded_rows_are_minus_one(first: Any, later: Any) -> None:
    """An engine that was restarted with another version, for example."""
    rows = [experts(4, first, 3), experts(3, later, 0, 1)]
    sample = merged(Sample, generation(2, rows[0], 1, finish="abort"), generation(3, rows[1], 2))
    assert sample.rollout_routed_experts.dtype == (first if first is later else np.int32)
    assert sample.padded_rows == 3
    wanted = [*signed_experts(rows[0]).tolist(), *signed_experts(rows[1]).tolist()]
    assert signed_experts(sample.rollout_routed_experts).tolist() == wanted


@each_dtype
def test_padded_rows_stay_so_in_json_in_a_buffer_and_behind_a_rewind(dtype: Any, tmp_path: Path) -> None:
    sample: Any = merged(Sample, generation(2, experts(4, dtype, 0, 3), 2, finish="abort"))
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.rollout_routed_experts is not None
    assert again.padded_rows == 2
    assert again.rollout_routed_experts.dtype == np.int32
    assert again.rollout_routed_experts.tolist() == signed_experts(sample.rollout_routed_experts).tolist()
    buffer, loaded = Buffer(), Buffer()
    buffer.put([[sample]])
    buffer.save(tmp_path / "buffer")
    loaded.load(tmp_path / "buffer")
    saved: Any
    ((saved,),) = loaded.take(1)
    assert saved.rollout_routed_experts.dtype == dtype
    assert saved.rollout_routed_experts.tolist() == sample.rollout_routed_experts.tolist()
    rewind(sample, 1, 0)
    assert sample.padded_rows == 1


@pytest.mark.parametrize("shape", [(0, 2, 2), (3, 0, 2), (3, 2, 0)])
def test_no_slots_are_no_padding(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        assert not padded_rows(np.zeros(shape, dtype)).any()
