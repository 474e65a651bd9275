"""The loopback engine's control endpoints: aborts, queue, pauses, weight versions, client disconnects."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from streamfold.loopback import Loopback
from support.loopback_http import PLAIN, PROMPT, generate, get, load, opened, payload, post, undisturbed, unread, until

LONG: dict[str, Any] = {"params": {"max_new_tokens": 20_000}}
RUNNING_ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUE_ABORT = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL = {"type": "abort", "status_code": 503, "message": "The request queue is full."}


# Aborts


@pytest.mark.parametrize("incremental", [False, True])
def test_an_abort_ends_the_stream_with_one_more_token(incremental: bool) -> None:
    # So slow that the second token would take longer than the test: an abort does not wait for it.
    with Loopback(incremental=incremental, token_rate=0.001) as engine, opened(engine, rid="a", **LONG) as stream:
        stream.frame()
        post(engine, "abort_request", {"rid": "a"})
        answer = stream.to_end()
        assert answer.finish == RUNNING_ABORT
        assert len(answer.frames) == 2
        assert answer.read().token_ids == undisturbed(engine, params={"max_new_tokens": 2}).token_ids
        assert load(engine) == (0, 0)


def test_an_aborted_generation_resumed_from_its_tokens_equals_the_undisturbed_one() -> None:
    with Loopback(incremental=True, token_rate=200) as engine:
        params = {"max_new_tokens": 60, "temperature": 1, "sampling_seed": 11}
        with opened(engine, rid="a", params=params) as stream:
            for _ in range(10):
                stream.frame()
            post(engine, "abort_request", {"rid": "a"})
            first = stream.to_end().read()
        rest = {**params, "max_new_tokens": 60 - len(first.token_ids)}
        second = generate(engine, input_ids=PROMPT + first.token_ids, params=rest).read()
        wanted = undisturbed(engine, params=params)
        assert first.token_ids + second.token_ids == wanted.token_ids
        assert (first.logprobs or []) + (second.logprobs or []) == wanted.logprobs


def test_an_abort_takes_every_rid_that_begins_so_and_no_unknown_one() -> None:
    with Loopback(incremental=True, token_rate=50) as engine:
        with (
            opened(engine, rid="job-1", **LONG) as one,
            opened(engine, rid="job-10", **LONG) as ten,
            opened(engine, rid="other", **LONG) as other,
        ):
            for stream in (one, ten, other):
                stream.frame()
            for unknown in ("job", "", "job-100"):
                assert post(engine, "abort_request", {"rid": unknown}).status_code == 200
            other.frame()
            assert load(engine) == (3, 0), "no request has exactly this id"
            assert post(engine, "abort_request", {"rid": "job-1"}).content == b""
            assert one.to_end().finish == RUNNING_ABORT
            assert ten.to_end().finish == RUNNING_ABORT
            assert load(engine) == (1, 0)
        assert engine.stats().aborts == ("job", "", "job-100", "job-1")


def test_an_abort_during_prefill_is_prompt_and_still_brings_a_token() -> None:
    with Loopback(prefill_delay=1000) as engine, opened(engine, rid="a") as stream:
        until(lambda: load(engine) == (1, 0))
        post(engine, "abort_request", {"rid": "a"})
        answer = stream.to_end()
        assert answer.finish == RUNNING_ABORT
        assert len(answer.read().token_ids) == 1


def test_abort_all_ends_what_runs_and_what_waits() -> None:
    with Loopback(token_rate=50, max_running_requests=1) as engine:
        with opened(engine, **LONG) as running, opened(engine, **LONG) as waiting:
            running.frame()
            until(lambda: load(engine) == (1, 1))
            post(engine, "abort_request", {"abort_all": True})
            assert running.to_end().finish == RUNNING_ABORT
            assert waiting.to_end().finish == QUEUE_ABORT
        assert engine.stats().aborts == ("*",)
        assert load(engine) == (0, 0)


def test_a_second_abort_and_one_after_the_end_change_nothing() -> None:
    with Loopback(token_rate=20) as engine, opened(engine, rid="a", **LONG) as stream:
        stream.frame()
        for _ in range(3):
            post(engine, "abort_request", {"rid": "a"})
        answer = stream.to_end()
        post(engine, "abort_request", {"rid": "a"})
        assert answer.finish == RUNNING_ABORT
        assert len(generate(engine, rid="a", params={"max_new_tokens": 2}).read().token_ids) == 2, "the id is free"


# The queue


def test_who_finds_no_place_waits_in_line() -> None:
    with Loopback(max_running_requests=2, token_rate=400) as engine:
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(generate, engine, params={"max_new_tokens": 10}) for _ in range(6)]
            assert all(len(answer.result().read().token_ids) == 10 for answer in answers)
        stats = engine.stats()
        assert (stats.requests, stats.running, stats.waiting, stats.tokens) == (6, 0, 0, 60)


def test_the_batch_never_holds_more_than_it_may() -> None:
    with (
        Loopback(max_running_requests=1, prefill_delay=1000) as engine,
        opened(engine, rid="first"),
        opened(engine, rid="second") as second,
        opened(engine, rid="third"),
    ):
        until(lambda: load(engine) == (1, 2))
        post(engine, "abort_request", {"rid": "second"})
        assert second.to_end().finish == QUEUE_ABORT
        assert load(engine) == (1, 1)


@pytest.mark.parametrize("frontend", ["python", "rust"])
def test_an_abort_in_the_queue_tells_nothing_and_only_in_part_of_the_keys(frontend: Any) -> None:
    with Loopback(max_running_requests=1, prefill_delay=1000, frontend=frontend) as engine:
        with opened(engine, rid="first"), opened(engine, rid="second") as second:
            until(lambda: load(engine) == (1, 1))
            post(engine, "abort_request", {"rid": "second"})
            answer = second.to_end()
        assert answer.finish == (QUEUE_ABORT if frontend == "python" else {**RUNNING_ABORT, **QUEUE_ABORT})
        assert ("prompt_tokens" in answer.last["meta_info"]) == (frontend == "rust")
        assert answer.last.get("output_ids", []) == []
        assert answer.read().token_ids == []


def test_a_full_queue_is_an_abort_frame_in_a_stream_and_a_status_elsewhere() -> None:
    with (
        Loopback(max_running_requests=1, max_queued_requests=1, prefill_delay=1000) as engine,
        opened(engine, rid="runs"),
        opened(engine, rid="waits"),
    ):
        until(lambda: load(engine) == (1, 1))
        refused = generate(engine)
        assert refused.status == 200
        assert refused.finish == QUEUE_FULL
        assert (refused.last["output_ids"], refused.last["text"]) == ([], "")
        whole = generate(engine, stream=False)
        assert whole.status == 503
        reported = {"message": "The request queue is full.", "type": "503", "param": None, "code": 503}
        assert whole.json == {"object": "error", **reported}
        assert load(engine) == (1, 1)


def test_the_rust_frontend_tells_a_full_queue_as_an_error() -> None:
    with (
        Loopback(frontend="rust", max_running_requests=1, max_queued_requests=0, prefill_delay=1000) as engine,
        opened(engine),
    ):
        until(lambda: load(engine) == (1, 0))
        error = {"error": {"message": "The request queue is full.", "code": 503}}
        assert generate(engine).last == error
        whole = generate(engine, stream=False)
        assert (whole.status, whole.json) == (503, error)


# Pauses


def test_a_pause_in_place_silences_streams_and_loses_nothing() -> None:
    with Loopback(incremental=True, token_rate=100) as engine, opened(engine) as stream:
        stream.frame()
        reported = post(engine, "pause_generation", {"mode": "in_place"}).json()
        assert reported == {"message": "Generation paused successfully.", "status": "ok"}
        tokens = engine.stats().tokens
        with opened(engine, rid="new") as new:
            assert new.response.status_code == 200, "headers come at once, events do not"
            assert load(engine) == (1, 0), "and it was not taken in"
            assert engine.stats().tokens == tokens
            post(engine, "continue_generation")
            assert new.to_end().ids == undisturbed(engine).token_ids
        assert stream.to_end().ids == undisturbed(engine).token_ids


def test_a_retracted_request_waits_and_goes_on_where_it_was() -> None:
    with Loopback(incremental=True, token_rate=100) as engine, opened(engine) as stream:
        stream.frame()
        post(engine, "pause_generation", {"mode": "retract"})
        assert load(engine) == (0, 1)
        post(engine, "continue_generation")
        answer = stream.to_end()
        assert answer.ids == undisturbed(engine).token_ids
        assert answer.frames[0]["meta_info"]["num_retractions"] == 0
        assert answer.last["meta_info"]["num_retractions"] == 1


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"])
def test_an_abort_of_a_retracted_request_repeats_all_it_had(incremental: bool, version: str) -> None:
    """sgl-project/sglang#40901, #34488."""
    with Loopback(incremental=incremental, version=version, token_rate=100) as engine:
        with opened(engine, rid="a", **LONG) as stream:
            for _ in range(5):
                stream.frame()
            post(engine, "pause_generation", {"mode": "retract"})
            post(engine, "abort_request", {"abort_all": True})
            answer = stream.to_end()
        n = engine.stats().tokens
        wanted = undisturbed(engine, params={"max_new_tokens": n})
        assert answer.finish == QUEUE_ABORT
        whole_ids = version == "0.5.23" and not incremental
        assert answer.last["output_ids"] == (wanted.token_ids if whole_ids else wanted.token_ids[-1:])
        assert len(answer.last["meta_info"]["output_token_logprobs"]) == n
        assert answer.read().token_ids == wanted.token_ids
        assert answer.read().logprobs == wanted.logprobs


