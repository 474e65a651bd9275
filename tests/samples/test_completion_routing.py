"""The key by which a router keeps all calls and turns of a sample on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from streamfold import Client, CompletionOptions, Sample, complete
from support.completing import SOON, answers, completed, sample_of, truncated
from support.replay import DONE, Replay, event, stream
from support.speaking import SGLANG, VLLM

if TYPE_CHECKING:
    from support.speaking import Speech

BOTH_LOOPS = True

SPOKEN = [(SGLANG, "x-smg-routing-key"), (VLLM, "x-session-id")]


@pytest.mark.parametrize(("speech", "header"), SPOKEN, ids=["sglang", "vllm"])
async def test_every_call_and_turn_of_a_sample_carries_its_key_which_is_made_once(speech: Speech, header: str) -> None:
    replies = answers(
        truncated(speech.event([1], 1)),
        stream(speech.event([2], 1, "stop", prompt=4), DONE),
        stream(speech.event([3], 1, "stop", prompt=5), DONE),
    )
    async with speech.replay(replies) as server, speech.client(server.url, retries=SOON) as client:
        sample = await completed(client, sample_of())
        key = sample.session_id
        sample.status = Sample.Status.PENDING  # another turn
        await completed(client, sample)
        other = sample_of()
        server.routes[speech.path] = stream(speech.event([1], 1, "stop"), DONE)
        await completed(client, other)
        keys = [request.headers[header] for request in server.generates]
    assert keys == [key, key, key, other.session_id]
    assert len({key, other.session_id, None}) == 3


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"routing_header": None}, {}),
        ({"routing_header": "X-Sticky"}, {"x-sticky": "mine"}),
        ({"headers": {"x-smg-ROUTING-key": "theirs"}}, {"x-smg-routing-key": "theirs"}),
        ({"headers": {"X-Other": "1"}}, {"x-other": "1", "x-smg-routing-key": "mine"}),
    ],
)
async def test_the_header_can_be_another_one_or_none_and_a_callers_own_stays(
    options: dict[str, Any], sent: dict[str, str]
) -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        sample = sample_of()
        sample.session_id = "mine"
        await completed(client, sample, **options)
        (request,) = server.generates
    names = ("x-smg-routing-key", "x-session-id", "x-sticky", "x-other")
    assert {name: value for name, value in request.fields if name.lower() in names} == {
        name: value for name, value in request.fields if name.lower() in sent
    }
    assert {name: request.headers[name] for name in sent} == sent


@pytest.mark.parametrize(
    ("routing_header", "sent"), [("auto", "the client's"), ("X-SMG-Routing-Key", "mine")], ids=["auto", "by name"]
)
async def test_a_routing_header_of_the_client_wins_over_one_that_nobody_asked_for(
    routing_header: str, sent: str
) -> None:
    async with (
        Replay(stream(event([1], 1, "stop"), DONE)) as server,
        Client(server.url, headers={"X-smg-Routing-Key": "the client's"}) as client,
    ):
        sample = sample_of()
        sample.session_id = "mine"
        await completed(client, sample, routing_header=routing_header)
        (request,) = server.generates
    assert request.headers["x-smg-routing-key"] == sent


async def test_where_no_key_is_sent_none_is_made() -> None:
    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        sample = await completed(client, sample_of(), routing_header=None)
    assert sample.session_id is None


async def test_a_sample_without_such_a_field_is_completed_without_a_key() -> None:
    class Bare(Sample):
        def __getattribute__(self, name: str) -> Any:
            if name == "session_id":
                raise AttributeError(name)
            return super().__getattribute__(name)

    async with Replay(stream(event([1], 1, "stop"), DONE)) as server, Client(server.url) as client:
        sample = Bare(tokens=[5, 6, 7])
        await complete(client, sample, {"max_new_tokens": 4})
        assert vars(sample)["session_id"] is None
        assert "x-smg-routing-key" not in server.generates[0].headers


@pytest.mark.parametrize("name", ["X Mine", "", "Host", "X-Mine\n"])
def test_what_can_be_no_header_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="routing_header must be"):
        CompletionOptions(routing_header=name)
