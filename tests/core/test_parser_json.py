"""JSON as events hold it: what is none, what numbers and strings are, and which of two equal keys counts."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import struct
import subprocess
import sys
from typing import Any

import pytest

from reference import exact, read
from support.bodies import DONE, event, fields, finish, logprobs, sse
from support.folding import agreed, fold

FIRST = event([11], 1, text="a")
LAST = event([12], 2, text="b", reason=finish(matched=12))
WITH_EXTRA = event([12], 2, text="b", reason=finish(), extra="PUT HERE", top={"outer": 1})


def second(raw: bytes) -> bytes:
    """A good event, then one whose unread field has this raw value."""
    return FIRST + WITH_EXTRA.replace(b'"PUT HERE"', raw)


def with_logprob(raw: str) -> bytes:
    return FIRST + LAST.replace(b"[-1.5,12,null]", b"[" + raw.encode() + b",12,null]")


def with_id(raw: str) -> bytes:
    """A second event whose token is this, in its pair and in output_ids alike."""
    return FIRST + LAST.replace(b"[12]", f"[{raw}]".encode()).replace(b"[-1.5,12,null]", f"[-1.5,{raw},null]".encode())


# --- what is no JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"{this is not json}",
        b"<html>502 Bad Gateway</html>",
        b"{",
        b"}",
        b"{}}",
        b"{} {}",
        b"{},",
        b"[1,]",
        b'{"a":1,}',
        b'{"a" 1}',
        b'{"a":}',
        b"{a:1}",
        b"{'a':1}",
        b'{1:"a"}',
        b'{"a":1 "b":2}',
        b'{"a":"b',
        b'"\\x41"',
        b'"\\u12g4"',
        b'"\\u+123"',
        b'"\\u 123"',
        b'"\\u123"',
        b"nul",
        b"nulls",
        b"True",
        b"undefined",
        b"01",
        b"-01",
        b"1.",
        b".5",
        b"-.5",
        b"+1",
        b"1e",
        b"1e+",
        b"-",
        b"0x10",
        b"1_000",
        b"1 2",
        b"\x00",
        b"{\x00}",
        b'{"a":\xc2\xa01}',
        b"\xef\xbb\xbf{}",
        b"\x0b{}",
        b"// c\n{}",
    ],
)
def test_an_event_that_is_no_json_is_an_error_and_never_skipped(raw: bytes) -> None:
    """agentic-os-org/ANOLISA#2209: a skipped event's tokens were gone and the rest was joined on."""
    for body in (FIRST + sse(raw) + LAST, second(raw)):
        folded = agreed(body)
        assert folded.decode_error.kind == "json"
        assert len(FIRST) <= folded.decode_error.offset < len(body)
        assert folded.reading.token_ids == [11]
    assert agreed(sse(raw)).decode_error.kind == "json"


@pytest.mark.parametrize("raw", [b"null", b"5", b"-0.5", b"[]", b"[{}]", b'"text"', b"true", b'"[DONE]"'])
def test_json_that_is_no_object_is_an_error(raw: bytes) -> None:
    assert agreed(FIRST + sse(raw) + LAST).decode_error.kind == "schema"


