"""`prompt_token_ids`: the prompt's tokens, which SGLang sends in every event and vLLM in the first one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bodies import DONE, event, finish, sse
from bodies_vllm import event as vllm_event
from bodies_vllm import fields as vllm_fields
from bodies_vllm import usage, usage_event
from folding import Folded, agreed, fold, parser_for

PROMPT = [0, 2**31 - 1, 7]
LENGTH = finish("length", length=2)


def prompt_field(ids: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids}


def sglang(*prompts: Any, **asked: Any) -> Folded:
    """One token in each event, with these prompt ids; Ellipsis: without the key."""
    last = len(prompts)
    body = b"".join(
        event([n], n, top={} if ids is ... else prompt_field(ids), reason=LENGTH if n == last else None)
        for n, ids in enumerate(prompts, 1)
    )
    return agreed(body + DONE, **asked)


def vllm(*prompts: Any, dialect: str = "vllm", **asked: Any) -> Folded:
    """As above; completions have the ids in the choice."""
    wire: Any = "completions" if dialect == "vllm-completions" else "0.32"
    events = []
    for n, ids in enumerate(prompts, 1):
        fields = {} if ids is ... else prompt_field(ids)
        placed = fields if wire == "completions" else {"top": fields}
        events.append(vllm_event([n], "length" if n == len(prompts) else None, wire=wire, **placed))
    body = b"".join(events)
    return agreed(body + DONE, dialect, **asked)


@pytest.mark.parametrize(
    "prompts", [[PROMPT, PROMPT, PROMPT], [PROMPT, None, ...], [..., PROMPT], [None, PROMPT, PROMPT]]
)
def test_the_prompt_may_be_in_any_event(prompts: list[Any]) -> None:
    for folded in (sglang(*prompts), vllm(*prompts), vllm(*prompts, dialect="vllm-completions")):
        assert folded.reading.prompt_token_ids == PROMPT
        assert "prompt_token_ids" not in folded.reading.meta


def test_the_prompt_is_none_if_no_event_has_it() -> None:
    for folded in (sglang(None, ...), vllm(None, ...), vllm(None, ..., dialect="vllm-completions")):
        assert folded.reading.prompt_token_ids is None
    # Completions have it in the choice, so the key at the top is ignored.
    assert agreed(vllm_event([1], "stop", top=prompt_field([5]), wire="completions"), "vllm-completions").error is None


@pytest.mark.parametrize("bad", [-1, 2**31, 1.0, "7", None, True, [7], 10**30])
def test_an_element_that_is_no_token_id_is_a_token_error(bad: Any) -> None:
    for folded in (sglang([1, bad, 3]), vllm([1, bad, 3])):
        assert (folded.decode_error.kind, folded.decode_error.path) == ("token", "prompt_token_ids[1]")
        assert folded.reading.token_ids == []
    completions = vllm([1, bad, 3], dialect="vllm-completions").decode_error
    assert (completions.kind, completions.path) == ("token", "choices[0].prompt_token_ids[1]")


@pytest.mark.parametrize("bad", [7, "7", {}, False])
def test_anything_but_a_list_or_null_is_a_schema_error(bad: Any) -> None:
    for folded in (sglang(PROMPT, bad), vllm(PROMPT, bad)):
        assert (folded.decode_error.kind, folded.decode_error.path) == ("schema", "prompt_token_ids")
        assert folded.reading.prompt_token_ids == PROMPT


def test_the_number_of_ids_is_the_number_of_tokens_sent() -> None:
    assert sglang(PROMPT, prompt_len=3).error is None
    for folded in (sglang(PROMPT[:2], prompt_len=3), vllm(PROMPT[:2], prompt_len=3), sglang([], prompt_len=3)):
        assert (folded.decode_error.kind, folded.decode_error.path) == ("length", "prompt_token_ids")
        assert "but 3 were sent" in str(folded.decode_error)


def test_the_number_of_ids_is_the_engines_own_count_in_any_event() -> None:
    """SGLang's events here count 3 tokens in the prompt."""
    assert sglang([5, 6]).decode_error.kind == "length"
    later = event([1], 1, top=prompt_field([5, 6]), prompt_tokens=None) + event([2], 2, reason=LENGTH)
    error = agreed(later).decode_error
    assert (error.kind, error.path) == ("length", "meta_info.prompt_tokens")
    assert "2 token ids for the prompt, but prompt_tokens is 3" in str(error)
    late = vllm_event([1], "stop", top=prompt_field([5, 6])) + usage_event(1)
    error = agreed(late, "vllm").decode_error
    assert (error.kind, error.path) == ("length", "usage.prompt_tokens")
    before = sse(vllm_fields([1], None, top={"usage": usage(1)})) + vllm_event([2], "stop", top=prompt_field([5, 6]))
    assert agreed(before, "vllm").decode_error.path == "prompt_token_ids"


