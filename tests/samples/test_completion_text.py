"""The text of a response that took several calls: what one uninterrupted call of the engine sends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, StreamTruncated
from streamfold.engines.detect import ENGINES
from streamfold.loopback import Faults, Loopback
from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.samples.completion import complete
from streamfold.samples.merging import merge
from streamfold.samples.sample import Sample
from support.completing import SOON, answers, completed, sample_of, truncated
from support.exactly import exactly
from support.replay import DONE, PROMPT, Replay, event, stream
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.speaking import Speech

OPEN = [300, 0xF0, 0x9F]  # a prompt that ends in the middle of a character


async def in_two_calls(engine: Loopback, prompt: Sequence[int], border: int, params: dict[str, Any]) -> Sample:
    """A sample whose first call was aborted after ``border`` tokens."""
    async with Client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
        sample = sample_of(prompt, **params)
        merge(sample, await client.generate(prompt, {**params, "max_new_tokens": border}))
        sample.status = Sample.Status.ABORTED
        return await completed(client, sample)


@pytest.mark.parametrize("border", range(1, 6))
async def test_a_character_that_the_prompt_leaves_incomplete_is_in_no_text(border: int) -> None:
    """vllm-project/vllm#48853. An engine takes it for a character of the prompt."""
    params: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1, "ignore_eos": True}
    with Loopback() as engine:
        for seed in range(4):
            asked = {**params, "sampling_seed": seed}
            expected = engine.undisturbed(OPEN, asked)
            sample = await in_two_calls(engine, OPEN, border, asked)
            assert sample.tokens == [*OPEN, *expected.token_ids]
            assert sample.response == "".join(expected.pieces or [])
            assert "streamfold_text_joined" not in sample.metadata


@pytest.mark.parametrize("last", ["b", ""])
async def test_without_a_tokenizer_a_text_of_two_calls_is_marked_as_joined_even_if_the_second_is_empty(
    last: str,
) -> None:
    """What the first call has held back is lost all the same."""
    first = event([20], 1)
    second = event([21], 1, "stop", prompt_tokens=4).replace(b'"text": "v"', b'"text": "%b"' % last.encode())
    async with (
        Replay(answers(truncated(first), stream(second, DONE))) as server,
        Client(server.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of())
    assert (sample.response, sample.metadata["streamfold_text_joined"]) == ("u" + last, True)


@pytest.mark.parametrize("cut_at", [None, 2])
@pytest.mark.parametrize("trims", [True, False])
async def test_a_text_decoded_by_the_client_has_a_stop_token_only_if_the_engines_text_would(
    trims: bool, cut_at: int | None
) -> None:
    params: dict[str, Any] = {"max_new_tokens": 400, "temperature": 0, "skip_special_tokens": False}
    if not trims:
        params["no_stop_trim"] = True
    with (
        Loopback(stop_probability=1 / 20, skip_tokenizer_init=True) as engine,
        Loopback(stop_probability=1 / 20) as with_text,
    ):
        expected = with_text.undisturbed(PROMPT, params)
        assert expected.finish == {"type": "stop", "matched": engine.tokenizer.eos_token_id}
        async with Client(engine.url, tokenizer=engine.tokenizer) as client:
            sample = sample_of(**params)
            if cut_at is not None:
                first = await client.generate(PROMPT, {**params, "max_new_tokens": cut_at})
                merge(sample, first, text=engine.tokenizer.decode(first.token_ids.tolist()))
                sample.status = Sample.Status.ABORTED
            await completed(client, sample)
    assert sample.tokens == [*PROMPT, *expected.token_ids]
    assert sample.response == "".join(expected.pieces or [])
    assert sample.response.endswith("<|im_end|>") is not trims


@pytest.mark.parametrize("speech", [SGLANG, VLLM], ids=repr)
@pytest.mark.parametrize("more", [{}, {"no_stop_trim": True}, {"skip_special_tokens": True}])
async def test_a_response_aborted_at_its_eos_equals_one_that_was_not_aborted(
    speech: Speech, more: dict[str, Any]
) -> None:
    params: dict[str, Any] = {"max_new_tokens": 400, "temperature": 0, "skip_special_tokens": False, **more}
    with speech.loopback(stop_probability=1 / 20) as engine:
        expected = speech.undisturbed(engine, PROMPT, params)
        ends = {engine.tokenizer.eos_token_id}
        async with Client(engine.url, engine=speech.engine, tokenizer=engine.tokenizer, retries=SOON) as client:
            samples = [sample_of(**params) for _ in range(2)]
            for sample in samples:
                sample.session_id = "the same"
            whole = await completed(client, samples[0], stop_ids=ends)
            engine.faults = Faults([{"kind": "abort", "after_tokens": len(expected.token_ids) - 1, "times": 1}])
            aborted = await completed(client, samples[1], stop_ids=ends)
            assert engine.faults.done["abort"] == 1
    assert exactly(aborted) == exactly(whole)
    assert whole.tokens[-1] in ends


@pytest.mark.parametrize(
    "options", [{"engine": "vllm"}, {"engine": "sglang", "skip_tokenizer_init": True}], ids=["vllm", "sglang"]
)
@pytest.mark.parametrize("border", range(1, 6))
async def test_without_text_a_response_behind_an_incomplete_character_is_decoded_without_the_prompt(
    options: dict[str, Any], border: int
) -> None:
    params: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1, "ignore_eos": True}
    with Loopback(stop_probability=0, **options) as engine:
        async with Client(engine.url, engine=options["engine"], tokenizer=engine.tokenizer, retries=SOON) as client:
            for seed in range(4):
                asked = {**params, "sampling_seed": seed}
                whole = await completed(client, sample_of(OPEN, **asked))
                sample = sample_of(OPEN, **asked)
                first = await client.generate(OPEN, {**asked, "max_new_tokens": border})
                merge(sample, first, text=engine.tokenizer.decode(first.token_ids.tolist()))
                sample.status = Sample.Status.ABORTED
                await completed(client, sample)
                assert (sample.tokens, sample.response) == (whole.tokens, whole.response)
                assert "streamfold_text_joined" not in sample.metadata


