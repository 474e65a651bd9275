"""New weights for a running engine: from disk or bucket by bucket; what does not fit is refused and changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from streamfold.loopback import Faults, Loopback
from support.hf_generating import PROMPTS, generate, serve
from support.loopback_http import PLAIN, get, opened, post, until
from support.loopback_http import generate as ask

if TYPE_CHECKING:
    from pathlib import Path

    from support.hf_reference import Reference

pytestmark = pytest.mark.torch

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}


def from_disk(engine: Loopback, path: object, **body: Any) -> httpx.Response:
    return post(engine, "update_weights_from_disk", {"model_path": str(path), **body})


def from_tensor(engine: Loopback, bucket: str, **body: Any) -> httpx.Response:
    return post(engine, "update_weights_from_tensor", {"serialized_named_tensors": [bucket], **body})


def generated(engine: Loopback) -> tuple[list[int], list[float]]:
    generation = generate(engine, PROMPTS[0], GREEDY)
    assert generation.logprobs is not None
    return generation.token_ids.tolist(), generation.logprobs.tolist()


def version(engine: Loopback) -> str:
    found: str = get(engine, "model_info").json()["weight_version"]
    return found


def test_weights_from_disk_replace_those_of_the_start(moe: Reference, trained: Reference) -> None:
    with serve(moe) as engine:
        assert generated(engine)[0] == moe.greedy(PROMPTS[0], 16)
        answer = from_disk(engine, trained.path, weight_version="1")
        assert answer.json() == {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to 1.",
            "num_paused_requests": 0,
        }
        assert version(engine) == "1"
        assert generated(engine)[0] == trained.greedy(PROMPTS[0], 16)


def test_weights_bucket_by_bucket_give_what_those_from_disk_give(moe: Reference, trained: Reference) -> None:
    names = trained.names
    thirds = [names[i::3] for i in range(3)]
    with serve(moe, batch_invariant=True) as whole, serve(moe, batch_invariant=True) as parts:
        assert from_disk(whole, trained.path).status_code == 200
        for i, third in enumerate(thirds):
            last = {"weight_version": "2"} if i == 2 else {}
            assert from_tensor(parts, trained.bucket(*third), **last).json()["success"]
            assert version(parts) == ("2" if i == 2 else "default")
        assert generated(parts) == generated(whole)


def test_a_bucket_may_have_the_names_of_the_files_of_the_model(moe: Reference, trained: Reference) -> None:
    """Files hold each expert's matrices by themselves, the model has them in one."""
    with serve(moe, batch_invariant=True) as whole, serve(moe, batch_invariant=True) as parts:
        assert from_disk(whole, trained.path).status_code == 200
        for bucket in trained.file_buckets(3):
            assert from_tensor(parts, bucket).json()["success"]
        assert generated(parts) == generated(whole)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("name", "the model has no weight 'model.norm.bias'"),
        ("shape", "model.norm.weight must have the shape [32], not [31]"),
        ("part", "experts.0.up_proj.weight must have the shape [24, 32], not [24, 31]"),
        ("expert", "the model has no weight 'model.layers.0.mlp.experts.8.up_proj.weight'"),
        ("bytes", "the bucket is no safetensors file"),
        ("empty", "the bucket holds no tensor"),
    ],
)
def test_a_wrong_bucket_is_refused_and_changes_nothing(
    moe: Reference, trained: Reference, wrong: str, message: str
) -> None:
    with serve(moe, batch_invariant=True) as engine:
        before = generated(engine)
        answer = from_tensor(engine, trained.wrong_bucket(wrong), weight_version="2")
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert message in answer.json()["message"]
        assert generated(engine) == before, "the right tensor beside the wrong one was not taken either"
        assert version(engine) == "default"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"serialized_named_tensors": []}, "must hold one safetensors file in base64"),
        ({"serialized_named_tensors": ["AAAA", "AAAA"]}, "must hold one safetensors file in base64"),
        ({"serialized_named_tensors": ["not base64!"]}, "must hold one safetensors file in base64"),
        ({"serialized_named_tensors": [7]}, "must hold one safetensors file in base64"),
        ({}, "must hold one safetensors file in base64"),
        ({"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"}, "unpickles nothing"),
        ({"serialized_named_tensors": ["AAAA"], "weight_version": 3}, "weight_version must be a string"),
    ],
)
def test_a_malformed_update_is_refused(moe: Reference, body: dict[str, Any], message: str) -> None:
    with serve(moe) as engine:
        answer = post(engine, "update_weights_from_tensor", body)
        assert answer.status_code == 400
        assert message in answer.json()["message"]


