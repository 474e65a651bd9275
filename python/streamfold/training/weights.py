"""Sends the weights of a model to an engine, bucket by bucket, each a safetensors file in base64."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final, Literal

import httpx
import safetensors.torch

from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

__all__ = ["PauseMode", "buckets_of", "send_weights"]

PauseMode = Literal["abort", "retract", "in_place"]

_SECONDS: Final = 60.0  # for one request


def buckets_of(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Divide named tensors among buckets of at most ``bucket_bytes``; a larger tensor has a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


async def send_weights(
    url: str,
    weights: Mapping[str, torch.Tensor],
    version: str,
    *,
    bucket_bytes: int = 1 << 18,
    pause: PauseMode = "abort",
) -> int:
    """Pause an engine, replace its weights, and let it go on with them. The last bucket tells it the new version.

    An engine that refuses a bucket stays paused: it may hold old and new weights, and must not generate with both.

    Args:
        url: of the engine.
        weights: under the names of ``state_dict``; all of the model.
        version: that the engine reports with the tokens from now on.
        bucket_bytes: of the weights in one request, before base64.
        pause: what becomes of requests that run. ``"abort"`` ends them; ``"retract"`` computes their KV cache anew with
            the new weights; ``"in_place"`` keeps it, of the old weights.

    Returns:
        The number of buckets.

    Raises:
        EngineError: the engine refused a request, or cannot be reached.
    """
    buckets = [*buckets_of(weights.items(), bucket_bytes)]
    # Certificates take longer to read than the weights to send: not for plain HTTP.
    async with httpx.AsyncClient(base_url=url, timeout=_SECONDS, verify=url.startswith("https:")) as client:
        await _post(client, "/pause_generation", {"mode": pause})
        for number, bucket in enumerate(buckets, start=1):
            body: dict[str, Any] = {
                "serialized_named_tensors": [base64.b64encode(safetensors.torch.save(bucket)).decode()],
                "load_format": "safetensors",
                "flush_cache": pause != "in_place",
            }
            if number == len(buckets):
                body["weight_version"] = version
            await _post(client, "/update_weights_from_tensor", body)
        await _post(client, "/continue_generation", {})
    return len(buckets)


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    try:
        response = await client.post(path, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{path}: {error}", status=None, retryable=True) from error
    if response.status_code != 200:
        raise EngineError(f"{path}: {response.text}", status=response.status_code, retryable=False)
