"""The engine's text against that of the tokens: characters sent twice are corrected, anything else is left alone.

sgl-project/sglang#31598: where an event brings several tokens, SGLang's streamed text repeats characters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client
from streamfold.loopback import Faults, Loopback
from support.completing import SOON, answers, completed, sample_of
from support.replay import DONE, FIN, Replay, event, stream
from support.showing import shown_texts
from support.speaking import SGLANG
from support.tokenizers import EOS, ByteFallback, ByteLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold.samples.sample import Sample
    from support.replay import Step

CORRECTED, UNCHECKED, JOINED = (f"streamfold_{name}" for name in ("corrected_text", "unchecked_text", "text_joined"))
DENSE: dict[str, Any] = {"piece_probability": 1.0}  # text without spaces
LENGTH: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
SEVERAL: list[dict[str, Any]] = [{"stream_interval": n} for n in (4, 5, 10)] + [{"tokens_per_step": 5}]

# Prompts and responses as pieces, the end, and what the engine shows of the response if it is not streamed.
STOP: dict[str, Any] = {"stop": ["天气"]}
SMILE = "🙂".encode()
CASES: dict[str, tuple[list[Any], list[Any], dict[str, Any], Any, str]] = {
    "length": ([" the"], ["今天", "天气", "很好", "、", "今天"], {}, None, "今天天气很好、今天"),
    "bytes": ([" the"], [*"今天天气很好、今天"], {}, None, "今天天气很好、今天"),
    "stop string": ([" the"], ["今天", "、", "天气"], STOP, "天气", "今天、"),
    "stop string shown": ([" the"], ["今天", "、", "天气"], {**STOP, "no_stop_trim": True}, "天气", "今天、天气"),
    "eos skipped": ([" the"], ["今天", "天气", EOS], {}, EOS, "今天天气"),
    "eos hidden": ([" the"], ["今天", "天气", EOS], {"skip_special_tokens": False}, EOS, "今天天气"),
    "eos shown": (
        *([" the"], ["今天", "天气", EOS]),
        {"skip_special_tokens": False, "no_stop_trim": True},
        *(EOS, "今天天气<|eos|>"),
    ),
    "stop token": ([" the"], ["今天", "。"], {"stop_token_ids": [ByteLevel().encode("。")[0]]}, "。", "今天"),
    "leading space": (["today"], [" river", " the", "今天"], {}, None, " river the今天"),
    "spaces": (["today"], [" ", " a", " ", " "], {}, None, "  a  "),
    "emoji": ([" the"], [SMILE, " river", SMILE], {}, None, "🙂 river🙂"),
    "half an emoji": ([" the"], ["今天", SMILE[:3]], {}, None, "今天\ufffd"),
}
ACROSS: dict[str, tuple[list[Any], list[Any]]] = {
    "one of four": ([" the", SMILE[:1]], [SMILE[1:], " river", "天气"]),
    "three of four": ([" the", SMILE[:3]], [SMILE[3:], " river", "天气"]),
    "half a token": ([" the", SMILE[:2]], [SMILE[2:] + b" s", "ing", "天气"]),
}


def ids_of(tokenizer: ByteLevel, pieces: Sequence[Any]) -> list[int]:
    return [token for piece in pieces for token in ([piece] if piece == EOS else tokenizer.encode(piece))]


def events_of(  # noqa: PLR0917  # what an engine is given
    tokenizer: ByteLevel, prompt: list[int], ids: list[int], interval: int, params: dict[str, Any], matched: Any
) -> list[bytes]:
    """The stream that SGLang sends, ``interval`` tokens an event."""
    counts = [*range(interval, len(ids), interval), len(ids)]
    shown = shown_texts(
        *(tokenizer, prompt, ids, counts),
        skip=params.get("skip_special_tokens", True),
        matched=matched,
        no_stop_trim=params.get("no_stop_trim", False),
    )
    reason = {"type": "length"} if matched is None else {"type": "stop", "matched": matched}
    payloads, sent, before = [], "", 0
    for count, text in zip(counts, shown, strict=True):
        frame = json.loads(
            event(ids[before:count], count, reason if count == len(ids) else None, prompt_tokens=len(prompt))[6:]
        )
        payloads.append(b"data: " + json.dumps({**frame, "text": text[len(sent) :]}).encode() + b"\n\n")
        sent, before = text, count
    return payloads


async def finished(tokenizer: ByteLevel | None, prompt: list[int], steps: list[Step], **params: Any) -> Sample:
    async with Replay(steps) as server, Client(server.url, tokenizer=tokenizer, retries=SOON) as client:
        return await completed(client, sample_of(prompt, **{"max_new_tokens": 100, **params}))


# Left alone.


@pytest.mark.parametrize("tokenizer", [ByteLevel(), ByteFallback()], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("case", CASES)
async def test_a_text_that_the_engine_shows_of_the_tokens_is_not_changed(tokenizer: ByteLevel, case: str) -> None:
    before, response, params, end, expected = CASES[case]
    prompt, ids = ids_of(tokenizer, before), ids_of(tokenizer, response)
    matched = ids[-1] if end == "。" else end
    if isinstance(tokenizer, ByteFallback):  # one U+FFFD a byte
        expected = expected.replace("\ufffd", "\ufffd" * 3)
    body = stream(*events_of(tokenizer, prompt, ids, 1, params, matched), DONE)
    sample = await finished(tokenizer, prompt, body, **params)
    assert (sample.tokens, sample.response) == ([*prompt, *ids], expected)
    assert CORRECTED not in sample.metadata


@pytest.mark.parametrize("case", ACROSS)
async def test_an_emoji_across_the_border_of_the_prompt_is_left_to_the_prompt(case: str) -> None:
    tokenizer = ByteLevel()
    prompt, ids = (ids_of(tokenizer, pieces) for pieces in ACROSS[case])
    events = events_of(tokenizer, prompt, ids, 1, {}, None)
    expected = "".join(json.loads(each[6:])["text"] for each in events)
    assert "🙂" not in expected
    assert tokenizer.decode(ids, skip_special_tokens=True) != expected
    sample = await finished(tokenizer, prompt, stream(*events, DONE))
    assert (sample.response, CORRECTED in sample.metadata) == (expected, False)


@pytest.mark.parametrize(("tokenizer", "halves"), [(ByteLevel(), 1), (ByteFallback(), 5)], ids=["level", "fallback"])
@pytest.mark.parametrize("more", [[], [SMILE[2:3]]], ids=["length", "stop token"])
async def test_half_a_character_behind_bytes_of_the_prompt_is_left_as_the_engine_shows_it(
    tokenizer: ByteLevel, halves: int, more: list[bytes]
) -> None:
    """With byte fallback the whole run of bytes, prompt included, is no text then."""
    prompt, ids = ids_of(tokenizer, [" the", SMILE]), ids_of(tokenizer, [SMILE[:2], *more])
    events = events_of(tokenizer, prompt, ids, 1, {}, ids[-1] if more else None)
    sample = await finished(tokenizer, prompt, stream(*events, DONE))
    assert (sample.response, CORRECTED in sample.metadata) == ("\ufffd" * halves, False)


@pytest.mark.parametrize("engine", ["sglang", "vllm-completions"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "no_stop_trim": True},
        {"stop": ["你", " o", "🙂"]},
        {"stop": ["你", " o", "🙂"], "no_stop_trim": True},
        {"stop": ["<|im_end|>", "\ufffd"], "skip_special_tokens": False},
        {"stop_token_ids": [ord("\n"), 300, 301, 302]},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", [[300, 301], [300, 0xF0, 0x9F], [0xE4]], ids=["whole", "open", "half"])
async def test_the_text_of_one_call_is_the_engines_own(engine: Any, params: dict[str, Any], prompt: list[int]) -> None:
    kind = "sglang" if engine == "sglang" else "vllm"
    with Loopback(engine=kind, stop_probability=1 / 12, piece_probability=0.5) as served:
        urls = (
            Client(served.url, engine=engine, tokenizer=served.tokenizer, retries=SOON),
            Client(served.url, engine=engine),
        )
        async with urls[0] as checking, urls[1] as plain:
            for seed in range(12):
                asked = {"max_new_tokens": 30, "temperature": 1, "sampling_seed": seed, **params}
                checked = await completed(checking, sample_of(prompt, **asked))
                expected = await plain.generate(prompt, asked)
                assert (checked.response, CORRECTED in checked.metadata) == (expected.text, False)


@pytest.mark.parametrize("tokenizer", [ByteLevel(), ByteFallback()], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("case", [*CASES, *ACROSS])
async def test_without_the_prompts_ids_a_text_is_not_changed_for_how_it_begins(tokenizer: ByteLevel, case: str) -> None:
    """The prompt gives the first word its space, and completes the first character."""
    before, response, params, end = CASES[case][:4] if case in CASES else (*ACROSS[case], {}, None)
    prompt, ids = ids_of(tokenizer, before), ids_of(tokenizer, response)
    events = events_of(tokenizer, prompt, ids, 1, params, ids[-1] if end == "。" else end)
    expected = "".join(json.loads(each[6:])["text"] for each in events)
    sample = await finished(tokenizer, [], stream(*events, DONE), **params)
    assert (sample.response, CORRECTED in sample.metadata) == (expected, False)


# Corrected.


@pytest.mark.parametrize("options", SEVERAL, ids=str)
@pytest.mark.parametrize("incremental", [True, False])
async def test_characters_that_the_engine_repeats_are_in_the_sample_once(
    options: dict[str, Any], incremental: bool
) -> None:
    repeated = 0
    with Loopback(incremental=incremental, stop_probability=0, **DENSE, **options) as engine:
        clients = Client(engine.url, tokenizer=engine.tokenizer), Client(engine.url)
        async with clients[0] as checking, clients[1] as plain:
            for seed in range(40):
                asked = {**LENGTH, "sampling_seed": seed}
                checked = await completed(checking, sample_of(**asked))
                sent = await completed(plain, sample_of(**asked))
                assert (checked.tokens, checked.rollout_log_probs) == (sent.tokens, sent.rollout_log_probs)
                assert checked.response == engine.tokenizer.decode(checked.tokens[3:])
                is_repeated = sent.response != checked.response
                assert checked.metadata.get(CORRECTED, 0) == is_repeated
                assert JOINED not in checked.metadata
                repeated += is_repeated
    assert repeated > 3, "the engine repeats nothing: this tests nothing"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("interval", [2, 3, 4, 5])
async def test_a_corrected_text_ends_and_begins_as_the_engines_would(case: str, interval: int) -> None:
    tokenizer = ByteLevel()
    before, response, params, end, expected = CASES[case]
    prompt, ids = ids_of(tokenizer, before), ids_of(tokenizer, response)
    events = events_of(tokenizer, prompt, ids, interval, params, ids[-1] if end == "。" else end)
    sent = "".join(json.loads(each[6:])["text"] for each in events)
    sample = await finished(tokenizer, prompt, stream(*events, DONE), **params)
    assert (sample.response, sample.metadata.get(CORRECTED, 0)) == (expected, sent != expected)


async def test_the_reported_text_is_corrected() -> None:
    """今天天气很好 comes as 今天天今天天气很好: what is visible ends in half a character twice, first behind a word."""
    tokenizer, text, prompt = ByteLevel(), "今天天气很好、今天", ByteLevel().encode(" the")
    single = [bytes([byte]) for byte in "天气".encode()]
    last = [bytes([byte]) for byte in "今天".encode()]
    ids = ids_of(tokenizer, ["今天", *single, "很好", "、", *last])  # 今天天? 气很好、? 今天
    events = events_of(tokenizer, prompt, ids, 5, {}, None)
    texts = [json.loads(each[6:])["text"] for each in events]
    assert texts == ["今天天", "", text]
    sample = await finished(tokenizer, prompt, stream(*events, DONE))
    assert (sample.response, sample.metadata[CORRECTED]) == (text, 1)


async def test_a_repeat_before_an_abort_is_corrected_when_the_response_is_finished() -> None:
    with Loopback(incremental=True, stop_probability=0, **DENSE, stream_interval=5) as engine:
        async with Client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
            corrected = 0
            for seed in range(30):
                engine.faults = Faults([{"kind": "cut", "after_events": 6, "times": 1, "path": "/generate"}])
                sample = await completed(client, sample_of(**LENGTH, sampling_seed=seed))
                assert sample.metadata["streamfold_resumed"] == 1
                assert sample.response == engine.tokenizer.decode(sample.tokens[3:])
                assert JOINED not in sample.metadata
                corrected += sample.metadata.get(CORRECTED, 0)
    assert corrected > 3


@pytest.mark.parametrize(("interval", "repeats"), [(1, 0), (5, 1)])
async def test_a_repeat_in_the_last_of_several_calls_is_counted_too(interval: int, repeats: int) -> None:
    tokenizer, prompt = ByteLevel(), ByteLevel().encode(" the")
    single = [bytes([byte]) for byte in "天气".encode()]
    first, rest = ids_of(tokenizer, [" river", "today"]), ids_of(tokenizer, ["今天", *single, "很好", "、", *single])
    begun = events_of(tokenizer, prompt, [*first, EOS], 2, {}, EOS)[:1]
    ended = events_of(tokenizer, prompt + first, rest, interval, {}, None)
    async with (
        Replay(answers(stream(*begun, end=FIN), stream(*ended, DONE))) as server,
        Client(server.url, tokenizer=tokenizer, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(prompt, max_new_tokens=100))
    assert sample.tokens == [*prompt, *first, *rest]
    assert (sample.response, sample.metadata.get(CORRECTED, 0)) == (" rivertoday今天天气很好、天气", repeats)


async def test_a_stop_string_that_is_only_in_repeated_characters_does_not_end_an_aborted_response() -> None:
    """The engine looks for it in the tokens, not in what it has sent."""
    tokenizer, text = ByteLevel(), "今天天、气很好、今天很好。天气很好、天今、好" * 3
    ids, prompt = ids_of(tokenizer, [*text]), ids_of(tokenizer, [" the"])
    events, received, stop = next(
        (events[: n + 1], interval * (n + 1), stop)
        for interval in (4, 5, 7, 10)
        for events in [events_of(tokenizer, prompt, ids, interval, {}, None)]
        for n in range(len(events) - 1)
        for sent in ["".join(json.loads(each[6:])["text"] for each in events[: n + 1])]
        for stop in {sent[i : i + 2] for i in range(len(sent) - 1)}
        for decoded in [tokenizer.decode(ids[: interval * (n + 1)], skip_special_tokens=True)]
        if stop not in text and not decoded.endswith((stop[0], "\ufffd"))
    )
    rest = events_of(tokenizer, [*prompt, *ids[:received]], ids[received:], 1, {}, None)
    async with (
        Replay(answers(stream(*events, end=FIN), stream(*rest, DONE))) as server,
        Client(server.url, tokenizer=tokenizer, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(prompt, max_new_tokens=len(ids), stop=[stop]))
        assert len(server.generates) == 2
    assert (sample.tokens, sample.response) == ([*prompt, *ids], text)
    assert "streamfold_restarted_tokens" not in sample.metadata


async def test_only_the_turns_own_text_is_corrected() -> None:
    """A tool's answer may be text that its tokens do not decode to."""
    with Loopback(incremental=True, stop_probability=0, **DENSE, stream_interval=5) as engine:
        async with Client(engine.url, tokenizer=engine.tokenizer, retries=SOON) as client:
            corrected = 0
            for seed in range(20):
                sample = sample_of(**LENGTH, sampling_seed=seed)
                sample.append_response_tokens(tokens=[300, 301], log_probs=[0.0, 0.0], text="[今天天]", trainable=False)
                await completed(client, sample)
                assert sample.response == "[今天天]" + engine.tokenizer.decode(sample.tokens[5:])
                corrected += sample.metadata.get(CORRECTED, 0)
    assert corrected > 2


