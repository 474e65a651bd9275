"""A stream saved as it came, and read again: what a bug report needs.

``NAME.sse`` holds the body of the reply, byte for byte. ``NAME.json`` beside it tells what was asked, what HTTP said,
and when each read came, so that the bytes can be fed again in the same pieces.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from streamfold._core import Experts, Generation, Parser
from streamfold.client.urls import normalize_base_url
from streamfold.engines.detect import ENGINES
from streamfold.errors import DecodeError, StreamfoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["Recording", "record", "surroundings"]

_WIDTH = 70  # bytes shown on each side of an error
_TOLD: Final = {"request": dict, "engine": str, "status": int, "headers": dict, "reads": list, "end": str}
_MEDIA: Final = ("image_data", "video_data", "audio_data", "content_parts")  # they make a prompt longer than its ids


@dataclass
class Recording:
    """One reply.

    Attributes:
        body: its bytes, without HTTP's own framing.
        request: the JSON object that was sent; empty if nobody knows.
        engine: what took it, as :class:`Client` names it.
        status: the HTTP status; None if no reply came.
        headers: those of the reply.
        reads: for each read, the seconds since the request and the number of bytes.
        end: how it ended: ``"eof"``, or what broke it off.
    """

    body: bytes
    request: dict[str, Any] = field(default_factory=dict)
    engine: str = "sglang"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[float, int]] = field(default_factory=list)
    end: str = "eof"

    def save(self, path: Path) -> None:
        """Write ``path``, and what is known of it beside it, with the suffix ``.json``."""
        told = {key: value for key, value in asdict(self).items() if key != "body"}
        path.write_bytes(self.body)
        path.with_suffix(".json").write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read ``path`` and what stands beside it, if anything does.

        Raises:
            OSError: ``path`` cannot be read.
            ValueError: what stands beside it does not tell of a stream.
        """
        beside = path.with_suffix(".json")
        try:
            told = orjson.loads(beside.read_bytes()) if beside != path and beside.exists() else {}
            known = {key: told[key] for key in _TOLD if told.get(key) is not None}
            reads = [(float(at), int(size)) for at, size in known.pop("reads", [])]
            wrong = [key for key, value in known.items() if not isinstance(value, _TOLD[key])]
            wrong += ["reads"] * any(size < 0 for _, size in reads)
            wrong += ["engine"] * (known.get("engine", "sglang") not in ENGINES)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{beside} does not tell of a stream ({error}): move it away to go without") from None
        if wrong:
            raise ValueError(f"{beside} does not tell of a stream ({wrong[0]}): move it away to go without")
        return cls(path.read_bytes(), reads=reads, **known)

    def parts(self) -> list[bytes]:
        """The body in the pieces in which it came."""
        parts, start = [], 0
        for _, size in self.reads:
            parts.append(self.body[start : start + size])
            start += size
        return [part for part in [*parts, self.body[start:]] if part]

    def parser(
        self, dialect: str | None = None, *, logprobs: bool | None = None, experts: Experts | None = None
    ) -> Parser:
        """Make a parser that expects what was asked for.

        Args:
            dialect: None: that of the engine.
            logprobs: None: as the request said, or else no.
            experts: the shape of the routed experts, if they are to be checked.
        """
        dialect = ENGINES[self.engine].dialect if dialect is None else dialect
        prompt, asked, start = _asked(dialect, self.request)
        has_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        has_media = any(self.request.get(key) for key in _MEDIA)
        return Parser(
            dialect,
            logprobs=asked if logprobs is None else logprobs,
            experts=experts,
            prompt_len=len(prompt) if has_ids and not has_media else None,
            experts_start=start if isinstance(start, int) and 0 <= start < 2**31 else 0,
        )

    def replay(self, parser: Parser) -> tuple[Generation, StreamfoldError | None]:
        """Feed the body to ``parser`` as it came; what was good of it, and the error, if there is one."""
        error = None
        try:
            for part in self.parts():
                parser.feed(part)
            parser.close()
        except StreamfoldError as failure:
            error = failure
        return parser.take(), error


def _asked(dialect: str, request: Mapping[str, Any]) -> tuple[Any, bool, Any]:
    """What a request holds as its prompt, whether it asks for logprobs, and from which position on for experts."""
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
    headers: Mapping[str, str] | None = None,
    on_read: Callable[[int], object] = lambda _size: None,
) -> None:
    """POST the request of ``recording`` to its engine at ``url``, streamed, and add whatever comes back until it ends.

    Nothing is parsed and nothing is limited: silence is recorded too, until the engine or the caller ends it. However
    it ends, by a cancel too, the recording holds what has come.
    """
    recording.request = {**recording.request, "stream": True}
    body = bytearray(recording.body)
    started = time.monotonic()
    path = ENGINES[recording.engine].path
    timeout = httpx.Timeout(None, connect=10.0)
    sent = {"Accept-Encoding": "identity", **(headers or {})}
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=timeout) as client,
            client.stream("POST", normalize_base_url(url) + path, json=recording.request, headers=sent) as response,
        ):
            recording.status = response.status_code
            recording.headers = dict(response.headers)
            async for part in response.aiter_raw():
                recording.reads.append((round(time.monotonic() - started, 6), len(part)))
                body += part
                on_read(len(part))
    except httpx.TransportError as error:
        recording.end = str(error) or type(error).__name__
    except asyncio.CancelledError:
        recording.end = "an interrupt"
        raise
    finally:
        recording.body = bytes(body)


def surroundings(body: bytes, error: DecodeError) -> str:
    """The bytes around an error, with a mark under the place."""
    before = body[max(0, error.offset - _WIDTH) : error.offset].rpartition(b"\n")[2]
    after = body[error.offset : error.offset + _WIDTH].partition(b"\n")[0]
    left, right = (part.decode(errors="backslashreplace") for part in (before, after))
    return f"{left}{right}\n{' ' * len(left)}^ byte {error.offset}"
