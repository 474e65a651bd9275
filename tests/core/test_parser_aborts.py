"""Events that end a request early: what an abort event can look like, and how the engine says no."""

from __future__ import annotations

from typing import Any

import pytest

from support.bodies import DONE, LEFT_OUT, event, fields, finish, logprobs, queued_abort, sse
from support.folding import Folded, agreed, byte_by_byte, fold

ABORT = finish("abort", message="Aborted", status_code=None, err_type=None)
INCREMENTAL = event([11], 1, text="a") + event([12], 2, text="b")
CUMULATIVE = event([11], 1, text="a") + event([11, 12], 2, text="ab")
SENT = {"sglang-incremental": INCREMENTAL, "sglang-cumulative": CUMULATIVE}
MODES = list(SENT)
STATUSES = [(400, False), (404, False), (408, True), (429, True), (499, False), (500, True), (503, True), (599, True)]


def aborted_with(folded: Folded, tokens: list[int], text: str | None) -> bool:
    reading = folded.reading
    assert reading.error is None
    assert reading.finish_reason == "abort"
    assert (reading.token_ids, reading.logprobs) == (tokens, logprobs(*tokens))
    assert reading.text == text
    return True


def in_both(mode: str, last: bytes, **asked: Any) -> Folded:
    """Named, and found out: what was sent before the abort has locked the mode."""
    named = agreed(SENT[mode] + last + DONE, mode, **asked)
    assert agreed(SENT[mode] + last + DONE, "sglang", **asked) == named
    return named


# --- the branches, in their order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "marker",
    [
        event([], 0, text="zzz", reason=ABORT),
        event([], 1, text="zzz", reason=ABORT),
        event(None, 0, text="", reason=ABORT),
        event(None, 1, text="zzz", reason=ABORT),
        event(None, 2, text="zzz", reason=ABORT),
        event([], 2, text="zzz", reason=ABORT, output_token_logprobs=None),
        event(None, None, text="zzz", reason=ABORT, completion_tokens=2),
        sse({"meta_info": {"id": "r7", "finish_reason": ABORT, "completion_tokens": 2}}),
    ],
)
def test_a_bare_marker_brings_the_finish_reason_alone(mode: str, marker: bytes) -> None:
    """sgl-project/sglang#33042: an abort event without logprob fields made the sample fail."""
    assert aborted_with(in_both(mode, marker), [11, 12], "ab")


def test_a_bare_marker_keeps_side_data_and_adds_to_meta() -> None:
    sets: dict[str, Any] = {"top_p_token_ids": [11, 12], "top_p_token_offsets": [0, 1, 2], "routed_experts": "BwAAAA=="}
    body = event([11, 12], 2, text="ab", weight_version="v", **sets)
    ignored: dict[str, Any] = {"weight_versions": [], "routed_experts": "!", "top_p_token_ids": [9]}
    marker = event([], 0, text="", reason=ABORT, note=1, **ignored)
    reading = agreed(body + marker).reading
    assert (reading.finish_reason, reading.text) == ("abort", "ab")
    assert reading.top_p == ([11, 12], [0, 1, 2])
    assert reading.version_spans == [("v", 0, 2)]
    assert reading.routed_experts is not None
    assert (reading.meta["note"], reading.meta["finish_reason"]) == (1, ABORT)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_that_are_missing_for_new_tokens_are_an_error(mode: str) -> None:
    folded = in_both(mode, event(None, 3, reason=ABORT))
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path == "meta_info.output_token_logprobs"
    assert folded.reading.token_ids == [11, 12]
    assert in_both(mode, event([], None, reason=ABORT)).decode_error.kind == "schema"