def test_tokens_that_no_frame_told_are_lost_with_an_abort_in_the_queue() -> None:
    """The frontend makes that frame from what it knows."""
    with Loopback(incremental=True, stream_interval=10_000) as engine, opened(engine, rid="a", **LONG) as stream:
        stream.frame()
        until(lambda: engine.stats().tokens > 20)
        post(engine, "pause_generation", {"mode": "retract"})
        post(engine, "abort_request", {"rid": "a"})
        assert len(stream.to_end().read().token_ids) in {1, 10_001}


def test_what_a_slow_reader_did_not_take_stands_glued_before_what_the_abort_repeats() -> None:
    with Loopback(incremental=True, send_buffer=8192) as engine:
        with unread(engine, rid="a", **LONG) as read_all:
            until(lambda: engine.stats().tokens > 3000)
            post(engine, "pause_generation", {"mode": "retract"})
            post(engine, "abort_request", {"rid": "a"})
            answer = read_all()
        n = engine.stats().tokens
        sent = answer.frames[-2]["meta_info"]["completion_tokens"]
        assert len(answer.last["meta_info"]["output_token_logprobs"]) == n + n - sent > n
        assert answer.read().token_ids == undisturbed(engine, params={"max_new_tokens": n}).token_ids


def test_a_pause_by_abort_ends_everything_before_it_answers_and_holds_the_new_ones() -> None:
    with Loopback(token_rate=50) as engine, ThreadPoolExecutor(1) as pool:
        with opened(engine, **LONG) as stream:
            stream.frame()
            post(engine, "pause_generation")
            assert load(engine) == (0, 0)
            assert stream.to_end().finish == RUNNING_ABORT
        held = pool.submit(generate, engine)
        until(lambda: len(engine.seen()) >= 4)
        assert engine.stats().requests == 1
        post(engine, "abort_request", {"abort_all": True})
        post(engine, "continue_generation")
        assert held.result().finish["type"] == "length", "an abort does not reach what was not taken in"


