"""What comes beside the tokens of vLLM: sampling masks, routed experts, weight versions, and the rest."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy as np
import pytest

from support.bodies import DONE, LEFT_OUT, Shape, recordings, sse
from support.bodies_vllm import event, usage, usage_event
from support.folding import Folded, agreed, fold

FIRST = event([11])


def folded(*events: bytes, aborted: bool = False, **asked: Any) -> Folded:
    return agreed(b"".join(events), "vllm", aborted=aborted, **asked)


# --- sampling masks --------------------------------------------------------------------------------------------------


def test_sampling_masks_are_joined_to_top_p() -> None:
    body = [
        event([1], sampling_mask=[[1, 5]]),
        event([], sampling_mask=[]),
        event([2, 3], "stop", sampling_mask=[[], [3, 6, 9]]),
    ]
    assert folded(*body, usage_event(3)).reading.top_p == ([1, 5, 3, 6, 9], [0, 2, 2, 5])
    assert folded(event([], "stop", sampling_mask=[])).reading.top_p == ([], [0])


@pytest.mark.parametrize("untold", [None, LEFT_OUT])
def test_tokens_without_a_mask_leave_no_top_p(untold: Any) -> None:
    first, last = event([1], sampling_mask=[[1]]), event([2], "stop", sampling_mask=[[2]])
    assert folded(first, event([7], sampling_mask=untold), last).reading.top_p is None
    assert folded(event([7], sampling_mask=untold), last).reading.top_p is None
    assert folded(first, event([], sampling_mask=untold), last).reading.top_p == ([1, 2], [0, 1, 2])
    assert folded(first, event([], "abort", sampling_mask=untold)).reading.top_p == ([1], [0, 1])
    assert "sampling_mask" not in folded(first, last).reading.meta


@pytest.mark.parametrize(
    "mask",
    [[], [[1]], [[1]] * 3, [1, 2], [[1], None], [[1], [-1]], [[1], [2**31]], [[1], ["x"]], [[1], [1.0]], 5, "", {}],
)
def test_a_mask_that_does_not_fit_the_event_s_tokens_is_an_error(mask: Any) -> None:
    """A mask is a delta as the tokens are: one for all tokens so far (three here) is damage too."""
    error = folded(FIRST, event([1, 2], "stop", sampling_mask=mask))
    assert (error.decode_error.kind, error.decode_error.path) == ("metadata", "choices[0].sampling_mask")
    assert error.reading.token_ids == [11]


# --- routed experts --------------------------------------------------------------------------------------------------

TWO_BY_TWO = Shape(num_layers=2, top_k=2, num_experts=8)
ARRAY = np.arange(16).reshape(4, 2, 2) % 8


def saved(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy(header: str, body: bytes = b"", version: int = 1) -> bytes:
    """A file with a header of one's own."""
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode("latin-1") + body


def with_experts(payload: Any, shape: Shape | None = TWO_BY_TWO, **asked: Any) -> Folded:
    """Three prompt tokens and two sampled ones: four rows."""
    told = base64.b64encode(payload).decode() if isinstance(payload, bytes) else payload
    return folded(FIRST, event([12], "length", routed_experts=told), DONE, experts=shape, prompt_len=3, **asked)


@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<i4"])
def test_routed_experts_come_as_a_file_of_numpy_s_in_any_of_its_types(dtype: str) -> None:
    # What the file says counts, whatever type was expected.
    for expected in (TWO_BY_TWO, Shape(2, 2, None, "uint16")):
        reading = with_experts(saved(ARRAY.astype(dtype)), expected).reading
        assert reading.routed_experts is not None
        assert reading.routed_experts.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(reading.routed_experts, ARRAY)
        assert "routed_experts" not in reading.meta
    flat = with_experts(saved(ARRAY.astype(dtype)), None).reading.routed_experts
    assert flat is not None
    assert flat.tolist() == ARRAY.ravel().tolist()


def test_a_header_may_be_of_the_second_version_and_blank_as_it_likes() -> None:
    numbers = ARRAY.astype("|u1").tobytes()
    for header in (
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 2), }          \n",
        "{'descr':'|u1','fortran_order':False,'shape':(4,2,2)}\n",
        "{ 'descr' : '|u1' , 'fortran_order' : False , 'shape' : ( 4 , 2 , 2 , ) , } \n",
    ):
        for version in (1, 2):
            assert with_experts(npy(header, numbers, version)).reading.routed_experts is not None
    long = "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 2), }".ljust(70_000) + "\n"
    assert with_experts(npy(long, numbers, 2)).reading.routed_experts is not None