def test_new_pairs_are_a_delta() -> None:
    """One more token usually comes: the abort takes effect after the step that runs."""
    last = event([13], 3, text="c", reason=ABORT)
    assert aborted_with(in_both("sglang-incremental", last), [11, 12, 13], "abc")
    # In a cumulative stream the text is whole whatever the pairs are.
    whole_text = event([13], 3, text="abc", reason=ABORT)
    assert aborted_with(in_both("sglang-cumulative", whole_text), [11, 12, 13], "abc")
    assert aborted_with(in_both("sglang-incremental", event([], 2, text="c", reason=ABORT)), [11, 12], "abc")


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_list_brings_what_is_new_and_changes_nothing(mode: str) -> None:
    """sgl-project/sglang#40901: joined to an incremental stream it doubled the answer."""
    for tokens, text in (([11, 12], "ab"), ([11, 12, 13], "abc"), ([11, 12, 13, 14], "abcd")):
        for last in (event(tokens, len(tokens), text=text, reason=ABORT), queued_abort(tokens, len(tokens), text=text)):
            assert aborted_with(in_both(mode, last), tokens, text)
    for wrong in ([11, 77], [77, 12, 13], [11]):
        folded = in_both(mode, queued_abort(wrong, len(wrong), text="ab"))
        assert folded.decode_error.kind == "prefix"
        assert folded.reading.token_ids == [11, 12]
        assert folded.reading.finish_reason is None


def test_a_delta_glued_before_the_whole_list_counts_once() -> None:
    """sgl-project/sglang#40901: joined under back-pressure it gave [12, 11, 12] for two tokens."""
    first = event([11], 1, text="a")
    glued = queued_abort([12, 11, 12], 2, text="bab", top={"output_ids": [12, 12]})
    for dialect in ("sglang", "sglang-incremental"):
        assert aborted_with(agreed(first + glued + DONE, dialect), [11, 12], "ab")
    longer = queued_abort([13, 14, 11, 12, 13, 14], 4, text="cdabcd", top={"output_ids": [13, 14, 14]})
    assert aborted_with(in_both("sglang-incremental", longer), [11, 12, 13, 14], "abcd")
    # With prompt_tokens it is glued all the same: the pairs say so.
    told = event([13, 14, 11, 12, 13, 14], 4, text="cdabcd", reason=ABORT)
    assert aborted_with(in_both("sglang-incremental", told), [11, 12, 13, 14], "abcd")


@pytest.mark.parametrize("mode", MODES)
def test_what_fits_no_shape_is_an_error(mode: str) -> None:
    for tokens, n in (([12], 2), ([13], 4), ([13, 14, 11, 12, 13], 4), ([14, 13, 11, 12, 13, 14], 4), ([1] * 9, 3)):
        folded = in_both(mode, event(tokens, n, text="?", reason=ABORT))
        assert folded.decode_error.kind == "length"
        assert (folded.reading.token_ids, folded.reading.text) == ([11, 12], "ab")
    other = in_both("sglang-incremental", event([13, 14, 77, 12, 13, 14], 4, reason=ABORT))
    assert other.decode_error.kind == "prefix"


def test_an_abort_event_neither_obeys_nor_decides_the_mode() -> None:
    first = event([11], 1, text="a")
    for dialect in (*MODES, "sglang"):
        assert aborted_with(agreed(first + queued_abort([11, 12], 2, text="ab"), dialect), [11, 12], "ab")
        assert agreed(first + event([12], 2, text="b", reason=ABORT), dialect).reading.token_ids == [11, 12]
        assert aborted_with(agreed(event([11], 1, text="a", reason=ABORT), dialect), [11], "a")


@pytest.mark.parametrize("mode", MODES)
def test_output_ids_beside_the_pairs_of_an_abort_are_not_looked_at(mode: str) -> None:
    """They are the last one alone, sent again, or nothing."""
    for ids in ([12], [], [13, 13], [-1], ["x"], LEFT_OUT, None):
        last = queued_abort([11, 12], 2, text="ab", top={"output_ids": ids})
        assert aborted_with(in_both(mode, last), [11, 12], "ab")


@pytest.mark.parametrize("mode", MODES)
def test_the_tokens_of_an_abort_event_are_checked_as_all_are(mode: str) -> None:
    for pair, kind in (([-0.5, -1, None], "token"), ([None, 13, None], "logprob"), ([-9999.0, 13, None], "logprob")):
        pairs = [*fields([11, 12], 2)["meta_info"]["output_token_logprobs"], pair]
        folded = in_both(mode, queued_abort([11, 12, 13], 3, output_token_logprobs=pairs))
        assert folded.decode_error.kind == kind
        assert folded.decode_error.path.startswith("meta_info.output_token_logprobs[2]")
    disagree = in_both(mode, event([11, 12], 2, reason=ABORT, completion_tokens=3))
    assert disagree.decode_error.kind == "length"


