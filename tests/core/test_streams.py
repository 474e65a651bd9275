"""Every body that a real engine sent, cut in every way, gives what it must and what the reference reader says."""

from __future__ import annotations

import random

import pytest

from reference import differences, read
from support.bodies import Recording, random_cuts, recordings
from support.folding import byte_by_byte, fold


@pytest.mark.parametrize("recording", recordings("streams"), ids=str)
def test_a_recorded_stream_reads_the_same_however_it_is_cut(recording: Recording) -> None:
    """Invariant: any cut; and the obvious reader agrees."""
    rng = random.Random(recording.name)
    for dialect in recording.dialects:
        whole = fold(recording.body, dialect, **recording.asked)
        assert not differences(whole.reading, read(recording.body, dialect, **recording.asked))
        assert byte_by_byte(recording.body, dialect, **recording.asked) == whole
        for _ in range(20):
            cuts = random_cuts(recording.body, rng)
            assert fold(recording.body, dialect, cuts, **recording.asked) == whole, f"cut at {cuts}"


@pytest.mark.parametrize("recording", recordings("streams"), ids=str)
def test_every_beginning_of_a_recorded_stream_is_truncated_or_whole(recording: Recording) -> None:
    """A connection may end anywhere: what was whole by then is kept, and nothing is called finished too early."""
    rng = random.Random(recording.name)
    whole = read(recording.body, recording.dialect, **recording.asked)
    for end in sorted(rng.sample(range(len(recording.body)), min(40, len(recording.body)))):
        part = recording.body[:end]
        reading = fold(part, recording.dialect, **recording.asked).reading
        assert reading == read(part, recording.dialect, **recording.asked), f"ended at {end}"
        assert reading.error in ("StreamTruncated", whole.error)
        assert reading.token_ids == whole.token_ids[: len(reading.token_ids)]


@pytest.mark.parametrize("recording", recordings("streams"), ids=str)
def test_a_stream_cut_by_us_is_no_error(recording: Recording) -> None:
    middle = recording.body[: len(recording.body) // 2]
    cut = fold(middle, recording.dialect, aborted=True, **recording.asked)
    assert cut.reading == read(middle, recording.dialect, aborted=True, **recording.asked)
    assert cut.reading.error != "StreamTruncated"
