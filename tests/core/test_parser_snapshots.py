"""``Parser.snapshot()``: a copy of what was received so far. That it changes nothing is among the properties."""

from __future__ import annotations

import numpy as np
import pytest

from streamfold import Parser
from support.bodies import DONE, event, finish
from support.folding import check_owned

FIRST = event([11], 1, text="a")
LAST = event([12, 13], 3, text="b", reason=finish(matched=13))


def test_a_snapshot_has_arrays_of_its_own_and_the_parser_goes_on() -> None:
    parser = Parser("sglang")
    assert parser.snapshot() == Parser("sglang").take()
    parser.feed(FIRST + LAST[:40])
    snapshot = parser.snapshot()
    assert (snapshot.token_ids.tolist(), snapshot.text, snapshot.finish_reason) == ([11], "a", None)
    assert snapshot.logprobs is not None
    check_owned(snapshot.token_ids, np.int32)
    snapshot.token_ids[:], snapshot.logprobs[:] = 9, 9.0
    parser.feed(LAST[40:] + DONE)
    assert parser.snapshot().finish_reason == "stop"
    parser.close()
    assert parser.snapshot() == parser.snapshot()
    assert parser.take().token_ids.tolist() == [11, 12, 13]
    assert snapshot.token_ids.tolist() == [9]
    with pytest.raises(ValueError, match="taken"):
        parser.snapshot()
