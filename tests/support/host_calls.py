"""Shared by the tests of the integrations: a trainer's arguments, samples, written replies, checks.

Everything is of the trainer that is installed, and of its engine.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamfold.integrations.clients import _handles
from streamfold.loopback import Loopback
from support import bodies_vllm, replay
from support.host import arguments, engine
from support.host.helpers import LIMIT
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host.slime.utils.types import Sample
from support.replay import FIN, HANG, PROMPT, Replay, answer_json, chunk, head, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType, SimpleNamespace

    from streamfold.loopback.core.reply import Reply
    from support.replay import Request, Route, Step

Status = Sample.Status
HOSTS = ("slime", "vime")
TEXT = " the story"  # two ids
TOP_P: dict[str, Any] = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
PARAMS: dict[str, Any] = {"max_new_tokens": 64}


def entry_module() -> ModuleType:
    """Our module for the trainer that is installed."""
    return importlib.import_module(f"streamfold.{engine.current().package}")


def streaming(server: Loopback | Replay, **settings: Any) -> SimpleNamespace:
    """Arguments of a trainer that generates through our function; failures are not retried."""
    config = server.config if isinstance(server, Loopback) else None
    settings = {"custom_generate_function_path": entry_module().generate_streaming, "streamfold_tries": 1, **settings}
    return arguments(server.url, config, **settings)


def decoding(args: SimpleNamespace, decode: Callable[[list[int]], str]) -> None:
    """Let the trainer's tokenizer decode as written replies say."""
    tokenizer: Any = GenerateState(args).tokenizer
    tokenizer.decode = lambda ids, *, skip_special_tokens: decode(list(ids))


def sample_of(**fields: Any) -> Sample:
    """A sample with the prompt that written replies answer."""
    return Sample(**{"prompt": "x", "tokens": list(PROMPT), **fields})


def partial(*tokens: int, **fields: Any) -> Sample:
    """A sample that was aborted after some tokens of a written reply."""
    return sample_of(
        tokens=[*PROMPT, *tokens],
        response=text_of(*tokens),
        response_length=len(tokens),
        loss_mask=[1] * len(tokens),
        rollout_log_probs=[-token / 8 for token in tokens],
        status=Status.ABORTED,
        **fields,
    )


class Written(Sample):
    """A sample that counts how often it was written to."""

    writes = 0

    def append_response_tokens(self, *args: Any, **fields: Any) -> None:
        self.writes += 1
        super().append_response_tokens(*args, **fields)


def loopback_engine(*, replays: bool = False, incremental: bool = False, **options: Any) -> Loopback:
    """A loopback engine of the trainer's kind; ``replays``: it can send routed experts and top-p ids."""
    if engine.current().name == "sglang":
        return Loopback(incremental=incremental, **options)
    flags: dict[str, Any] = {"return_routed_experts": replays, "return_sampling_mask": replays, "track_load": True}
    return Loopback(engine="vllm", model_name="loopback/512", **flags, **options)


async def ask(args: SimpleNamespace, sample: Sample, params: dict[str, Any] | None = None) -> Sample:
    """Call our function as the trainer does, within the time after which something hangs."""
    given = PARAMS if params is None else params
    found: Sample = await asyncio.wait_for(entry_module().generate_streaming(args, sample, given), LIMIT)
    assert found is sample
    return found


# What the engine writes, and the requests that it got.


def event(ids: Sequence[int], total: int, finish: str | None = None, *, prompt_tokens: int = len(PROMPT)) -> bytes:
    """One event of a reply: ``ids`` are new, ``total`` is all so far; a logprob is -id / 8."""
    if engine.current().name == "sglang":
        return replay.event(ids, total, finish, prompt_tokens=prompt_tokens)
    counts = bodies_vllm.usage(total, prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + total)
    return bodies_vllm.event(ids, finish, top={"usage": counts})


def events(count: int, finish: str | None = "stop", *, start: int = 1) -> list[bytes]:
    """Events of one token each, the tokens being ``start``, ``start + 1``, ...; the last one with ``finish``."""
    return [event([start + i], start + i, finish if i == count - 1 else None) for i in range(count)]


def part(ids: Sequence[int], *, prompt: int = len(PROMPT), finish: str | None = None) -> bytes:
    """The one event of a call."""
    return event(ids, len(ids), finish, prompt_tokens=prompt)


def whole() -> list[Step]:
    """A reply of three tokens."""
    return stream(*events(3), replay.DONE)


