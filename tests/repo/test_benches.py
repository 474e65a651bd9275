"""The benchmarks compare like with like: all ways read the same replies the same way. Small replies here, no clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benches.bench_parser import WAYS
from benches.memory import held_by_parser
from benches.report import AIM_BYTES, report
from benches.streams import READ, Stream, cumulative, incremental, vllm
from support.folding import fold
from support.paths import DATA

STREAMS_DATA = DATA / "streams"
STREAMS = [incremental(3_000), incremental(500, per_event=1), cumulative(500), vllm(3_000), vllm(500, per_event=1)]


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_every_way_reads_what_the_stream_holds(stream: Stream, way: str) -> None:
    token_ids, logprobs, text = WAYS[way](stream.reads, stream.dialect)
    expected = fold(b"".join(stream.reads), stream.dialect).reading
    assert token_ids.tolist() == expected.token_ids
    assert logprobs.tolist() == expected.logprobs
    assert text == (expected.text or "")
    assert len(token_ids) == stream.tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [STREAMS[0], STREAMS[3]], ids=lambda stream: stream.name)
def test_every_way_refuses_a_stream_that_lost_an_event(stream: Stream, way: str) -> None:
    events = b"".join(stream.reads).split(b"\n\n")
    del events[7]
    with pytest.raises(ValueError, match=r"1[46]0"):
        WAYS[way]([b"\n\n".join(events)], stream.dialect)


@pytest.mark.parametrize("stream", [STREAMS[0], STREAMS[2]], ids=lambda stream: stream.name)
def test_events_have_the_keys_of_recorded_ones_in_their_order(stream: Stream) -> None:
    recorded = STREAMS_DATA / f"sglang-0.5.23-{stream.name}" / "stream_interval20_length150.sse"
    ours, theirs = events(b"".join(stream.reads)), events(recorded.read_bytes())
    for index in (0, 1, -1):
        assert list(ours[index]) == list(theirs[index])
        assert list(ours[index]["meta_info"]) == list(theirs[index]["meta_info"])
    assert len(ours[1]["meta_info"]) == 13


def test_events_of_vllm_have_the_keys_of_recorded_ones_in_their_order() -> None:
    recorded = events((STREAMS_DATA / "vllm-0.32" / "dense-80-stream-interval.sse").read_bytes())
    ours = events(b"".join(STREAMS[3].reads))
    for index in (0, 1, -2, -1):
        one, other = ours[index], recorded[index]
        assert list(one) == list(other)
        assert list(one["usage"]) == list(other["usage"])
        for choice, theirs in zip(one["choices"], other["choices"], strict=True):
            assert list(choice) == list(theirs)
            entry, its = choice["logprobs"]["content"][0], theirs["logprobs"]["content"][0]
            assert list(entry) == list(its)
            assert [list(likely) for likely in entry["top_logprobs"]] == [
                list(likely) for likely in its["top_logprobs"]
            ]


def test_a_reply_in_flight_holds_at_most_14_bytes_a_token() -> None:
    stream = incremental(50_000)
    assert AIM_BYTES == 14
    assert max(held_by_parser(stream, part / 20) for part in range(2, 21)) <= AIM_BYTES


def test_reads_are_as_long_as_a_socket_gives_them() -> None:
    for stream in STREAMS:
        assert {len(read) for read in stream.reads[:-1]} <= {READ}
        assert 0 < len(stream.reads[-1]) <= READ


def test_the_report_tells_each_ratio_and_each_aim() -> None:
    run = {
        "datetime": "2026-01-02T03:04:05",
        "machine_info": {
            "cpu": {"brand_raw": "A CPU", "count": 2},
            "system": "Linux",
            "machine": "x86_64",
            "python_implementation": "CPython",
            "python_version": "3.11.7",
        },
        "benchmarks": [
            {
                "extra_info": {"stream": "incremental", "way": way, "tokens": 1_000, "events": 50, "bytes": 50_000},
                "stats": {"data": [seconds]},
            }
            for way, seconds in (("streamfold", 0.001), ("streamfold", 0.002), ("json", 0.0125))
        ],
    }
    lines = list(report(run, {"parser": 13.456}))
    assert "| incremental | json | 0.0125 | 0.0125 | 4 | 12,500 | 12.5x | at least 9x |" in lines
    assert "| incremental | streamfold | 0.0010 | 0.0015 | 50 | 1,000 |  |  |" in lines
    assert any("13.46 | at most 14" in line for line in lines)