def test_a_pause_by_abort_ends_what_a_pause_in_place_had_frozen() -> None:
    with Loopback(token_rate=50) as engine, opened(engine, **LONG) as stream:
        stream.frame()
        post(engine, "pause_generation", {"mode": "in_place"})
        post(engine, "pause_generation", {"mode": "abort"})
        assert stream.to_end().finish == RUNNING_ABORT


def test_a_client_may_leave_while_its_request_is_held() -> None:
    with Loopback() as engine:
        post(engine, "pause_generation")
        with opened(engine):
            pass
        until(lambda: engine.stats().open_connections == 0)
        post(engine, "continue_generation")
        assert engine.stats().requests == 0


# Weight versions


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23"])
def test_tokens_keep_the_weight_version_that_they_were_sampled_under(version: str) -> None:
    with Loopback(incremental=True, token_rate=100, version=version, weight_version="1") as engine:
        with opened(engine, params={"max_new_tokens": 30}) as stream:
            for _ in range(5):
                stream.frame()
            post(engine, "pause_generation", {"mode": "in_place"})
            body = {"new_version": "2", "abort_all_requests": False}
            assert post(engine, "update_weight_version", body).json()["success"]
            changed = engine.stats().tokens
            post(engine, "continue_generation")
            answer = stream.to_end()
        assert answer.read().version_spans == [("1", 0, changed), ("2", changed, 30)]
        labels = [frame["meta_info"]["weight_version"] for frame in answer.frames]
        assert labels == ["1"] * changed + ["2"] * (30 - changed)
        reported = answer.last["meta_info"].get("weight_versions")
        spans = [{"version": "1", "start": 0, "end": changed}, {"version": "2", "start": changed, "end": 30}]
        assert reported == (None if version == "0.5.18" else spans)
        assert answer.ids == undisturbed(engine, params={"max_new_tokens": 30}).token_ids
        for name in ("model_info", "get_model_info", "server_info"):
            assert get(engine, name).json()["weight_version"] == "2"


