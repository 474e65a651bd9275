"""Every small body that broke some client gives what it must, and what the reference reader says."""

from __future__ import annotations

import random

import pytest

from reference import differences, exact, read
from support.bodies import Recording, random_cuts, recordings
from support.folding import byte_by_byte, fold


@pytest.mark.parametrize("case", recordings("cases"), ids=str)
def test_a_case_gives_its_answer_however_it_is_cut(case: Recording) -> None:
    rng = random.Random(case.name)
    for dialect in case.dialects:
        whole = fold(case.body, dialect, **case.asked)
        wanted = case.told.get("left", {}) if "error" in case.told else case.told["expected"]
        assert {key: exact(getattr(whole.reading, key)) for key in wanted} == exact(wanted)
        assert whole.reading.error == case.told.get("error")
        assert whole.reading.kind == case.told.get("kind")
        if "routed_experts" in case.told:
            assert whole.reading.routed_experts is not None
            assert whole.reading.routed_experts.shape == tuple(case.told["routed_experts"]["shape"])
            assert whole.reading.routed_experts.ravel().tolist() == case.told["routed_experts"]["int32"]
        assert not differences(whole.reading, read(case.body, dialect, **case.asked))

        assert fold(case.body, dialect, case.told.get("splits", ()), **case.asked) == whole
        for cut in case.told.get("splits", ()):
            assert fold(case.body, dialect, [cut], **case.asked) == whole
        assert byte_by_byte(case.body, dialect, **case.asked) == whole
        for _ in range(20):
            cuts = random_cuts(case.body, rng)
            assert fold(case.body, dialect, cuts, **case.asked) == whole, f"cut at {cuts}"


@pytest.mark.parametrize("case", recordings("cases"), ids=str)
@pytest.mark.parametrize("ending", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_a_case_gives_its_answer_with_any_line_ending(case: Recording, ending: bytes) -> None:
    """The bodies hold no raw line ending inside an event, so all of them can be rewritten."""
    lines = case.body.replace(b"\r", b"\n").replace(b"\n", ending)
    whole = fold(lines, case.dialect, **case.asked)
    assert whole.reading == fold(case.body, case.dialect, **case.asked).reading
    assert byte_by_byte(lines, case.dialect, **case.asked) == whole