def running() -> list[Step]:
    """A reply that stays open after two tokens."""
    return [head(), *map(chunk, events(2, finish=None)), HANG]


def broken_off(*payloads: bytes) -> list[Step]:
    """A reply whose body ends in the middle."""
    return stream(*payloads, end=FIN)


def text_of(*ids: int) -> str:
    """The text of a written reply's tokens: the engine's, or the tokenizer's where the engine sends none."""
    if engine.current().name == "sglang":
        return "".join(chr(97 + token % 26) for token in ids)
    return bytes(ids).decode()


class Server(Replay):
    """A server of written replies in the protocol of the trainer's engine."""

    def __init__(
        self, generate: Route = (), *, host: str = "127.0.0.1", routes: dict[str, Route] | None = None
    ) -> None:
        all_routes = {engine.current().path: generate, "/inference/v1/abort_requests": self._abort, **(routes or {})}
        super().__init__(generate, host=host, routes=all_routes)

    def _abort(self, request: Request) -> list[Step]:
        for rid in request.json["request_ids"]:
            self.aborted[rid.removeprefix("generate-tokens-")].set()
        return answer_json(None)

    def reply(self, generate: Route) -> None:
        """Give other replies from now on."""
        self.routes[engine.current().path] = generate

    @property
    def generates(self) -> list[Request]:
        return self.at(engine.current().path)

    @property
    def aborts(self) -> list[str]:
        if engine.current().name == "sglang":
            return super().aborts
        return [request.json["request_ids"][-1] for request in self.at("/inference/v1/abort_requests")]


@dataclass(frozen=True)
class SentRequest:
    """The fields of a request, under the same names for all engines."""

    rid: str
    ids: list[int]
    budget: int | None
    params: dict[str, Any]


def sent_request(request: Request) -> SentRequest:
    body = request.json
    params = body["sampling_params"]
    if engine.current().name == "sglang":
        return SentRequest(body["rid"], body["input_ids"], params.get("max_new_tokens"), params)
    return SentRequest(body["request_id"], body["token_ids"], params["max_tokens"], params)


# Checks.


def arrived() -> int:
    """How many tokens the running calls of this event loop's clients have received."""
    handles = _handles.get(asyncio.get_running_loop(), {})
    return sum(call.token_count for handle in handles.values() for call in handle.client.running)


def response_of(sample: Sample) -> list[int]:
    return sample.tokens[len(sample.tokens) - sample.response_length :]


def aligned(sample: Sample) -> bool:
    """Whether all per-token fields are as long as the response."""
    n = sample.response_length
    offsets = sample.rollout_top_p_token_offsets
    return (
        len(sample.loss_mask or []) == n
        and len(sample.rollout_log_probs or []) == n
        and (offsets is None or len(offsets) == n + 1)
    )


def undisturbed(server: Loopback, args: SimpleNamespace, prompt: list[int], params: dict[str, Any]) -> Reply:
    """What one undisturbed call gives."""
    if server.config.engine == "vllm":
        names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
        params = {names.get(name, name): value for name, value in params.items() if value is not None}
        return server.undisturbed(prompt, {**params, "logprobs": 1})
    return server.undisturbed(
        prompt, params, return_logprob=True, return_routed_experts=args.use_rollout_routing_replay
    )


def assert_undisturbed(server: Loopback, args: SimpleNamespace, sample: Sample, params: dict[str, Any]) -> None:
    """Check that a finished sample is, in all of its fields, what one undisturbed call gives."""
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    wanted = undisturbed(server, args, prompt, params)
    assert response_of(sample) == wanted.token_ids
    assert sample.rollout_log_probs == wanted.logprobs
    assert sample.status.name == {"stop": "COMPLETED", "length": "TRUNCATED"}[(wanted.finish or {})["type"]]
    assert aligned(sample)
    kept = wanted.top_p or (wanted.sampling_mask if server.config.engine == "vllm" else None)
    if kept is not None:
        assert sample.rollout_top_p_token_ids is not None
        assert sample.rollout_top_p_token_ids.tolist() == [token for each in kept for token in each]
    if wanted.routed_experts is not None:
        assert sample.rollout_routed_experts is not None
        rows = wanted.routed_experts
        if server.config.engine == "vllm":
            rows = np.load(io.BytesIO(rows)).astype(np.int32).tobytes()
        assert sample.rollout_routed_experts.tobytes() == rows


def snapshot(sample: Sample) -> dict[str, Any]:
    """All of a sample, to be compared later."""
    return copy.deepcopy(vars(sample))
