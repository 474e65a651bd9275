"""What is wrong with an event of vLLM's: the kind, the place, the order of the checks; and the engine's own errors."""

from __future__ import annotations

from typing import Any

import pytest

from support.bodies import DONE, LEFT_OUT, Shape, sse
from support.bodies_vllm import entry, event, logprobs_of, usage
from support.folding import agreed, fold

FIRST = event([11], top={"usage": usage(1)})
FIRST_OF_COMPLETIONS = event([11], wire="completions")


def completed(tokens: list[int], **told: Any) -> bytes:
    return event(tokens, wire="completions", **told)


# --- kinds, paths, offsets -------------------------------------------------------------------------------------------

ODD_USAGE = {
    "usage": 5,
    "usage.completion_tokens": usage(2) | {"completion_tokens": 2.0},
    "usage.prompt_tokens": usage(2) | {"prompt_tokens": "3"},
    "usage.prompt_tokens_details": usage(2) | {"prompt_tokens_details": [7]},
    "usage.prompt_tokens_details.cached_tokens": usage(2) | {"prompt_tokens_details": {"cached_tokens": -1}},
}


@pytest.mark.parametrize(
    ("wrong", "kind", "path", "at"),
    [
        (sse(b'{"choices": nope}'), "json", "", b"nope"),
        (sse(b'{"choices":[],"x":"\xfe"}'), "utf8", "", b"\xfe"),
        (sse(b"[]"), "schema", "", b"[]"),
        (sse({"choices": 5}), "schema", "choices", b"5}"),
        (sse({"choices": {}}), "schema", "choices", b"{}"),
        (sse({"choices": None}), "schema", "choices", b"null"),
        (sse({"request_id": "x"}), "schema", "choices", b"{"),
        (sse({"choices": [None]}), "schema", "choices[0]", b"null"),
        (sse({"choices": ["x"]}), "schema", "choices[0]", b'"x"'),
        (sse({"choices": [{}, {}]}), "schema", "choices", b"[{}"),
        (event([12], index=1), "schema", "choices[0].index", b"1,"),
        (event([12], index="0"), "schema", "choices[0].index", b'"0"'),
        (event([12], top={"request_id": "other"}), "schema", "request_id", b'"other"'),
        (event([12], top={"request_id": 7}), "schema", "request_id", b"7,"),
        (event([12], token_ids=7), "schema", "choices[0].token_ids", b"7,"),
        (event([12], text=7), "schema", "choices[0].text", b"7}"),
        (event([12], logprobs=7), "schema", "choices[0].logprobs", b"7,"),
        (event([12], logprobs={"content": 7}), "schema", "choices[0].logprobs.content", b"7}"),
        (event([12], logprobs={"content": [7]}), "schema", "choices[0].logprobs.content[0]", b"7]"),
        (event([12], logprobs={"content": [None]}), "schema", "choices[0].logprobs.content[0]", b"null]"),
        (
            event([12, 13], logprobs={"content": [entry(12), entry(13, logprob="x")]}),
            "schema",
            "choices[0].logprobs.content[1].logprob",
            b'"x"',
        ),
        (event([12], routed_experts=7), "schema", "choices[0].routed_experts", b"7,"),
        (event([12], weight_version=[7]), "schema", "choices[0].weight_version", b"[7]"),
        (event([12], top={"weight_version": {}}), "schema", "weight_version", b"{}"),
        *[(event([12], top={"usage": told}), "schema", path, b"") for path, told in ODD_USAGE.items()],
        (event([12], logprobs=None), "schema", "choices[0].logprobs.content", b'{"index'),
        (event([12], logprobs={}), "schema", "choices[0].logprobs.content", b'{"index'),
        (event([12], token_ids=None), "schema", "choices[0].token_ids", b'{"index'),
        (event([12], token_ids=LEFT_OUT), "schema", "choices[0].token_ids", b'{"index'),
        (event(None, text="lost"), "schema", "choices[0].token_ids", b'{"index'),
        (event([12], logprobs=logprobs_of([])), "length", "choices[0].logprobs.content", b"[]"),
        (event([12], logprobs=logprobs_of([12, 13])), "length", "choices[0].logprobs.content", b"[{"),
        (event([12], top={"usage": usage(3)}), "length", "usage.completion_tokens", b"3,"),
        (event([12], logprobs=logprobs_of([13])), "mismatch", "choices[0].token_ids[0]", b"12]"),
        (event([-5], logprobs={"content": [{"logprob": 0}]}), "token", "choices[0].token_ids[0]", b"-5]"),
        (event([12], token_ids=[2**31]), "token", "choices[0].token_ids[0]", b"2147483648"),
        (event([12], token_ids=["12"]), "token", "choices[0].token_ids[0]", b'"12"'),
        (event([12], token_ids=[12.0]), "token", "choices[0].token_ids[0]", b"12.0"),
        (
            event([12, 13], logprobs={"content": [entry(12), entry(13, logprob=None)]}),
            "logprob",
            "choices[0].logprobs.content[1].logprob",
            b"null",
        ),
        (
            event([12], logprobs={"content": [entry(12, logprob=LEFT_OUT)]}),
            "logprob",
            "choices[0].logprobs.content[0].logprob",
            b'{"token_id":12,"rank"',
        ),
        (
            event([12]).replace(b"-1.5", b"-1e999"),
            "logprob",
            "choices[0].logprobs.content[0].logprob",
            b"-1e999",
        ),
        (event([12], sampling_mask=5), "metadata", "choices[0].sampling_mask", b"5}"),
        (event([12], routed_experts="x"), "metadata", "choices[0].routed_experts", b'x"'),
        (event([12], "stop", weight_versions=[]), "metadata", "choices[0].weight_versions", b"[]"),
        (event([12], "stop", top={"weight_versions": [5]}), "metadata", "weight_versions", b"5]"),
    ],
)
def test_an_error_tells_its_kind_its_path_and_its_place(wrong: bytes, kind: str, path: str, at: bytes) -> None:
    body = FIRST + wrong + DONE
    folded = agreed(body, "vllm")
    error = folded.decode_error
    assert (error.kind, error.path) == (kind, path)
    assert body[error.offset :].startswith(at)
    assert len(FIRST) < error.offset < len(FIRST) + len(wrong)
    assert f"at byte {error.offset}" in str(error)
    # All or nothing: what is there is what came before.
    before = agreed(FIRST, "vllm", aborted=True).reading
    before.error, before.kind = "DecodeError", kind
    assert folded.reading == before


