"""Images of a sample: sent with each of its requests or refused by name, and the engine's count of their prompt."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from streamfold import Buffer, Client, CompletionOptions, DecodeError, Rollout, RolloutConfig, Sample, complete
from streamfold.loopback import Loopback
from support.completing import SOON, answers, truncated
from support.replay import DONE, Replay, stream, until

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAMS = {"max_new_tokens": 6, "ignore_eos": True}
IDS = [300, 301, 302]
PIXEL = b"\x89PNG of one pixel"


def pictured(*images: Any, tokens: Sequence[int] = IDS, prompt: str = "") -> Sample:
    return Sample(index=0, prompt=prompt, tokens=list(tokens), multimodal_inputs={"images": list(images)})


def bodies(engine: Loopback) -> list[dict[str, Any]]:
    return [seen.json() for seen in engine.seen() if seen.path == "/generate"]


class Picture:
    """An image as Pillow has it."""

    def save(self, file: Any, format: str) -> None:  # noqa: A002  # Pillow's name
        assert format == "PNG"
        file.write(PIXEL)


@pytest.mark.parametrize("tokens", [IDS, []])
@pytest.mark.parametrize(
    ("image", "sent"),
    [
        ("http://there/a.png", "http://there/a.png"),
        (PIXEL, base64.b64encode(PIXEL).decode()),
        (Picture(), base64.b64encode(PIXEL).decode()),
    ],
    ids=["address", "bytes", "Pillow"],
)
async def test_complete_sends_the_images_of_a_sample(image: Any, sent: str, tokens: list[int]) -> None:
    sample = pictured(image, tokens=tokens, prompt="Hi")
    with Loopback() as engine:
        async with Client(engine.url) as client:
            await complete(client, sample, PARAMS)
        (body,) = bodies(engine)
    assert body["image_data"] == [sent]
    assert body.get("input_ids", []) == tokens
    assert sample.response_length == 6
    assert sample.metadata.get("streamfold_prompt_tokens") == (16 + 3 if tokens else None)


async def test_a_rollout_sends_the_images_of_its_samples() -> None:
    with Loopback() as engine:
        async with Client(engine.url) as client:
            rollout = Rollout(client, RolloutConfig(sampling_params=PARAMS, groups=1))
            result = await rollout.run(Buffer([[pictured("a"), pictured("a")]]))
        assert [body["image_data"] for body in bodies(engine)] == [["a"], ["a"]]
    assert len(result.groups) == 1


async def test_a_resumed_sample_sends_its_images_again_and_equals_the_undisturbed_one() -> None:
    whole, cut = pictured("a"), pictured("a")
    params = {**PARAMS, "max_new_tokens": 400}
    with Loopback(token_rate=400) as engine:
        async with Client(engine.url) as client:
            task = asyncio.ensure_future(complete(client, cut, params))
            await until(lambda: sum(call.token_count for call in client.running))
            task.cancel()
            await asyncio.wait([task])
            assert cut.status is Sample.Status.ABORTED
            assert 0 < cut.response_length < 400
            await complete(client, cut, params)
            await complete(client, whole, params)
        assert [body["image_data"] for body in bodies(engine)] == [["a"]] * 3
    assert cut.tokens == whole.tokens
    assert cut.rollout_log_probs == whole.rollout_log_probs


@pytest.mark.parametrize("engine", ["vllm", "vllm-completions"])
async def test_images_for_an_endpoint_that_does_not_take_them_are_refused_before_any_request(engine: Any) -> None:
    with Loopback(engine="vllm") as server:
        async with Client(server.url, engine=engine) as client:
            with pytest.raises(ValueError, match=rf"multimodal_inputs.*engine='{engine}'"):
                await complete(client, pictured("a"), PARAMS)
        assert server.stats().requests == 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"videos": ["a"]}, "multimodal_inputs has videos: only images can be sent"),
        ({"images": ["a"], "audio": ["b"]}, "multimodal_inputs has audio"),
        ({"images": ["a", 7]}, r'multimodal_inputs\["images"\]\[1\] is a int'),
    ],
)
async def test_inputs_that_cannot_be_sent_are_refused_before_any_request(inputs: Any, message: str) -> None:
    sample = Sample(tokens=IDS, multimodal_inputs=inputs)
    with Loopback() as engine:
        async with Client(engine.url) as client:
            with pytest.raises(ValueError, match=message):
                await complete(client, sample, PARAMS)
        assert bodies(engine) == []
    assert (sample.status, sample.tokens) == (Sample.Status.PENDING, IDS)


async def test_inputs_of_nothing_are_no_images() -> None:
    sample = Sample(tokens=IDS, multimodal_inputs={"images": [], "videos": None})
    with Loopback() as engine:
        async with Client(engine.url) as client:
            await complete(client, sample, PARAMS)
        assert "image_data" not in bodies(engine)[0]


def event(ids: list[int], prompt_tokens: int, finish: str | None = None) -> bytes:
    """SGLang's event with a count of the prompt."""
    logprobs = [[-1.0, token, None] for token in ids]
    meta: dict[str, Any] = {"id": "r", "finish_reason": finish and {"type": finish}, "prompt_tokens": prompt_tokens}
    meta |= {"completion_tokens": len(ids), "output_token_logprobs": logprobs}
    return b"data: " + orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}) + b"\n\n"


