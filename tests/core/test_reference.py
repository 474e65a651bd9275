"""The reference reader gives what the recordings say, before anything is compared with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference import Reading, exact, read
from support.bodies import DONE, Recording, Shape, event, finish, logprobs, queued_abort, recordings


def check(reading: Reading, told: dict[str, Any]) -> None:
    """The reading holds all that the recording tells."""
    wanted = told.get("left", {}) if "error" in told else told["expected"]
    assert {key: exact(getattr(reading, key)) for key in wanted} == exact(wanted)
    assert reading.error == told.get("error")
    assert reading.kind == told.get("kind")
    if "routed_experts" in told:
        assert reading.routed_experts is not None
        assert reading.routed_experts.shape == tuple(told["routed_experts"]["shape"])
        assert reading.routed_experts.ravel().tolist() == told["routed_experts"]["int32"]


@pytest.mark.parametrize("recording", [*recordings("streams"), *recordings("cases")], ids=str)
def test_the_reader_gives_what_the_recording_tells(recording: Recording) -> None:
    for dialect in recording.dialects:
        check(read(recording.body, dialect, **recording.asked), recording.told)


def test_all_recordings_of_one_request_tell_the_same_in_both_modes() -> None:
    """The scripted engine sent the same tokens in both modes, so two folders check each other."""
    by_name: dict[str, list[Reading]] = {}
    for recording in recordings("streams"):
        folder, name = recording.name.split("/")
        if folder.startswith("sglang") and "-moe-" not in folder and "error" not in recording.told:
            by_name.setdefault(f"{folder.rpartition('-')[0]}/{name}", []).append(
                read(recording.body, recording.dialect, **recording.asked)
            )
    pairs = [readings for readings in by_name.values() if len(readings) == 2]
    assert len(pairs) > 20
    for one, other in pairs:
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert exact(one.logprobs) == exact(other.logprobs)


def test_readings_differ_by_the_sign_of_zero_and_by_the_type_of_a_number() -> None:
    assert Reading([1], [0.0]) == Reading([1], [0.0])
    assert Reading([1], [0.0]) != Reading([1], [-0.0])
    assert Reading([1], [0.0]) != Reading([1], [0])
    assert Reading([1], None, meta={"a": True, "b": 1}) == Reading([1], None, meta={"b": 1, "a": True})
    assert Reading([1], None, meta={"a": True}) != Reading([1], None, meta={"a": 1})
    int32, uint8 = np.zeros(2, np.int32), np.zeros(2, np.uint8)
    assert Reading([], None, routed_experts=int32) != Reading([], None, routed_experts=uint8)


def test_every_field_of_a_reading_can_be_told() -> None:
    body = (
        event([0], 1, text="a", cached_tokens=2, weight_version=6)
        + event(
            [5, 9],
            3,
            text="b",
            reason=finish("stop", matched=9),
            cached_tokens=2,
            weight_versions=[{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}],
            routed_experts="AQIDBA==",
            routed_experts_dtype="uint8",
            top_p_token_ids=[0, 5, 6, 9],
            top_p_token_offsets=[0, 1, 3, 4],
            e2e_latency=0.5,
        )
        + DONE
    )
    assert read(body, "sglang", experts=Shape(1, 1), prompt_len=3, experts_start=1) == Reading(
        token_ids=[0, 5, 9],
        logprobs=logprobs(0, 5, 9),
        text="ab",
        finish_reason="stop",
        matched=9,
        routed_experts=np.array([1, 2, 3, 4], np.uint8).reshape(4, 1, 1),
        top_p=([0, 5, 6, 9], [0, 1, 3, 4]),
        version_spans=[("6", 0, 1), ("7", 1, 3)],
        prompt_tokens=3,
        cached_tokens=2,
        max_tokens_per_event=2,
        meta={
            "id": "r7",
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs_length": 3,
            "completion_tokens": 3,
            "weight_version": 6,
            "routed_experts_dtype": "uint8",
            "e2e_latency": 0.5,
        },
        done=True,
    )


def test_a_wrong_event_leaves_the_state_of_the_last_good_one() -> None:
    good = event([1], 1, text="a", weight_version="v", note="kept")
    for wrong in (
        event([2, 3], 4, text="b", note="lost"),
        event([2], 2, text="b", note="lost", routed_experts="!"),
        event([-2], 2, text="b", note="lost"),
    ):
        reading = read(good + wrong, "sglang-incremental")
        assert reading.error == "DecodeError"
        assert (reading.token_ids, reading.logprobs, reading.text) == ([1], [logprobs(1)[0]], "a")
        assert reading.meta["note"] == "kept"


def test_the_queue_s_abort_event_repeats_what_was_sent() -> None:
    told = event([1], 1, text="a") + event([2], 2, text="b")
    for text, tokens, whole in (
        ("ab", [1, 2], [1, 2]),
        ("abc", [1, 2, 3], [1, 2, 3]),
        ("cabc", [3, 1, 2, 3], [1, 2, 3]),
    ):
        reading = read(told + queued_abort(tokens, len(whole), text=text), "sglang-incremental")
        assert (reading.token_ids, reading.finish_reason) == (whole, "abort")
        assert reading.text == "abc"[: len(whole)]
