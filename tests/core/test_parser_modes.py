"""Counting: how many tokens an event brings, whether it repeats the ones before, and that its lists agree."""

from __future__ import annotations

from typing import Any

import pytest

from support.bodies import DONE, LEFT_OUT, event, fields, finish, logprob, logprobs, sse
from support.folding import agreed, fold, parser_for

MODES = ["sglang-cumulative", "sglang-incremental"]
ALL = [*MODES, "sglang"]
STOP = finish(matched=2)


def written(mode: str, *runs: list[int], **told: Any) -> bytes:
    """A whole stream in a mode, one run of tokens for each event."""
    body = b""
    sent: list[int] = []
    for number, run in enumerate(runs, 1):
        sent += run
        tokens = sent if mode == "sglang-cumulative" else run
        text = "".join(chr(97 + token) for token in tokens)
        last = {"reason": STOP, **told} if number == len(runs) else {}
        body += event(tokens, len(sent), text=text, **last)
    return body


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_sglang_finds_the_mode_out(mode: str, with_logprobs: bool) -> None:
    streams: list[list[list[int]]] = [[[1]], [[1], [2]], [[1], [2, 3], [4]], [[1, 2, 3], [4], [5]], [[], [1]], [[]]]
    for runs in streams:
        body = written(mode, *runs) + DONE
        named = agreed(body, mode, logprobs=with_logprobs)
        assert named.reading.error is None
        assert named.reading.token_ids == [token for run in runs for token in run]
        assert agreed(body, "sglang", logprobs=with_logprobs) == named


@pytest.mark.parametrize("runs", [[[1], [2]], [[1], [2, 3], [4]], [[1, 2, 3], [4, 5]]])
def test_the_wrong_mode_is_seen_at_the_second_event(runs: list[list[int]]) -> None:
    """ai-dynamo/dynamo#7642, sgl-project/sglang#21583: ids repeated like a triangle, or only the last piece."""
    for mode, other in (MODES, MODES[::-1]):
        folded = agreed(written(mode, *runs), other)
        assert folded.decode_error.kind == "length"
        assert folded.reading.token_ids == runs[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_of_one_event_is_the_same_in_both_modes(mode: str) -> None:
    for body in (written(mode, [1, 2, 3]), written(mode, [])):
        assert agreed(body, MODES[0]) == agreed(body, MODES[1]) == agreed(body, "sglang")


def test_a_mode_once_found_is_locked() -> None:
    # Four tokens told and four in the list: it would be right if the mode could still change.
    late_cumulative = event([1], 1) + event([2], 2) + event([1, 2, 3, 4], 4, reason=STOP)
    late_incremental = event([1], 1) + event([1, 2], 2) + event([3], 3, reason=STOP)
    for body in (late_cumulative, late_incremental):
        folded = agreed(body, "sglang")
        assert folded.decode_error.kind == "length"
        assert len(folded.reading.token_ids) == 2


def test_ids_of_one_mode_beside_pairs_of_the_other_are_a_mismatch() -> None:
    """sgl-project/sglang#21583: logprobs stayed cumulative while ids were incremental."""
    body = event([1], 1) + event([1, 2], 2, top={"output_ids": [2]})
    assert agreed(body, "sglang").decode_error.kind == "mismatch"
    assert agreed(body, "sglang-cumulative").decode_error.kind == "mismatch"
    assert agreed(body, "sglang-incremental").decode_error.kind == "length"


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ALL)
def test_a_hole_in_the_count_is_an_error(dialect: str) -> None:
    """sgl-project/sglang#19977: under load events were dropped, and answers had holes."""
    first = event([1], 1, text="a")
    # Tokens in the event, tokens told: a jump, a jump back, and more than told.
    wrong = [([3], 3), ([], 5), ([], 0), ([1, 2, 3], 2)]
    wrong += [([1, 2], 3)] if dialect == "sglang-cumulative" else [([1, 2], 4)]
    for tokens, n in wrong:
        later = event(tokens, n)
        folded = agreed(first + later, dialect)
        assert folded.decode_error.kind == "length"
        assert len(first) <= folded.decode_error.offset < len(first + later)
        assert folded.reading.token_ids == [1]
    at_the_start = agreed(event([1], 5), dialect)
    assert at_the_start.decode_error.kind == "length"
    assert at_the_start.reading.token_ids == []


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(("length", "completion"), [(2, 3), (3, 2), (2, 0), (0, 2), (2, 2**31), (2**31, 2)])
def test_both_counts_of_an_event_must_agree(dialect: str, length: int, completion: int) -> None:
    """sgl-project/sglang#26510: one logprob too few, hidden by a zip."""
    tokens = [1, 2] if dialect == "sglang-cumulative" else [2]
    body = event([1], 1) + event(tokens, 2, output_token_logprobs_length=length, completion_tokens=completion)
    folded = agreed(body, dialect)
    assert folded.decode_error.kind == "length"
    assert folded.decode_error.path.startswith("meta_info.")
    assert folded.reading.token_ids == [1]


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("absent", [LEFT_OUT, None])
def test_either_count_is_enough_and_none_is_not(dialect: str, absent: Any) -> None:
    for key in ("output_token_logprobs_length", "completion_tokens"):
        assert agreed(event([1, 2], 2, reason=STOP, **{key: absent}), dialect).reading.token_ids == [1, 2]
    untold = agreed(event([1], 1, output_token_logprobs_length=absent, completion_tokens=absent), dialect)
    assert untold.decode_error.kind == "schema"


