"""vLLM alone: aborts without a finish reason, missing endpoints, usage after the terminal event.

All that is the same with every engine is in the tests that ask for the fixture ``speech``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, DecodeError, EngineError, Retries, StreamTruncated
from streamfold.loopback import Loopback, Router
from streamfold.samples.sample import Sample
from support.bodies_vllm import usage_event
from support.completing import SOON, answers, completed, sample_of
from support.replay import ASKED, DONE, HANG, PROMPT, Request, answer_json, begun, chunk, head, stream, until
from support.speaking import OLD_VLLM, SPEECHES, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replay import Step
    from support.speaking import Speech

ONCE = Retries(tries=1)
FORBIDDEN = {"error": {"message": "Scale-out endpoints are disabled.", "type": "PermissionDeniedError", "code": 403}}
LONG = {"max_new_tokens": 20_000}


# Up to 0.31 the terminal event of an abort is dropped: the stream ends as a good one, without a finish reason.


async def test_an_abort_of_ours_that_an_older_release_does_not_tell_is_a_result() -> None:
    async with OLD_VLLM.replay(routes={OLD_VLLM.abort_path: [0.1, *answer_json(None)]}) as server:

        def unfinished(request: Request) -> Iterator[Step]:
            yield from OLD_VLLM.two
            yield server.aborted[request.rid]
            yield from stream(*OLD_VLLM.after(2), DONE)[1:]

        server.routes[OLD_VLLM.path] = unfinished
        async with OLD_VLLM.client(server.url) as client:
            call = await begun(client)
            generation = await call.abort()
            assert (generation.token_ids.tolist(), generation.finish_reason) == ([1, 2], None)
            assert await call is generation


async def test_an_abort_of_others_that_an_older_release_does_not_tell_is_a_truncated_stream() -> None:
    unfinished = stream(*OLD_VLLM.events(2, finish=None), *OLD_VLLM.after(2), DONE)
    async with OLD_VLLM.replay(unfinished) as server, OLD_VLLM.client(server.url, retries=ONCE) as client:
        with pytest.raises(StreamTruncated) as truncated:
            await client.generate(PROMPT, ASKED)
    assert truncated.value.partial is not None
    assert truncated.value.partial.token_ids.tolist() == [1, 2]


async def test_a_sample_resumes_after_an_abort_that_an_older_release_does_not_report() -> None:
    unfinished = stream(OLD_VLLM.part([10, 11]), *OLD_VLLM.after(2), DONE)
    rest = stream(OLD_VLLM.part([12], prompt=5, finish="stop"), DONE)
    async with (
        OLD_VLLM.replay(answers(unfinished, rest)) as server,
        OLD_VLLM.client(server.url, retries=SOON) as client,
    ):
        sample = await completed(client, sample_of())
    assert OLD_VLLM.ids(server.generates[1]) == [*PROMPT, 10, 11]
    assert (sample.tokens, sample.status) == ([*PROMPT, 10, 11, 12], Sample.Status.COMPLETED)


@pytest.mark.parametrize(
    "options",
    [{}, {"version": "0.28.0"}, {"frontend": "rust"}, {"version": "0.28.0", "stream_interval": 5}],
    ids=["0.32", "0.28", "rust", "0.28 in steps"],
)
async def test_an_abort_of_all_of_an_engine_ends_the_calls_and_the_samples_go_on(options: dict[str, Any]) -> None:
    box = Loopback(engine="vllm", token_rate=300, stop_probability=0, leave_delay=None, **options)
    with box as engine:
        often = Retries(tries=100, first=0.001, longest=0.01)  # each sweep aborts them again
        async with VLLM.client(engine.url, retries=often, tokenizer=engine.tokenizer) as client:
            samples = [sample_of(max_new_tokens=120, sampling_seed=seed) for seed in range(4)]
            work = [asyncio.ensure_future(completed(client, sample)) for sample in samples]
            await until(lambda: sum(call.token_count > 10 for call in client.running) == 4)
            await client.abort_engines(1)  # whether the engine was seen idle is chance: they are back at once
            await asyncio.gather(*work)
        for sample in samples:
            undisturbed = VLLM.undisturbed(engine, PROMPT, sample.metadata["sampling_params"])
            assert sample.metadata["streamfold_resumed"] >= 1, "nothing was aborted: this tests nothing"
            assert sample.tokens == [*PROMPT, *undisturbed.token_ids]


# The usage event behind the terminal one.


async def test_fields_after_the_terminal_event_are_read() -> None:
    steps: list[Step] = [head(), *map(chunk, VLLM.events(2)), 0.1, *stream(usage_event(2, cached=2), DONE)[1:]]
    async with VLLM.replay(steps) as server, VLLM.client(server.url) as client:
        generation = await client.generate(PROMPT, ASKED)
    assert (generation.finish_reason, generation.cached_tokens) == ("stop", 2)


async def test_a_count_after_the_end_that_contradicts_the_tokens_makes_the_sample_start_again() -> None:
    lost = stream(VLLM.part([10, 11], finish="stop"), *VLLM.after(3), DONE)
    whole = stream(VLLM.part([10, 11, 12], finish="stop"), *VLLM.after(3), DONE)
    async with VLLM.replay(answers(lost, whole)) as server, VLLM.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
    assert [VLLM.ids(request) for request in server.generates] == [PROMPT] * 2
    assert sample.tokens == [*PROMPT, 10, 11, 12]


async def test_a_count_that_contradicts_the_tokens_ends_the_call_even_if_the_body_does_not_end() -> None:
    steps: list[Step] = [head(), *map(chunk, VLLM.events(2)), chunk(usage_event(3)), HANG]
    async with VLLM.replay(steps) as server, VLLM.client(server.url, retries=ONCE) as client:
        with pytest.raises(DecodeError) as raised:
            await asyncio.wait_for(client.generate(PROMPT, ASKED), 20)
        assert raised.value.partial is not None
        assert raised.value.partial.token_ids.tolist() == [1, 2]
        assert server.aborts == [], "the engine has finished"
        await until(lambda: server.open == 0)


# Servers without endpoints to abort.


@pytest.mark.parametrize("refusal", [answer_json(FORBIDDEN, 403), answer_json({"detail": "Not Found"}, 404)])
async def test_where_no_abort_can_be_posted_the_socket_is_closed_which_is_said_once_and_not_tried_again(
    refusal: list[Step], caplog: pytest.LogCaptureFixture
) -> None:
    routes = {VLLM.abort_path: refusal, VLLM.abort_all_path: refusal}
    async with VLLM.replay(VLLM.running, routes=routes) as server, VLLM.client(server.url) as client:
        with caplog.at_level(logging.INFO, "streamfold"):
            calls = [await begun(client) for _ in range(20)]
            await client.abort_all()
            sent = len(server.at(VLLM.abort_path)), len(server.at(VLLM.abort_all_path))
            assert all(1 <= count <= 20 for count in sent)
            calls += [await begun(client) for _ in range(5)]
            await client.abort_all()
            assert (len(server.at(VLLM.abort_path)), len(server.at(VLLM.abort_all_path))) == sent, "it knows by now"
        assert [(await call).token_ids.tolist() for call in calls] == [[1, 2]] * 25
        for request in server.generates:
            await asyncio.wait_for(request.peer_closed.wait(), 20)
        assert len(caplog.records) == 1
        assert "closing its stream" in caplog.text


async def test_an_endpoint_that_is_not_there_is_asked_once_and_the_next_one_from_then_on() -> None:
    routes = {VLLM.abort_path: answer_json({"detail": "Not Found"}, 404)}
    async with VLLM.replay(VLLM.running, routes=routes) as server, VLLM.client(server.url) as client:
        calls = [await begun(client) for _ in range(3)]
        for call in calls:
            await call.abort()
        assert len(server.at(VLLM.abort_path)) == 1
        assert [request.rid for request in server.at(VLLM.abort_all_path)] == [call.rid for call in calls]


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
async def test_an_engine_without_an_abort_endpoint_stops_when_the_socket_is_closed(version: str) -> None:
    options: dict[str, Any] = {"version": version, "dev_mode": False, "token_rate": 200, "stop_probability": 0}
    with Loopback(engine="vllm", enable_scale_out=version == "0.28.0", **options) as engine:
        kind: Any = "vllm" if version == "0.28.0" else "vllm-completions"
        async with Client(engine.url, engine=kind) as client:
            calls = [client.start(PROMPT, LONG) for _ in range(4)]
            await until(lambda: all(call.token_count for call in calls))
            await client.abort_all()
            for _ in range(100):  # it takes effect at the engine's next step
                if not (load := await client.load()):
                    break
                await asyncio.sleep(0.02)
            assert load == 0
            assert {(await call).finish_reason for call in calls} <= {None, "abort"}


async def test_a_request_id_of_the_callers_own_headers_does_not_take_the_place_of_ours() -> None:
    """By that one an abort would name the request, which this engine would not end for a closed socket."""
    with Loopback(engine="vllm", token_rate=200, stop_probability=0, leave_delay=None) as engine:
        async with Client(engine.url, engine="vllm", headers={"X-Request-ID": "a trace"}) as client:
            call = client.start(PROMPT, LONG, headers={"x-request-id": "another"})
            await until(lambda: call.token_count)
            generation = await call.abort()
            assert generation.meta["request_id"] == f"generate-tokens-{call.rid}"
            assert await client.load() == 0


async def test_the_load_is_asked_of_the_next_place_where_there_are_no_metrics() -> None:
    routes = {"/load": answer_json({"server_load": 4})}
    async with VLLM.replay(routes=routes) as server, VLLM.client(server.url) as client:
        assert await client.load() == 4
    assert [request.target for request in server.requests if request.target != "/workers"] == ["/metrics", "/load"]


# Finding out what a server is, and its key.


@pytest.mark.parametrize("speech", SPEECHES.values(), ids=SPEECHES)
@pytest.mark.parametrize("routed", [False, True], ids=["itself", "behind a router"])
async def test_an_engine_in_a_box_is_found_out_and_spoken_to(speech: Speech, *, routed: bool) -> None:
    with speech.loopback(api_key="k") as box, Router([box]) as router:
        async with Client(router.url if routed else box.url, engine="auto", api_key="k") as client:
            assert client.engine == speech.engine
            assert (await client.generate(PROMPT, {"max_new_tokens": 3})).finish_reason in ("stop", "length")


async def test_without_the_token_endpoint_a_server_is_asked_for_completions() -> None:
    with Loopback(engine="vllm", enable_scale_out=False) as box:
        async with Client(box.url, engine="auto") as client:
            assert client.engine == "vllm-completions"
            generation = await client.generate(PROMPT, {"max_new_tokens": 5, "ignore_eos": True})
        undisturbed = box.undisturbed(PROMPT, {"max_tokens": 5, "ignore_eos": True})
    assert generation.token_ids.tolist() == undisturbed.token_ids


@pytest.mark.parametrize("speech", SPEECHES.values(), ids=SPEECHES)
async def test_the_engine_of_a_server_that_denies_access_is_not_guessed(speech: Speech) -> None:
    with speech.loopback(api_key="k") as box:
        client = Client(box.url, engine="auto")
        with pytest.raises(EngineError, match="Unauthorized") as refused:
            await client.discover()
        assert (refused.value.status, client.engine) == (401, "auto")
        await client.aclose()


async def test_a_missing_key_is_an_error_in_the_servers_one_word_and_is_not_tried_again() -> None:
    with Loopback(engine="vllm", api_key="k") as box:
        async with Client(box.url, engine="vllm", retries=SOON) as client:
            call = client.start(PROMPT, ASKED)
            with pytest.raises(EngineError, match="Unauthorized") as refused:
                await call
            assert (refused.value.status, call.tries) == (401, 1)