# Without a tokenizer.


@pytest.mark.parametrize("is_incremental", [True, False])
@pytest.mark.parametrize(
    ("text", "counts", "is_noted"),
    [
        ("今天天今天", [1, 4], True),
        ("今天天今天", [4], True),
        ("今天天今天", [1, 2, 3, 4], False),
        ("today", [1, 4], False),
        ("today", [1, 2, 3, 4], False),
    ],
)
async def test_without_a_tokenizer_a_text_that_may_repeat_characters_is_marked(
    text: str, counts: list[int], is_incremental: bool, is_noted: bool
) -> None:
    """It is seen in the stream: an interval of the server's own is in no request, and in none of its counts."""
    payloads, sent = [], 0
    for count in counts:
        first = sent if is_incremental else 0
        frame = json.loads(event(range(first, count), count, "stop" if count == 4 else None)[6:])
        part = text if count == 4 or not is_incremental else ""
        payloads.append(b"data: " + json.dumps({**frame, "text": part}).encode() + b"\n\n")
        sent = count
    for tokenizer in (None, ByteLevel()):
        async with (
            Replay(stream(*payloads, DONE)) as server,
            Client(server.url, tokenizer=tokenizer, retries=SOON) as client,
        ):
            sample = await completed(client, sample_of())
        assert (UNCHECKED in sample.metadata) is (is_noted and tokenizer is None)
        if tokenizer is None:
            assert (sample.response, CORRECTED in sample.metadata) == (text, False)


