"""Routed experts that a host holds in another form than an array: they are counted, checked and joined all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Generation, merge
from streamfold.samples.experts import count_rows, kept_experts
from streamfold.samples.merging import check_ready
from streamfold.samples.reset import rewind
from support.host.helpers import nowhere
from support.host.slime.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

ARGS = nowhere(num_layers=2, moe_router_topk=2, num_experts=None)
PROMPT = [5, 6, 7]


def rows(count: int, first: int = 0) -> Any:
    return np.arange(first, first + 4 * count, dtype=np.int32).reshape(count, 2, 2)


class Tensor:
    """The part of a torch tensor that is used."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape

    def __getitem__(self, rows: slice) -> Tensor:
        return Tensor(self._values[rows])

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> Any:
        return self._values


class Reference:
    """A reference to a tensor that is elsewhere: it has a shape, and neither a length nor slices."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape
        self.loads = 0

    def load(self) -> Tensor:
        self.loads += 1
        return Tensor(self._values)


class Older(Sample):
    """A sample of a host that takes all rows only, and joins none itself."""

    def _set_routed_experts(self, args: Any, meta: Any) -> None:
        super()._set_routed_experts(args, {**meta, "routed_experts_start_len": 0})


class Materializing(Older):
    """A sample of a host that has a function of its own for that."""

    def materialize_rollout_routed_experts(self, *, replace: bool = True) -> Tensor:
        assert not replace
        held: Any = self.rollout_routed_experts
        return Tensor(held if isinstance(held, np.ndarray) else held._values)


class Opaque:
    """A reference that only its host's function can read."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape


FORMS: dict[str, Callable[[Any], Any]] = {
    "an array": lambda values: values,
    "nested lists": lambda values: values.tolist(),
    "a tensor": Tensor,
    "a list of one tensor": lambda values: [Tensor(values)],
    "a list of tensors": lambda values: [Tensor(values[:1]), Tensor(values[1:])],
    "a list of arrays": lambda values: [values[:1], values[1:]],
    "a reference": Reference,
    "a reference of a sample that reads it": Reference,
    "a reference that only its host reads": Opaque,
}
each_form = pytest.mark.parametrize("form", FORMS)


def sample_with(form: str, experts: Any, tokens: list[int]) -> Sample:
    kind = Materializing if "reads" in form else Older
    sample = kind(tokens=[*PROMPT, *tokens], response_length=len(tokens), status=Sample.Status.ABORTED)
    sample.loss_mask, sample.rollout_log_probs = [1] * len(tokens), [-0.5] * len(tokens)
    sample.rollout_routed_experts = FORMS[form](experts)
    return sample


@each_form
def test_rows_are_counted_without_loading_them(form: str) -> None:
    sample = sample_with(form, rows(4), [8, 9])
    assert count_rows(sample, "rollout_routed_experts") == 4
    check_ready(sample)
    assert getattr(sample.rollout_routed_experts, "loads", 0) == 0
    assert kept_experts(sample).tolist() == rows(4).tolist()


def test_a_sample_without_rows_or_without_the_field_has_none() -> None:
    assert count_rows(Sample(), "rollout_routed_experts") == 0
    assert count_rows(Sample(), "rollout_indexer_topk") == 0


@each_form
def test_more_rows_than_tokens_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="rollout_routed_experts has 5 rows, but at most 4 fit 5 tokens"):
        check_ready(sample_with(form, rows(5), [8, 9]))


@each_form
def test_new_rows_are_joined_to_those_that_are_held(form: str) -> None:
    sample = sample_with(form, rows(4), [8, 9])
    merge(sample, Generation([1, 2], [-1.0] * 2, finish_reason="stop", routed_experts=rows(2, first=90)), ARGS)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tolist() == [*rows(4).tolist(), *rows(2, first=90).tolist()]


@each_form
@pytest.mark.parametrize("held", [1, 2, 4])
def test_a_turn_that_is_dropped_takes_its_rows_along(form: str, held: int) -> None:
    sample = sample_with(form, rows(held), [8, 9])
    rewind(sample, 0, 0)
    assert count_rows(sample, "rollout_routed_experts") == min(held, 2)
    assert kept_experts(sample).tolist() == rows(min(held, 2)).tolist()
