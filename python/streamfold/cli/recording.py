"""Recordings of streams, for bug reports: ``streamfold record`` writes them, ``streamfold replay`` reads them.

``NAME.sse`` holds the body of the response, byte for byte. ``NAME.json`` beside it holds the request, status and
headers of the response, and time and size of each read, so that a parser can be fed the same pieces again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from streamfold._core import Experts, Generation, Parser
from streamfold.client.drivers.choose import driver_factory
from streamfold.client.request import new_rid
from streamfold.client.session import Session
from streamfold.client.urls import BaseUrl, bearer
from streamfold.engines.detect import ENGINES
from streamfold.errors import DecodeError, StreamfoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from streamfold.client.drivers.base import Fields

__all__ = ["Recording", "check_replaced_recording", "record", "surroundings"]

_WIDTH = 70  # bytes shown on each side of an error
_DETAILS: Final = {"request": dict, "engine": str, "status": int, "headers": dict, "reads": list, "end": str}
_MEDIA: Final = ("image_data", "video_data", "audio_data", "content_parts")  # the prompt is longer than its ids then


@dataclass
class Recording:
    """One response.

    Attributes:
        body: its bytes, without HTTP framing.
        request: the JSON object that was sent; empty if it is not known.
        engine: that it was sent to, as in ``Client(engine=...)``.
        status: the HTTP status; None if there was no response.
        headers: of the response.
        reads: for each read, the seconds since the request and the number of bytes.
        end: ``"eof"``, or the error that ended the response.
    """

    body: bytes
    request: dict[str, Any] = field(default_factory=dict)
    engine: str = "sglang"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[float, int]] = field(default_factory=list)
    end: str = "eof"

    def save(self, path: Path) -> None:
        """Write the body to ``path``, and everything else to the same path with the suffix ``.json``."""
        details = {key: value for key, value in asdict(self).items() if key != "body"}
        path.write_bytes(self.body)
        path.with_suffix(".json").write_bytes(orjson.dumps(details, option=orjson.OPT_INDENT_2))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what :meth:`save` wrote; the ``.json`` file may be missing.

        Raises:
            OSError: ``path`` cannot be read.
            ValueError: the ``.json`` file is not one of a recording.
        """
        details_path = path.with_suffix(".json")
        details: dict[str, Any] = {}
        if details_path != path and details_path.exists():
            try:
                details = _read_details(details_path.read_bytes())
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{details_path} does not describe a recording ({error}): move it away to read {path} without it"
                ) from None
        return cls(path.read_bytes(), **details)

    def parts(self) -> list[bytes]:
        """The body in the pieces in which it was received."""
        parts, start = [], 0
        for _, size in self.reads:
            parts.append(self.body[start : start + size])
            start += size
        return [part for part in [*parts, self.body[start:]] if part]

    def parser(
        self, dialect: str | None = None, *, logprobs: bool | None = None, experts: Experts | None = None
    ) -> Parser:
        """Make a parser for the response, which checks that it fits the request.

        Args:
            dialect: None: that of the engine.
            logprobs: whether log-probabilities were requested; None: as in the request, or no without one.
            experts: the shape of the routed experts, to check it.
        """
        dialect = ENGINES[self.engine].dialect if dialect is None else dialect
        prompt, has_logprobs, start = _read_request(dialect, self.request)
        has_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        has_media = any(self.request.get(key) for key in _MEDIA)
        return Parser(
            dialect,
            logprobs=has_logprobs if logprobs is None else logprobs,
            experts=experts,
            prompt_len=len(prompt) if has_ids and not has_media else None,
            experts_start=start if isinstance(start, int) and 0 <= start < 2**31 else 0,
        )

    def replay(self, parser: Parser) -> tuple[Generation, StreamfoldError | None]:
        """Feed the body to ``parser``; returns what was parsed, and the error if there is one."""
        error = None
        try:
            for part in self.parts():
                parser.feed(part)
            parser.close()
        except StreamfoldError as failure:
            error = failure
        return parser.take(), error


def check_replaced_recording(path: Path) -> None:
    """Check that nothing is at ``path``, and in the ``.json`` file beside it, but a recording, which may be replaced.

    Raises:
        ValueError: there is something else.
        OSError: it cannot be read.
    """
    details_path = path.with_suffix(".json")
    for file in (details_path, path):
        if file.is_file() and file.stat().st_size and not _describes_recording(details_path):
            raise ValueError(f"--out {path}: {file} is not of a recording: give another file, or move it away")


def _describes_recording(path: Path) -> bool:
    try:
        _read_details(data := path.read_bytes())
    except (AttributeError, FileNotFoundError, TypeError, ValueError):
        return False
    return _DETAILS.keys() <= set(orjson.loads(data))


