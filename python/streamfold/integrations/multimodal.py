"""Prompts with images for vLLM's token endpoint: rendered by the server, and laid over the ids that the trainer has.

The server's ``/v1/chat/completions/render`` turns messages into the body of a token request. In it, placeholders tell
which ids stand for an image. The trainer makes ids of its own, with its own chat template: the same placeholders stand
in them, elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from streamfold.client.responses import error_from_response
from streamfold.client.transport import new_transport
from streamfold.errors import EngineError, EngineTimeout, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold.client.abort_signal import AbortSignal
    from streamfold.integrations.base import Seat

__all__ = ["body_of", "render"]

_PATH: Final = "/v1/chat/completions/render"
_NOT_THERE: Final = (403, 404, 405)
_OURS: Final = {"token_ids", "sampling_params", "stream", "stream_options", "request_id"}


async def render(
    seat: Seat, request: Mapping[str, Any], headers: Mapping[str, str], aborted: AbortSignal
) -> dict[str, Any] | None:
    """Ask the server to render a prompt; what fails for a while is asked for again, as a call is.

    Returns:
        The body of a token request. None: the host has begun to abort.

    Raises:
        EngineError: the server refused it, or cannot be reached.
        EngineTimeout: it did not answer within ``timeouts.first_token``.
        NotImplementedError: it has no such endpoint, or the reply is of an unknown shape.
    """
    retries = seat.client.retries
    for tries in range(1, retries.tries + 1):
        if aborted():
            return None
        try:
            return await _unless(aborted, seat, request, headers)
        except (EngineError, EngineTimeout) as error:
            if tries == retries.tries or not getattr(error, "retryable", True):
                raise
            seconds = retries.pause(tries, getattr(error, "retry_after", None))
        if await aborted.wait(seconds):
            return None
    return None


async def _unless(
    aborted: AbortSignal, seat: Seat, request: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any] | None:
    """Ask once, and leave it when the host begins to abort: nobody else would end it."""
    task = asyncio.ensure_future(_ask(seat, request, headers))
    watcher = asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if (watcher.done() and watcher.result()) or aborted.is_set():
            return None
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.wait({task, watcher})
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it any more


async def _ask(seat: Seat, request: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    url, limits = seat.client.base_url + _PATH, seat.timeouts
    timeout = httpx.Timeout(None, connect=limits.connect)
    # A transport of its own: nothing of a request that is cancelled stays in a pool.
    async with httpx.AsyncClient(transport=new_transport(), timeout=timeout, trust_env=False) as client:
        sent = {**headers, "Content-Type": "application/json"}
        try:
            reply = await asyncio.wait_for(
                client.post(url, content=orjson.dumps(request), headers=sent), limits.first_token
            )
        except httpx.ConnectTimeout as error:
            raise EngineTimeout(f"{url} took no connection within {limits.connect} s", phase="connect") from error
        except asyncio.TimeoutError as error:
            message = f"{url} did not answer within {limits.first_token} s (Timeouts.first_token)"
            raise EngineTimeout(message, phase="first_token") from error
        except httpx.RequestError as error:
            raise EngineError(f"no reply from {url}: {error!r}", retryable=True) from error
    if reply.status_code in _NOT_THERE:
        raise NotImplementedError(
            f"prompts with images need {_PATH}, which the server does not have ({reply.status_code}): "
            "take a vLLM that has it, and start it with --enable-scale-out"
        )
    if reply.status_code != 200:
        raise error_from_response(reply, reply.content)
    try:
        told = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or not _are_ids(told.get("token_ids")):
        raise NotImplementedError(
            f"{_PATH} gave no object with token_ids but {quote(reply.content)}: that release cannot be used with images"
        )
    return told


def body_of(rendered: Mapping[str, Any], prompt_ids: Sequence[int], items: int) -> dict[str, Any]:
    """What a token request for ``prompt_ids`` holds besides them: the images of a rendered prompt, where they are.

    Args:
        rendered: what :func:`render` gave.
        prompt_ids: the trainer's ids for the same prompt.
        items: how many images, videos and sounds it has.

    Raises:
        NotImplementedError: the reply is of an unknown shape, or its placeholders are not in ``prompt_ids``.
    """
    ids, ours = list(rendered["token_ids"]), list(prompt_ids)
    features = rendered.get("features")
    placeholders = features.get("mm_placeholders") if isinstance(features, dict) else None
    if not isinstance(features, dict) or not isinstance(placeholders, dict):
        raise NotImplementedError("the rendered prompt tells of no placeholders: its images would be lost")
    ranges = sorted(
        (*_range(entry, len(ids)), modality, number)
        for modality, entries in placeholders.items()
        for number, entry in enumerate(entries or ())
    )
    if len(ranges) < items:
        raise NotImplementedError(
            f"the rendered prompt has {len(ranges)} placeholders for {items} images: some are lost"
        )
    moved = {modality: [dict(entry) for entry in entries or ()] for modality, entries in placeholders.items()}
    after = 0
    for offset, length, modality, number in ranges:
        at = _find(ours, ids[offset : offset + length], after)
        if at is None or _is_longer(ours, at, length) != _is_longer(ids, offset, length):
            raise NotImplementedError(
                f"placeholder {number} ({modality}) of the rendered prompt, {length} ids from {offset} on, is not in "
                "the prompt's ids: the trainer's processor and the server's differ"
            )
        moved[modality][number]["offset"] = at
        after = at + length
    kept = {key: value for key, value in rendered.items() if key not in _OURS and value is not None}
    if ids != ours:
        kept.pop("token_offsets", None)  # they are of other ids
    return {**kept, "features": {**features, "mm_placeholders": moved}}


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int for token in value)


def _range(entry: Any, limit: int) -> tuple[int, int]:  # noqa: ANN401  # whatever a server tells
    offset, length = (entry.get(key) if isinstance(entry, dict) else None for key in ("offset", "length"))
    if type(offset) is not int or type(length) is not int or not 0 <= offset < offset + length <= limit:
        raise NotImplementedError(f"a placeholder of the rendered prompt is {entry!r:.200}: that shape is not known")
    return offset, length


def _find(ids: list[int], part: list[int], start: int) -> int | None:
    places = range(start, len(ids) - len(part) + 1)
    return next((at for at in places if ids[at] == part[0] and ids[at : at + len(part)] == part), None)


def _is_longer(ids: list[int], at: int, length: int) -> tuple[bool, bool]:
    """Whether a range's first and last id go on before and behind it, as where an image has more ids than it."""
    end = at + length
    return at > 0 and ids[at - 1] == ids[at], end < len(ids) and ids[end] == ids[end - 1]