@pytest.mark.parametrize("name", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_bare_nan_or_infinity_is_no_json_wherever_it_stands(name: bytes) -> None:
    """sgl-project/sglang#4097: one path raised while another stored nan."""
    for body in (with_logprob(name.decode()), second(name), second(b'[{"x":[' + name + b"]}]")):
        folded = agreed(body)
        assert folded.decode_error.kind == "json"
        assert 0 <= folded.decode_error.offset - body.index(name, len(FIRST)) < len(name)
        assert folded.reading.token_ids == [11]


# Without CR and LF, which end a line.
@pytest.mark.parametrize("code", sorted({*range(0x20)} - {*b"\r\n"}))
def test_a_raw_control_character_in_a_string_is_no_json(code: int) -> None:
    folded = agreed(second(b'"a' + bytes([code]) + b'b"'))
    assert folded.decode_error.kind == "json"
    assert agreed(second(f'"a\\u{code:04x}b"'.encode())).reading.meta["extra"] == f"a{chr(code)}b"


# --- strings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"\x80",
        b"\xe5\x8c",  # half a character
        b"\xc0\xaf",  # longer than need be
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",  # a surrogate
        b"\xf4\x90\x80\x80",  # beyond U+10FFFF
        b"\xf8\x88\x80\x80\x80",
    ],
)
def test_bytes_that_are_no_utf8_are_an_error_wherever_they_stand(raw: bytes) -> None:
    """api7/aisix#120: lossy on one path, an exception on the other."""
    for body in (
        FIRST + LAST.replace(b'"b"', b'"x' + raw + b'y"'),
        second(b'"' + raw + b'"'),
        second(b'{"' + raw + b'":1}'),
        FIRST + sse(raw),
        FIRST + sse(b'{"a":' + raw + b"}"),
    ):
        folded = agreed(body)
        assert folded.decode_error.kind == "utf8"
        assert 0 <= folded.decode_error.offset - body.index(raw, len(FIRST)) < len(raw)
        assert folded.reading.token_ids == [11]


def test_utf8_is_looked_at_before_json() -> None:
    assert agreed(FIRST + sse(b'{"a":NaN,"b":"\xff"}')).decode_error.kind == "utf8"
    assert agreed(FIRST + sse(b'{"error":"\xff"}')).decode_error.kind == "utf8"
    assert agreed(FIRST + sse(b'{"error":NaN}')).decode_error.kind == "json"


def test_a_character_cut_by_a_read_is_whole() -> None:
    """jawah/urllib3.future#349: each read decoded by itself gave U+FFFD."""
    text = "北京😀é\U0010ffff\u0000\ufffd"
    folded = agreed(FIRST + event([12], 2, text=text, reason=finish()) + DONE)
    assert folded.reading.text == "a" + text


@pytest.mark.parametrize("lone", [r"\ud83d", r"\ude00", r"x\ud83dy\ude00", r"\ud83d\u0041", r"\ude00\ud83d", r"\uD83D"])
def test_a_lone_surrogate_escape_is_no_json_in_any_string(lone: str) -> None:
    """serde-rs/json#495: Python keeps it in a str that cannot be saved later."""
    raw = b'"' + lone.encode() + b'"'
    for body in (
        FIRST + LAST.replace(b'"b"', raw),
        second(raw),
        second(b"{" + raw + b":1}"),
        second(b"[[" + raw + b"]]"),
        FIRST + LAST.replace(b"null]", raw + b"]"),
        second(b'1,"extra":' + raw + b',"extra":2'),  # a value that a later key replaces
    ):
        folded = agreed(body)
        assert folded.decode_error.kind == "json"
        assert folded.decode_error.offset >= len(FIRST)
        assert folded.reading.token_ids == [11]


def test_a_pair_of_surrogate_escapes_is_one_character_however_it_is_cut() -> None:
    reading = agreed(FIRST + LAST.replace(b'"b"', rb'"\ud83d\ude00\uD83D\uDE00\u0041\\ud83d"')).reading
    assert reading.text == "a\U0001f600\U0001f600A\\ud83d"


def test_every_escape_is_read() -> None:
    raw = r'"\"\\\/\b\f\n\r\t\u00e9\u0000 / é"'
    reading = agreed(FIRST + LAST.replace(b'"b"', raw.encode()).replace(b'"r7"', raw.encode()), aborted=True)
    assert reading.decode_error.kind == "schema"  # another id
    assert agreed(FIRST + LAST.replace(b'"b"', raw.encode())).reading.text == 'a"\\/\b\f\n\r\té\0 / é'


# --- keys ------------------------------------------------------------------------------------------------------------


