"""Penalties over several calls: what an engine counts anew is resumed and noted, or restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from streamfold import CompletionOptions
from streamfold.engines.detect import ENGINES
from streamfold.loopback import Faults
from streamfold.samples.merging import merge
from streamfold.samples.sample import Sample
from support.completing import SOON, completed, differs, sample_of
from support.replay import PROMPT

if TYPE_CHECKING:
    from streamfold.loopback import Loopback
    from streamfold.samples.options import ResumePenalties
    from support.speaking import Speech

PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
NOTE, DROPPED = "streamfold_resumed_penalties", "streamfold_restarted_tokens"
LENGTH: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def counts_anew(speech: Speech, name: str) -> bool:
    return name in ENGINES[speech.engine].resets_penalties


def cut_at(speech: Speech, *events: int) -> Faults:
    """The first streams break off after as many events."""
    path = ENGINES[speech.engine].path
    return Faults(
        [{"kind": "cut", "after_events": after, "requests": i, "path": path} for i, after in enumerate(events)]
    )


async def over_several_calls(
    speech: Speech, engine: Loopback, resume: ResumePenalties, *events: int, **params: Any
) -> Sample:
    engine.faults = cut_at(speech, *events)
    async with speech.client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
        sample = await completed(client, sample_of(**LENGTH, **params), resume_penalties=resume)
    assert engine.faults.done["cut"] == len(events)
    return sample


@pytest.mark.parametrize("name", PENALTIES)
async def test_by_default_a_response_with_penalties_goes_on_and_each_call_that_continues_it_is_noted(
    speech: Speech, name: str
) -> None:
    with speech.loopback() as engine:
        asked = {name: PENALTIES[name]}
        sample = await over_several_calls(speech, engine, "continue", 10, 10, **asked)
        whole = speech.undisturbed(engine, PROMPT, {**LENGTH, **asked})
        assert sample.tokens[:13] == [*PROMPT, *whole.token_ids[:10]]
        assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 40)
        assert DROPPED not in sample.metadata
        if counts_anew(speech, name):
            assert sample.tokens[13:] != whole.token_ids[10:], "it is another sample from the cut on"
            assert sample.metadata[NOTE] == 2
        else:
            assert differs(speech, sample, engine) == {}
            assert NOTE not in sample.metadata


@pytest.mark.parametrize("name", PENALTIES)
async def test_restarted_responses_with_penalties_are_what_one_call_gives(speech: Speech, name: str) -> None:
    with speech.loopback() as engine:
        sample = await over_several_calls(speech, engine, "restart", 10, 10, **{name: PENALTIES[name]})
        assert differs(speech, sample, engine) == {}
    assert NOTE not in sample.metadata
    assert (DROPPED in sample.metadata) is counts_anew(speech, name), "restarted only where it has to be"


@pytest.mark.parametrize("resume", ["continue", "restart"])
@pytest.mark.parametrize(
    "neutral", [{"frequency_penalty": 0, "repetition_penalty": 1.0}, {"presence_penalty": None}, {}]
)
async def test_without_a_penalty_that_has_an_effect_nothing_is_noted_or_restarted(
    speech: Speech, resume: ResumePenalties, neutral: dict[str, Any]
) -> None:
    with speech.loopback() as engine:
        sample = await over_several_calls(speech, engine, resume, 10, **neutral)
        assert differs(speech, sample, engine) == {}
    assert not {NOTE, DROPPED} & sample.metadata.keys()


async def test_a_call_that_generates_nothing_continues_nothing(speech: Speech) -> None:
    with speech.loopback() as engine:
        async with speech.client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
            sample = sample_of(**LENGTH, frequency_penalty=0.5)
            merge(sample, await client.generate(PROMPT, {**LENGTH, "max_new_tokens": 5}), text="abcde")
            sample.status = Sample.Status.ABORTED
            assert (await completed(client, sample, aborted=lambda: True)).metadata.get(NOTE) is None
            await completed(client, sample)
    assert sample.metadata[NOTE] == 1


async def test_of_a_later_turn_only_what_the_turn_has_generated_is_restarted(speech: Speech) -> None:
    """A new turn counts anew in an uninterrupted call too: starting it is no resume."""
    asked: dict[str, Any] = {**LENGTH, "frequency_penalty": 0.5}
    with speech.loopback() as engine:
        engine.faults = cut_at(speech, 10)
        async with speech.client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
            sample = sample_of(**asked)
            sample.append_response_tokens(tokens=[300, 301], log_probs=[0.0, 0.0], text=" a tool", trainable=False)
            await completed(client, sample, resume_penalties="restart")
        whole = speech.undisturbed(engine, [*PROMPT, 300, 301], {**asked, "max_new_tokens": 38})
    assert sample.tokens == [*PROMPT, 300, 301, *whole.token_ids]
    assert sample.response.startswith(" a tool")
    assert (sample.metadata[DROPPED], NOTE in sample.metadata) == (10, False)


@pytest.mark.parametrize("value", ["raise", "", None, True])
def test_any_other_policy_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match='resume_penalties must be "continue" or "restart"'):
        CompletionOptions(resume_penalties=value)
