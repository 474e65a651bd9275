"""The benchmarks' server sends what engines send, and every client reads the same of it. Small counts, no clock."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvloop

from benches import measure, scale
from benches.clients.base import PATHS, Target
from benches.clients.registry import AIOHTTP, BARE, CLIENTS, HTTPX, PRODUCT, make
from benches.server import Pace, serving, stats
from benches.streams import Stream, incremental, vllm
from benches.transport import ROWS, Result, section
from support.cargo import needs_cargo
from support.folding import Folded, agreed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal

    from benches.clients.base import Reading

pytestmark = needs_cargo

TOKENS = 50  # in events of three: the last one has two
RIDS = [f"{index:032x}" for index in range(6)]
PACE = Pace(streams=len(RIDS), per_event=3, tick=0.002)
DIALECTS: dict[str, tuple[Literal["sglang", "vllm"], bool]] = {
    "sglang-incremental": ("sglang", False),
    "sglang-cumulative": ("sglang", True),
    "vllm": ("vllm", False),
}


def request_bytes(target: Target, rid: str, tokens: int, *, close: bool = True) -> bytes:
    body = json.dumps(target.payload(rid, tokens)).encode()
    return post(PATHS[target.engine], body, close=close)


def post(path: str, body: bytes, *, close: bool = True) -> bytes:
    connection = b"Connection: close\r\n" if close else b""
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        connection,
        len(body),
        body,
    )


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=30)


def received(peer: socket.socket) -> bytes:
    """All bytes to the end of the connection."""
    reads = []
    while read := peer.recv(1 << 16):
        reads.append(read)
    return b"".join(reads)


def body_of(response: bytes) -> bytes:
    """The body of a chunked response, whose head and framing are as they have to be."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    chunks: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        chunk, end, rest = rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert rest == b""
            return b"".join(chunks)
        assert chunk.endswith(b"\n\n")
        chunks.append(chunk)


def round_of(url: str, target: Target) -> list[bytes]:
    """The bodies of one round."""
    peers = [connected(url) for _ in RIDS]
    for peer, rid in zip(peers, RIDS, strict=True):
        peer.sendall(request_bytes(target, rid, TOKENS))
    responses = [received(peer) for peer in peers]
    for peer in peers:
        peer.close()
    return [body_of(response) for response in responses]


def parsed(body: bytes, dialect: str, rid: str) -> Folded:
    """What the strict parser reads, after the reference reader has said the same."""
    found = agreed(body, dialect, prompt_len=512)
    assert found.error is None, found.error
    assert {event_id(event) for event in events(body)} == {rid}
    return found


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


def event_id(event: dict[str, Any]) -> str:
    if "meta_info" in event:
        return str(event["meta_info"]["id"])
    return str(event["request_id"]).removeprefix("generate-tokens-")