@pytest.mark.parametrize("dialect", [*MODES, "sglang"])
def test_an_abort_before_the_first_token_is_an_empty_result(dialect: str) -> None:
    """vllm-project/vllm#47933: the terminal event was skipped because it has no tokens."""
    assert aborted_with(agreed(event([], 0, text="", reason=ABORT), dialect), [], "")
    queued = queued_abort([], 0, text="", weight_versions=[{"version": "v", "start": 0, "end": 0}])
    assert aborted_with(agreed(queued + DONE, dialect, prompt_len=3), [], "")
    assert agreed(event(None, 0, reason=ABORT), dialect).reading.finish_reason == "abort"


# --- without logprobs ------------------------------------------------------------------------------------------------


def without(tokens: list[int] | None, n: int, **told: Any) -> bytes:
    return event(tokens, n, output_token_logprobs=LEFT_OUT, output_token_logprobs_length=LEFT_OUT, **told)


@pytest.mark.parametrize(
    ("mode", "ids", "n", "wanted"),
    [
        ("sglang-incremental", [13], 3, [11, 12, 13]),
        ("sglang-incremental", [12], 2, [11, 12]),  # the last one, sent again
        ("sglang-incremental", [], 2, [11, 12]),
        ("sglang-incremental", [13, 13], 3, [11, 12, 13]),  # a delta, and the last one again
        ("sglang-incremental", [13, 14, 14], 4, [11, 12, 13, 14]),
        ("sglang-incremental", [11, 12], 2, [11, 12]),
        ("sglang-incremental", [11, 12, 13], 3, [11, 12, 13]),  # whole: it begins with those kept
        ("sglang-incremental", [13, 14, 15], 3, [11, 12, 13]),  # as many, but it does not
        ("sglang-incremental", [77], 1, [11, 12]),
        ("sglang-cumulative", [11, 12], 2, [11, 12]),
        ("sglang-cumulative", [11, 12, 13], 3, [11, 12, 13]),
        ("sglang-cumulative", [12], 2, [11, 12]),  # up to 0.5.19 the last one alone
        ("sglang-cumulative", [13], 3, [11, 12, 13]),
    ],
)
def test_without_logprobs_the_ids_of_an_abort_are_whole_or_begin_with_the_new_ones(
    mode: str, ids: list[int], n: int, wanted: list[int]
) -> None:
    reading = in_both(mode, without(ids, n, reason=ABORT), logprobs=False).reading
    assert (reading.token_ids, reading.finish_reason, reading.logprobs) == (wanted, "abort", None)


@pytest.mark.parametrize(
    ("mode", "ids", "n", "kind"),
    [
        ("sglang-incremental", [13], 4, "length"),
        ("sglang-incremental", [], 3, "length"),
        ("sglang-cumulative", [13], 4, "length"),
        ("sglang-cumulative", [11, 77, 13], 3, "prefix"),
        ("sglang-cumulative", [11], 1, "prefix"),
        ("sglang-cumulative", None, 3, "schema"),
        ("sglang-incremental", None, 3, "schema"),
        ("sglang-incremental", [2**31], 3, "token"),
    ],
)
def test_without_logprobs_an_abort_that_fits_nothing_is_an_error(
    mode: str, ids: list[int] | None, n: int, kind: str
) -> None:
    folded = in_both(mode, without(ids, n, reason=ABORT), logprobs=False)
    assert folded.decode_error.kind == kind
    assert folded.reading.token_ids == [11, 12]


@pytest.mark.parametrize("mode", MODES)
def test_without_logprobs_an_abort_may_bring_the_finish_reason_alone(mode: str) -> None:
    for marker in (without(None, 2, text="zz", reason=ABORT), without([], 1, text="zz", reason=ABORT)):
        reading = in_both(mode, marker, logprobs=False).reading
        assert (reading.token_ids, reading.text, reading.finish_reason) == ([11, 12], "ab", "abort")


