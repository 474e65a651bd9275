"""Text at the border of two requests: the engine decodes a response after the last tokens of its prompt."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from streamfold.loopback import Faults, Loopback
from streamfold.loopback.core.model import PIECES
from support.loopback_http import PROMPT, Answer, generate, undisturbed
from support.showing import HALF, shown_texts

if TYPE_CHECKING:
    from collections.abc import Iterator

EMOJI = "🙂"


@pytest.fixture(scope="module")
def engine() -> Iterator[Loopback]:
    with Loopback(incremental=True) as running:
        yield running


def text(answer: Answer) -> str:
    return "".join(frame["text"] for frame in answer.frames)


def before_emoji(engine: Loopback) -> list[int]:
    """The ids after which the model says a word and an emoji."""
    ids = engine.undisturbed(PROMPT, {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}).token_ids
    emoji, first_word = list(EMOJI.encode()), engine.tokenizer.first_word_id
    start = next(i for i in range(9, len(ids)) if ids[i : i + 4] == emoji and min(ids[i - 1], ids[i + 4]) >= first_word)
    return PROMPT + ids[: start - 1]


def told_at(answer: Answer) -> list[str]:
    """The whole text up to each event."""
    texts = [frame["text"] for frame in answer.frames]
    return ["".join(texts[: i + 1]) for i in range(len(texts))] if answer.dialect == "sglang-incremental" else texts


def test_an_emoji_cut_in_three_vanishes_at_the_borders(engine: Loopback) -> None:
    """Each part is what the engine tells: half of the character, nothing, and what follows it."""
    start = before_emoji(engine)
    whole = generate(engine, input_ids=start, params={"max_new_tokens": 6})
    first_word, *emoji, next_word = whole.ids
    assert bytes(emoji).decode() == EMOJI
    word = [engine.tokenizer.decode([token]) for token in (first_word, next_word)]
    assert text(whole) == f"{word[0]}{EMOJI}{word[1]}"

    prompt, parts = start, []
    for count in (2, 2, 2):  # a word and a byte, two bytes, a byte and a word
        answer = generate(engine, input_ids=prompt, params={"max_new_tokens": count})
        prompt = prompt + answer.ids
        parts.append(text(answer))
    assert prompt == start + whole.ids, "no token is lost"
    assert parts == [word[0] + HALF, "", word[1]]
    assert engine.tokenizer.decode(prompt[len(start) :]) == text(whole), "whoever decodes all ids has the character"


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_character_that_the_prompt_leaves_open_is_in_no_text_of_an_aborted_and_resumed_response(
    incremental: bool, held: int
) -> None:
    with Loopback(incremental=incremental) as engine:
        start = before_emoji(engine)
        engine.faults = Faults([{"kind": "abort", "after_tokens": held, "requests": 0}])
        first = generate(engine, input_ids=start, params={"max_new_tokens": 40})
        rest = generate(engine, input_ids=start + first.ids, params={"max_new_tokens": 40 - 1 - held})
        assert engine.faults.done == {"abort": 1}
        assert len(first.ids) == 1 + held
        texts = [told_at(answer)[-1] for answer in (first, rest)]
        whole = told_at(generate(engine, input_ids=start, params={"max_new_tokens": 40}))[-1]
        assert EMOJI not in texts[0] + texts[1][:5]
        assert whole == texts[0].replace(HALF, EMOJI) + texts[1]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_response_that_only_goes_on_with_the_character_has_no_text(engine: Loopback, left: int) -> None:
    prompt = engine.tokenizer.encode(f" the {EMOJI}")[:-left]
    answer = generate(engine, input_ids=prompt, params={"max_new_tokens": left})
    completed = engine.tokenizer.decode([*prompt, *answer.ids])
    assert (len(completed), completed.isascii(), HALF in completed) == (len(" the ") + 1, False, False)
    assert [frame["text"] for frame in answer.frames] == [""] * left


def test_after_a_prompt_of_whole_characters_the_text_is_that_of_the_response_alone(engine: Loopback) -> None:
    tokenizer = engine.tokenizer
    for prompt in (*PIECES, " the", "the water", "<|im_start|>", "a", "\ufffd"):
        ids = tokenizer.encode(prompt)
        for skip in (False, True):
            params = {"max_new_tokens": 120, "skip_special_tokens": skip, "temperature": 1}
            reply = undisturbed(engine, input_ids=ids, params=params)
            assert "".join(reply.pieces or []) == tokenizer.decode(reply.token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("incremental", [False, True])
def test_every_event_tells_what_the_obvious_decoding_gives(interval: int, incremental: bool) -> None:
    chance = random.Random(interval)
    halves = 0
    with Loopback(incremental=incremental, stream_interval=interval, token_rate=5000) as engine:
        tokenizer = engine.tokenizer
        for seed in range(40):
            pieces = "".join(chance.choice(PIECES) for _ in range(3))
            prompt = (tokenizer.encode(" the") + list(pieces.encode()))[: chance.randrange(1, 30)]
            halves += tokenizer.decode(prompt).endswith(HALF)
            skip = chance.random() < 0.5
            params: dict[str, Any] = {"temperature": 1, "sampling_seed": seed, "skip_special_tokens": skip}
            answer = generate(engine, input_ids=prompt, params={**params, "max_new_tokens": chance.randrange(1, 40)})
            counts = [frame["meta_info"]["completion_tokens"] for frame in answer.frames]
            assert told_at(answer) == list(shown_texts(tokenizer, prompt, answer.ids, counts, skip=skip))
    assert halves > 5


def test_what_is_not_streamed_has_the_text_of_the_stream(engine: Loopback) -> None:
    prompt = before_emoji(engine)
    word_and_half = generate(engine, input_ids=prompt, params={"max_new_tokens": 3}).ids
    streamed = generate(engine, input_ids=prompt + word_and_half)
    assert generate(engine, input_ids=prompt + word_and_half, stream=False).json["text"] == text(streamed)
    reply = undisturbed(engine, input_ids=prompt + word_and_half)
    assert "".join(reply.pieces or []) == text(streamed)


@pytest.mark.parametrize("options", [{"stream_interval": 4}, {"stream_interval": 10}, {"tokens_per_step": 5}])
@pytest.mark.parametrize("incremental", [False, True])
def test_where_an_event_brings_several_tokens_characters_are_repeated_and_the_tokens_are_right(
    options: dict[str, Any], incremental: bool, soak: bool
) -> None:
    """sgl-project/sglang#31598, in the streams of 0.5.15 and of 0.5.23 alike."""
    repeated = 0
    model: dict[str, Any] = {"piece_probability": 1.0}
    with Loopback(incremental=incremental, **model, **options) as engine, Loopback(**model) as one_by_one:
        for seed in range(60 if soak else 40):
            params = {"temperature": 1, "sampling_seed": seed, "max_new_tokens": 200, "ignore_eos": True}
            answer = generate(engine, params=params)
            expected = undisturbed(one_by_one, params=params)
            assert answer.ids == expected.token_ids
            decoded = engine.tokenizer.decode(answer.ids)
            shown = told_at(answer)[-1]
            assert "".join(expected.pieces or []) == decoded, "not where each event brings one"
            repeated += shown != decoded
            assert set(shown) <= set(decoded)
            assert len(shown) >= len(decoded)
    assert repeated > 5