def test_the_last_of_equal_keys_counts() -> None:
    """serde-rs/serde#690: first, last, or an error, one answer in every place."""
    good = fields([12], 2, text="b", reason=finish(matched=12))
    wrong: dict[str, Any] = fields(
        [77, 88], 9, text="wrong", reason=finish("length"), prompt_tokens=99, id="other", top={"index": 3}
    )
    for doubled in (False, True):
        inner = json.dumps(good["meta_info"])
        if doubled:
            inner = json.dumps(wrong["meta_info"])[:-1] + "," + inner[1:]
        raw = json.dumps(wrong)[:-1] + f',"index":0,"text":"b","output_ids":[12],"meta_info":{inner}}}'
        reading = agreed(FIRST + sse(raw.encode()) + DONE).reading
        assert (reading.token_ids, reading.logprobs, reading.text) == ([11, 12], logprobs(11, 12), "ab")
        assert (reading.finish_reason, reading.prompt_tokens) == ("stop", 3)
        assert reading.meta["id"] == "r7"
    raw = json.dumps(good)[:-1] + ',"text":null}'
    assert agreed(FIRST + sse(raw.encode())).reading.text is None


def test_the_order_of_keys_never_matters() -> None:
    """Python's and Rust's frontends of the same engine differ."""
    good = fields([12], 2, text="b", reason=finish(matched=12), extra={"a": 1}, top={"index": 0})
    inner = list(good["meta_info"].items())
    rng = random.Random(5)
    wanted = agreed(FIRST + sse(good)).reading
    for outer in itertools.permutations(good.items()):
        rng.shuffle(inner)
        assert agreed(FIRST + sse({**dict(outer), "meta_info": dict(inner)})).reading == wanted


def test_unknown_keys_never_matter_and_missing_ones_may_be_missing() -> None:
    strange: dict[str, Any] = {"n": None, "l": [1, [2, {}]], "o": {"text": "no", "meta_info": {}}, "": 0, "text ": "x"}
    raw = sse({**strange, **fields([12], 2, text="b", reason=finish(), **strange)})
    reading = agreed(FIRST + raw).reading
    assert (reading.token_ids, reading.text, reading.finish_reason) == ([11, 12], "ab", "stop")
    bare = sse({"meta_info": {"output_token_logprobs": [[-0.5, 3]], "completion_tokens": 1, "finish_reason": finish()}})
    reading = agreed(bare).reading
    assert (reading.token_ids, reading.logprobs, reading.text) == ([3], [-0.5], None)


def test_a_key_may_be_written_with_escapes() -> None:
    raw = (FIRST + LAST).replace(b'"meta_info"', b'"\\u006deta_info"').replace(b'"text"', b'"te\\u0078t"')
    raw = raw.replace(b'"output_token_logprobs"', b'"output_token_logprob\\u0073"').replace(b'"stop"', b'"\\u0073top"')
    assert agreed(raw).reading == agreed(FIRST + LAST).reading


def test_white_space_between_values_never_matters() -> None:
    wanted = agreed(FIRST + LAST).reading
    for space in (b" ", b"\t", b" \t  "):
        spaced = re.sub(rb"([{}\[\]:,])", space + rb"\1" + space, FIRST[6:-2])
        assert agreed(sse(spaced) + LAST).reading == wanted


# --- depth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_an_event_may_be_128_deep_and_no_deeper(opening: bytes, closing: bytes) -> None:
    """The event itself is depth 1, meta_info 2."""
    step = opening.count(b"{") + opening.count(b"[")
    for times in range(60, 130):
        folded = agreed(second(opening * times + (b"[]" if b"[" in opening else b"{}") + closing * times))
        if 2 + times * step + 1 <= 128:
            assert folded.reading.error is None
        else:
            assert folded.decode_error.kind == "json"
            assert folded.reading.token_ids == [11]