def test_a_new_weight_version_aborts_everything_unless_told_not_to() -> None:
    """radixark/miles#2589."""
    with Loopback(token_rate=50) as engine, opened(engine, **LONG) as stream:
        stream.frame()
        post(engine, "update_weight_version", {"new_version": "7"})
        assert stream.to_end().finish == RUNNING_ABORT
        assert post(engine, "update_weight_version", {"new_version": 7}).status_code == 400


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_once(stream: bool) -> None:
    with Loopback(token_rate=20) as engine:
        body = payload(rid="gone", params={"max_new_tokens": 20_000, "stream_interval": 1000}, stream=stream)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/generate", json=body, **{**PLAIN, "timeout": 0.2})
        until(lambda: engine.stats().leavers == ("gone",))
        assert load(engine) == (0, 0)
        tokens = engine.stats().tokens
        generate(engine, params={"max_new_tokens": 2})
        assert engine.stats().tokens == tokens + 2


def test_a_client_that_leaves_the_queue_gives_up_its_place() -> None:
    with Loopback(max_running_requests=1, prefill_delay=1000) as engine, opened(engine, rid="first"):
        until(lambda: load(engine) == (1, 0))
        with opened(engine, rid="second"):
            until(lambda: load(engine) == (1, 1))
        until(lambda: load(engine) == (1, 0))
        assert engine.stats().leavers == ("second",)


def test_a_client_that_leaves_without_reading_is_noticed_too() -> None:
    with Loopback(incremental=True, send_buffer=8192) as engine:
        with unread(engine, **LONG):
            until(lambda: engine.stats().tokens > 3000)
        until(lambda: len(engine.stats().leavers) == 1 and engine.stats().open_connections == 0)
        assert load(engine) == (0, 0)


def test_some_releases_notice_a_leaver_late_or_never() -> None:
    with Loopback(leave_delay=None) as engine:
        with opened(engine, params={"max_new_tokens": 3000}) as stream:
            stream.frame()
        until(lambda: engine.stats().tokens == 3000)
        assert len(engine.stats().leavers) == 1
    with Loopback(leave_delay=0.2, token_rate=100) as engine:
        with opened(engine, **LONG) as stream:
            stream.frame()
        until(lambda: len(engine.stats().leavers) == 1)
        assert load(engine) == (1, 0)
        until(lambda: load(engine) == (0, 0))
