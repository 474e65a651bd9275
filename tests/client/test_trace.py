"""Trace: a file that viewers open, with every phase of every call, whatever ends the process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from streamfold import (
    Buffer,
    Client,
    Rollout,
    RolloutConfig,
    Sample,
    StreamTruncated,
    Trace,
    complete,
    prompt_groups,
)
from streamfold.client.observer import Observer, Subject, observed
from streamfold.loopback import Loopback
from support.loopback_http import post
from support.replay import ASKED, FIN, HANG, PROMPT, Step, chunk, head, until
from support.rollouts import bounded
from support.traces import args_of, lines, phases, records
from support.tries import BUSY, SOON, in_turn

if TYPE_CHECKING:
    from pathlib import Path

    from support.speaking import Speech

WHOLE = phases("queue", "connect", "prefill", "tokens")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


async def test_a_call_shows_its_phases_in_microseconds(speech: Speech, path: Path) -> None:
    before = time.monotonic()
    async with speech.replay(speech.whole) as server:
        with Trace(path) as trace:
            begun = time.monotonic()
            async with speech.client(server.url, trace=trace) as client:
                call = client.start(PROMPT, ASKED)
                generation = await call
    found = records(path)
    assert lines(found) == {f"call {call.rid}": WHOLE}
    assert args_of(found, "M", "process_name") == [{"name": server.url}]
    (end,) = args_of(found, "E", "call")
    assert end["tokens"] == len(generation.token_ids)
    assert end["finish_reason"] == generation.finish_reason
    assert call.ttft is not None
    times = {(record["ph"], record["name"]): record["ts"] for record in found}
    assert times["E", "call"] - times["B", "call"] == pytest.approx(call.age * 1e6, abs=1.0)
    assert times["B", "tokens"] - times["B", "prefill"] == pytest.approx(call.ttft * 1e6, abs=1000.0)
    assert times["E", "call"] <= (time.monotonic() - before) * 1e6
    assert times["B", "call"] >= (begun - time.monotonic()) * 1e6
    assert args_of(found, "C", "calls")[-1] == {"waiting": 0, "prefill": 0, "tokens": 0}


async def test_failed_tries_and_pauses_are_seen(speech: Speech, path: Path) -> None:
    async with speech.replay() as server:
        with Trace(path) as trace:
            async with speech.client(server.url, trace=trace, retries=SOON) as client:
                server.routes[speech.path] = in_turn(server, BUSY, BUSY, speech.whole)
                call = client.start(PROMPT, ASKED)
                await call
    found = records(path)
    ((_, shown),) = lines(found).items()
    tried = ["queue", "connect", "prefill"]
    assert shown == phases(*tried, "retry", *tried, "retry", *tried, "tokens")
    errors = [args["error"] for args in args_of(found, "E", "prefill") if args]
    assert errors == ["busy (status 503)"] * 2
    assert [args["try"] for args in args_of(found, "B", "connect")] == [1, 2, 3]
    assert args_of(found, "B", "connect")[-1]["rid"] == call.rid


async def test_an_abort_shows_what_it_waits_for(speech: Speech, path: Path) -> None:
    steps: list[Step] = [head(), chunk(speech.event([1, 2], 2)), HANG]
    async with speech.replay(steps) as server:
        with Trace(path) as trace:
            async with speech.client(server.url, trace=trace) as client:
                call = client.start(PROMPT, ASKED)
                await call.wait_tokens(2)
                await call.abort(drain=0.01)
                await until(lambda: not client.running)
    assert lines(records(path)) == {
        f"call {call.rid}": phases("queue", "connect", "prefill", "tokens", "abort", "drain")
    }


async def test_a_failed_call_says_why(speech: Speech, path: Path) -> None:
    async with speech.replay([head(), chunk(speech.event([1], 1)), FIN]) as server:
        with Trace(path) as trace:
            async with speech.client(server.url, trace=trace) as client:
                with pytest.raises(StreamTruncated) as caught:
                    await client.generate(PROMPT, ASKED)
    (end,) = args_of(records(path), "E", "call")
    assert (end["error"], end["tokens"]) == (str(caught.value), 1)


async def test_the_number_of_records_does_not_depend_on_the_number_of_tokens(path: Path) -> None:
    counts = []
    with Loopback(token_rate=2000, stop_probability=0) as engine:
        for tokens in (2, 300):
            with Trace(path) as trace:
                async with Client(engine.url, trace=trace) as client:
                    assert len((await client.generate(PROMPT, {"max_new_tokens": tokens})).token_ids) == tokens
            counts.append(len([record for record in records(path) if record["ph"] != "C"]))
    assert counts[0] == counts[1] < 16


async def test_a_sample_has_one_line_over_resumes_and_weight_versions(path: Path) -> None:
    sample = Sample(index=7, prompt="p", tokens=PROMPT.copy())
    with Loopback(token_rate=300, stop_probability=0, weight_version="1") as engine, Trace(path) as trace:
        async with Client(engine.url, trace=trace) as client:
            completing = asyncio.create_task(complete(client, sample, {"max_new_tokens": 60}))
            await until(lambda: [call for call in client.running if call.token_count])
            await client.abort_all()
            await completing
            assert 0 < sample.response_length < 60
            await asyncio.to_thread(post, engine, "update_weight_version", {"new_version": "2"})
            await complete(client, sample, {"max_new_tokens": 60})
    found = records(path)
    (shown,) = [shown for label, shown in lines(found).items() if label == "sample 7"]
    first = [name for name in phases("queue", "connect", "prefill", "tokens", "abort") if name in shown]
    assert shown[: len(first)] == first
    assert shown[-len(WHOLE) - 2 :] == ["!resume", *WHOLE, "!weight version"]
    assert args_of(found, "i", "weight version") == [{"from": "1", "to": "2"}]


async def test_a_rollout_shows_its_rewards_and_its_abort(path: Path) -> None:
    prompts = [Sample(prompt="p", tokens=[5, 6, 7 + i]) for i in range(2)]
    with Loopback(token_rate=1000, stop_probability=0) as engine, Trace(path) as trace:
        config = RolloutConfig(sampling_params={"max_new_tokens": 8}, groups=2, progress=False, trace=trace)
        async with Client(engine.url, trace=trace) as client:
            rollout = Rollout(client, config, reward=lambda sample: float(sample.index))
            await bounded(rollout.run(Buffer(prompt_groups(prompts, 1)), 3))
    found = records(path)
    assert lines(found) == {
        "rollouts": ["=abort", "=rollout 3"],
        "sample 0": [*WHOLE, "=reward"],
        "sample 1": [*WHOLE, "=reward"],
    }
    assert sorted(args["reward"] for args in args_of(found, "X", "reward")) == [0.0, 1.0]


def test_a_process_that_is_killed_leaves_a_file_that_can_be_read(path: Path) -> None:
    program = f"""