def test_without_logprobs_the_text_of_the_queue_s_abort_is_told_apart_by_its_beginning() -> None:
    for ids, n, text, wanted in (
        ([12], 2, "ab", "ab"),
        ([], 2, "ab", "ab"),
        ([13, 13], 3, "cabc", "abc"),
        ([13, 14, 14], 4, "c\U0001f600abc\U0001f600", "abc\U0001f600"),
        ([], 2, "abX", "abX"),
    ):
        last = without(ids, n, text=text, reason=ABORT, prompt_tokens=LEFT_OUT)
        assert in_both("sglang-incremental", last, logprobs=False).reading.text == wanted


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_text_of_an_abort_event_in_an_incremental_stream() -> None:
    """With prompt_tokens by what the pairs are, without (the queue's) by how it begins."""
    for tokens, n, text, wanted in (
        ([13], 3, "c", "abc"),
        ([13], 3, "ab", "abab"),  # a delta that says the same again
        ([11, 12, 13], 3, "abc", "abc"),
        ([11, 12, 13], 3, "x", "x"),  # a whole list's text replaces
    ):
        last = event(tokens, n, text=text, reason=ABORT)
        assert in_both("sglang-incremental", last).reading.text == wanted
    for tokens, n, text, wanted in (
        ([11, 12, 13], 3, "abc", "abc"),
        ([13], 3, "abc", "abc"),
        ([11, 12, 13], 3, "cabc", "abc"),
        ([13, 11, 12, 13], 3, "cabc", "abc"),
        ([11, 12], 2, "", ""),
    ):
        assert in_both("sglang-incremental", queued_abort(tokens, n, text=text)).reading.text == wanted


def test_the_text_of_an_abort_event_in_a_cumulative_stream_replaces() -> None:
    for tokens, n, text in (([11, 12], 2, "ab"), ([11, 12, 13], 3, "a\ufffd"), ([13], 3, "xyz"), ([11, 12], 2, "")):
        assert in_both("sglang-cumulative", event(tokens, n, text=text, reason=ABORT)).reading.text == text
        assert in_both("sglang-cumulative", queued_abort(tokens, n, text=text)).reading.text == text


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_event_without_text_keeps_the_text_unless_it_brings_tokens(mode: str) -> None:
    for absent in (None, LEFT_OUT):
        assert in_both(mode, queued_abort([11, 12], 2, text=absent)).reading.text == "ab"
        assert in_both(mode, queued_abort([11, 12, 13], 3, text=absent)).reading.text is None


def test_text_is_counted_in_code_points() -> None:
    first = event([11], 1, text="\U0001f600é")
    glued = queued_abort([12, 11, 12], 2, text="\U0001f680\U0001f600é\U0001f680")
    assert agreed(first + glued).reading.text == "\U0001f600é\U0001f680"


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(status: Any, tokens: list[int] | None = None, n: int = 2, **told: Any) -> bytes:
    return event(tokens, n, reason=finish("abort", message="The queue is full.", status_code=status), **told)


@pytest.mark.parametrize(("status", "retryable"), STATUSES)
@pytest.mark.parametrize("mode", MODES)
def test_an_abort_with_a_status_is_the_engine_s_error(mode: str, status: int, retryable: bool) -> None:
    """sgl-project/sglang#28175: a refusal was taken for our own abort, and the loop resumed at once."""
    folded = in_both(mode, refusal(status))
    assert (folded.engine_error.status, folded.engine_error.retryable) == (status, retryable)
    assert folded.engine_error.message == "The queue is full."
    reading = folded.reading
    assert (reading.token_ids, reading.text, reading.finish_reason) == ([11, 12], "ab", None)


@pytest.mark.parametrize("status", [None, 0, 200, 302, 399, 600, -503])
def test_an_abort_without_an_error_s_status_is_a_result(status: int | None) -> None:
    assert aborted_with(agreed(INCREMENTAL + refusal(status)), [11, 12], "ab")


@pytest.mark.parametrize("status", ["503", 503.0, True, [], {}])
def test_a_status_of_a_wrong_type_is_an_error(status: Any) -> None:
    assert agreed(INCREMENTAL + refusal(status)).decode_error.kind == "schema"