@pytest.mark.parametrize(
    ("wrong", "kind", "path", "at"),
    [
        (completed([12], top={"id": "other"}), "schema", "id", b'"other"'),
        (completed([12], logprobs=None), "schema", "choices[0].logprobs.token_logprobs", b'{"index'),
        (completed([12], logprobs=logprobs_of([12])), "schema", "choices[0].logprobs.token_logprobs", b'{"index'),
        (completed([12], logprobs={"token_logprobs": 7}), "schema", "choices[0].logprobs.token_logprobs", b"7}"),
        (
            completed([12], logprobs={"token_logprobs": [True]}),
            "schema",
            "choices[0].logprobs.token_logprobs[0]",
            b"true",
        ),
        (
            completed([12], logprobs={"token_logprobs": [-1], "tokens": 7}),
            "schema",
            "choices[0].logprobs.tokens",
            b"7}",
        ),
        (completed([12], logprobs={"token_logprobs": []}), "length", "choices[0].logprobs.token_logprobs", b"[]"),
        (
            completed([12], logprobs={"token_logprobs": [-1], "tokens": ["a", "b"]}),
            "length",
            "choices[0].logprobs.tokens",
            b'["a"',
        ),
        (
            completed([12], logprobs={"token_logprobs": [None]}),
            "logprob",
            "choices[0].logprobs.token_logprobs[0]",
            b"null",
        ),
        (completed([12], token_ids=None, text="ids were not asked for"), "schema", "choices[0].token_ids", b'{"index'),
    ],
)
def test_an_error_in_completions_tells_the_same(wrong: bytes, kind: str, path: str, at: bytes) -> None:
    body = FIRST_OF_COMPLETIONS + wrong + DONE
    folded = agreed(body, "vllm-completions")
    assert (folded.decode_error.kind, folded.decode_error.path) == (kind, path)
    assert body[folded.decode_error.offset :].startswith(at)
    assert folded.reading.token_ids == [11]


def test_an_event_that_is_too_large_is_refused_after_the_end_too() -> None:
    big = event([12], text="x" * 700)
    for body in (big, FIRST + event([12], "stop") + big):
        for cuts in (range(0), range(1, len(body))):
            assert fold(body, "vllm", cuts, max_event_bytes=600).decode_error.kind == "too_large"


# --- the order of the checks -----------------------------------------------------------------------------------------

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("schema", {"finish_reason": "x"}),
    ("schema", {"index": 2}),
    ("schema", {"text": 5}),
    ("length", {"usage": usage(9)}),
    ("mismatch", {"logprobs": {"content": [entry(99, logprob=None), entry(13)]}}),
    ("token", {"token_ids": [12, -1]}),
    ("logprob", {"logprobs": {"content": [entry(12), entry(13, logprob=None)]}}),
    ("metadata", {"sampling_mask": []}),
]


