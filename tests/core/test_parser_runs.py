"""Members that repeat those of the last event are passed over as a run, and never wrongly."""

from __future__ import annotations

import random

import pytest

from support.bodies import event, finish, queued_abort, sse
from support.folding import agreed

SGLANG = {
    "id": ['"x"'],
    "finish_reason": ["null"],
    "prompt_tokens": ["3", "null"],
    "cached_tokens": ["1", "2", "null"],
    "weight_version": ['"a"', '"b"', "null", "7"],
    "routed_experts": ["null"],
    "a": ["1", "12", "null", '"x"', "[1]", '{"a":1}'],
    "b": ["1", "0.5", "true"],
    "c": ["1", "12"],
}
VLLM_TOP = {
    "request_id": ['"x"'],
    "output_mode": ['"tokens"', '"text"', "null"],
    "weight_version": ['"a"', "null"],
    "a": ["1", "12", "[]"],
    "error": ["null"],
}
VLLM_CHOICE = {
    "index": ["0", "null"],
    "finish_reason": ["null"],
    "stop_reason": ["null"],
    "routed_experts": ["null"],
    "sampling_mask": ["null", "[[1]]"],
    "weight_version": ['"c"', "null"],
    "weight_versions": ["null"],
    "b": ["1", "2"],
}
VLLM_USAGE = {"prompt_tokens": ["3", "null"], "total_tokens": ["7", "8"], "prompt_tokens_details": ["null", "{}"]}


class Members:
    """The members of an object, which change a little from event to event."""

    def __init__(self, rng: random.Random, values: dict[str, list[str]]) -> None:
        self.rng, self.values = rng, values
        self.now = [(key, rng.choice(values[key])) for key in rng.sample(sorted(values), rng.randint(1, len(values)))]

    def next(self) -> list[str]:
        """The members of the next event, as they are spelled."""
        rng = self.rng
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            at = rng.randrange(len(self.now) + 1)
            key = rng.choice(sorted(self.values))
            way = rng.choice(["value", "value", "drop", "add", "swap"])
            if way == "add":
                self.now.insert(at, (key, rng.choice(self.values[key])))
            elif at < len(self.now):
                key = self.now[at][0]
                if way == "value":
                    self.now[at] = (key, rng.choice(self.values[key]))
                elif way == "drop":
                    del self.now[at]
                else:
                    self.now[at:] = self.now[at:][::-1]
        return [f'"{key}":{value}{" " if rng.random() < 0.02 else ""}' for key, value in self.now]


@pytest.mark.parametrize("seed", range(60))
def test_sglang_s_repeated_members_are_read_as_if_each_were_parsed(seed: int) -> None:
    rng = random.Random(seed)
    members = Members(rng, SGLANG)
    body = b""
    for n in range(1, 16):
        told = [f'"output_token_logprobs":[[-0.5,{n},null]]', f'"completion_tokens":{n}']
        spelled = members.next()
        at = rng.choice([0, len(spelled), len(spelled) // 2])
        meta_info = ",".join([*spelled[:at], *told, *spelled[at:]])
        body += sse(f'{{"text":"x","meta_info":{{{meta_info}}}}}'.encode())
    agreed(body, aborted=True)


@pytest.mark.parametrize("seed", range(60))
def test_vllm_s_repeated_members_are_read_as_if_each_were_parsed(seed: int) -> None:
    rng = random.Random(seed)
    top, choice, usage = (Members(rng, values) for values in (VLLM_TOP, VLLM_CHOICE, VLLM_USAGE))
    body = b""
    for n in range(1, 16):
        told = ['"token_ids":[5]', '"logprobs":{"content":[{"token_id":5,"logprob":-0.5}]}']
        inner = ",".join([*choice.next(), *told, *choice.next()[:0]])
        counts = ",".join([*usage.next(), f'"completion_tokens":{n}'])
        outer = [*top.next(), f'"choices":[{{{inner}}}]', f'"usage":{{{counts}}}']
        body += sse(("{" + ",".join(outer) + "}").encode())
    agreed(body, "vllm", aborted=True)


@pytest.mark.parametrize("version", [None, "null", "a", 7])
def test_a_version_that_is_repeated_is_that_of_the_new_tokens_and_null_is_none(version: str | int | None) -> None:
    body = b"".join(event([n], n, text="a", weight_version=version) for n in range(1, 5))
    told = None if version is None else str(version)
    assert agreed(body, aborted=True).reading.version_spans == [(told, 0, 4)]


def test_prompt_tokens_that_are_repeated_tell_where_an_abort_was_written() -> None:
    told = b"".join(event([n], n, text="ab") for n in range(1, 5))
    running = told + event([], 4, text="", reason=finish("abort"))
    queued = told + queued_abort([1, 2, 3, 4], 4, text="abababab")
    assert agreed(running).reading.text == agreed(queued).reading.text == "abababab"


def test_a_run_that_ended_an_object_does_not_hide_what_comes_behind_it_later() -> None:
    meta = '"output_token_logprobs":[[-0.5,{n},null]],"completion_tokens":{n},"a":1,"b":2'
    more = ["", "", "", ',"weight_version":"v"', "", ',"c":3', ',"a":4', ""]
    events = [f'{{"text":"x","meta_info":{{{meta.replace("{n}", str(n))}{last}}}}}' for n, last in enumerate(more, 1)]
    reading = agreed(b"".join(sse(event.encode()) for event in events), aborted=True).reading
    assert reading.version_spans == [(None, 0, 3), ("v", 3, 4), (None, 4, 8)]
    assert reading.meta["a"] == 1


@pytest.mark.parametrize("changed", range(5))
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_value_that_goes_and_comes_back_is_the_latest_one(changed: int, times: int) -> None:
    keys = ["cached_tokens", "weight_version", "a", "b", "c"]
    body = b""
    for n, value in enumerate([1] * 3 + [2] * times + [1] * 2 + [2], start=1):
        members = [f'"{key}":{value if place == changed else 1}' for place, key in enumerate(keys)]
        told = [f'"output_token_logprobs":[[-0.5,{n},null]]', f'"completion_tokens":{n}']
        body += sse(('{"text":"x","meta_info":{' + ",".join(members + told) + "}}").encode())
        reading = agreed(body, aborted=True).reading
        assert [reading.cached_tokens, *(reading.meta[key] for key in keys[1:])][changed] == value