def test_the_tokens_of_a_refusal_count_with_5xx_and_not_with_4xx() -> None:
    for status, tokens, note in ((500, [11, 12, 13], "n"), (503, [11, 12, 13], "n"), (400, [11, 12], None)):
        reading = in_both("sglang-incremental", refusal(status, [13], 3, text="c", note="n")).reading
        assert (reading.token_ids, reading.logprobs) == (tokens, logprobs(*tokens))
        assert reading.text == "abc"[: len(tokens)]
        assert (reading.finish_reason, reading.error, reading.status) == (None, "EngineError", status)
        assert reading.meta.get("note") == note


def test_the_tokens_of_a_refusal_that_fail_a_check_do_not_count() -> None:
    for wrong in (
        refusal(500, [13], 4, note="n"),
        refusal(500, [-1], 3, note="n"),
        refusal(500, [13], 3, note="n", routed_experts="!"),
        refusal(500, [13], 3, top={"index": 1}, note="n"),
        refusal(500, None, 3, note="n"),
        refusal(500, [13], 3, id="other", note="n"),
    ):
        folded = in_both("sglang-incremental", wrong)
        assert folded.engine_error.status == 500
        assert folded.reading.token_ids == [11, 12]
        assert "note" not in folded.reading.meta


def test_what_is_checked_before_the_status_is_said_first() -> None:
    for wrong, kind in (
        (refusal(503).replace(b"full", b"\xff"), "utf8"),
        (refusal(503).replace(b"503", b"NaN"), "json"),
        (sse({"meta_info": [{"finish_reason": finish("abort", status_code=503)}]}), "schema"),
    ):
        assert agreed(INCREMENTAL + wrong).decode_error.kind == kind
    # Its index, its counts and its prompt are checked after it.
    for later in (refusal(400, top={"index": 3}), refusal(400, [1], 9), refusal(400, prompt_tokens=1)):
        assert agreed(INCREMENTAL + later, prompt_len=3).engine_error.status == 400


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (
            {"error": {"message": "engine fell over", "type": "Internal", "code": 500}},
            500,
            "engine fell over",
        ),
        (
            {"error": {"message": "bad", "type": "x", "code": 400, "retryable": False}},
            400,
            "bad",
        ),
        ({"error": {"message": "no"}}, None, "no"),
        ({"error": {"message": "later", "code": 429}, "index": 1}, 429, "later"),
        ({"error": "text alone"}, None, "text alone"),
        ({"object": "error", "message": "too long", "type": "BadRequest", "param": None, "code": 400}, 400, "too long"),
        ({"detail": "not found"}, None, "not found"),
        ({"error": {"message": "odd", "code": "rate_limit"}}, None, "odd"),
        ({"error": {"message": "odd", "code": "500"}}, 500, "odd"),
        ({"error": "beside", "code": 500}, 500, "beside"),
        ({"error": {"message": "odd", "code": "+500"}}, None, "odd"),
        ({"error": {"message": "odd", "code": None}}, None, "odd"),
    ],
)
@pytest.mark.parametrize("before", [b"", INCREMENTAL])
def test_an_error_event_of_any_shape_is_the_engine_s_error(
    before: bytes, raw: dict[str, Any], status: int | None, message: str
) -> None:
    """vllm-project/guidellm#743: the event was skipped, and success reported."""
    for body in (before + sse(raw) + DONE, before + sse(raw), before + b"event: error\n" + sse(raw)):
        folded = agreed(body)
        assert (folded.engine_error.status, folded.engine_error.message) == (status, message)
        assert folded.engine_error.retryable == (status in (429, 500))
        assert folded.reading.token_ids == ([11, 12] if before else [])
        assert folded.reading.finish_reason is None


@pytest.mark.parametrize(("status", "retryable"), STATUSES)
def test_an_error_event_is_retryable_by_its_status(status: int, retryable: bool) -> None:
    assert agreed(sse({"error": {"message": "x", "code": status}})).engine_error.retryable == retryable


