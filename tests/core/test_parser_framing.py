"""Server-sent events on bytes: what ends a line, what is an event, what ends the stream."""

from __future__ import annotations

import itertools

import pytest

from reference import read
from support.bodies import DONE, event, fields, finish, sse
from support.folding import agreed, byte_by_byte, fold, parser_for

FIRST = event([11], 1, text="a")
LAST = event([12], 2, text="b", reason=finish(matched=12))
BOM = b"\xef\xbb\xbf"


def both_tokens(body: bytes) -> bool:
    reading = agreed(body).reading
    return (reading.token_ids, reading.text, reading.finish_reason) == ([11, 12], "ab", "stop")


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\u000b", "\u000c", "\u001c", "\u001e", "\u007f"])
def test_only_cr_and_lf_end_a_line(mark: str) -> None:
    """Seen as encode/httpx's aiter_lines and in florimondmanca/httpx-sse#34: one event became three lines."""
    raw = mark if mark >= " " else f"\\u{ord(mark):04x}"
    body = FIRST.replace(b'"a"', f'"x{raw}y"'.encode()).replace(b'"r7"', f'"{raw}"'.encode()) + DONE
    reading = agreed(body, aborted=True).reading
    assert reading.text == f"x{mark}y"
    assert reading.meta["id"] == mark


@pytest.mark.parametrize("ending", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_lf_cr_and_crlf_end_a_line_wherever_reads_fall(ending: bytes) -> None:
    """encode/httpx#1033, psf/requests#3980: a read that ends between CR and LF."""
    body = (FIRST + LAST + DONE).replace(b"\n", ending)
    assert both_tokens(body)
    for cut in range(len(body)):
        assert fold(body, "sglang-incremental", [cut]).reading.text == "ab"


@pytest.mark.parametrize("blank", [b"".join(pair) for pair in itertools.product([b"\n", b"\r", b"\r\n"], repeat=2)])
def test_unlike_line_endings_make_a_blank_line(blank: bytes) -> None:
    """anthropics/anthropic-sdk-typescript#1049. CR LF alone is one ending, so it ends no event."""
    body = FIRST.rstrip(b"\n") + blank + LAST
    if blank != b"\r\n":
        assert both_tokens(body)
    else:
        assert agreed(body).decode_error.kind == "json"


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\r", b"\r\n\r", b"\n\r", b"\n\r\n", b"\r\n\n"])
def test_an_event_counts_before_the_next_read(blank: bytes) -> None:
    """Nothing waits for the byte after a CR."""
    parser = parser_for("sglang-incremental")
    assert parser.feed(FIRST.rstrip(b"\n") + blank) == 1
    for byte in (b"\n", b"") if blank.endswith(b"\r") else (b"",):
        assert parser.feed(byte) == 0
    assert parser.feed(LAST) == 1
    parser.close()
    assert parser.take().token_ids.tolist() == [11, 12]


def test_a_lone_lf_after_a_crlf_is_a_blank_line() -> None:
    parser = parser_for("sglang-incremental")
    counts = [parser.feed(piece) for piece in (FIRST.rstrip(b"\n") + b"\r", b"\n", b"\n" + LAST)]
    assert counts == [0, 0, 2]


def test_one_bom_at_the_start_goes_and_others_stay() -> None:
    """openai/openai-python#3819."""
    assert both_tokens(BOM + FIRST + LAST)
    assert agreed(BOM + FIRST.replace(b'"a"', b'"' + BOM + b'"') + LAST).reading.text == "\ufeffb"
    # A second one makes another field's name of the first: the event is lost, and its loss is seen.
    lost = agreed(BOM + BOM + FIRST + LAST)
    assert lost.decode_error.kind == "length"
    assert lost.reading.token_ids == []
    assert agreed(FIRST + BOM + LAST).reading.error == "StreamTruncated"


@pytest.mark.parametrize("body", [b"", BOM, BOM[:2], b"\n\n\n", b": hello\n\n", b"data", b"data:\n\n"])
def test_a_body_without_an_event_is_truncated(body: bytes) -> None:
    folded = agreed(body)
    assert folded.reading.error == "StreamTruncated"
    assert folded.reading.token_ids == []


@pytest.mark.parametrize(
    "noise",
    [
        b": ping\n\n",
        b":\n\n",
        b":\n",
        b"retry: 3000\n\n",
        b"id: 7\n\n",
        b"id: 7\n\n\n\n",
        b"event: ping\ndata:\n\n",
        b"event: ping\n\n",
        b"data\n\n",
        b"data\ndata:\ndata: \n\n",
        b"data: \t \n\n",
        b"dataa: {}\n\n",
        b"Data: {}\n\n",
        b" data: {}\n\n",
        b"data : {}\n\n",
        b"nonsense\n\n",
        b": \xff\xfe\n\n",
        b"\xff\n\n",
        b"\n\n",
    ],
)
def test_what_is_no_event_with_data_is_ignored(noise: bytes) -> None:
    """openai/openai-python#2722, modelcontextprotocol/python-sdk#1670: heartbeats crashed or ended the stream."""
    assert both_tokens(noise + FIRST + noise + LAST + noise + DONE + noise)


@pytest.mark.parametrize("line", [b": ping", b"id: 7", b"event: message", b"retry: 1", b"x", b"\xff\xff: y"])
def test_other_fields_may_stand_within_an_event(line: bytes) -> None:
    assert both_tokens(line + b"\n" + FIRST + LAST.rstrip(b"\n") + b"\n" + line + b"\n\n" + DONE)


@pytest.mark.parametrize("lead", [b"data:", b"data: ", b"data:   ", b"data:\t", b"data: \t"])
def test_the_space_after_the_colon_is_optional(lead: bytes) -> None:
    """agentic-os-org/ANOLISA#2209: a dropped middle event must never give a shorter sample."""
    assert both_tokens(FIRST.replace(b"data: ", lead, 1) + LAST.replace(b"data: ", lead, 1) + b"data:[DONE]\n\n")


def test_several_data_lines_are_joined_by_a_line_feed() -> None:
    """open-metadata/OpenMetadata#28945."""
    for ending in (b"\n", b"\r", b"\r\n"):
        assert both_tokens(
            (FIRST.replace(b",", b",\ndata: ") + LAST.replace(b":{", b":\ndata:{")).replace(b"\n", ending)
        )
    inside = agreed(FIRST + LAST.replace(b'"b"', b'"b\ndata: c"'))
    assert inside.decode_error.kind == "json"
    assert inside.reading.token_ids == [11]


def test_the_first_bytes_of_a_line_are_never_taken_for_its_field() -> None:
    """A read may end after any byte of the field's name, its colon and the space."""
    body = FIRST + LAST
    for start in (0, len(FIRST)):
        for cut in range(start, start + 8):
            for other in range(cut, start + 8):
                assert fold(body, "sglang-incremental", [cut, other]).reading.token_ids == [11, 12]


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [b"", b"\n", b"\r", b"\n\n", b"\r\n", b"\r\n\r\n", b"\ndata", b"\n: x", b"\nid"])
def test_a_pending_event_counts_at_the_end_if_it_is_whole_json(rest: bytes) -> None:
    """openai/openai-node#2725: a proxy closes after the last line, and the finish reason was lost."""
    assert both_tokens(FIRST + LAST.rstrip(b"\n") + rest)