def test_ids_and_pairs_of_unequal_number_never_meet() -> None:
    first = event([1], 1)
    for ids, pairs, kind in (([2, 3], [2], "mismatch"), ([2], [2, 3], "mismatch"), ([], [2], "mismatch")):
        folded = agreed(first + event(pairs, 1 + len(pairs), top={"output_ids": ids}))
        assert folded.decode_error.kind == kind
        assert folded.decode_error.path.startswith("output_ids")
        assert folded.reading.token_ids == [1]


def test_output_ids_beside_pairs_must_be_equal() -> None:
    """lightseekorg/tokenspeed#584: ids of the prompt's end leaked into output_ids."""
    for mode in MODES:
        tokens = [1, 2] if mode == "sglang-cumulative" else [2]
        for raw in (b"13", b"2.0", b"true", b"null", b'"2"', b"-1"):
            last = event(tokens, 2, reason=STOP, top={"output_ids": [*tokens[:-1], "ID"]}).replace(b'"ID"', raw)
            folded = agreed(event([1], 1) + last, mode)
            assert folded.decode_error.kind == "mismatch"
            assert folded.decode_error.path.startswith("output_ids")
            assert folded.reading.token_ids == [1]
        for absent in (LEFT_OUT, None):
            assert agreed(event([1], 1, top={"output_ids": absent}), mode, aborted=True).reading.token_ids == [1]


def test_prompt_tokens_must_be_the_prompt_s_length() -> None:
    for prompt_len, kind in ((3, None), (2, "length"), (None, None)):
        assert agreed(event([1], 1, reason=STOP), prompt_len=prompt_len).reading.kind == kind
    folded = agreed(event([1], 1) + event([2], 2, prompt_tokens=4), prompt_len=3)
    assert folded.decode_error.path == "meta_info.prompt_tokens"
    assert folded.reading.token_ids == [1]
    assert agreed(event([1], 1, prompt_tokens=None, reason=STOP), prompt_len=3).reading.error is None


# --- empty events ----------------------------------------------------------------------------------------------------