import asyncio
from streamfold import Client, Trace
from streamfold.loopback import Loopback

async def main():
    with Loopback(token_rate=50, stop_probability=0) as engine:
        async with Client(engine.url, trace=Trace({str(path)!r})) as client:
            call = client.start([5, 6, 7], {{"max_new_tokens": 1000}})
            await client.generate([5, 6, 8], {{"max_new_tokens": 2}})
            await call.wait_tokens(1)
            print("go", flush=True)
            await call

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        process.send_signal(signal.SIGKILL)
    found = records(path)
    names = [record["ph"] + record["name"] for record in found]
    assert names.count("Bcall") == 2
    assert names.count("Ecall") == 1
    assert names.count("Btokens") == names.count("Etokens") + 1, "it is seen what was waited for"


async def test_closing_ends_what_is_open_and_nothing_follows(speech: Speech, path: Path) -> None:
    steps: list[Step] = [head(), chunk(speech.event([1, 2], 2)), HANG]
    async with speech.replay(steps) as server:
        trace = Trace(path)
        async with speech.client(server.url, trace=trace) as client:
            call = client.start(PROMPT, ASKED)
            await call.wait_tokens(2)
            trace.close()
            trace.close()
            closed = records(path)
            await call.abort(drain=0.0)
    assert lines(closed) == {f"call {call.rid}": WHOLE}
    assert records(path) == closed


@pytest.mark.parametrize("content", ["old", "[\n{}\n]\n", '[\n{"a', '{"ph":"B"}'])
def test_a_file_that_is_no_trace_is_not_replaced(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(FileExistsError, match="not a trace"):
        Trace(path)
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", "[", "[\n", '[\n{"ph":"B","na', "[\n\n]\n", '[\n{"ph":"B"}\n]\n'])
def test_a_trace_is_replaced_by_the_next_one_however_its_process_ended(path: Path, content: str) -> None:
    path.write_text(content)
    with Trace(path):
        pass
    assert records(path) == []


def test_a_trace_that_had_nothing_to_write_and_was_not_closed_leaves_the_one_before(path: Path) -> None:
    with Trace(path) as trace:
        trace.on_work(Subject("a", "before"), "reward", 0.0, 1.0, {})
    before = path.read_bytes()
    trace = Trace(path)
    assert path.read_bytes() == before
    del trace
    assert path.read_bytes() == before


def test_a_trace_is_a_regular_file() -> None:
    with pytest.raises(OSError, match="a trace needs a regular file"):
        Trace("/dev/null")


def test_a_file_has_one_writer(path: Path) -> None:
    path.write_text('[\n{"ph":"B"}\n')
    with Trace(path) as trace:
        with pytest.raises(BlockingIOError, match="another trace"):
            Trace(path)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(trace)
        if os.fork() == 0:
            trace.on_work(Subject("a", "a"), "reward", 0.0, 1.0, {})
            trace.close()
            os._exit(0)
        os.wait()
        trace.on_work(Subject("a", "mine"), "reward", time.monotonic(), time.monotonic(), {"reward": 1.0})
    assert lines(records(path)) == {"mine": ["=reward"]}
    with Trace(path):
        pass
    assert records(path) == []


async def test_calls_for_one_sample_at_the_same_time_have_lines_of_their_own(path: Path) -> None:
    with Loopback(token_rate=500, stop_probability=0) as engine, Trace(path) as trace:
        async with Client(engine.url, trace=trace) as client:
            with observed(subject=Subject("key", "sample 3")):
                calls = [client.start(PROMPT, {"max_new_tokens": 5}) for _ in range(2)]
            for call in calls:
                await call
            with observed(subject=Subject("key", "sample 3")):
                await client.generate(PROMPT, {"max_new_tokens": 5})
    found = records(path)
    lines(found)
    tids = [record["tid"] for record in found if (record["ph"], record["name"]) == ("B", "call")]
    assert len(set(tids)) == 2, "the third one is where one of the others was"


async def test_an_observer_that_fails_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def on_phase(self, *_: Any) -> None:
            raise LookupError("not today")

        def on_end(self, *_: Any) -> None:
            raise LookupError("not today")

    with Loopback() as engine:
        async with Client(engine.url, observers=[Broken()]) as client:
            sample = await complete(client, Sample(prompt="a", tokens=PROMPT.copy()), {"max_new_tokens": 4})
    assert sample.response_length
    assert caplog.text.count("Broken failed") == 1
