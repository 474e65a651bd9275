"""Groups that wait and groups in flight: none twice, none missing, whatever is called in whatever order."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamfold.rollout.buffer import Buffer
from streamfold.samples.sample import Sample
from support.host.helpers import nowhere
from support.host.slime.rollout.data_source import RolloutDataSourceWithBuffer
from support.host.slime.utils.types import Sample as HostSample

if TYPE_CHECKING:
    from collections.abc import Iterator

Group: TypeAlias = list[Any]  # of our samples or a host's, and elements that are lists of them

# Decorators run before pytest's options are there to be asked.
SOAK = "--soak" in sys.argv or os.environ.get("STREAMFOLD_SOAK", "0") not in ("", "0")
pytestmark = pytest.mark.timeout(7_200 if SOAK else 120)


def group(index: int | None, size: int = 2) -> Group:
    return [Sample(group_index=index, index=None if index is None else index * size + i) for i in range(size)]


def groups(count: int) -> list[Group]:
    return [group(index) for index in range(count)]


def indices(found: list[Group]) -> list[int]:
    return [each[0].group_index for each in found]


def waiting(buffer: Buffer) -> list[int]:
    """What would be served, oldest first; the buffer is not used any more after that."""
    return indices(buffer.take(len(buffer)))


# Take, put, done.


def test_groups_come_from_the_source_one_at_a_time_when_they_are_needed() -> None:
    drawn = []

    def source() -> Iterator[Group]:
        for index in itertools.count():
            drawn.append(index)
            yield group(index)

    buffer = Buffer(source())
    assert drawn == []
    assert indices(buffer.take(2)) == [0, 1]
    assert indices(buffer.take(1)) == [2]
    assert buffer.take(0) == []
    assert drawn == [0, 1, 2]
    assert (buffer.position, buffer.in_flight, len(buffer)) == (3, 3, 0)


def test_what_was_put_back_is_served_first_and_the_oldest_of_it_before_the_rest() -> None:
    buffer = Buffer(groups(9))
    taken = buffer.take(4)
    buffer.put([taken[2]])
    buffer.put([taken[0], taken[3]])
    assert (len(buffer), buffer.in_flight) == (3, 1)
    assert indices(buffer.take(2)) == [2, 0]
    assert indices(buffer.take(3)) == [3, 4, 5]


def test_fewer_groups_come_only_at_the_end_of_the_source() -> None:
    buffer = Buffer(groups(3))
    taken = buffer.take(2)
    buffer.put(taken[1:])
    assert indices(buffer.take(5)) == [1, 2]
    assert buffer.take(5) == []
    assert (buffer.position, buffer.in_flight) == (3, 3)


def test_a_buffer_without_a_source_gives_what_was_put_into_it() -> None:
    buffer = Buffer()
    assert buffer.take(1) == []
    buffer.put(groups(2))
    assert (len(buffer), buffer.in_flight, buffer.position) == (2, 0, 0)
    assert indices(buffer.take(3)) == [0, 1]


def test_a_group_may_come_back_as_another_list_and_the_one_that_came_back_counts() -> None:
    buffer = Buffer(groups(2))
    buffer.take(2)
    fanned_out: Group = [[Sample(group_index=0), Sample(group_index=0)], [Sample(group_index=0)]]
    buffer.put([fanned_out])
    assert (len(buffer), buffer.in_flight) == (1, 1)
    assert buffer.take(1)[0] is fanned_out
    buffer.done([[[], [Sample(group_index=0)]]])
    buffer.done([group(1)])
    assert buffer.in_flight == 0


def test_a_group_without_an_index_is_known_by_its_list() -> None:
    buffer = Buffer([group(None), group(None), [[], []], []])
    taken = buffer.take(4)
    buffer.put([taken[1], taken[3]])
    buffer.done([taken[0], group(None)])
    assert (len(buffer), buffer.in_flight) == (2, 1)
    assert [each is taken[i] for each, i in zip(buffer.take(2), (1, 3), strict=True)] == [True, True]


def test_telling_done_twice_or_of_a_stranger_does_no_harm() -> None:
    buffer = Buffer(groups(3))
    taken = buffer.take(3)
    buffer.put(taken[:1])
    buffer.done(taken[1:2])
    buffer.done([*taken[1:2], group(77)])
    assert (len(buffer), buffer.in_flight) == (1, 1)


def test_a_waiting_group_that_is_done_is_not_served_any_more() -> None:
    buffer = Buffer(groups(3))
    buffer.put(buffer.take(2))
    buffer.done([group(0)])
    assert indices(buffer.take(2)) == [1, 2]


def test_a_group_that_is_put_back_twice_is_refused_and_nothing_is_put() -> None:
    buffer = Buffer(groups(3))
    taken = buffer.take(3)
    buffer.put(taken[:1])
    for back in ([taken[1], taken[0]], [taken[2], taken[1], group(2)]):
        with pytest.raises(ValueError, match=r"group [02] waits already"):
            buffer.put(back)
        assert (len(buffer), buffer.in_flight) == (1, 2)


@pytest.mark.parametrize("put_back", [True, False])
def test_a_source_that_gives_an_index_twice_is_refused(put_back: bool) -> None:
    buffer = Buffer([group(0), group(1), group(0)])
    taken = buffer.take(2)
    if put_back:
        buffer.put(taken)
    with pytest.raises(ValueError, match=r"gave group 0.*must not restart group_index"):
        buffer.take(3)


def test_a_source_that_fails_loses_nothing_that_it_gave_before() -> None:
    class Flaky:
        """Fails at every third group that is asked for."""

        def __init__(self) -> None:
            self.asked = self.given = 0

        def __iter__(self) -> Flaky:
            return self

        def __next__(self) -> Group:
            self.asked += 1
            if self.asked % 3 == 0:
                raise OSError("the file system is away")
            self.given += 1
            return group(self.given - 1)

    buffer = Buffer(Flaky())
    with pytest.raises(OSError, match="away"):
        buffer.take(4)
    assert (buffer.position, len(buffer), buffer.in_flight) == (2, 2, 0)
    assert indices(buffer.take(3)) == [0, 1, 2]


@pytest.mark.parametrize("call", ["put", "done"])
def test_a_group_in_place_of_a_list_of_groups_is_refused(call: str) -> None:
    with pytest.raises(TypeError, match=r"not a .*Sample: did you mean \[group\]"):
        getattr(Buffer(), call)(group(0))


def test_a_negative_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 groups cannot be taken"):
        Buffer(groups(1)).take(-1)


def test_a_data_source_of_a_host_is_a_source_and_the_buffer_has_the_names_of_one() -> None:
    theirs = RolloutDataSourceWithBuffer(nowhere(prompt_data=["a", "b"], n_samples_per_prompt=2))

    def source() -> Iterator[Group]:
        while drawn := theirs.get_samples(1):
            yield from drawn

    buffer = Buffer(source(), sample_type=HostSample)
    taken = buffer.get_samples(3)
    buffer.add_samples(taken[1:])
    assert indices(buffer.get_samples(3)) == [1, 2, 3]


# The source's position.


def saved_after(count: int, path: Path) -> None:
    """A file of a buffer from whose source so many groups were drawn, none of which is there any more."""
    buffer = Buffer(groups(count))
    buffer.done(buffer.take(count))
    buffer.save(path)


def test_what_was_in_flight_waits_again_before_what_waited(tmp_path: Path) -> None:
    buffer = Buffer(groups(8))
    taken = buffer.take(5)
    buffer.put([taken[4], taken[0]])
    buffer.done([taken[1]])
    buffer.save(tmp_path / "buffer")
    fresh = Buffer(groups(8))
    fresh.load(tmp_path / "buffer")
    assert (len(fresh), fresh.in_flight, fresh.position) == (4, 0, 5)
    assert indices(fresh.take(9)) == [2, 3, 4, 0, 5, 6, 7]


def test_a_load_takes_the_place_of_everything_that_was_there(tmp_path: Path) -> None:
    saved_after(2, tmp_path / "buffer")
    buffer = Buffer(groups(8))
    buffer.put(buffer.take(5)[:2])
    buffer.load(tmp_path / "buffer")
    assert (len(buffer), buffer.in_flight, buffer.position) == (0, 0, 2)
    assert indices(buffer.take(2)) == [2, 3]


def test_a_generator_is_caught_up_with_and_never_turned_back(tmp_path: Path) -> None:
    saved_after(3, tmp_path / "buffer")
    behind = Buffer(iter(groups(8)))
    behind.take(1)
    behind.load(tmp_path / "buffer")
    assert indices(behind.take(1)) == [3]
    with pytest.raises(ValueError, match=r"after 3 groups .* but 4 have been drawn .* a fresh source"):
        behind.load(tmp_path / "buffer")
    assert (behind.in_flight, behind.position) == (1, 4)
    assert indices(behind.take(1)) == [4]


def test_a_source_that_can_seek_is_told_where_to_go_on(tmp_path: Path) -> None:
    class Counting:
        at = 0

        def seek(self, position: int) -> None:
            if position > 100:
                raise OSError("no such place")
            self.at = position

        def __iter__(self) -> Iterator[Group]:
            while True:
                yield group(self.at)
                self.at += 1

    saved_after(6, tmp_path / "buffer")
    buffer = Buffer(Counting())
    buffer.take(9)
    buffer.load(tmp_path / "buffer")
    assert indices(buffer.take(2)) == [6, 7]
    assert buffer.position == 8

    saved_after(101, tmp_path / "buffer")
    with pytest.raises(OSError, match="no such place"):
        buffer.load(tmp_path / "buffer")
    assert (buffer.in_flight, buffer.position) == (2, 8)
    assert indices(buffer.take(1)) == [8]


@pytest.mark.parametrize("once", [True, False])
def test_a_source_that_ends_before_its_old_place_is_an_error_and_not_an_end(once: bool, tmp_path: Path) -> None:
    saved_after(5, tmp_path / "buffer")
    buffer = Buffer(iter(groups(4)) if once else groups(4))
    buffer.load(tmp_path / "buffer")
    for _ in range(2):
        with pytest.raises(ValueError, match="ended after 4 groups, but 5 had been drawn"):
            buffer.take(1)
    exact = Buffer(groups(5))
    exact.load(tmp_path / "buffer")
    assert exact.take(1) == []


def test_the_position_is_kept_by_a_buffer_without_a_source(tmp_path: Path) -> None:
    saved_after(3, tmp_path / "buffer")
    between = Buffer()
    between.load(tmp_path / "buffer")
    assert between.take(1) == []
    between.save(tmp_path / "buffer")
    last = Buffer(groups(9))
    last.load(tmp_path / "buffer")
    assert indices(last.take(1)) == [3]


# Whatever is called in whatever order.


class AnyOrder(RuleBasedStateMachine):
    """Four sets of indices, in which each group of the source is in exactly one, and the buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "buffer"
        self.saved: tuple[list[int], list[int], int] | None = None

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(size=st.integers(0, 12), kind=st.sampled_from(["list", "generator"]))
    def begin(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.buffer = self.fresh()
        self.waiting: list[int] = []
        self.flying: list[int] = []
        self.strangers: list[int] = []  # put without having been taken
        self.drawn = 0

    def fresh(self) -> Buffer:
        source = groups(self.size)
        return Buffer(source if self.kind == "list" else iter(source))

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        more = min(max(0, n - len(self.waiting)), self.size - self.drawn)
        expected = [*self.waiting[:n], *range(self.drawn, self.drawn + more)]
        assert indices(self.buffer.take(n)) == expected
        self.waiting, self.drawn = self.waiting[n:], self.drawn + more
        self.flying += expected

    def some(self, data: st.DataObject, of: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(of), unique=True)) if of else []

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        back = self.some(data, self.flying)
        self.buffer.put([group(index) for index in back])
        self.flying = [index for index in self.flying if index not in back]
        self.waiting += back

    @rule()
    def put_a_stranger(self) -> None:
        index = 1_000 + len(self.strangers)
        self.buffer.put([group(index)])
        self.waiting.append(index)
        self.strangers.append(index)

    @rule(data=st.data())
    def put_twice(self, data: st.DataObject) -> None:
        if self.waiting:
            again = data.draw(st.sampled_from(self.waiting))
            with pytest.raises(ValueError, match="waits already"):
                self.buffer.put([*map(group, self.flying), group(again)])

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        gone = self.some(data, [*self.flying, *self.waiting])
        self.buffer.done([group(index) for index in [*gone, *gone]])
        self.flying = [index for index in self.flying if index not in gone]
        self.waiting = [index for index in self.waiting if index not in gone]

    @rule()
    def save(self) -> None:
        self.buffer.save(self.path)
        self.saved = [*self.flying, *self.waiting], list(self.strangers), self.drawn

    @rule(restarted=st.booleans())
    def load(self, restarted: bool) -> None:
        if self.saved is None:
            return
        waiting, strangers, drawn = self.saved
        if restarted:
            self.buffer = self.fresh()
        elif self.kind == "generator" and self.drawn > drawn:
            with pytest.raises(ValueError, match="cannot go back"):
                self.buffer.load(self.path)
            return
        self.buffer.load(self.path)
        self.waiting, self.flying, self.strangers, self.drawn = list(waiting), [], list(strangers), drawn

    @invariant()
    def counts_agree(self) -> None:
        buffer = self.buffer
        assert (len(buffer), buffer.in_flight, buffer.position) == (len(self.waiting), len(self.flying), self.drawn)

    @invariant()
    def each_group_is_in_one_place(self) -> None:
        here = indices([*self.buffer._waiting.values(), *self.buffer._in_flight.values()])
        assert here == [*self.waiting, *self.flying]
        assert len(here) == len(set(here))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=3_000 if SOAK else 60,
    stateful_step_count=30,
    derandomize=not SOAK,
    database=None,
)