def test_the_finish_reason_may_come_in_an_event_of_its_own() -> None:
    """vllm-project/vllm#35705: the last tokens or the finish reason were lost."""
    for last in (
        event([], 4, text="", reason=STOP),
        event(None, 4, text="", reason=STOP),
        event([], 4, reason=STOP, output_token_logprobs=None),
    ):
        body = event([11, 12, 13], 3, text="abc") + event([2], 4, text="") + last + DONE
        for dialect in ("sglang", "sglang-incremental"):
            reading = agreed(body, dialect).reading
            assert (reading.token_ids, reading.logprobs) == ([11, 12, 13, 2], logprobs(11, 12, 13, 2))
            assert (reading.text, reading.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("pairs", [LEFT_OUT, None])
def test_an_event_without_pairs_brings_nothing_and_decides_nothing(pairs: Any) -> None:
    empty = event([], 1, output_token_logprobs=pairs)
    for dialect in ALL:
        assert agreed(event([1], 1) + empty, dialect, aborted=True).reading.token_ids == [1]
    for mode in MODES:
        later = event([1, 2] if mode == "sglang-cumulative" else [2], 2, reason=STOP)
        assert agreed(event([1], 1) + empty + later, "sglang").reading.token_ids == [1, 2]
    jump = agreed(event([1], 1) + event([2], 2, output_token_logprobs=pairs))
    assert jump.decode_error.kind == "schema"
    assert jump.decode_error.path == "meta_info.output_token_logprobs"


def test_missing_pairs_are_said_before_counts_that_disagree() -> None:
    folded = agreed(event(None, 3, completion_tokens=4))
    assert folded.decode_error.kind == "schema"
    assert agreed(event(None, 0, completion_tokens=4)).decode_error.kind == "length"


def test_an_event_with_an_empty_list_of_pairs_is_no_cumulative_one() -> None:
    body = event([1], 1) + event([], 1, reason=STOP)
    assert agreed(body, "sglang-incremental").reading.token_ids == [1]
    assert agreed(body, "sglang").reading.token_ids == [1]
    assert agreed(body, "sglang-cumulative").decode_error.kind == "length"


def test_without_logprobs_the_ids_are_the_source() -> None:
    for pairs in (LEFT_OUT, None):
        body = event([1], 1, output_token_logprobs=pairs, output_token_logprobs_length=LEFT_OUT)
        body += event([2], 2, output_token_logprobs=pairs, output_token_logprobs_length=LEFT_OUT, reason=STOP)
        reading = agreed(body, logprobs=False).reading
        assert (reading.token_ids, reading.logprobs) == ([1, 2], None)
        wanted = agreed(body)
        assert wanted.decode_error.kind == "schema"
        assert wanted.decode_error.path == "meta_info.output_token_logprobs"
    absent = {"output_ids": LEFT_OUT}
    folded = agreed(event([1], 1) + event(None, 1) + event([2], 2, reason=STOP, top=absent), logprobs=False)
    assert folded.decode_error.kind == "length"
    assert folded.reading.token_ids == [1]


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["sglang", "sglang-cumulative"])
def test_a_cumulative_event_may_change_nothing_that_was_sent(dialect: str) -> None:
    """sgl-project/sglang#39645: the head of one run was joined to the tail of another."""
    start = event([1], 1) + event([1, 2, 3], 3)
    pairs = fields([1, 2, 3, 4], 4)["meta_info"]["output_token_logprobs"]
    for place in range(3):
        for changed in ([-9.0, pairs[place][1], None], [pairs[place][0], 77, None], [None, pairs[place][1], None]):
            wrong = [changed if i == place else pair for i, pair in enumerate(pairs)]
            ids = [pair[1] for pair in wrong]
            body = start + event(ids, 4, output_token_logprobs=wrong)
            folded = agreed(body, dialect)
            assert folded.decode_error.kind == "prefix"
            assert folded.decode_error.path.startswith("meta_info.output_token_logprobs")
            assert len(start) < folded.decode_error.offset < len(body)
            assert folded.reading.token_ids == [1, 2, 3]
            assert folded.reading.logprobs == logprobs(1, 2, 3)
    without = agreed(start + event([1, 77, 3, 4], 4), dialect, logprobs=False)
    assert without.decode_error.kind == "prefix"
    assert without.decode_error.path.startswith("output_ids")