def test_an_event_named_error_is_one_whatever_it_holds() -> None:
    for data, message in (({"message": "gone", "code": 500}, "gone"), ({"detail": "gone"}, "gone")):
        assert agreed(INCREMENTAL + b"event: error\n" + sse(data)).engine_error.message == message
    whole = event([13], 3, text="c")
    for raw in (whole, sse({}), sse("text"), sse(5), sse(None), sse([])):
        folded = agreed(INCREMENTAL + b"event:error\n" + raw)
        assert folded.engine_error.status is None
        assert folded.reading.token_ids == [11, 12]
    # The order of checks: what is no JSON is said first, and blank data is no event.
    assert agreed(INCREMENTAL + b"event: error\ndata: it broke\n\n").decode_error.kind == "json"
    assert agreed(INCREMENTAL + b"event: error\ndata:\n\n" + whole, aborted=True).reading.token_ids == [11, 12, 13]
    # The name ends with its event.
    assert agreed(INCREMENTAL + b"event: error\n\n" + whole, aborted=True).reading.token_ids == [11, 12, 13]
    assert agreed(INCREMENTAL + b"event: errors\n" + whole, aborted=True).reading.token_ids == [11, 12, 13]


def test_keys_of_an_error_beside_meta_info_are_keys_like_others() -> None:
    values: list[Any] = [None, False, True, 0, 5, []]
    others = ({"error": value} for value in values)
    for top in ({"detail": "x"}, {"object": "error"}, {"object": "text"}, *others):
        assert agreed(INCREMENTAL + event([13], 3, text="c", top=top), aborted=True).reading.token_ids == [11, 12, 13]
    folded = agreed(INCREMENTAL + event([13], 3, text="c", top={"error": {"message": "x", "code": 500}}))
    assert (folded.engine_error.status, folded.reading.token_ids) == (500, [11, 12])
    assert agreed(sse({"object": "text"})).decode_error.kind == "schema"


# --- finish reasons --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length", "", 5, 0, True, False, [], {}, {"type": None}, {"type": "error"}])
def test_a_finish_reason_of_no_known_type_is_an_error(reason: Any) -> None:
    """vllm-project/vllm#57082: what is unknown was filed under complete."""
    folded = agreed(INCREMENTAL + event([13], 3, text="c", reason=reason))
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path.startswith("meta_info.finish_reason")
    assert folded.reading.token_ids == [11, 12]
    for kind in ("content_filter", "timeout", "Stop", "stop ", "cancelled", ["stop"]):
        assert agreed(event([1], 1, reason={"type": kind})).decode_error.kind == "schema"


@pytest.mark.parametrize(
    ("reason", "kind", "matched"),
    [
        (finish("stop", matched=151645), "stop", 151645),
        (finish("stop", matched=0), "stop", 0),
        (finish("stop", matched="</s>"), "stop", "</s>"),
        (finish("stop", matched=""), "stop", ""),
        (finish("stop", matched=[1, 2]), "stop", None),
        (finish("stop", matched=None), "stop", None),
        (finish("stop"), "stop", None),
        (finish("length", length=2), "length", None),
    ],
)
def test_a_finish_reason_tells_what_matched(reason: dict[str, Any], kind: str, matched: int | str | None) -> None:
    reading = agreed(event([1], 1, reason=reason)).reading
    assert (reading.finish_reason, reading.matched) == (kind, matched)
    assert reading.meta["finish_reason"] == reason


def test_a_sampled_nan_is_the_engine_s_error() -> None:
    """The token is made up in its place, so it must not count."""
    folded = agreed(INCREMENTAL + event([13], 3, text="c", reason=finish("stop", matched="NaN happened")))
    assert "NaN" in folded.engine_error.message
    assert (folded.reading.token_ids, folded.reading.finish_reason) == ([11, 12], None)


# --- after an error --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [event([13], 4), sse({"error": {"code": 500}}), refusal(503), b"data: {\n\n", b"data: \xff\n\n"],
)
def test_nothing_is_read_after_an_error(wrong: bytes) -> None:
    body = INCREMENTAL + wrong + event([13], 3, text="c", reason=finish()) + DONE
    for folded in (fold(body), byte_by_byte(body)):
        assert folded.error is not None
        assert (folded.reading.token_ids, folded.reading.finish_reason, folded.reading.done) == ([11, 12], None, False)