def test_a_directory_that_does_not_fit_is_refused_and_changes_nothing(moe: Reference, tmp_path: Path) -> None:
    from support import hf_architectures  # noqa: PLC0415 - only where torch is installed

    other = hf_architectures.make("llama", tmp_path / "other")
    with serve(moe, batch_invariant=True) as engine:
        before = generated(engine)
        for path in (other.path, tmp_path, tmp_path / "missing"):
            answer = from_disk(engine, path, weight_version="2")
            assert answer.status_code == 400, path
            assert answer.json()["success"] is False
        assert post(engine, "update_weights_from_disk", {}).json()["message"] == "model_path must be a string"
        assert generated(engine) == before
        assert version(engine) == "default"


def test_the_mock_model_refuses_weights() -> None:
    with Loopback() as engine:
        for answer in (from_disk(engine, "/tmp"), from_tensor(engine, "AAAA")):
            assert answer.status_code == 400
            assert "the mock model has no weights" in answer.json()["message"]


def test_an_update_without_a_pause_waits_until_all_streams_have_ended(moe: Reference, trained: Reference) -> None:
    with serve(moe, token_rate=100, incremental=True) as engine, ThreadPoolExecutor(2) as pool:
        with opened(engine, rid="a", input_ids=PROMPTS[0], params={"max_new_tokens": 400}) as stream:
            stream.frame()
            update = pool.submit(from_disk, engine, trained.path, weight_version="1")
            for _ in range(20):
                stream.frame()
            assert not update.done()
            later = pool.submit(ask, engine, input_ids=PROMPTS[0], params=GREEDY)
            stream.frame()
            post(engine, "abort_request", {"rid": "a"})
            first = stream.to_end()
        assert update.result().json()["success"]
        assert {span["version"] for span in first.last["meta_info"]["weight_versions"]} == {"default"}
        answer = later.result()
        assert answer.ids == trained.greedy(PROMPTS[0], 16), "it was let in after the update"
        assert answer.last["meta_info"]["weight_version"] == "1"


def test_an_update_may_abort_all_requests_first(moe: Reference, trained: Reference) -> None:
    with (
        serve(moe, token_rate=100, incremental=True) as engine,
        opened(engine, input_ids=PROMPTS[0], params={"max_new_tokens": 400}) as stream,
    ):
        stream.frame()
        assert from_disk(engine, trained.path, abort_all_requests=True).json()["success"]
        assert stream.to_end().finish["type"] == "abort"


def test_an_engine_that_dies_comes_back_with_the_weights_of_the_start(moe: Reference, trained: Reference) -> None:
    script = Faults([{"kind": "die", "rid": "last", "seconds": 0.1}])
    with serve(moe, faults=script) as engine:
        assert from_disk(engine, trained.path, weight_version="1").json()["success"]
        with pytest.raises(httpx.HTTPError):
            ask(engine, rid="last")
        until(lambda: is_back(engine))
        assert version(engine) == "default"
        assert generated(engine)[0] == moe.greedy(PROMPTS[0], 16)


def is_back(engine: Loopback) -> bool:
    try:
        return httpx.get(f"{engine.url}/health", **PLAIN).status_code == 200
    except httpx.HTTPError:
        return False