GOOD = "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 2), }\n"


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "!",
        "AAAA",
        saved(ARRAY.astype("|u1"))[:-1],
        saved(ARRAY.astype("|u1")) + b"\0",
        saved(ARRAY.astype("<i4"))[:-4],
        saved(ARRAY.astype(">u2")),
        saved(ARRAY.astype("<i8")),
        saved(ARRAY.astype("<f4")),
        saved(ARRAY.astype("|i1")),
        saved(np.asfortranarray(ARRAY.astype("|u1"))),
        saved(ARRAY.astype("|u1").reshape(2, 4, 2)),
        saved(ARRAY.astype("|u1").reshape(4, 4)),
        saved(ARRAY.astype("|u1").reshape(-1)),
        saved(ARRAY[:3].astype("|u1")),
        saved(np.tile(ARRAY, (2, 1, 1)).astype("|u1")),
        saved((ARRAY + 1).astype("|u1")),  # an expert 8 of 8
        saved((ARRAY - 2).astype("<i4")),
        npy(GOOD, b"\0" * 16, 3),
        npy(GOOD.rstrip("\n"), b"\0" * 16),
        npy(GOOD.replace("|u1", "=u1"), b"\0" * 16),
        npy(GOOD.replace("|u1", "O"), b"\0" * 16),
        npy(GOOD.replace("False", "0"), b"\0" * 16),
        npy(GOOD.replace("4, 2, 2", "4, 2, -2"), b"\0" * 16),
        npy(GOOD.replace("4, 2, 2", "4, 2, 02"), b"\0" * 16),
        npy(GOOD.replace("4, 2, 2", "4, 2, 2.0"), b"\0" * 16),
        npy(GOOD.replace("(4, 2, 2)", "16"), b"\0" * 16),
        npy(GOOD.replace("(4, 2, 2)", "(16)"), b"\0" * 16),
        npy(GOOD.replace("4, 2, 2", "4611686018427387904, 4, 1"), b""),
        npy(GOOD.replace("4, 2, 2", "9" * 25 + ","), b""),
        npy(GOOD.replace(" }", " 'x': 1, }"), b"\0" * 16),
        npy(GOOD.replace("'descr': '|u1', ", ""), b"\0" * 16),
        npy("", b"\0" * 16),
        b"\x93NUMPY",
        b"\x93NUMPY\1\0\xff",
        b"\x93NUMPY\1\0\xff\xff{}",
        b"\x93NUMPY\2\0\xff\xff\xff\xff{}",
        saved(ARRAY.astype("|u1")).replace(b"\x93NUMPY", b"\x94NUMPY"),
    ],
)
def test_routed_experts_that_are_no_such_file_or_do_not_fit_are_an_error(payload: Any) -> None:
    error = with_experts(payload)
    assert (error.decode_error.kind, error.decode_error.path) == ("metadata", "choices[0].routed_experts")
    assert (error.reading.token_ids, error.reading.finish_reason) == ([11], None)


def test_a_wrong_shape_tells_both_shapes() -> None:
    message = str(with_experts(saved(ARRAY[:3].astype("|u1"))).decode_error)
    assert "[3, 2, 2]" in message
    assert "4 rows (3 of the prompt + 2 tokens - 1 - 0) of 2 layers and top 2" in message


def test_rows_follow_the_prompt_and_the_start() -> None:
    rows = saved(ARRAY[:3].astype("|u1"))
    assert with_experts(rows, experts_start=1).reading.routed_experts is not None
    told = base64.b64encode(saved(ARRAY.astype("|u1"))).decode()
    for top, is_good in (({"usage": usage(2)}, True), ({}, False)):
        last = event([12], "length", routed_experts=told, top=top)
        reading = folded(FIRST, last, DONE, experts=TWO_BY_TWO).reading
        assert (reading.kind is None) == is_good
    # An earlier event may have told the prompt.
    first = event([11], top={"usage": usage(1)})
    last = event([12], "length", routed_experts=told)
    assert folded(first, last, experts=TWO_BY_TWO).reading.routed_experts is not None