@pytest.mark.parametrize("times", [3_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ("[[{},", "]]"), ("[", "")])
def test_deep_nesting_ends_no_process(opening: str, closing: str, times: int) -> None:
    """ijl/orjson#620: a stack overflow in native code takes the whole process. So it is tried in a child."""
    child = f"""
import sys
sys.path[:0] = {sys.path!r}
from streamfold import DecodeError, Parser
parser = Parser("sglang")
parser.feed({FIRST!r})
raw = {opening!r} * {times} + "0" + {closing!r} * {times}
try:
    parser.feed({second(b"RAW")!r}.replace(b"RAW", raw.encode()))
except DecodeError as error:
    print(error.kind, parser.take().token_ids.tolist())
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "json [11]"), done.stderr


# --- numbers ---------------------------------------------------------------------------------------------------------

CORNERS = [
    "-117.63331139400017",
    "-0.9999999999999999",
    "-122.416294033786585",
    "-2.2250738585072011e-308",
    "-2.2250738585072014e-308",
    "-5e-324",
    "-4.9406564584124654e-324",
    "-2.4703282292062328e-324",
    "-2.4703282292062327e-324",
    "-1e-400",
    "1e-400",
    "-0.0",
    "0.0",
    "-0.0e5",
    "0e-999",
    "0",
    "-9007199254740993",
    "-9007199254740993.0",
    "-9007199254740992.99999999999999999999999999",
    "1E2",
    "-1e+02",
    "-1.7976931348623157e308",
    "-1.7976931348623158e308",
    "-3.4028234663852886e+37",
    "-9999.000000000001",
    "-0.12345678806304931",
    "-1e-05",
    "-0.00001",
    "-1" + "0" * 308,
    "-0." + "0" * 400 + "1" + "2" * 400,
    "-" + "1" * 100 + "e-100",
    "-" + "7" * 5_000 + ".0e-4999",
    "-0.500000000000000166533453693773481063544750213623046875",
    "-8.3881e+128",
]


@pytest.mark.parametrize("raw", CORNERS, ids=lambda raw: raw[:30])
def test_a_logprob_is_the_nearest_double(raw: str) -> None:
    """serde-rs/json#604, #707: the last bit was off, so importance ratios differed."""
    reading = agreed(with_logprob(raw)).reading
    assert exact(reading.logprobs) == exact([*logprobs(11), float(raw)])


def test_random_logprobs_are_read_bit_for_bit(soak: bool) -> None:
    """As Python and Rust print float32 and double, and with more digits than need be."""
    rng = random.Random(21)
    written = []
    for _ in range(1_000_000 if soak else 20_000):
        double, single = struct.unpack("<df", rng.randbytes(12))
        usual = -(10 ** rng.uniform(-9, 2))
        value = rng.choice([double, single, usual])
        if math.isfinite(value):
            written.append(rng.choice(["%r", "%.17g", "%.16e", "%.25e", "%.9g"]) % value)
    pairs = ",".join(f"[{raw},{i},null]" for i, raw in enumerate(written))
    ids = list(range(len(written)))
    raw = json.dumps(fields(ids, len(ids), reason=finish(), output_token_logprobs="PAIRS"))
    folded = fold(sse(raw.replace('"PAIRS"', f"[{pairs}]").encode()), clamped="keep")
    assert folded.error is None
    assert folded.reading.logprobs is not None
    assert [value.hex() for value in folded.reading.logprobs] == [float(raw).hex() for raw in written]


@pytest.mark.parametrize("raw", ["-1e999", "1e999", "-1.7976931348623159e308", "-1" + "0" * 309, "-" + "9" * 4_300])
def test_a_logprob_beyond_double_range_is_an_error(raw: str) -> None:
    body = with_logprob(raw)
    folded = agreed(body)
    assert folded.decode_error.kind == "logprob"
    assert folded.decode_error.path == "meta_info.output_token_logprobs[0][0]"
    assert folded.decode_error.offset == body.index(raw.encode(), len(FIRST))
    assert folded.reading.token_ids == [11]


def test_an_integer_of_more_than_4300_digits_is_no_json() -> None:
    """Python refuses to convert it, whatever the field."""
    for digits, kind in ((4_300, None), (4_301, "json"), (100_000, "json")):
        for sign in (b"", b"-"):
            folded = agreed(second(sign + b"7" * digits))
            assert folded.reading.kind == kind
            assert folded.reading.token_ids == ([11] if kind else [11, 12])


def test_a_null_logprob_is_an_error() -> None:
    """huggingface/trl#6166: NaN on the wire; never 0.0, never a shorter list."""
    body = with_logprob("null")
    folded = agreed(body)
    assert folded.decode_error.kind == "logprob"
    assert folded.decode_error.offset == body.index(b"[null,12,null]") + 1
    assert folded.reading.logprobs == logprobs(11)