@pytest.mark.parametrize("dialect", ["sglang", "sglang-cumulative"])
def test_a_shrunken_list_is_an_error(dialect: str) -> None:
    for later in (event([1, 2], 2), event([21, 22], 2), event([], 0)):
        folded = agreed(event([1], 1) + event([1, 2, 3], 3) + later, dialect)
        assert folded.decode_error.kind == "length"
        assert folded.reading.token_ids == [1, 2, 3]


@pytest.mark.parametrize("dialect", ["sglang", "sglang-cumulative"])
def test_a_prefix_written_otherwise_is_the_same_prefix(dialect: str) -> None:
    """A router may parse and write each event anew: other spelling of numbers, spaces, another third place."""
    body = event([8], 1) + event([8, 16], 2) + event([8, 16, 24], 3, reason=STOP)
    for old, new in (
        (b"[[-1.0,8,null],[-2.0,16,null],", b"[[-1,8,null],[-0.2e1,16,null],"),
        (b"[[-1.0,8,null],[-2.0,16,null],", b"[ [-1.00 , 8 , null ] ,\t[-20E-1,16 ],"),
        (b"[[-1.0,8,null],[-2.0,16,null],", b'[[-1.0,8,"a"],[-2.0,16,"b", {}],'),
    ):
        assert old in body
        reading = agreed(body.replace(old, new), dialect).reading
        assert (reading.token_ids, reading.logprobs) == ([8, 16, 24], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize("dialect", ["sglang", "sglang-cumulative"])
def test_a_cumulative_event_may_repeat_everything_and_bring_nothing(dialect: str) -> None:
    body = event([1], 1, text="a") + event([1], 1, text="a") + event([1, 2], 2, text="ab") + event([1, 2], 2, text="ab")
    reading = agreed(body + event([1, 2], 2, text="ab", reason=STOP), dialect).reading
    assert (reading.token_ids, reading.text, reading.finish_reason) == ([1, 2], "ab", "stop")


def test_a_long_cumulative_stream_keeps_every_bit_and_guards_it() -> None:
    tokens = [token * 7919 for token in range(600)]
    head = b"".join(event(tokens[:end], end) for end in range(0, 600, 7))
    last = event(tokens, 600, reason=STOP)
    for dialect in ("sglang", "sglang-cumulative"):
        reading = fold(head + last, dialect).reading
        assert (reading.token_ids, reading.logprobs) == (tokens, logprobs(*tokens))
        for place in (0, 1, 300, 594):
            pair = f"[{logprob(tokens[place])},".encode()
            assert pair in last
            changed = fold(head + last.replace(pair, b"[-0.001,"), dialect)
            assert changed.decode_error.kind == "prefix"
            assert changed.reading.token_ids == tokens[:595]


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_is_the_last_one_of_a_cumulative_stream_and_may_shrink() -> None:
    body = event([1], 1, text="abc") + event([1, 2], 2, text="abcd\ufffd") + event([1, 2, 3], 3, text="ab", reason=STOP)
    for dialect in ("sglang", "sglang-cumulative"):
        assert agreed(body, dialect).reading.text == "ab"


def test_text_of_a_cumulative_event_without_pairs_is_the_whole_text_too() -> None:
    """Joined it would be doubled."""
    body = event([1], 1, text="a") + event([1, 2], 2, text="ab")
    for text in ("ab", "abc", ""):
        for dialect in ("sglang", "sglang-cumulative"):
            assert agreed(body + event(None, 2, text=text, reason=STOP), dialect).reading.text == text


def test_text_is_joined_from_the_deltas_of_an_incremental_stream() -> None:
    body = event([1], 1, text="a") + event([2], 2, text="") + event([3], 3, text="\U0001f600b", reason=STOP)
    for dialect in ("sglang", "sglang-incremental"):
        assert agreed(body, dialect).reading.text == "a\U0001f600b"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("absent", [LEFT_OUT, None])
def test_there_is_no_text_if_an_event_with_tokens_held_none(mode: str, absent: Any) -> None:
    """sgl-project/sglang#7727: 'None' in the text, or half of it."""
    tokens = [[1], [1, 2], [1, 2, 3]] if mode == "sglang-cumulative" else [[1], [2], [3]]
    for texts in (
        [absent, absent, absent],
        [absent, "b", "c"],
        ["a", absent, "c"],
        ["a", "b", absent],
    ):
        parts = [event(tokens[i], i + 1, text=text, reason=STOP if i == 2 else None) for i, text in enumerate(texts)]
        reading = agreed(b"".join(parts), mode).reading
        assert (reading.token_ids, reading.text) == ([1, 2, 3], None)
    # One that brings no tokens may be without.
    body = event([1], 1, text="a") + event(None, 1, text=absent, reason=STOP)
    assert agreed(body, mode).reading.text == "a"


@pytest.mark.parametrize("raw", ["5", "true", "[]", "{}"])
def test_text_that_is_no_string_is_an_error(raw: str) -> None:
    body = event([1], 1, text="a") + event([2], 2, text="RAW").replace(b'"RAW"', raw.encode())
    folded = agreed(body)
    assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "text")
    assert folded.decode_error.offset == body.rindex(b'"text":') + len(b'"text":')
    assert (folded.reading.token_ids, folded.reading.text) == ([1], "a")