@pytest.mark.parametrize("counted", [8, 21, 200])
@pytest.mark.parametrize("noted", [20, 3])
@pytest.mark.parametrize("sent_by", ["the sample", "extra"])
async def test_another_count_of_the_prompt_on_a_resume_is_a_length_error_and_its_tokens_are_dropped(
    counted: int, noted: int, sent_by: str
) -> None:
    """The first call is cut off behind two tokens; the prompt was counted as ``noted``."""
    sample = pictured("a") if sent_by == "the sample" else Sample(index=0, tokens=list(IDS))
    keys = lambda: {"image_data": ["a"], "input_ids": sample.tokens}  # noqa: E731
    options = CompletionOptions(extra=None if sent_by == "the sample" else keys)
    async with Replay() as server, Client(server.url, retries=SOON) as client:
        second = stream(event([9, 9], counted), event([9, 9, 9, 9], counted, "length"), DONE)
        server.routes["/generate"] = answers(truncated(event([7, 8], noted)), second)
        with pytest.raises(DecodeError, match=rf"prompt of {counted} tokens, but there are {noted + 2}") as failed:
            await complete(client, sample, PARAMS, options=options)
        assert len(server.generates) == 2
    assert failed.value.kind == "length"
    assert sample.tokens == [*IDS, 7, 8]
    assert sample.status is Sample.Status.ABORTED
    assert sample.metadata.get("streamfold_prompt_tokens") == (20 if noted == 20 else None)
    assert sample.metadata["streamfold_restarted_tokens"] == 4


@pytest.mark.parametrize("noted", [20, 3])
async def test_the_same_count_on_a_resume_finishes_the_sample(noted: int) -> None:
    sample = pictured("a")
    async with Replay() as server, Client(server.url, retries=SOON) as client:
        second = stream(event([9, 9, 9, 9], noted + 2, "length"), DONE)
        server.routes["/generate"] = answers(truncated(event([7, 8], noted)), second)
        await complete(client, sample, PARAMS)
    assert sample.tokens == [*IDS, 7, 8, 9, 9, 9, 9]
    assert sample.status is Sample.Status.TRUNCATED


async def test_another_count_of_a_prompt_of_ids_alone_is_a_length_error_in_every_call() -> None:
    sample = Sample(index=0, tokens=list(IDS))
    async with Replay() as server, Client(server.url, retries=SOON) as client:
        server.routes["/generate"] = answers(truncated(event([7, 8], 3)), stream(event([9] * 4, 8, "length"), DONE))
        with pytest.raises(DecodeError, match="prompt of 8 tokens, but 5 were sent") as failed:
            await complete(client, sample, PARAMS, resume="continue")
    assert failed.value.kind == "length"
