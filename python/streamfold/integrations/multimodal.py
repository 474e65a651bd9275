"""Prompts with images, videos or audio for vLLM's token endpoint ``/inference/v1/generate``.

The server's ``/v1/chat/completions/render`` turns chat messages into the body of a token request, in which placeholders
say which ids stand for an image (``features.mm_placeholders``). The trainer tokenizes the prompt with its own chat
template, so the same placeholders are at other offsets in its ids: :func:`token_request` finds them there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx
import orjson

from streamfold.client._internal import internals_of
from streamfold.client.drivers.base import Head
from streamfold.client.drivers.httpx_connection import new_transport
from streamfold.client.responses import error_from_response
from streamfold.errors import EngineError, EngineTimeout, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold.integrations.base import SampleRequest

__all__ = ["render", "token_request"]

_PATH: Final = "/v1/chat/completions/render"
_NOT_THERE: Final = (403, 404, 405)
_SET_BY_US: Final = {"token_ids", "sampling_params", "stream", "stream_options", "request_id"}


async def render(request: SampleRequest, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Let the server render a prompt. Retries as a call does.

    Args:
        request: whose client, headers and abort flag are used.
        body: ``messages``, and ``model`` if the server needs it.

    Returns:
        The body of a token request. None: the trainer started to abort.

    Raises:
        EngineError: the server refused, or cannot be reached.
        EngineTimeout: it did not answer within ``timeouts.first_token``.
        NotImplementedError: the server has no such endpoint, or its response has an unknown shape.
    """
    retries, tries = request.handle.client.retries, 0
    while not request.abort.is_set():
        tries += 1
        try:
            return await _render_unless_aborted(request, body)
        except (EngineError, EngineTimeout) as error:
            if retries.is_last(tries) or not getattr(error, "retryable", True):
                raise
            seconds = retries.pause(tries, getattr(error, "retry_after", None))
        await request.abort.wait(seconds)
    return None


