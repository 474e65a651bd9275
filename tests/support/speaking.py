"""How each engine speaks, so that one test of the client is a test with every engine.

Ask for the fixture ``speech``, serve with :meth:`Speech.replay` and call with :meth:`Speech.client`.
"""

from __future__ import annotations

import base64
import io
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from streamfold import Client
from streamfold.engines.base import RequestOptions
from streamfold.engines.detect import ENGINES
from streamfold.loopback import Loopback
from support import replay
from support.bodies_vllm import fields, usage
from support.replay import DONE, HANG, PROMPT, Replay, Step, answer, answer_json, chunk, head, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from streamfold.loopback.core.reply import Reply
    from support.bodies_vllm import Wire
    from support.replay import Request, Route, Steps


Spoken: TypeAlias = "Steps | Callable[[Speech], Steps]"


class Letters:
    """A tokenizer that makes of ids what SGLang's events say here."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(chr(97 + token % 26) for token in ids)


class Speech(ABC):
    """One kind of engine, as it appears on the wire.

    Attributes:
        engine: as :class:`Client` takes it.
        path: of the endpoint that generates.
        rid_key, ids_key: under which the request's id and the prompt's ids stand in a request.
        abort_path, abort_all_path: of the POSTs that end one request, and all.
        load_path: where the load is told.
        tokenizer: makes the text of samples of what a test writes; None: the engine sends it.
    """

    engine: ClassVar[Literal["sglang", "vllm"]]
    path: ClassVar[str]
    rid_key: ClassVar[str]
    ids_key: ClassVar[str]
    abort_path: ClassVar[str]
    abort_all_path: ClassVar[str]
    abort_all_body: ClassVar[dict[str, Any]]
    load_path: ClassVar[str]
    tokenizer: ClassVar[Letters | None]

    def __repr__(self) -> str:
        return self.engine

    def client(self, url: str, **options: Any) -> Client:
        return Client(url, engine=self.engine, **{"tokenizer": self.tokenizer, **options})

    def replay(self, generate: Route = (), *, routes: Mapping[str, Route] | None = None) -> Replay:
        """A server of raw bytes, of which nothing runs that an abort of all would have to end."""
        taken = {self.abort_all_path: answer_json({"status": "aborted", "aborted": 0})}
        return Replay(generate, path=self.path, abort_path=self.abort_path, routes={**taken, **(routes or {})})

    @abstractmethod
    def loopback(self, **options: Any) -> Loopback:
        """A loopback engine."""

    @abstractmethod
    def event(
        self,
        ids: Sequence[int],
        total: int,
        finish: str | None = None,
        *,
        prompt: int = len(PROMPT),
        matched: int | str | None = None,
        version: str | None = None,
        experts: np.ndarray[Any, Any] | None = None,
    ) -> bytes:
        """One event: ``ids`` are new, ``total`` is all so far; a logprob is -id / 8.

        Args:
            prompt: tokens in the prompt.
            matched: at what it stopped.
            version: of the weights; some engines tell it with the terminal event alone.
            experts: those of all positions, for the terminal event.
        """

    @abstractmethod
    def refusal(self, status: int, total: int = 0) -> bytes:
        """The event by which an engine says in a stream that it will not go on, and with which status."""

    @abstractmethod
    def load(self, running: int, waiting: int = 0) -> list[Step]:
        """A reply to the question for the load."""

    @abstractmethod
    def text(self, text: str) -> str | None:
        """The text of a generation that is told as these letters."""

    def events(self, count: int, finish: str | None = "stop", *, start: int = 1) -> list[bytes]:
        """Events of one token each, the tokens being ``start``, ``start + 1``, ...; the last one with ``finish``."""
        return [self.event([start + i], start + i, finish if i == count - 1 else None) for i in range(count)]

    def part(self, ids: Sequence[int], **told: Any) -> bytes:
        """The one event of a call."""
        return self.event(ids, len(ids), **told)

    def after(self, total: int) -> list[bytes]:
        """What stands between the terminal event and the end."""
        del total
        return []

    @property
    def whole(self) -> list[Step]:
        """A whole reply of the tokens 1, 2 and 3."""
        return stream(*self.events(3), *self.after(3), DONE)

    @property
    def two(self) -> list[Step]:
        """The head of a reply, and its first two tokens."""
        return [head(), *map(chunk, self.events(2, finish=None))]

    @property
    def running(self) -> list[Step]:
        """A reply that stays open after two tokens."""
        return [*self.two, HANG]

    def hint(self, status: int) -> str:
        """What the client adds to an engine's refusal."""
        return ENGINES[self.engine]().hint(status)

    def told(self, steps: Spoken) -> Steps:
        """Steps that may depend on the engine."""
        return steps(self) if callable(steps) else steps

    def tokenizer_of(self, loopback: Loopback) -> Any:
        """The tokenizer of a loopback engine, for the same purpose."""
        return None if self.tokenizer is None else loopback.tokenizer

    def params(self, request: Request) -> dict[str, Any]:
        """The sampling parameters of a request, as they were given to the client."""
        told: dict[str, Any] = request.json["sampling_params"]
        return told

    def ids(self, request: Request) -> list[int]:
        """The prompt of a request."""
        told: list[int] = request.json[self.ids_key]
        return told

    def undisturbed(self, loopback: Loopback, prompt: Sequence[int], params: Mapping[str, Any]) -> Reply:
        """What an undisturbed generation gives, for parameters as the client takes them."""
        body = ENGINES[self.engine]().payload(np.asarray(prompt, np.int32), params, RequestOptions(rid="r"))
        more = {"return_logprob": True} if self.engine == "sglang" else {}
        return loopback.undisturbed(list(prompt), body["sampling_params"], **more)