@pytest.mark.parametrize("raw", ['"-0.5"', "true", "[]", "{}", '"NaN"'])
def test_a_logprob_that_is_no_number_is_an_error(raw: str) -> None:
    folded = agreed(with_logprob(raw))
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path.startswith("meta_info.output_token_logprobs[0]")


@pytest.mark.parametrize(
    "raw",
    [
        "2147483648",
        "4294967307",
        "-1",
        "-2147483648",
        "12.0",
        "1.2e1",
        "12e0",
        "9999999999999999999999",
        "18446744073709551627",
        "1e999",
        "true",
        "false",
        "null",
        '"12"',
        "[12]",
        "{}",
    ],
)
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_a_token_is_an_integer_from_0_to_2147483647(raw: str, with_logprobs: bool) -> None:
    """ijl/orjson#308: 2**32 + 11 read as 32 bits is 11, a valid looking token."""
    body = with_id(raw)
    folded = agreed(body, logprobs=with_logprobs)
    assert folded.decode_error.kind == "token"
    path = "meta_info.output_token_logprobs[0][1]" if with_logprobs else "output_ids[0]"
    assert folded.decode_error.path == path
    before = b"[[-1.5," if with_logprobs else b'"output_ids":['
    assert folded.decode_error.offset == body.index(before, len(FIRST)) + len(before)
    assert folded.reading.token_ids == [11]


def test_the_first_and_the_last_token_are_read() -> None:
    for raw, token in (("0", 0), ("2147483647", 2**31 - 1)):
        assert agreed(with_id(raw)).reading.token_ids == [11, token]


@pytest.mark.parametrize(
    "field", ["output_token_logprobs_length", "completion_tokens", "prompt_tokens", "cached_tokens"]
)
@pytest.mark.parametrize(
    "raw", ["2.0", '"2"', "-1", "1e3", "true", "[2]", "{}", "-9223372036854775809", "18446744073709551618"]
)
def test_a_count_is_an_integer_not_below_0(field: str, raw: str) -> None:
    """simdjson/simdjson#178: a typed error that names the field, never another number."""
    whole = event([12], 2, text="b", reason=finish(), **{field: "COUNT"})
    folded = agreed(FIRST + whole.replace(b'"COUNT"', raw.encode()))
    assert folded.decode_error.kind == "schema"
    assert folded.decode_error.path == f"meta_info.{field}"
    body = FIRST + whole.replace(b'"COUNT"', raw.encode())
    assert folded.decode_error.offset == body.index(raw.encode(), body.index(f'"{field}"'.encode(), len(FIRST)))
    assert folded.reading.token_ids == [11]


def test_zero_is_a_value_and_no_absence() -> None:
    """xorbitsai/inference#5270: token id 0, logprob 0.0, matched 0, cached 0, empty text."""
    body = event([0], 1, text="", output_token_logprobs=[[0.0, 0]], prompt_tokens=0, cached_tokens=0)
    body += event([0], 2, text="0", output_token_logprobs=[[-0.0, 0]], reason=finish(matched=0), prompt_tokens=0)
    reading = agreed(body, prompt_len=0).reading
    assert reading.token_ids == [0, 0]
    assert exact(reading.logprobs) == exact([0.0, -0.0])
    assert exact((reading.matched, reading.prompt_tokens, reading.cached_tokens, reading.text)) == exact((0, 0, 0, "0"))


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**300, 0.0, -0.0, 1e-320, 0.1, 1e300, True, False, None],
    ids=repr,
)
def test_a_scalar_of_meta_is_what_json_gives(value: Any) -> None:
    reading = agreed(FIRST + event([12], 2, reason=finish(), extra=value, nested={"a": [value]})).reading
    assert exact(reading.meta["extra"]) == exact(value)
    assert exact(reading.meta["nested"]) == exact({"a": [value]})


def test_the_reader_itself_rests_on_python_s_json() -> None:
    """A check of the check: a body of random doubles through json.loads and through the reader."""
    values = [random.Random(3).uniform(-50, 0) for _ in range(50)]
    body = event(
        [*range(50)], 50, reason=finish(), output_token_logprobs=[[value, i] for i, value in enumerate(values)]
    )
    assert exact(read(body, "sglang").logprobs) == exact(values)