def test_an_abort_without_routed_experts_is_no_error() -> None:
    for tokens in ([], [12]):
        reading = folded(FIRST, event(tokens, "abort"), experts=TWO_BY_TWO, prompt_len=3).reading
        assert (reading.routed_experts, reading.error) == (None, None)


def test_rows_that_tokens_have_outgrown_are_dropped() -> None:
    told = base64.b64encode(saved(ARRAY[:3].astype("|u1"))).decode()
    body = [event([11], routed_experts=told), event([12], "stop")]
    assert folded(body[0], aborted=True, prompt_len=3, experts=TWO_BY_TWO).reading.routed_experts is not None
    assert folded(*body, prompt_len=3, experts=TWO_BY_TWO).reading.routed_experts is None


def test_the_recorded_experts_have_their_shape() -> None:
    found = {}
    for recording in recordings("streams"):
        if recording.name.startswith("vllm-0.28/moe-0"):
            experts = fold(recording.body, "vllm", **recording.asked).reading.routed_experts
            found[recording.name[13:16]] = None if experts is None else (experts.dtype.name, experts.shape)
    assert found == {"-01": ("uint8", (7, 2, 2)), "-03": ("uint8", (7, 2, 2)), "-06": None}


# --- weight versions -------------------------------------------------------------------------------------------------


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_the_last_event_tells_the_spans_of_weight_versions() -> None:
    spans = [span("default", 0, 1), span("empty", 1, 1), span("step-7", 1, 3)]
    for told in ({"weight_versions": spans}, {"weight_versions": None, "top": {"weight_versions": spans}}):
        reading = folded(FIRST, event([12, 13], "stop", **told)).reading
        assert reading.version_spans == [("default", 0, 1), ("step-7", 1, 3)]
        assert "weight_versions" not in reading.meta
    both = event([12], "stop", weight_versions=[span("a", 0, 2)], top={"weight_versions": [span("b", 0, 2)]})
    assert folded(FIRST, both).reading.version_spans == [("a", 0, 2)]
    assert folded(event([], "abort", weight_versions=[])).reading.version_spans == []
    # Before the end they may be of tokens that are still to come.
    early = event([12], weight_versions=[span("a", 0, 9)])
    assert folded(FIRST, early, aborted=True).reading.version_spans == [(None, 0, 2)]


def test_each_event_s_tokens_have_its_weight_version() -> None:
    body = [
        event([1], top={"weight_version": "a"}),
        event([2], weight_version="a"),
        event([3], weight_version="b", top={"weight_version": "a"}),
        event([], top={"weight_version": "c"}),
        event([4]),
        event([5], "stop", top={"weight_version": 7}),
    ]
    reading = folded(*body).reading
    assert reading.version_spans == [("a", 0, 2), ("b", 2, 3), (None, 3, 4), ("7", 4, 5)]
    assert reading.meta["weight_version"] == "b"  # the choice's own comes before the event's


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [span("a", 0, 1)],
        [span("a", 0, 3)],
        [span("a", 1, 2)],
        [span("a", 0, 1), span("b", 0, 2)],
        [span("a", 0, 2), span("b", 2, 1)],
        [span("a", 0, 2.0)],
        [span("a", "0", 2)],
        [span(None, 0, 2)],
        [{"version": "a", "start": 0}],
        [["a", 0, 2]],
        ["a"],
        "a",
        {"a": 2},
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_an_error(spans: Any) -> None:
    error = folded(FIRST, event([12], "stop", weight_versions=spans))
    assert (error.decode_error.kind, error.decode_error.path) == ("metadata", "choices[0].weight_versions")
    assert error.reading.token_ids == [11]


# --- meta ------------------------------------------------------------------------------------------------------------


def test_meta_holds_what_event_choice_and_usage_tell_beside() -> None:
    stats = {"spec_num_drafts": 3}
    body = [
        event(
            [11],
            top={"usage": usage(1), "prompt_token_ids": [1, 2, 3], "mm_placeholders": {"image": []}},
            note="first",
        ),
        event([12], "stop", stop_reason=12, top={"request_spec_decode_stats": stats, "kv_transfer_params": {"a": [1]}}),
        usage_event(2, cached=1, completion_tokens_details=None),
        DONE,
    ]
    assert folded(*body, logprobs=True).reading.meta == {
        "request_id": "generate-tokens-r7",
        "output_mode": "tokens",
        "mm_placeholders": {"image": []},
        "request_spec_decode_stats": stats,
        "kv_transfer_params": {"a": [1]},
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 12,
        "note": "first",
        "total_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": None,
    }