@pytest.mark.parametrize("is_incremental", [True, False])
@pytest.mark.parametrize(("interval", "step", "most"), [(1, 1, 1), (4, 1, 4), (1, 3, 3)])
async def test_the_most_tokens_of_an_event_are_seen_whatever_made_them_several(
    is_incremental: bool, interval: int, step: int, most: int
) -> None:
    options: dict[str, Any] = {"stream_interval": interval, "tokens_per_step": step}
    for more in ({"incremental": is_incremental}, {"engine": "vllm"}):
        with Loopback(**options, **more) as engine:
            async with Client(engine.url, engine=engine.config.engine) as client:
                generation = await client.generate([300], {"max_new_tokens": 24, "ignore_eos": True})
        assert generation.max_tokens_per_event == most


async def test_the_mark_stays_with_the_response_and_goes_with_it() -> None:
    def body(ids: list[int], prompt: int, finish: str | None) -> bytes:
        frame = json.loads(event(ids, len(ids), finish, prompt_tokens=prompt)[6:])
        return b"data: " + json.dumps({**frame, "text": "今天"}).encode() + b"\n\n"

    params: dict[str, Any] = {"stream_interval": 4, "max_new_tokens": 9}
    first, second = stream(body([1, 2], 3, None), end=FIN), stream(body([3], 5, "stop"), DONE)
    async with Replay(answers(first, second)) as server, SGLANG.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(**params))
    assert sample.metadata[UNCHECKED] is True, "the second call brought one token, the first one several"
    again = stream(body([1], 3, "stop"), DONE)
    async with Replay(answers(first, again)) as server, SGLANG.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(**params), resume="restart")
    assert (sample.response, UNCHECKED in sample.metadata) == ("今天", False), "that of the first call was dropped"