def test_text_never_finds_the_borders_of_tokens() -> None:
    """sgl-project/sglang#33151: a stop string cuts the text, and tokens past it stay."""
    body = event([1, 2, 3], 3, text="thi") + event([4, 5, 6], 6, text="", reason=finish(matched="END"))
    reading = agreed(body).reading
    assert (reading.token_ids, reading.logprobs) == ([1, 2, 3, 4, 5, 6], logprobs(1, 2, 3, 4, 5, 6))
    assert (reading.text, reading.matched) == ("thi", "END")


# --- one request -----------------------------------------------------------------------------------------------------


def test_a_parser_folds_one_request() -> None:
    """A batch streams its requests with an index each; mixed up, the counts may even fit for a while."""
    parts = [event([11], 1, top={"index": 0}), event([21], 1, top={"index": 1}), event([12], 2, top={"index": 0})]
    folded = agreed(b"".join(parts))
    assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "index")
    assert folded.reading.token_ids == [11]
    changed = agreed(event([11], 1, id="a") + event([12], 2, id="b"))
    assert (changed.decode_error.kind, changed.decode_error.path) == ("schema", "meta_info.id")
    assert changed.reading.token_ids == [11]


@pytest.mark.parametrize("index", [1, -1, 2**70, 0.0, "0", True, False, [0], {}])
def test_an_index_is_0_or_absent(index: Any) -> None:
    assert agreed(event([11], 1, top={"index": index})).decode_error.path == "index"
    for fine in (0, None, LEFT_OUT):
        assert agreed(event([11], 1, top={"index": fine}), aborted=True).reading.error is None


def test_an_id_may_come_late_and_stay_away() -> None:
    ids: list[Any] = [LEFT_OUT, None, "a", LEFT_OUT, "a", None]
    body = b"".join(event([number], number + 1, id=request) for number, request in enumerate(ids))
    assert agreed(body, aborted=True).reading.token_ids == [0, 1, 2, 3, 4, 5]
    strange: list[Any] = [5, True, [], {}]
    for wrong in strange:
        assert agreed(event([1], 1, id=wrong)).decode_error.path == "meta_info.id"


