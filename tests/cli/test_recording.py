"""A stream saved as it came: what its request asked for is what the parser of a replay expects."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamfold import Experts
from streamfold.cli.recording import Recording, record
from streamfold.errors import DecodeError
from streamfold.loopback import Faults, Loopback
from support.loopback_http import PROMPT
from support.replay import until

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("sglang", "vllm", "vllm-completions")
USAGE = {"include_usage": True}


def request(engine: str, *, logprobs: bool = True, prompt: Any = None, **params: Any) -> dict[str, Any]:
    """A request as that engine takes it: a prompt of three tokens, twelve to come, and what else is told."""
    prompt = PROMPT if prompt is None else prompt
    params = {"temperature": 0, "ignore_eos": True, **params}
    if engine == "sglang":
        params["max_new_tokens"] = 12
        return {"input_ids": prompt, "sampling_params": params, "return_logprob": logprobs}
    params |= {"max_tokens": 12, **({"logprobs": 0} if logprobs else {})}
    if engine == "vllm":
        return {"token_ids": prompt, "sampling_params": params, "stream_options": USAGE}
    return {"prompt": prompt, **params, "stream_options": USAGE, "return_token_ids": True}


def serving(engine: str, **config: Any) -> Loopback:
    return Loopback(engine="sglang" if engine == "sglang" else "vllm", **config)


def recorded(server: Loopback, engine: str, asked: dict[str, Any], folder: Path) -> Recording:
    """Record the reply, save it, and load it."""
    recording = Recording(b"", request=asked, engine=engine)
    asyncio.run(record(server.url, recording))
    recording.save(folder / "stream.sse")
    loaded = Recording.load(folder / "stream.sse")
    assert loaded == recording
    assert (loaded.status, loaded.end) == (200, "eof")
    return loaded


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_recorded_of_an_engine_is_read_as_that_engine_writes(
    engine: str, logprobs: bool, tmp_path: Path
) -> None:
    with serving(engine) as server:
        recording = recorded(server, engine, request(engine, logprobs=logprobs), tmp_path)
        most = "max_new_tokens" if engine == "sglang" else "max_tokens"
        params = {most: 12, "temperature": 0, "ignore_eos": True, **({} if engine == "sglang" else {"logprobs": 0})}
        expected = server.undisturbed(PROMPT, params, return_logprob=True)
    generation, error = recording.replay(recording.parser())
    assert error is None
    assert generation.token_ids.tolist() == expected.token_ids
    assert (generation.finish_reason, generation.prompt_tokens) == ("length", 3)
    told = None if generation.logprobs is None else generation.logprobs.tolist()
    assert told == (expected.logprobs if logprobs else None)
    assert len(expected.logprobs or []) == 12


@pytest.mark.parametrize("key", ["input_ids", "token_ids", "prompt"])
def test_an_engine_that_counts_another_prompt_than_was_sent_is_found_out(key: str, tmp_path: Path) -> None:
    engine = dict(zip(["input_ids", "token_ids", "prompt"], ENGINES, strict=True))[key]
    with serving(engine) as server:
        recording = recorded(server, engine, request(engine), tmp_path)
    recording.request[key] = [*PROMPT, 303]
    _, error = recording.replay(recording.parser())
    assert isinstance(error, DecodeError)
    assert error.kind == "length"


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        ("sglang", {"input_ids": PROMPT, "image_data": ["data:image/png;base64,AA=="]}),
        ("sglang", {"input_ids": None, "text": "Hi"}),
        ("vllm-completions", {"prompt": "Hi"}),
        ("vllm-completions", {"prompt": ["Hi"]}),
        ("vllm-completions", {"prompt": [PROMPT]}),
    ],
)
def test_a_prompt_whose_length_the_engine_makes_is_as_long_as_it_says(
    engine: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    asked = {key: value for key, value in {**request(engine), **extra}.items() if value is not None}
    with serving(engine) as server:
        recording = recorded(server, engine, asked, tmp_path)
    generation, error = recording.replay(recording.parser())
    assert error is None
    assert len(generation.token_ids) == 12


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_routed_experts_begin_where_the_request_said(engine: str, tmp_path: Path) -> None:
    asked, config = request(engine), {"num_layers": 3, "top_k": 2, "num_experts": 8}
    if engine == "sglang":
        asked |= {"return_routed_experts": True, "routed_experts_start_len": 2}
    else:
        asked["sampling_params"]["routed_experts_prompt_start"] = 2
        config["return_routed_experts"] = True
    with serving(engine, **config) as server:
        recording = recorded(server, engine, asked, tmp_path)
    generation, error = recording.replay(recording.parser(experts=Experts(3, 2, 8)))
    assert error is None
    assert generation.routed_experts is not None
    assert generation.routed_experts.shape == (3 + 12 - 1 - 2, 3, 2)


def test_a_recording_that_names_no_engine_is_sglang_s_unless_told_otherwise(tmp_path: Path) -> None:
    for engine in ENGINES:
        with serving(engine) as server:
            recording = recorded(server, engine, request(engine), tmp_path)
        beside = tmp_path / "stream.json"
        told = json.loads(beside.read_bytes())
        assert told.pop("engine") == engine
        beside.write_text(json.dumps(told), encoding="utf-8")
        old = Recording.load(tmp_path / "stream.sse")
        assert old.engine == "sglang"
        generation, error = old.replay(old.parser(None if engine == "sglang" else engine))
        assert error is None
        expected, _ = recording.replay(recording.parser())
        assert generation.logprobs is not None
        assert np.array_equal(generation.token_ids, expected.token_ids)
        assert generation == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_of_any_shape_makes_a_parser(engine: str) -> None:
    keys = ("input_ids", "token_ids", "prompt", "sampling_params", "return_logprob", "routed_experts_start_len")
    starts = [{"routed_experts_prompt_start": start} for start in ("2", -1, 2**70)]
    for odd in (None, 7, -1, 2**70, "x", [None], {"logprobs": 1}, *starts):
        asked: dict[str, Any] = dict.fromkeys(keys, odd)
        recording = Recording(b"", request=asked, engine=engine)
        generation, error = recording.replay(recording.parser())
        assert len(generation.token_ids) == 0
        assert type(error).__name__ == "StreamTruncated"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ids", [True, False], ids=["own id", "no id"])
async def test_a_recording_that_is_cancelled_aborts_its_request_and_keeps_the_end_that_follows(
    engine: str, ids: bool
) -> None:
    asked, keys = request(engine), {"sglang": "rid"}
    key = keys.get(engine, "request_id")
    most = asked["sampling_params"] if engine == "sglang" else asked.get("sampling_params", asked)
    most["max_new_tokens" if engine == "sglang" else "max_tokens"] = 2000
    if ids:
        asked[key] = "the-id-of-mine"
    with serving(engine, token_rate=100, leave_delay=None) as server:
        recording = Recording(b"", request=asked, engine=engine)
        came = asyncio.Event()
        task = asyncio.ensure_future(record(server.url, recording, on_read=lambda _size: came.set()))
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = server.stats()
        assert (stats.running, stats.waiting) == (0, 0), "nothing but the abort ends it"
        assert [rid for rid in stats.aborts if recording.request[key] in rid]
    assert recording.request[key] == "the-id-of-mine" if ids else len(recording.request[key]) == 32
    assert recording.end == "an interrupt"
    generation, error = recording.replay(recording.parser())
    assert error is None
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 2000


async def test_a_second_cancel_of_a_recording_does_not_wait_for_the_end() -> None:
    faults = Faults([{"kind": "silence", "after_events": 3}])
    with Loopback(token_rate=100, faults=faults) as server:
        recording = Recording(b"", request=request("sglang"))
        task = asyncio.ensure_future(record(server.url, recording, drain=3600))
        await until(lambda: len(recording.reads) >= 3)
        task.cancel()
        await until(lambda: server.stats().aborts)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert recording.end == "an interrupt"
    assert sum(size for _, size in recording.reads) == len(recording.body) > 0