async def _render_unless_aborted(request: SampleRequest, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Send one request, and cancel it when the trainer starts to abort."""
    task = asyncio.ensure_future(_render_once(request, body))
    unsubscribe = request.abort.subscribe(task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        unsubscribe()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    return None if task.cancelled() or request.abort.is_set() else task.result()


async def _render_once(request: SampleRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    response = await _post(request, body)
    if response.status_code in _NOT_THERE:
        raise NotImplementedError(
            f"prompts with images need {_PATH}, which this server does not have (status {response.status_code}): "
            "use a vLLM that has it, and start it with --enable-scale-out"
        )
    if response.status_code != 200:
        headers = {name.lower(): value for name, value in response.headers.multi_items()}
        raise error_from_response(Head(response.status_code, is_stream=False, headers=headers), response.content)
    try:
        rendered = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        rendered = None
    if not isinstance(rendered, dict) or not _are_ids(rendered.get("token_ids")):
        raise NotImplementedError(
            f"{_PATH} returned no object with token_ids but {quote(response.content)}: "
            "this release of vLLM cannot be used with images"
        )
    return rendered


async def _post(request: SampleRequest, body: Mapping[str, Any]) -> httpx.Response:
    client = request.handle.client
    url, timeouts = client.base_url + _PATH, internals_of(client).timeouts
    timeout = httpx.Timeout(None, connect=timeouts.connect)
    # A transport of its own: a cancelled request leaves nothing behind in a pool.
    async with httpx.AsyncClient(transport=new_transport(), timeout=timeout, trust_env=False) as http:
        headers = {**request.settings.sent_headers, **request.headers, "Content-Type": "application/json"}
        try:
            work = http.post(url, content=orjson.dumps(body), headers=headers)
            return await asyncio.wait_for(work, timeouts.first_token)
        except httpx.ConnectTimeout as error:
            raise EngineTimeout(
                f"{url} accepted no connection within {timeouts.connect} s (Timeouts.connect)", phase="connect"
            ) from error
        except asyncio.TimeoutError as error:
            message = f"{url} did not answer within {timeouts.first_token} s (Timeouts.first_token)"
            raise EngineTimeout(message, phase="first_token") from error
        except httpx.RequestError as error:
            raise EngineError(f"no reply from {url}: {error!r}", retryable=True) from error


def token_request(rendered: Mapping[str, Any], prompt_ids: Sequence[int], items: int) -> dict[str, Any]:
    """The token request for ``prompt_ids``, without them: a rendered prompt's images, at their offsets in these ids.

    Args:
        rendered: what :func:`render` returned.
        prompt_ids: the trainer's ids of the same prompt.
        items: how many images, videos and audio clips the prompt has.

    Raises:
        NotImplementedError: the response has an unknown shape, or its placeholders are not in ``prompt_ids``.
    """
    ids, ours = list(rendered["token_ids"]), list(prompt_ids)
    entries = _placeholder_entries(rendered)
    placeholders = _placeholders(entries, len(ids))
    if len(placeholders) < items:
        raise NotImplementedError(
            f"the rendered prompt has {len(placeholders)} placeholders for {items} images: some images would be lost"
        )
    moved = {modality: [dict(entry) for entry in of_one or ()] for modality, of_one in entries.items()}
    for placeholder, offset in zip(placeholders, _offsets_in(ours, ids, placeholders), strict=True):
        moved[placeholder.modality][placeholder.number]["offset"] = offset
    kept = {key: value for key, value in rendered.items() if key not in _SET_BY_US and value is not None}
    if ids != ours:
        kept.pop("token_offsets", None)  # they refer to the rendered ids
    return {**kept, "features": {**rendered["features"], "mm_placeholders": moved}}


class _Placeholder(NamedTuple):
    """A range of rendered ids that stands for one image; sorts by offset."""

    offset: int
    length: int
    modality: str
    number: int  # among those of its modality


def _placeholder_entries(rendered: Mapping[str, Any]) -> dict[str, Any]:
    """``features.mm_placeholders``: for each modality a list of entries, or None."""
    features = rendered.get("features")
    entries = features.get("mm_placeholders") if isinstance(features, dict) else None
    if not isinstance(entries, dict):
        raise NotImplementedError("the rendered prompt has no features.mm_placeholders: its images would be lost")
    return entries


def _placeholders(entries: Mapping[str, Any], limit: int) -> list[_Placeholder]:
    """All placeholders, in the order of the rendered ids."""
    return sorted(
        _Placeholder(*_range(entry, limit), modality, number)
        for modality, of_one in entries.items()
        for number, entry in enumerate(of_one or ())
    )


def _offsets_in(ours: list[int], rendered: list[int], placeholders: list[_Placeholder]) -> list[int]:
    """The offset of each placeholder in the trainer's ids, in the same order and without overlap."""
    offsets: list[int] = []
    after = 0
    for offset, length, modality, number in placeholders:
        at = _find(ours, rendered[offset : offset + length], after)
        if at is None or _run_extends(ours, at, length) != _run_extends(rendered, offset, length):
            raise NotImplementedError(
                f"placeholder {number} ({modality}) of the rendered prompt, {length} ids at offset {offset}, is not in "
                "the prompt's ids: the trainer's processor and the server's differ"
            )
        offsets.append(at)
        after = at + length
    return offsets


def _range(entry: Any, limit: int) -> tuple[int, int]:  # noqa: ANN401  # any JSON
    """Offset and length of a placeholder within ``limit`` ids."""
    offset, length = (entry.get(key) if isinstance(entry, dict) else None for key in ("offset", "length"))
    if type(offset) is not int or type(length) is not int or not 0 <= offset < offset + length <= limit:
        raise NotImplementedError(f"a placeholder of the rendered prompt is {entry!r:.200}: that shape is not known")
    return offset, length


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int for token in value)


def _find(ids: list[int], part: list[int], start: int) -> int | None:
    """Where ``part`` first is in ``ids``, from ``start`` on."""
    places = range(start, len(ids) - len(part) + 1)
    return next((at for at in places if ids[at] == part[0] and ids[at : at + len(part)] == part), None)


def _run_extends(ids: list[int], at: int, length: int) -> tuple[bool, bool]:
    """Whether the id before, and the id behind a range repeats its edge: then the image has more ids than the range."""
    end = at + length
    return at > 0 and ids[at - 1] == ids[at], end < len(ids) and ids[end] == ids[end - 1]