@pytest.mark.parametrize("meta_info", [LEFT_OUT, None, {}, [], "text", 5])
def test_an_event_without_meta_info_is_an_error_that_names_the_field(meta_info: Any) -> None:
    """NVIDIA-NeMo/ProRL-Agent-Server#52: a router dropped the fields, and nothing was trainable."""
    whole = {"text": "b", "output_ids": [12], "meta_info": meta_info}
    folded = agreed(event([11], 1) + sse({key: value for key, value in whole.items() if value is not LEFT_OUT}))
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path.startswith("meta_info")
    assert folded.reading.token_ids == [11]


@pytest.mark.parametrize("raw", ["5", "{}", '"x"', "[5]", "[[]]", "[[-0.5]]", "[{}]", "[null]", "true"])
def test_pairs_of_a_wrong_type_are_an_error(raw: str) -> None:
    last = event([12], 2, output_token_logprobs="PAIRS").replace(b'"PAIRS"', raw.encode())
    folded = agreed(event([11], 1) + last)
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path.startswith("meta_info.output_token_logprobs")
    # Not asked for, they are not looked at.
    assert agreed(event([11], 1) + last, logprobs=False, aborted=True).reading.token_ids == [11, 12]


@pytest.mark.parametrize("ids", [5, {}, "x", True])
def test_output_ids_of_a_wrong_type_are_an_error(ids: Any) -> None:
    for with_logprobs in (True, False):
        folded = agreed(event([11], 1) + event([12], 2, top={"output_ids": ids}), logprobs=with_logprobs)
        assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "output_ids")


# --- clamped logprobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", ["-3.4028234663852886e+38", "-34028234663852886" + "0" * 22, "-9999.0", "-9999"])
def test_a_clamped_logprob_is_damage_or_kept_and_counted(raw: str) -> None:
    body = event([1], 1) + event([2], 2, reason=STOP).replace(b"[-0.25,2", b"[" + raw.encode() + b",2")
    folded = agreed(body)
    assert (folded.decode_error.kind, folded.decode_error.path) == ("logprob", "meta_info.output_token_logprobs[0][0]")
    assert folded.decode_error.offset == body.rindex(raw.encode() + b",2")
    assert folded.reading.token_ids == [1]
    kept = agreed(body, clamped="keep").reading
    assert (kept.logprobs, kept.clamped_logprobs) == ([-0.125, float(raw)], 1)


def test_a_clamped_logprob_counts_once_however_often_it_is_repeated() -> None:
    pairs = [[-9999.0, 1, None], [-0.25, 2, None], [-9999.0, 3, None]]
    body = b"".join(event([1, 2, 3][:n], n, output_token_logprobs=pairs[:n]) for n in (1, 2, 2, 3))
    assert agreed(body, "sglang", clamped="keep", aborted=True).reading.clamped_logprobs == 2


def test_only_the_sampled_token_s_logprob_can_be_damage() -> None:
    body = event([1], 1, output_top_logprobs=[[[-9999.0, 5, None]]], input_token_logprobs=[[None, 4, None]])
    assert agreed(body, aborted=True).reading.token_ids == [1]


def test_tokens_are_checked_before_logprobs() -> None:
    """All ids of an event, then all logprobs: the kind does not hang on which comes first in the list."""
    pairs = [[None, 1, None], [-0.5, -1, None]]
    folded = agreed(event([1, -1], 2, output_token_logprobs=pairs))
    assert (folded.decode_error.kind, folded.decode_error.path) == ("token", "meta_info.output_token_logprobs[1][1]")


def test_a_parser_told_of_fewer_tokens_takes_more() -> None:
    """max_new_tokens sizes the first buffers, it is no limit."""
    for size in (0, 1, 10**12, None):
        parser = parser_for("sglang", max_new_tokens=size)
        assert parser.feed(event(range(50), 50, reason=STOP)) == 50
        parser.close()
        assert len(parser.take().token_ids) == 50
