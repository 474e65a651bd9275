"""A plain client of the loopback engine as vLLM."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import httpx

from support.loopback_http import PLAIN, PROMPT, Answer, OpenStream, get, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamfold.loopback import Loopback
    from streamfold.loopback.core.reply import Reply

TOKENS = "inference/v1/generate"
DONE = b"data: [DONE]\n\n"


def payload(**body: Any) -> dict[str, Any]:
    """The body of a request: three tokens in, greedy, streamed, with logprobs, by default."""
    params = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 1, **body.pop("params", {})}
    params = {key: value for key, value in params.items() if value is not ...}
    given = {"token_ids": PROMPT, "stream": True, "sampling_params": params, **body}
    return {key: value for key, value in given.items() if value is not ...}


def generate(engine: Loopback, *, headers: dict[str, str] | None = None, **body: Any) -> Answer:
    return send(engine, TOKENS, payload(**body), headers=headers)


def complete(engine: Loopback, *, headers: dict[str, str] | None = None, **body: Any) -> Answer:
    """Ask for a completion, with ids and logprobs."""
    given = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 1, "stream": True}
    given |= {"return_token_ids": True, **body}
    answer = send(
        engine, "v1/completions", {key: value for key, value in given.items() if value is not ...}, headers=headers
    )
    answer.dialect = "vllm-completions"
    return answer


def send(engine: Loopback, path: str, body: Any, *, headers: dict[str, str] | None = None) -> Answer:
    response = httpx.post(f"{engine.url}/{path}", json=body, headers=headers, **PLAIN)
    return Answer(response.status_code, response.headers, response.content, "vllm")


@contextlib.contextmanager
def opened(engine: Loopback, *, headers: dict[str, str] | None = None, **body: Any) -> Iterator[OpenStream]:
    """Start a stream; leaving the block leaves the stream."""
    with httpx.stream("POST", f"{engine.url}/{TOKENS}", json=payload(**body), headers=headers, **PLAIN) as response:
        yield OpenStream(response, "vllm")


def undisturbed(engine: Loopback, **body: Any) -> Reply:
    """What the same request must generate."""
    given = payload(**body)
    return engine.undisturbed(given.pop("token_ids"), given.pop("sampling_params"), **given)


def choices(answer: Answer) -> list[dict[str, Any]]:
    """The choices of all events that have one."""
    return [choice for frame in answer.frames for choice in frame["choices"]]


def ids(answer: Answer) -> list[int]:
    return [token for choice in choices(answer) for token in choice["token_ids"]]


def whole_characters(engine: Loopback, tokens: list[int]) -> str:
    """The text of some tokens, up to the last character that is complete."""
    tokenizer = engine.tokenizer
    said = b"".join(tokenizer.piece(token) for token in tokens if token not in tokenizer.special_ids)
    return said.decode(errors="ignore")


def usage(answer: Answer) -> dict[str, Any]:
    """The event that counts all."""
    (reported,) = (frame["usage"] for frame in answer.frames if not frame["choices"])
    assert isinstance(reported, dict)
    return reported


def load(engine: Loopback) -> tuple[int, int]:
    """How many requests run and wait, as the metrics tell."""
    lines = get(engine, "metrics").text.splitlines()
    running, waiting = (float(line.split()[1]) for line in lines if line.startswith("vllm:"))
    return int(running), int(waiting)


def until_load(engine: Loopback, running: int, waiting: int) -> None:
    until(lambda: load(engine) == (running, waiting))


def error_of(answer: Answer) -> dict[str, Any]:
    """The error that is a whole answer, in a stream or alone."""
    frame = answer.frames[-1] if answer.body.endswith(DONE) else json.loads(answer.body)
    error = frame["error"]
    assert isinstance(error, dict)
    return error