@pytest.mark.parametrize("first", range(len(FAULTS)))
@pytest.mark.parametrize("second", range(len(FAULTS)))
def test_of_two_faults_the_one_that_is_checked_first_is_reported(first: int, second: int) -> None:
    told: dict[str, Any] = {}
    for _, fault in (FAULTS[max(first, second)], FAULTS[min(first, second)]):
        told |= fault
    top = {"usage": told.pop("usage")} if "usage" in told else {}
    folded = agreed(FIRST + event([12, 13], **told, top=top), "vllm")
    assert folded.decode_error.kind == FAULTS[min(first, second)][0]


def test_json_comes_before_everything_and_an_error_object_before_the_schema() -> None:
    broken = event([12], index=5).replace(b'"finish_reason":null', b'"finish_reason":nul')
    assert agreed(FIRST + broken, "vllm").decode_error.kind == "json"
    assert agreed(FIRST + sse({"choices": 5, "error": "x"}), "vllm").reading.error == "EngineError"


# --- the engine's errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "message", "status", "retryable"),
    [
        (b'{"error": {"message": "no such id", "type": "E", "param": null, "code": 400}}', "no such id", 400, False),
        (b'{"error": {"message": "list index out of range", "code": 500}}', "list index out of range", 500, True),
        (b'{"error": {"message": "later", "code": "503"}}', "later", 503, True),
        (b'{"error": {"message": "gone", "type": "server_error", "code": "server_error"}}', "gone", 500, True),
        (b'{"error": {"message": "gone", "type": "server_error"}}', "gone", 500, True),
        (b'{"error": {"message": "gone", "code": "server_error"}}', "gone", 500, True),
        (b'{"error": {"message": "gone", "type": "server_error", "code": 503}}', "gone", 503, True),
        (b'{"error": "gone", "type": "server_error"}', "gone", 500, True),
        (b'{"object": "error", "message": "gone", "code": "server_error"}', "gone", 500, True),
        (b'{"error": {"message": "no", "type": "invalid_request_error", "code": "x"}}', "no", None, False),
        (b'{"error": "The model is currently scaling."}', "The model is currently scaling.", None, False),
        (b'{"object": "error", "message": "no", "code": 404}', "no", 404, False),
        (b'{"detail": "Not Found"}', "Not Found", None, False),
        (b'{"error": "beside choices", "choices": []}', "beside choices", None, False),
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "vllm-completions"])
def test_an_error_event_is_an_engine_error_and_tokens_stay(
    told: bytes, message: str, status: int | None, retryable: bool, dialect: str
) -> None:
    first = FIRST if dialect == "vllm" else FIRST_OF_COMPLETIONS
    for body, tokens in ((sse(told) + DONE, []), (first + sse(told) + DONE, [11])):
        folded = agreed(body, dialect)
        error = folded.engine_error
        assert (error.message, error.status, error.retryable) == (message, status, retryable)
        assert (folded.reading.token_ids, folded.reading.finish_reason) == (tokens, None)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (b'{"error": {"message": "no", "type": "T", "code": "c"}}', "c"),
        (b'{"error": {"message": "no", "type": "T", "code": 500}}', "T"),
        (b'{"error": {"message": "no", "type": null, "code": null}}', None),
        (b'{"error": "no"}', None),
    ],
)
def test_an_error_event_keeps_the_engine_s_name_of_the_error(told: bytes, code: str | None) -> None:
    assert agreed(sse(told) + DONE, "vllm").engine_error.code == code


def test_an_event_that_is_named_error_is_one_whatever_it_holds() -> None:
    folded = agreed(FIRST + b"event: error\n" + sse({"choices": [], "message": "gone", "code": 500}), "vllm")
    assert (folded.engine_error.status, folded.engine_error.message) == (500, "gone")


def test_a_chunk_of_completions_is_no_error_for_its_object() -> None:
    for name in ("text_completion", "error"):
        reading = agreed(completed([7], top={"object": name}), "vllm-completions", aborted=True).reading
        assert (reading.token_ids, reading.meta["object"]) == ([7], name)


# --- what was asked --------------------------------------------------------------------------------------------------


def test_the_dialect_of_another_engine_is_a_schema_error() -> None:
    for spoken, body in (("sglang", event([7])), ("vllm", sse({"text": "a", "meta_info": {"completion_tokens": 0}}))):
        assert agreed(body, spoken).decode_error.kind == "schema"
    shape = Shape(1, 1)
    assert agreed(event([7]), "vllm", aborted=True, experts=shape).reading.routed_experts is None