@pytest.mark.parametrize("other", [[0, 2**31 - 1, 8], [1, 2**31 - 1, 7], [0, 2**31 - 1, "7"]])
def test_a_prompt_that_changes_is_a_prefix_error(other: list[Any]) -> None:
    for folded in (sglang(PROMPT, PROMPT, other), vllm(PROMPT, PROMPT, other)):
        assert (folded.decode_error.kind, folded.decode_error.path) == ("prefix", "prompt_token_ids")
        assert (folded.reading.prompt_token_ids, folded.reading.token_ids) == (PROMPT, [1, 2])


@pytest.mark.parametrize("other", [[0], [0, 2**31 - 1, 7, 7], []])
def test_a_prompt_that_grows_or_shrinks_is_a_prefix_error(other: list[int]) -> None:
    body = b"".join(
        event([n], n, top=prompt_field(ids), prompt_tokens=None, reason=LENGTH if n == 2 else None)
        for n, ids in enumerate([PROMPT, other], 1)
    )
    error = agreed(body).decode_error
    assert error.kind == "prefix"
    assert f"had 3 tokens, this one has {len(other)}" in str(error)


def test_a_prompt_that_is_written_differently_is_the_same() -> None:
    """A router may serialize the event again."""
    raw = event([1], 1, top=prompt_field(PROMPT))
    spaced = event([2], 2, top=prompt_field(PROMPT)).replace(b"[0,2147483647,7]", b"[ 0 ,2147483647, 7 ]")
    assert b" 7 ]" in spaced
    last = event([3], 3, top=prompt_field(PROMPT), reason=LENGTH)
    assert agreed(raw + spaced + spaced + last).reading.prompt_token_ids == PROMPT


def test_of_two_prompts_in_one_event_the_last_counts() -> None:
    twice = event([1], 1, top=prompt_field(PROMPT), reason=LENGTH).replace(
        b'"prompt_token_ids"', b'"prompt_token_ids":[9],"prompt_token_ids"'
    )
    assert agreed(twice).reading.prompt_token_ids == PROMPT
    choices = vllm_event([1], "stop", wire="completions")
    first = choices.replace(b'"choices"', b'"choices":[{"index":0,"prompt_token_ids":[1,2,3]}],"choices"')
    assert agreed(first, "vllm-completions").reading.prompt_token_ids is None


def test_a_repeated_prompt_takes_no_memory() -> None:
    prompt = list(range(100_000, 150_000))
    parser = parser_for("sglang")
    parser.feed(event([1], 1, top=prompt_field(prompt), prompt_tokens=None))
    held = sys.getsizeof(parser)
    assert held < 4 * len(prompt) + 20_000
    for n in range(2, 20):
        parser.feed(event([n], n, top=prompt_field(prompt), prompt_tokens=None))
    assert sys.getsizeof(parser) < held + 20_000
    taken = parser.take().prompt_token_ids
    assert taken is not None
    assert taken.tolist() == prompt


def test_an_event_with_a_bad_prompt_applies_nothing() -> None:
    folded = fold(event([1], 1) + event([2], 2, top=prompt_field([5, 6, -1])))
    assert (folded.reading.token_ids, folded.reading.prompt_token_ids) == ([1], None)