def _read_details(data: bytes) -> dict[str, Any]:
    """The fields of a recording's ``.json`` file.

    Raises:
        AttributeError, TypeError, ValueError: it is anything else.
    """
    loaded = orjson.loads(data)
    details = {key: loaded[key] for key in _DETAILS if loaded.get(key) is not None}
    for key, value in details.items():
        if not isinstance(value, _DETAILS[key]):
            raise TypeError(f"{key} is a {type(value).__name__}")
    if details.get("engine", "sglang") not in ENGINES:
        raise ValueError(f"engine is {details['engine']}")
    if "reads" in details:
        details["reads"] = [(float(at), int(size)) for at, size in details["reads"]]
        if any(size < 0 for _, size in details["reads"]):
            raise ValueError("reads has a negative size")
    return details


def _read_request(dialect: str, request: Mapping[str, Any]) -> tuple[Any, bool, Any]:
    """The prompt of a request, whether it asks for log-probabilities, and the first position of routed experts."""
    if dialect == "vllm":
        params = request.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        start = params.get("routed_experts_prompt_start")
        return request.get("token_ids"), params.get("logprobs") is not None, start
    if dialect == "vllm-completions":
        return request.get("prompt"), request.get("logprobs") is not None, None
    return request.get("input_ids"), bool(request.get("return_logprob")), request.get("routed_experts_start_len")


async def record(
    url: str,
    recording: Recording,
    *,
    api_key: str | None = None,
    drain: float = 2.0,
    on_read: Callable[[int], object] = lambda _size: None,
) -> None:
    """POST the request of ``recording`` to its engine at ``url``, streamed, and add the response to the recording.

    Nothing is parsed, and only connecting has a timeout. A request without an id gets one. If this is cancelled, the
    request is aborted at the engine, and ``drain`` seconds are read on for the end of the stream; another cancel does
    not wait for it. The recording then holds what was received.
    """
    engine = ENGINES[recording.engine]()
    request = {**recording.request, "stream": True}
    rid = request.setdefault(engine.rid_key, new_rid())
    recording.request = request
    base_url = BaseUrl.parse(url)
    fields: Fields = () if api_key is None else (("Authorization", bearer(api_key)),)
    sent = {"Accept-Encoding": "identity", **dict(fields)}
    if isinstance(rid, str):
        sent |= engine.headers(rid)
    reading = asyncio.ensure_future(_read(f"{base_url}{engine.path}", recording, sent, on_read))
    try:
        await asyncio.shield(reading)
    except asyncio.CancelledError:
        try:
            if isinstance(rid, str) and not reading.done():
                session = Session(str(base_url), engine, driver_factory("direct", None, 1)(), fields, calls=1)
                await _abort(session, rid, reading, drain, has_tokens=bool(recording.reads))
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            recording.end = "an interrupt"
        raise


async def _abort(session: Session, rid: str, reading: asyncio.Future[None], drain: float, *, has_tokens: bool) -> None:
    """Abort a request at each engine, and wait for the end of its stream."""
    answered = asyncio.Event()
    try:
        session.control.send_abort(rid, has_tokens=has_tokens, answered=answered.set)
        await answered.wait()  # the engines, or one of them is silent for a second
        await asyncio.wait({reading}, timeout=drain)
    finally:
        await session.aclose()


async def _read(url: str, recording: Recording, headers: Mapping[str, str], on_read: Callable[[int], object]) -> None:
    """Send the request, and read the response to its end."""
    body = bytearray(recording.body)
    started = time.monotonic()
    timeout = httpx.Timeout(None, connect=10.0)
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=timeout) as client,
            client.stream("POST", url, json=recording.request, headers=headers) as response,
        ):
            recording.status = response.status_code
            recording.headers = dict(response.headers)
            async for part in response.aiter_raw():
                recording.reads.append((round(time.monotonic() - started, 6), len(part)))
                body += part
                on_read(len(part))
    except httpx.TransportError as error:
        recording.end = str(error) or type(error).__name__
    finally:
        recording.body = bytes(body)


def surroundings(body: bytes, error: DecodeError) -> str:
    """The bytes around an error, with a mark under its offset."""
    before = body[max(0, error.offset - _WIDTH) : error.offset].rpartition(b"\n")[2]
    after = body[error.offset : error.offset + _WIDTH].partition(b"\n")[0]
    left, right = (part.decode(errors="backslashreplace") for part in (before, after))
    return f"{left}{right}\n{' ' * len(left)}^ byte {error.offset}"