def test_a_pending_event_is_truncated_at_every_byte_before_its_end() -> None:
    last = LAST.rstrip(b"\n")
    for cut in range(1, len(last)):
        folded = fold(FIRST + last[:cut], "sglang-incremental")
        assert folded.reading.error == "StreamTruncated", last[:cut]
        assert (folded.reading.token_ids, folded.reading.finish_reason) == ([11], None)
        assert folded.reading == read(FIRST + last[:cut], "sglang-incremental")


@pytest.mark.parametrize(
    "pending", [b'data: {"a":"\xff"}', b'data: {"a":NaN}', b"data: <html>", b'data: {"a":"\\ud800"}']
)
def test_a_pending_event_that_is_no_json_is_truncated(pending: bytes) -> None:
    assert agreed(FIRST + pending).reading.error == "StreamTruncated"
    assert agreed(FIRST + pending, aborted=True).reading.error is None


def test_a_pending_event_that_is_json_and_wrong_is_an_error() -> None:
    assert agreed(FIRST + event([12], 3).rstrip(b"\n")).decode_error.kind == "length"
    assert agreed(FIRST + b"data: 5").decode_error.kind == "schema"
    assert agreed(FIRST + b'data: {"error":{"message":"no","code":500}}', aborted=True).engine_error.status == 500


def test_a_partial_event_after_the_terminal_one_is_ignored() -> None:
    for partial in (b"data: {", b'data: {"error":"x"}', b"data: [DO", b"\xff", b"data: \xff"):
        assert both_tokens(FIRST + LAST + partial)


