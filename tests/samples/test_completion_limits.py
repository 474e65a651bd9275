"""What a resumed sample must respect: its budget, its stop strings and stop tokens, and an abort at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Client, Retries, StreamTruncated
from streamfold.samples.sample import Sample
from support import bodies_vllm
from support.completing import SOON, answers, completed, sample_of, truncated
from support.replay import DONE, HANG, PROMPT, RST, answer_json, chunk, head, stream, until
from support.speaking import SGLANG, VLLM, Speech
from support.tries import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamfold.client.runner import CallRunner
    from support.replay import Step


ABORTED, COMPLETED, TRUNCATED = Sample.Status.ABORTED, Sample.Status.COMPLETED, Sample.Status.TRUNCATED


def calls_of(client: Client) -> Iterable[CallRunner]:
    assert client._session is not None
    return client._session.calls.values()


@pytest.mark.parametrize("number", [int, np.int64, np.int32])
@pytest.mark.parametrize("names", [("max_new_tokens", "min_new_tokens"), ("max_tokens", "min_tokens")])
async def test_the_budget_is_respected_for_any_integer_type_and_under_either_name(
    speech: Speech, number: Callable[[int], Any], names: tuple[str, str]
) -> None:
    if speech is SGLANG and names[0] == "max_tokens":
        pytest.skip("SGLang has no such name")
    sample = Sample(index=0, tokens=list(PROMPT))
    params = {names[0]: number(5), names[1]: number(4)}
    last = stream(speech.part([12, 13, 14], prompt=5, finish="length"), DONE)
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])), last)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        sample.metadata["sampling_params"] = params
        await completed(client, sample)
    assert (sample.response_length, sample.status) == (5, TRUNCATED)
    asked = speech.params(server.generates[1])
    assert (asked["max_new_tokens"], asked["min_new_tokens"]) == (3, 2)
    assert params == {names[0]: number(5), names[1]: number(4)}


async def test_with_ignore_eos_vllm_still_stops_at_given_stop_tokens() -> None:
    """SGLang ignores those too."""
    aborted = stream(VLLM.part([10, 9], finish="abort"), DONE)
    async with VLLM.replay(answers(aborted)) as server, VLLM.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of(ignore_eos=True, stop_token_ids=[9]))
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 9], COMPLETED)


@pytest.mark.parametrize("params", [{}, {"stop": ["zz"]}, {"stop_token_ids": [9]}, {"ignore_eos": True}])
async def test_the_eos_that_vllm_does_not_name_is_learned_if_nothing_else_can_have_stopped_the_response(
    params: dict[str, Any],
) -> None:
    ended = stream(VLLM.part([8, 9], finish="stop"), DONE)
    ends: set[int] = set()
    async with VLLM.replay(answers(ended)) as server, VLLM.client(server.url, retries=SOON) as client:
        await completed(client, sample_of(**params), stop_ids=ends)
    assert ends == (set() if params else {9})


async def test_without_text_a_truncated_response_with_stop_strings_is_restarted() -> None:
    whole = stream(VLLM.part([10, 11, 12], finish="stop"), DONE)
    async with (
        VLLM.replay(answers(truncated(VLLM.part([10, 11])), whole)) as server,
        Client(server.url, engine="vllm", retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(stop=["END"]))
    assert VLLM.ids(server.generates[1]) == PROMPT
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11, 12], COMPLETED)
    assert sample.metadata["streamfold_restarted_tokens"] == 2


GRAMMARS = [(SGLANG, name) for name in ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")]


@pytest.mark.parametrize(("speech", "name"), [*GRAMMARS, (VLLM, "structured_outputs")])
async def test_a_truncated_response_with_a_grammar_is_restarted(speech: Speech, name: str) -> None:
    whole = stream(speech.part([12, 13], finish="stop"), DONE)
    params: dict[str, Any] = {name: {"regex": "a"} if speech is VLLM else "a"}
    async with (
        speech.replay(answers(truncated(speech.part([10, 11])), whole)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(**params))
    assert speech.ids(server.generates[1]) == PROMPT
    assert (sample.tokens, sample.metadata["streamfold_restarted_tokens"]) == ([*PROMPT, 12, 13], 2)


@pytest.mark.parametrize(("speech", "name"), [*GRAMMARS, (VLLM, "structured_outputs")])
async def test_the_token_that_ends_a_grammar_does_not_end_other_samples(speech: Speech, name: str) -> None:
    """SGLang reports the last token, which may be a closing brace, as a matched stop token."""
    matched = 9 if speech is SGLANG else None
    by_grammar = stream(speech.part([8, 9], finish="stop", matched=matched), DONE)
    rest = stream(speech.part([12], prompt=5, finish="length"), DONE)
    params: dict[str, Any] = {name: {"regex": "a"} if speech is VLLM else "a"}
    ends: set[int] = set()
    async with (
        speech.replay(answers(by_grammar, truncated(speech.part([8, 9])), rest)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        await completed(client, sample_of(**params), stop_ids=ends)
        other = await completed(client, sample_of(max_new_tokens=3), stop_ids=ends)
    assert (other.tokens, other.status, ends) == ([*PROMPT, 8, 9, 12], TRUNCATED, set())


async def test_a_stop_string_before_min_new_tokens_does_not_complete_a_truncated_response_of_vllm() -> None:
    """vLLM does not match stop strings before min_new_tokens, and later only in what the same call generates."""
    text = "".join(chr(97 + token % 26) for token in (10, 11))
    whole = stream(VLLM.part([10, 11, 12, 13], finish="length"), DONE)
    async with (
        VLLM.replay(answers(truncated(VLLM.part([10, 11])), whole)) as server,
        VLLM.client(server.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of(max_new_tokens=4, min_new_tokens=3, stop=[text]))
    assert (sample.response_length, sample.status) == (4, TRUNCATED)


async def test_a_text_decoded_by_the_client_ends_before_the_stop_string_as_the_engines_does() -> None:
    reply = stream(VLLM.part([10, 11, 12], finish="stop", matched="lm"), DONE)
    async with VLLM.replay(reply) as server, VLLM.client(server.url, retries=SOON) as client:
        hidden = await completed(client, sample_of(stop=["lm"]))
        shown = await completed(client, sample_of(stop=["lm"], no_stop_trim=True))
    assert (hidden.response, shown.response) == ("k", "klm")
    assert hidden.tokens == shown.tokens == [*PROMPT, 10, 11, 12]


@pytest.mark.parametrize("ends", ["by an event", "without a word"])
async def test_a_call_that_the_engine_ends_while_the_host_aborts_is_a_result(speech: Speech, ends: str) -> None:
    rest = [speech.event([10, 11] if speech is SGLANG else [11], 2, "abort")] if ends == "by an event" else []
    aborting = False
    slow = [
        head(),
        chunk(speech.event([10], 1)),
        0.2,
        *stream(*rest, DONE)[1:],
    ]  # vLLM up to 0.31 sends no terminal event
    async with speech.replay(slow) as server, speech.client(server.url, retries=SOON) as client:
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample, aborted=lambda: aborting))
        await until(lambda: client.running and client.running[0].token_count)
        aborting = True
        await asyncio.wait_for(task, 20)
        assert len(server.generates) == 1
    assert (sample.response_length, sample.status) == (1 + len(rest), ABORTED)


async def end_all(client: Client, how: str, task: asyncio.Future[Any]) -> None:
    """Abort all calls, or close the client, and check that the task ends."""
    await getattr(client, how)()
    await asyncio.wait_for(task, 20)
    assert client._session is None or how == "abort_all", "a closed client has opened itself again"
    await client.aclose()


@pytest.mark.parametrize("end", ["abort_all", "aclose"])
async def test_a_sample_that_waits_for_its_next_call_is_not_resumed_after_abort_all(speech: Speech, end: str) -> None:
    long = Retries(tries=4, first=30.0, longest=30.0)
    async with speech.replay(truncated(speech.part([10, 11]))) as server:
        client = speech.client(server.url, retries=long)
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample))
        await until(lambda: sample.response_length == 2)
        await asyncio.sleep(0)
        await end_all(client, end, task)
        assert len(server.generates) == 1
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], ABORTED)


@pytest.mark.parametrize("moment", ["while the engine is notified", "as it ends"])
@pytest.mark.parametrize("end", ["abort_all", "aclose"])
async def test_a_sample_whose_failed_call_is_being_aborted_is_not_resumed_after_abort_all(
    speech: Speech, end: str, moment: str
) -> None:
    async with speech.replay(routes={speech.abort_path: [0.2, *answer_json(None)]}) as server:
        server.routes[speech.path] = answers(stream(speech.part([10, 11]), end=RST), speech.whole)
        client = speech.client(server.url, retries=SOON)
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample))
        await until(lambda: server.aborts)
        for _ in iter(lambda: bool(client.running) and moment == "as it ends", False):
            await asyncio.sleep(0)  # to run before the task that waits for the call
        await end_all(client, end, task)
        assert len(server.generates) == 1
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11], ABORTED)


async def test_a_truncated_stream_is_raised_when_no_tries_are_left() -> None:
    async with (
        SGLANG.replay(truncated(SGLANG.part([10]))) as server,
        Client(server.url, retries=Retries(tries=1)) as client,
    ):
        with pytest.raises(StreamTruncated):
            await completed(client, sample_of(), aborted=lambda: False)


def test_a_retry_after_of_hours_is_limited_to_minutes() -> None:
    assert Retries(jitter=0).pause(1, 86_400.0) == 600.0
    assert Retries(jitter=0).pause(1, 30.0) == 30.0


async def test_abort_all_ends_a_hanging_stream(speech: Speech) -> None:
    """A running call is aborted itself; only the backoff between two calls has to be woken."""
    running: list[Step] = [head(), chunk(speech.part([10])), HANG]
    async with speech.replay(running) as server, speech.client(server.url, retries=SOON) as client:
        task = asyncio.ensure_future(completed(client, sample_of()))
        await until(lambda: client.running and client.running[0].token_count)
        await client.abort_all()
        assert (await task).status is ABORTED


@pytest.mark.parametrize(
    ("last", "text", "stop"), [(9, "over. A tool", None), (11, "said lm, a tool", "lm"), (11, "a tool\n", "\n\n")]
)
async def test_a_stop_at_the_end_of_a_pending_response_does_not_end_the_next_turn(
    speech: Speech, last: int, text: str, stop: str | None
) -> None:
    """Only an aborted response may have stopped unnoticed; a pending one ends with a finished turn or a tool."""
    sample = sample_of([*PROMPT, 10, last], stop=stop)
    sample.response, sample.response_length = text, 2
    sample.loss_mask, sample.rollout_log_probs = [1, 0], [-1.0, 0.0]
    async with (
        speech.replay(stream(speech.part([12], prompt=len(PROMPT) + 2, finish="stop"), DONE)) as server,
        speech.client(server.url, retries=SOON) as client,
    ):
        await completed(client, sample, stop_ids={9})
    assert speech.ids(server.generates[0]) == [*PROMPT, 10, last]
    assert (sample.tokens, sample.loss_mask) == ([*PROMPT, 10, last, 12], [1, 0, 1])
    assert sample.response.startswith(text)
    assert sample.status is COMPLETED


@pytest.mark.parametrize("has", [True, False])
async def test_logprobs_for_a_part_of_the_response_are_refused_before_the_request(speech: Speech, *, has: bool) -> None:
    """A whole response was generated each time, and then dropped as it did not fit."""
    sample = sample_of([*PROMPT, 10])
    sample.response, sample.response_length, sample.status = "k", 1, ABORTED
    sample.rollout_log_probs = [-1.0] if has else None
    async with speech.replay(speech.whole) as server, speech.client(server.url) as client:
        with pytest.raises(ValueError, match=f"1 response tokens {'have' if has else 'lack'} log-probabilities"):
            await completed(client, sample, logprobs=not has)
        assert server.generates == []


async def test_a_cancel_does_not_complete_a_response_that_has_lost_an_event() -> None:
    """A server that reports usage only behind the terminal event shows only there that an event is missing."""
    steps: list[Step] = [head(), *map(chunk, (bodies_vllm.event([10]), bodies_vllm.event([12], "stop")))]
    async with VLLM.replay() as server, VLLM.client(server.url, retries=SOON) as client:
        server.routes[VLLM.path] = in_turn(server, [*steps, chunk(bodies_vllm.usage_event(3)), HANG], [HANG])
        sample = sample_of()
        task = asyncio.ensure_future(completed(client, sample))
        # The error is there, or the next call has begun.
        await until(
            lambda: (
                len(server.generates) == 2 or (client.running and any(call._attempt.error for call in calls_of(client)))
            )
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (sample.tokens, sample.status) == (PROMPT, ABORTED)
    assert sample.metadata["streamfold_restarted_tokens"] == 2