@pytest.mark.parametrize("prompt", [PROMPT, OPEN], ids=["whole", "open"])
@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"skip_special_tokens": False}], ids=["halves", "ends"])
async def test_where_vllm_sends_text_that_of_two_calls_equals_that_of_one(
    prompt: list[int], params: dict[str, Any]
) -> None:
    """It sends a character with its last token, never an incomplete one, and does not report its EOS."""
    with Loopback(engine="vllm", stop_probability=1 / 12) as engine:
        async with Client(engine.url, engine="vllm-completions", tokenizer=engine.tokenizer, retries=SOON) as client:
            for seed in range(40):
                asked = {**params, "max_new_tokens": 6 + seed % 8, "temperature": 1, "sampling_seed": seed}
                whole = await completed(client, sample_of(prompt, **asked))
                sample = sample_of(prompt, **asked)
                border = min(1 + seed % 5, whole.response_length - 1)
                if border:
                    merge(sample, await client.generate(prompt, {**asked, "max_new_tokens": border}))
                    sample.status = Sample.Status.ABORTED
                await completed(client, sample)
                assert (sample.tokens, sample.response) == (whole.tokens, whole.response)
                assert "streamfold_text_joined" not in sample.metadata


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("border", [None, 1, 2])
async def test_a_text_decoded_by_the_client_ends_at_its_stop_string_within_the_last_token(
    border: int | None, shows: bool
) -> None:
    """As the engine's text does, for one call and for two."""
    params: dict[str, Any] = {"stop": ["ous"], **({"no_stop_trim": True} if shows else {})}
    tokenizer = MockTokenizer()
    ids = tokenizer.encode(" have water house")
    before = border or 0
    last = stream(VLLM.part(ids[before:], prompt=3 + before, finish="stop", matched="ous"), DONE)
    first = [] if border is None else [truncated(VLLM.part(ids[:border]))]
    async with (
        VLLM.replay(answers(*first, last)) as server,
        VLLM.client(server.url, tokenizer=tokenizer, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(**params))
    assert sample.tokens == [*PROMPT, *ids]
    assert sample.response == " have water h" + "ous" * shows


async def test_a_stop_token_given_for_one_sample_does_not_end_another() -> None:
    """Samples share only the model's EOS."""
    wished = stream(event([10, 9], 2, {"type": "stop", "matched": 9}), DONE)
    rest = stream(event([11], 1, "length", prompt_tokens=5), DONE)
    async with (
        Replay(answers(wished, truncated(event([10, 9], 2)), rest)) as server,
        Client(server.url, retries=SOON) as client,
    ):
        shared: set[int] = set()
        first = await completed(client, sample_of(stop_token_ids=[9]), stop_ids=shared)
        second = await completed(client, sample_of(), stop_ids=shared)
    assert first.tokens == [*PROMPT, 10, 9]
    assert second.tokens == [*PROMPT, 10, 9, 11]
    assert shared == set()


@pytest.mark.parametrize("params", [{"stop_token_ids": [1]}, {"stop": ["b"]}, {"stop": "ab"}])
async def test_a_response_truncated_at_its_limit_is_truncated_even_if_a_stop_would_have_completed_it(
    params: dict[str, Any],
) -> None:
    """SGLang checks the length first, and leaves the text as it is."""
    async with Replay(truncated(event([0], 1), event([1], 2))) as server, Client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(max_new_tokens=2, **params))
        assert len(server.generates) == 1
    assert (sample.status, sample.response) == (Sample.Status.TRUNCATED, "ab")