def test_without_a_finish_reason_the_stream_is_truncated_unless_we_aborted() -> None:
    """vllm-project/vime#410: a cut answer was rewarded and trained on."""
    for body in (FIRST, FIRST + DONE, FIRST + b"data: [DONE]", FIRST + LAST[:-9], DONE):
        folded = agreed(body)
        assert folded.reading.error == "StreamTruncated"
        assert folded.reading.finish_reason is None
        assert folded.reading.token_ids == ([11] if body is not DONE else [])
        assert agreed(body, aborted=True).reading.error is None


def test_only_the_whole_data_can_be_the_end_marker() -> None:
    """openai/openai-python#3440."""
    text = "x\n\ndata: [DONE]\n\ny[DONE]"
    folded = agreed(event([11], 1, text=text) + event([12], 2, text="[DONE]", reason=finish()) + DONE)
    assert folded.reading.text == text + "[DONE]"
    assert folded.reading.done
    for lookalike in (b"data: [DONE] \n\n", b"data:  [DONE]\n\n", b"data: [done]\n\n", b"data: [DONE]\ndata\n\n"):
        assert agreed(FIRST + lookalike + LAST).decode_error.kind == "json"
        after = agreed(FIRST + LAST + lookalike)
        assert after.reading.error is None
        assert not after.reading.done
    assert agreed(FIRST + sse("[DONE]")).decode_error.kind == "schema"


def test_done_is_told_apart_from_finished() -> None:
    parser = parser_for("sglang-incremental")
    seen = []
    for piece in (FIRST, LAST, DONE):
        parser.feed(piece)
        seen.append((parser.finished, parser.done))
    assert seen == [(False, False), (True, False), (True, True)]
    assert agreed(FIRST + LAST + b"data: [DONE]").reading.done


@pytest.mark.parametrize(
    "later",
    [
        event([13], 3, text="c"),
        event([99], 1, text="zzz", reason=finish("length")),
        sse({"error": {"message": "too late", "code": 500}}),
        b"event: error\ndata: {}\n\n",
        b"data: {nonsense}\n\n",
        b"data: \xff\n\n",
        sse(fields([13], 3, top={"index": 1})),
        b"\x00" * 100 + b"\n\n",
        b": bye\n\n",
    ],
)
def test_events_after_the_terminal_one_and_after_done_are_ignored(later: bytes) -> None:
    """openai/openai-python#3581."""
    assert both_tokens(FIRST + LAST + later + DONE)
    assert both_tokens(FIRST + LAST + DONE + later)
    assert both_tokens(FIRST + LAST + later)
    assert agreed(FIRST + DONE + later).reading.error == "StreamTruncated"


# --- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [300_000, 8_000_000])
def test_a_line_may_be_long(size: int) -> None:
    """aio-libs/aiohttp#4453: "line too long" at 64 KiB."""
    body = FIRST + event([12], 2, text="b", reason=finish(), extra="x" * size)
    for step in (len(body), 65_536, 1_000):
        folded = fold(body, "sglang-incremental", range(step, len(body), step))
        assert folded.reading.token_ids == [11, 12]
        assert len(folded.reading.meta["extra"]) == size


@pytest.mark.soak
def test_a_line_of_64_mb_is_read() -> None:
    test_a_line_may_be_long(64_000_000)


def test_an_event_larger_than_the_limit_is_too_large() -> None:
    big = event([12], 2, text="b" * 5_000, reason=finish())
    for body in (FIRST + big, FIRST + big.replace(b'",', b'",\ndata: '), FIRST + big[:4_000]):
        for folded in (
            fold(body, "sglang-incremental", max_event_bytes=1_000),
            byte_by_byte(body, "sglang-incremental", max_event_bytes=1_000),
            fold(body, "sglang-incremental", [1_500, 1_501], max_event_bytes=1_000),
        ):
            assert folded.decode_error.kind == "too_large"
            assert len(FIRST) <= folded.decode_error.offset <= len(body)
            assert folded.reading.token_ids == [11]
    assert fold(FIRST + big, "sglang-incremental", max_event_bytes=len(big)).reading.error is None


def test_the_size_of_an_event_counts_not_that_of_the_stream() -> None:
    body = b"".join(event([token], token + 1, text="a") for token in range(1_000))
    folded = fold(body + DONE, "sglang-incremental", aborted=True, max_event_bytes=1_000)
    assert len(folded.reading.token_ids) == 1_000