def test_meta_of_completions_holds_the_same() -> None:
    outer = {"object": "text_completion", "model": "tiny", "system_fingerprint": "vllm", "usage": None}
    body = event([7], "stop", wire="completions", text="x", prompt_token_ids=[1], top=outer) + DONE
    assert agreed(body, "vllm-completions").reading.meta == {
        "id": "generate-tokens-r7",
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "vllm",
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_a_key_in_several_places_has_the_innermost_value() -> None:
    told = event([11], x=2, top={"x": 1, "usage": usage(1, x=3)})
    for later in (event([12], top={"x": 9}), event([12], x=8), event([12], top={"usage": usage(2)})):
        assert folded(told, later, aborted=True).reading.meta["x"] == 3
    assert folded(event([11], x=2, top={"x": 1}), event([12], top={"x": 9}), aborted=True).reading.meta["x"] == 2


@pytest.mark.parametrize(
    "raw",
    [
        b'"x":1,"x":2',
        b'"x":1,"x":[2]',
        b'"x":[1],"x":2',
        b'"x":1,"\\u0078":[2]',
        b'"\\u0078":1,"x":[2],"y":1',
        b'"x":1,"\\u0078":null',
        b'"usage":{"completion_tokens":9},"usage":{"total_tokens":5}',
        b'"usage":{"completion_tokens":9},"usage":null',
        b'"usage":5,"usage":{"completion_tokens":2,"completion_tokens":1}',
        b'"choices":[{"token_ids":[1,2],"finish_reason":"bad","note":1}],"usage":null',
        b'"choices":5,"weight_versions":1,"weight_versions":null',
        b'"output_mode":"text","output_mode":7',
        b'"error":"x","error":null',
    ],
)
def test_of_equal_keys_the_last_counts(raw: bytes) -> None:
    choices = b'"choices":[{"token_ids":[7],"token_ids":[8],"index":5,"index":0,"text":5,"text":"b"}]'
    for body in (sse(b"{" + raw + b"," + choices + b"}"), sse(b"{" + raw + b',"a":1,' + choices + b"}")):
        for events in (body, body.replace(b"[8]", b"[9]") + body.replace(b'"completion_tokens":1', b'"x":1')):
            reading = agreed(events, "vllm", aborted=True, logprobs=False).reading
            assert (reading.token_ids[-1], reading.text) in [(8, "b"), (8, "bb")]


def test_more_unknown_keys_than_are_remembered_are_read_too() -> None:
    many = {f"k{number}": number for number in range(300)}
    body = [event([11], top=many), event([12], top={**many, "k7": "x"}), event([13], "stop", **many, x=[1])]
    meta = folded(*body).reading.meta
    assert {key: meta[key] for key in many} == many
    twice = sse(b'{"choices":[{"token_ids":[]}],' + b",".join(b'"k%d":1' % n for n in range(300)) + b',"k7":[1]}')
    assert "k7" not in folded(twice, aborted=True).reading.meta


# --- what comes again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        ("1", "1", "2", "1"),
        ('"a"', "null", '"a"', "null"),
        ('"a"', "[]", '"a"', '"a"'),
        ("7", "7", "7.0", "7"),
        ('"a"', '"\\u0061"', '"a"', '"b"'),
    ],
)
@pytest.mark.parametrize("place", ["HERE", '"choices":[{"token_ids":[],HERE}]', '"usage":{HERE}'])
@pytest.mark.parametrize("key", ["x", "weight_version", "prompt_tokens_details"])
def test_a_value_that_goes_and_comes_back_is_the_latest(values: tuple[str, ...], place: str, key: str) -> None:
    if key == "prompt_tokens_details" and "usage" in place:
        values = tuple(
            "null" if value == "null" else f'{{"cached_tokens":{number}}}' for number, value in enumerate(values)
        )
    for with_gap in (False, True):
        events = []
        for number, value in enumerate(values):
            told = place.replace("HERE", f'"{key}":{value}')
            choices = "" if "choices" in told else ',"choices":[{"token_ids":[]}]'
            if with_gap and number == 1:
                events.append(sse({"choices": []}))
            events.append(sse(f"{{{told}{choices}}}".encode()))
        for end in range(1, len(events) + 1):
            agreed(b"".join(events[:end]), "vllm", aborted=True)