@pytest.mark.parametrize("metadata", [{}, None])
async def test_a_text_of_several_calls_is_decoded_again_even_if_the_last_one_generates_no_token(
    speech: Speech, metadata: dict[str, Any] | None
) -> None:
    smile = list("🙂".encode())
    parts = [speech.part(smile[:2]), speech.part(smile[2:], prompt=5), speech.part([], prompt=7, finish="stop")]
    with Loopback() as engine:
        tokenizer = engine.tokenizer
    async with (
        speech.replay(answers(truncated(parts[0]), truncated(parts[1]), stream(parts[2], DONE))) as server,
        speech.client(server.url, tokenizer=tokenizer, retries=SOON) as client,
    ):
        sample = Sample(tokens=list(PROMPT), metadata=metadata)  # type: ignore[arg-type]  # hosts' may be None
        with contextlib.suppress(StreamTruncated):
            await complete(client, sample, {"max_new_tokens": 8}, resume="raise")
        sample.response = ""  # the engine has held an incomplete character back
        sample.metadata = metadata  # type: ignore[assignment]
        await complete(client, sample, {"max_new_tokens": 8})
    assert (sample.response, sample.tokens[len(PROMPT) :]) == ("🙂", smile)
    assert sample.status is Sample.Status.COMPLETED
    assert sample.metadata.keys() == {"streamfold_resumed", "streamfold_written"}


@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokenizer", "none"])
@pytest.mark.parametrize("kind", ["sglang", "vllm", "vllm-completions"])
@pytest.mark.parametrize("shown", [True, False], ids=["shown", "trimmed"])
async def test_a_stop_string_that_is_split_between_two_calls_ends_the_response(
    kind: Any, *, tokenizer: bool, shown: bool
) -> None:
    """No engine sends an incomplete character, and some hold back what may become a stop string."""
    speech = SGLANG if kind == "sglang" else VLLM
    with speech.loopback(stop_probability=0) as engine:
        plain: dict[str, Any] = {"max_new_tokens": 40, "sampling_seed": 0}
        if shown:
            plain["no_stop_trim"] = True
        text = engine.tokenizer.decode(speech.undisturbed(engine, PROMPT, plain).token_ids)
        split = next(i for i, character in enumerate(text) if ord(character) > 0xFFFF)  # four tokens
        stops = [text[split], text[split - 1 : split + 1], text[split : split + 2], "e " + text[text.index("e ") + 2]]
        async with Client(
            engine.url, engine=kind, tokenizer=engine.tokenizer if tokenizer else None, retries=SOON
        ) as client:
            for stop in stops:
                params = {**plain, "stop": [stop]}
                expected = speech.undisturbed(engine, PROMPT, params)
                assert expected.finish == {"type": "stop", "matched": stop}
                for after_events in range(1, len(expected.token_ids)):
                    path = ENGINES[kind].path
                    engine.faults = Faults([{"kind": "cut", "after_events": after_events, "times": 1, "path": path}])
                    sample = await completed(client, sample_of(**params))
                    assert sample.tokens == [*PROMPT, *expected.token_ids], f"{stop!r} truncated after {after_events}"


@pytest.mark.parametrize("kind", ["sglang", "vllm", "vllm-completions"])
async def test_a_response_truncated_outside_any_stop_string_is_resumed(kind: Any) -> None:
    """With a tokenizer the text is known, so that no token has to be generated twice."""
    speech = SGLANG if kind == "sglang" else VLLM
    faults = Faults([{"kind": "cut", "after_events": 5, "times": 1, "path": ENGINES[kind].path}])
    with speech.loopback(stop_probability=0, faults=faults) as engine:
        async with Client(engine.url, engine=kind, tokenizer=engine.tokenizer, retries=SOON) as client:
            sample = await completed(client, sample_of(max_new_tokens=40, stop=["\U0001f642 never said", "nor that"]))
            assert sample.metadata["streamfold_resumed"] == 1
    assert "streamfold_restarted_tokens" not in sample.metadata


class Counted:
    """A tokenizer that counts how often it decodes many tokens."""

    def __init__(self, tokenizer: MockTokenizer) -> None:
        self.tokenizer = tokenizer
        self.times = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.times += len(ids) > 20
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


async def test_a_response_is_decoded_once_before_each_call_and_once_at_its_end_but_not_when_it_is_aborted() -> None:
    """Thousands of long ones are aborted at once, and resumed at once."""
    with Loopback(stop_probability=1 / 200) as engine:
        tokenizer = Counted(engine.tokenizer)
        async with Client(engine.url, tokenizer=tokenizer, retries=SOON) as client:
            sample = sample_of(max_new_tokens=4000, stop=["never said"])
            times = []
            for cuts in range(3):
                engine.faults = Faults([{"kind": "abort", "after_tokens": 40, "times": 1}])
                await completed(client, sample, resume_aborts=False)
                assert (sample.response_length > 40 * cuts, sample.status) == (True, Sample.Status.ABORTED)
                times.append(tokenizer.times)
            # Not by a reset, which takes along what the engine's kernel has not sent yet.
            engine.faults = Faults([{"kind": "cut", "how": "fin", "after_events": 40, "times": 1}])
            await completed(client, sample)
    assert (sample.status, sample.metadata["streamfold_resumed"]) == (Sample.Status.COMPLETED, 1)
    assert times == [0, 0, 1], "the text of one call is known"
    assert tokenizer.times == 4