class SglangSpeech(Speech):
    """SGLang's native endpoint; what is written here is incremental."""

    engine = "sglang"
    path = "/generate"
    rid_key = "rid"
    ids_key = "input_ids"
    abort_path = abort_all_path = "/abort_request"
    abort_all_body: ClassVar = {"abort_all": True}
    load_path = "/v1/loads"
    tokenizer = None

    def loopback(self, **options: Any) -> Loopback:
        return Loopback(**options)

    def event(
        self,
        ids: Sequence[int],
        total: int,
        finish: str | None = None,
        *,
        prompt: int = len(PROMPT),
        matched: int | str | None = None,
        version: str | None = None,
        experts: np.ndarray[Any, Any] | None = None,
    ) -> bytes:
        meta: dict[str, Any] = {"prompt_tokens": prompt}
        if version is not None:
            meta["weight_version"] = version
        if experts is not None:
            dtype = str(experts.dtype)
            meta |= {"routed_experts": base64.b64encode(experts.tobytes()).decode(), "routed_experts_dtype": dtype}
        reason = (
            None if finish is None else {"type": finish} if matched is None else {"type": finish, "matched": matched}
        )
        return replay.event(ids, total, reason, **meta)

    def refusal(self, status: int, total: int = 0) -> bytes:
        reason = {"type": "abort", "message": "The request queue is full.", "status_code": status}
        return replay.event([], total, reason)

    def load(self, running: int, waiting: int = 0) -> list[Step]:
        return answer_json({"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]})

    def text(self, text: str) -> str | None:
        return text


class VllmSpeech(Speech):
    """vLLM's token endpoint, as newer releases write."""

    engine = "vllm"
    path = "/inference/v1/generate"
    rid_key = "request_id"
    ids_key = "token_ids"
    abort_path = "/inference/v1/abort_requests"
    abort_all_path = "/abort_requests"
    abort_all_body: ClassVar[dict[str, Any]] = {}
    load_path = "/metrics"
    tokenizer = Letters()
    wire: ClassVar[Wire] = "0.32"

    def params(self, request: Request) -> dict[str, Any]:
        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
        told = {names.get(name, name): value for name, value in super().params(request).items()}
        assert (told.pop("n"), told.pop("logprobs")) == (1, 1)
        return told

    def loopback(self, **options: Any) -> Loopback:
        return Loopback(engine="vllm", **options)

    def event(
        self,
        ids: Sequence[int],
        total: int,
        finish: str | None = None,
        *,
        prompt: int = len(PROMPT),
        matched: int | str | None = None,
        version: str | None = None,
        experts: np.ndarray[Any, Any] | None = None,
    ) -> bytes:
        counts = {**usage(total), "prompt_tokens": prompt, "total_tokens": prompt + total}
        choice: dict[str, Any] = {} if matched is None else {"stop_reason": matched}
        if version is not None and finish is not None:
            choice["weight_versions"] = [{"version": version, "start": 0, "end": total}] if total else []
        if experts is not None:
            file = io.BytesIO()
            np.save(file, experts)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        told = fields(ids, finish, wire=self.wire, top={"usage": counts}, **choice)
        return b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"

    def refusal(self, status: int, total: int = 0) -> bytes:
        del total  # no usage after an error
        error = {"message": "The request queue is full.", "type": "ServiceUnavailableError", "param": None}
        return b"data: " + json.dumps({"error": {**error, "code": status}}).encode() + b"\n\n"

    def after(self, total: int) -> list[bytes]:
        told = fields(None, wire=self.wire, top={"choices": [], "usage": usage(total)})
        return [b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"]

    def load(self, running: int, waiting: int = 0) -> list[Step]:
        told = {"running": running, "waiting": waiting}
        gauges = "".join(f'vllm:num_requests_{name}{{engine="0"}} {count}.0\n' for name, count in told.items())
        return answer(gauges.encode(), kind="text/plain; version=0.0.4; charset=utf-8")

    def text(self, text: str) -> str | None:
        del text
        return None


class OldVllmSpeech(VllmSpeech):
    """vLLM's token endpoint, 0.31 and older: logprobs under names, and an abort that is not told."""

    wire = "0.28"


SPEECHES: dict[str, Speech] = {"sglang": SglangSpeech(), "vllm": VllmSpeech()}
SGLANG, VLLM = SPEECHES.values()
OLD_VLLM = OldVllmSpeech()