@pytest.mark.parametrize("pacing", ["burst", "spread"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_stream_of_a_round_parses_strictly_and_is_the_same_but_for_its_id(
    dialect: str, pacing: Literal["burst", "spread"]
) -> None:
    engine, cumulative = DIALECTS[dialect]
    with serving(replace(PACE, pacing=pacing, cumulative=cumulative)) as url:
        target = Target(url=url, engine=engine, cumulative=cumulative)
        bodies = round_of(url, target)
        again = round_of(url, target)
    assert bodies == again
    found = [parsed(body, dialect, rid) for body, rid in zip(bodies, RIDS, strict=True)]
    assert len(found[0].reading.token_ids) == TOKENS
    assert found[0].reading.finish_reason == "length"
    assert found[0].reading.prompt_tokens == 512
    plain = {body.replace(rid.encode(), b"") for body, rid in zip(bodies, RIDS, strict=True)}
    assert len(plain) == 1
    assert len([event for event in events(bodies[0]) if event.get("choices") != []]) == 17  # of three tokens each


@pytest.mark.parametrize("stream", [incremental(TOKENS, 3), vllm(TOKENS, 3)], ids=lambda stream: stream.name)
def test_events_have_the_keys_of_recorded_ones_in_their_order(stream: Stream) -> None:
    """The streams of the parser's benchmark are held to recorded ones."""
    engine: Literal["sglang", "vllm"] = "vllm" if stream.dialect == "vllm" else "sglang"
    with serving(PACE) as url:
        ours = events(round_of(url, Target(url=url, engine=engine))[0])
    theirs = events(b"".join(stream.reads))
    assert len(ours) == len(theirs)
    assert [shape(one) for one in ours] == [shape(other) for other in theirs]


def shape(value: Any) -> Any:
    """Keys in their order, and the types of what they hold."""
    if isinstance(value, dict):
        return [(key, shape(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value)


def test_events_are_as_long_as_recorded_ones() -> None:
    with serving(replace(PACE, per_event=1)) as url:
        bodies = round_of(url, Target(url=url))
    ours, theirs = len(bodies[0]), sum(map(len, incremental(TOKENS, 1).reads))
    assert abs(ours - theirs) < theirs / 50


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("pacing", ["burst", "spread"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_client_reads_the_same_tokens(
    dialect: str,
    tls: bool,
    pacing: Literal["burst", "spread"],
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    engine, cumulative = DIALECTS[dialect]

    async def read(name: str) -> list[Reading]:
        async with make(name, target) as client:
            return await asyncio.gather(*[client.read(rid, TOKENS) for rid in RIDS])

    with serving(replace(PACE, pacing=pacing, cumulative=cumulative, tls=tls)) as url:
        target = Target(url=url, engine=engine, cumulative=cumulative)
        found = {}
        for name in CLIENTS:
            with closing(loop()) as running:
                found[name] = running.run_until_complete(read(name))
        counted = stats(url)
    dropped = found.pop(BARE)
    assert len({reading.size for reading in dropped}) == 1
    assert dropped[0].size > TOKENS * 40
    expected = found[PRODUCT][0]
    assert expected.token_ids is not None
    assert len(expected.token_ids) == TOKENS
    for readings in found.values():
        for reading in readings:
            np.testing.assert_array_equal(reading.token_ids, expected.token_ids, strict=True)
            np.testing.assert_array_equal(reading.logprobs, expected.logprobs, strict=True)
    assert counted["events"] == len(CLIENTS) * len(RIDS) * 17
    assert set(counted["finished"]) == set(RIDS)


def test_a_request_of_one_event_waits_for_no_other_and_keeps_its_connection() -> None:
    with serving(replace(PACE, streams=100)) as url, closing(connected(url)) as peer:
        target = Target(url=url)
        for rid in RIDS[:3]:
            peer.sendall(request_bytes(target, rid, 3, close=False))
            response = b""
            while not response.endswith(b"0\r\n\r\n"):
                response += peer.recv(1 << 16)
            assert len(parsed(body_of(response), "sglang-incremental", rid).reading.token_ids) == 3
        peer.sendall(request_bytes(target, RIDS[3], 3))
        assert len(parsed(body_of(received(peer)), "sglang-incremental", RIDS[3]).reading.token_ids) == 3
        assert stats(url)["connections"] == 2  # this one, and that of the question


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_abort_ends_the_stream_that_it_names_and_no_other(dialect: str) -> None:
    engine, cumulative = DIALECTS[dialect]
    with serving(replace(PACE, cumulative=cumulative, tick=0.01)) as url:
        target = Target(url=url, engine=engine, cumulative=cumulative)
        peers = [connected(url) for _ in RIDS]
        for peer, rid in zip(peers, RIDS, strict=True):
            peer.sendall(request_bytes(target, rid, TOKENS))
        start = peers[2].recv(1 << 16)  # it is under way
        with closing(connected(url)) as control:
            named = {"rid": RIDS[2]} if engine == "sglang" else {"request_ids": [f"generate-tokens-{RIDS[2]}", RIDS[2]]}
            path = "/abort_request" if engine == "sglang" else "/inference/v1/abort_requests"
            control.sendall(post(path, json.dumps(named).encode()))
            assert received(control).startswith(b"HTTP/1.1 200 OK\r\n")
        aborted = start + received(peers[2])
        whole = [received(peer) for peer in peers if peer is not peers[2]]
        for peer in peers:
            peer.close()
    found = agreed(body_of(aborted), dialect, prompt_len=512)
    assert found.error is None
    assert found.reading.finish_reason == "abort"
    assert 0 < len(found.reading.token_ids) < TOKENS
    for response in whole:
        assert len(agreed(body_of(response), dialect).reading.token_ids) == TOKENS


@pytest.mark.parametrize("kind", measure.KINDS)
async def test_each_kind_of_measurement_gives_its_figures(kind: measure.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BLOCKED", 0.2)
    expected = {
        "stream": {
            "cpu",
            "wall",
            "finish_p99",
            "digest",
            "server_cpu",
            "server_events",
            "server_late",
            "server_latest",
        },
        "abort": {"abort_p50", "abort_p99"},
        "blocked": {"catch_up", "digest"},
        "start": {"cpu", "wall"},
        "memory": {"waiting_bytes"},
    }
    expected["sweeps"] = expected["stream"] | {"sweep_p99", "longest_sweep", "sweep_cpu"}
    expected["lag"] = expected["stream"] | {"lag_mean", "lag_p99"}
    tokens = {"abort": 3000, "start": 3, "blocked": 300}.get(kind, TOKENS)
    streams = len(RIDS) + (kind == "memory")
    with serving(replace(PACE, streams=streams, tick=0.01)) as url:
        target = Target(url=url)
        job = measure.Job(kind=kind, client=PRODUCT, loop="asyncio", target=target, streams=len(RIDS), tokens=tokens)
        async with make(PRODUCT, target) as client:
            assert set(await measure.KINDS[kind](client, job)) == expected[kind]


def test_all_streams_are_aborted_at_once_and_waiting_ones_too() -> None:
    with serving(PACE) as url, closing(connected(url)) as peer:
        peer.sendall(request_bytes(Target(url=url), RIDS[0], TOKENS))
        while stats(url)["waiting"] != 1:
            pass
        with closing(connected(url)) as control:
            control.sendall(post("/abort_request", b'{"abort_all": true}'))
            received(control)
        assert agreed(body_of(received(peer))).reading.finish_reason == "abort"
        assert stats(url)["waiting"] == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /workers HTTP/1.1\r\nConnection: close\r\n\r\n", b"404"),
        (post("/generate", b"{"), b"400"),
        (post("/generate", b'{"input_ids": [1], "sampling_params": {}}'), b"400"),
    ],
)
def test_other_requests_are_refused(sent: bytes, status: bytes) -> None:
    with serving(PACE) as url, closing(connected(url)) as peer:
        peer.sendall(sent)
        assert received(peer).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_measurement_runs_in_a_process_of_its_own(client: str) -> None:
    with serving(PACE) as url:
        target = Target(url=url)
        job = measure.Job(client=client, loop="uvloop", target=target, streams=len(RIDS), tokens=TOKENS)
        figures = measure.measure(job)
    assert figures["cpu"] > 0
    assert figures["server_events"] == len(RIDS) * 17
    assert (figures["digest"] is None) == (client == BARE)


def test_the_section_shows_each_ratio_and_each_aim() -> None:
    row = ROWS[0]
    cpu = {PRODUCT: 0.016, BARE: 0.032}
    results = [
        Result(
            row=row,
            pacing="spread",
            loop="asyncio",
            client=client,
            tokens=10,
            turns=[
                {"cpu": seconds, "finish_p99": 0.004, "server_late": 4, "server_events": 160},
                {"cpu": seconds * 2, "finish_p99": 0.003, "server_late": 8, "server_events": 160},
            ],
        )
        for client, seconds in cpu.items()
    ]
    lines = list(section(results, ["- a machine"]))
    assert "- a machine" in lines
    assert f"| {row.name} | spread | asyncio | event | 100.00 | 200.00 (0.50, aim 1.10) | 5% |" in lines
    assert f"| {row.name} | spread | asyncio | finish, p99 | 3.00 ms | 3.00 ms | ≤ 60 ms |" in lines


def test_the_scale_has_a_table_and_a_plot(tmp_path: Path) -> None:
    costs = {"streams": {1: dict.fromkeys(scale.CLIENTS, 200.0), 4: {PRODUCT: 12.5, HTTPX: 50.0, AIOHTTP: 25.0}}}
    lines = list(scale.section(costs, ["- a machine"], "scale.png"))
    assert "| streams | 4 | 12.50 | 50.00 | 25.00 |" in lines
    assert any("(scale.png)" in line for line in lines)
    scale.draw(costs, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_each_curve_varies_one_thing() -> None:
    for points in scale.CURVES.values():
        assert [point.x for point in points] == sorted({point.x for point in points})
    streams, per_event, length = scale.CURVES.values()
    assert [streams[0].streams, streams[-1].streams] == [1, 4096]
    assert [per_event[0].per_event, per_event[-1].per_event] == [1, 64]
    assert [length[0].x, length[-1].x] == [1024, 128 * 1024]
