"""What differs between inference engines: how to ask, how to end requests, how to see what an engine is doing."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import numpy as np
import orjson

from streamfold.client.responses import quote
from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from streamfold._core import Experts

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
    Ids = npt.NDArray[np.int32]
    Post = tuple[str, dict[str, Any]]  # path and JSON body

__all__ = [
    "ENGINES",
    "Asked",
    "Engine",
    "Sglang",
    "Vllm",
    "VllmCompletions",
    "expects_top_p",
    "token_array",
]

_LARGEST_TOKEN = 2**31 - 1
_ALL_TOKENS = 1 << 30  # a top_k that leaves every choice


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for besides its prompt and sampling parameters: see :meth:`Client.start`."""

    rid: str
    logprobs: bool = True
    top_p: bool = False
    experts: Experts | None = None
    experts_start: int = 0
    extra: Mapping[str, Any] | None = None


class Engine(ABC):
    """One kind of server. Has no state: one object serves all calls of a client.

    Attributes:
        name: as :class:`Client` takes it.
        dialect: as the parser takes it.
        path: of the endpoint that generates.
        rid_key: under which the request id stands in the request's JSON object.
        loads: paths that tell the load; the next one is asked where one is not there.
        closing_ends: whether a request ends at once, in every release, when its stream is closed.
        aliases: its own names of sampling parameters that are known here under others.
        budget_first: whether a response that is full counts as truncated, whatever else would have ended it.
        ends_by_name: whether an end at the model's own stop token names the token.
        ignores_given_ends: whether ``ignore_eos`` goes for ``stop_token_ids`` too.
        tells_text: whether the text comes from the engine, unless it was started without a tokenizer.
        stops_after_minimum: whether stop strings are looked for only behind the minimum of tokens.
        tells_unasked: whether top-p ids and routed experts may come unasked: it is for the server to tell them or not.
        text_lags: whether tokens come before their text, where that may become a stop string or is half a character.
    """

    name: ClassVar[str]
    dialect: ClassVar[str]
    path: ClassVar[str]
    rid_key: ClassVar[str]
    loads: ClassVar[tuple[str, ...]]
    closing_ends: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {}
    budget_first: ClassVar[bool] = False
    ends_by_name: ClassVar[bool] = True
    ignores_given_ends: ClassVar[bool] = False
    tells_text: ClassVar[bool] = True
    stops_after_minimum: ClassVar[bool] = False
    tells_unasked: ClassVar[bool] = False
    text_lags: ClassVar[bool] = False
    workers_path: Final = "/workers"

    def canonical(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Give sampling parameters under the names that are used here, their counts as plain integers.

        Raises:
            ValueError: one is given under two names.
        """
        named: dict[str, Any] = {}
        for name, value in sampling_params.items():
            known = self.aliases.get(name, name)
            if known in named:
                raise ValueError(f"{known} is given under two names")
            named[known] = value
        for name in ("max_new_tokens", "min_new_tokens"):
            with contextlib.suppress(TypeError):  # whatever else it is, the engine has a word for it
                if named.get(name) is not None:
                    named[name] = operator.index(named[name])
        return named

    def budget(self, sampling_params: Mapping[str, Any]) -> int | None:
        """How many tokens may come at most; None if it is left to the engine.

        Raises:
            ValueError: ``max_new_tokens`` is negative or no integer, or several answers are asked for.
        """
        if sampling_params.get("n", 1) not in (1, None):
            raise ValueError("a call is one generation, so n must be 1: start one call for each answer")
        budget = sampling_params.get("max_new_tokens")
        if budget is None:
            return None
        try:
            budget = operator.index(budget)
        except TypeError:
            raise ValueError(f"max_new_tokens must be an integer, not {budget!r}") from None
        if budget < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, not {budget}: no budget is left to ask for")
        return budget

    @abstractmethod
    def payload(self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
        """Build the request's JSON object, its id first. Nothing of the caller's is changed or kept for later.

        Raises:
            ValueError: ``extra`` holds a key that an argument sets, a sampling parameter is NaN or infinite, or the
                engine has no such thing.
        """

    def headers(self, rid: str) -> dict[str, str]:
        """Headers that a request of that id needs."""
        del rid
        return {}

    @abstractmethod
    def route(self, session: str | None, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """Give headers and keys of a request that keep it with its session, or bring it to a data-parallel rank."""

    def rename(self, body: bytes, old: str, new: str) -> bytes:
        """Put another id into the JSON text of a :meth:`payload`, and leave the rest as it is."""
        was, now = (orjson.dumps({self.rid_key: rid})[:-1] for rid in (old, new))
        if not body.startswith(was):
            raise ValueError(f"this is not the request {old!r}: {quote(body)}")
        return now + body[len(was) :]

    def asks_side_data(self, payload: Mapping[str, Any]) -> bool:
        """Whether the terminal event will carry arrays that come nowhere else, so that an abort has to drain."""
        del payload
        return False

    def hint(self, status: int) -> str:
        """What to do about a refusal with that status, if the engine's own words do not say so."""
        del status
        return ""

    @abstractmethod
    def aborts(self, rid: str) -> Sequence[Post]:
        """Give the POSTs that end one request, the best first; the next one is for servers that do not have one."""

    @abstractmethod
    def aborts_all(self) -> Sequence[Post]:
        """Give the POSTs that end every request of an engine, likewise."""

    @abstractmethod
    def read_load(self, reply: bytes) -> int:
        """Requests that run or wait, out of a reply to one of :attr:`loads`.

        Raises:
            EngineError: the reply has none of the known shapes.
        """

    def read_workers(self, reply: object) -> list[str]:
        """Worker URLs out of a router's reply to :attr:`workers_path`; none if this is no such reply."""
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list):
            return []
        urls = (worker.get("url") for worker in workers if isinstance(worker, dict))
        # A data-parallel rank is named behind an @ and is no part of the address.
        return list(dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls if isinstance(url, str) and url))


class Sglang(Engine):
    """SGLang's native ``/generate``, 0.5.11 and newer, with or without a router before it."""

    name = "sglang"
    dialect = "sglang"  # the parser finds out by itself whether the server streams incrementally
    path = "/generate"
    rid_key = "rid"
    loads = ("/v1/loads?include=core",)
    budget_first = True
    ignores_given_ends = True

    def payload(self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
        """Build the request's JSON object."""
        params = _finite(sampling_params)
        if asked.top_p:
            params["custom_params"] = {**(params.get("custom_params") or {}), "return_top_p_token_ids": True}
        payload: dict[str, Any] = {"rid": asked.rid}
        if input_ids is not None:
            payload["input_ids"] = input_ids
        payload |= {"sampling_params": params, "stream": True, "return_logprob": asked.logprobs}
        if asked.experts is not None:
            payload["return_routed_experts"] = True
            if asked.experts.dtype != "int32":
                payload["routed_experts_dtype"] = asked.experts.dtype
            if asked.experts_start:
                payload["routed_experts_start_len"] = asked.experts_start
        return _with_extra(payload, asked.extra)

    def route(self, session: str | None, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """A header for routers; a key for the engine, 0.5.10 and newer."""
        headers = {} if session is None else {"X-SMG-Routing-Key": session}
        return headers, {} if dp_rank is None else {"routed_dp_rank": dp_rank}

    def hint(self, status: int) -> str:
        """Say what else the server may be."""
        return f"is {self.path} there? engine='auto' asks the server what it is" if status == 404 else ""

    def asks_side_data(self, payload: Mapping[str, Any]) -> bool:
        """Whether routed experts or top-p ids were asked for: an abort's last event brings them."""
        return _asks_top_p(payload["sampling_params"]) or bool(payload.get("return_routed_experts"))

    def aborts(self, rid: str) -> Sequence[Post]:
        """Give the one POST; the engine matches ``rid`` by prefix."""
        return [("/abort_request", {"rid": rid})]

    def aborts_all(self) -> Sequence[Post]:
        """Give the one POST."""
        return [("/abort_request", {"abort_all": True})]

    def read_load(self, reply: bytes) -> int:
        """Sum over the data-parallel ranks."""
        told = _json(reply)
        loads = told.get("loads", [told]) if isinstance(told, dict) else told
        if not isinstance(loads, list):
            raise EngineError(f"the engine's load is of an unknown shape: {quote(reply)}")
        return sum(_requests(load) for load in loads)


class Vllm(Engine):
    """vLLM's token endpoint, ``/inference/v1/generate``, 0.20 and newer; as from 0.30 it has to be switched on.

    Sampling parameters are SGLang's or vLLM's own, which differ in a few names: ``max_new_tokens``,
    ``min_new_tokens``, ``sampling_seed`` and ``no_stop_trim`` are sent as vLLM names them.
    """

    name = "vllm"
    dialect = "vllm"
    path = "/inference/v1/generate"
    rid_key = "request_id"
    loads = ("/metrics", "/load")  # the second one counts only if the server was told to
    closing_ends = True
    ends_by_name = False
    tells_text = False
    stops_after_minimum = True
    tells_unasked = True

    _RENAMED: Final = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "no_stop_trim": "include_stop_str_in_output",
    }
    aliases: ClassVar[Mapping[str, str]] = {theirs: ours for ours, theirs in _RENAMED.items()}
    # vLLM passes over what it does not know without a word.
    _UNKNOWN: Final = ("beam_width", "ebnf", "json_schema", "regex", "stop_regex", "structural_tag")

    def budget(self, sampling_params: Mapping[str, Any]) -> int | None:
        """Demand a budget: without one some releases stop at 16 tokens, others at the end of their context."""
        budget = super().budget(self.canonical(sampling_params))
        if budget is None:
            raise ValueError("max_new_tokens must be given: vLLM's own default is 16 in some releases")
        return budget

    def payload(self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
        """Build the request's JSON object. Masks and routed experts are switched on at the server, not here."""
        params = self._params(sampling_params)
        if asked.logprobs:
            params.setdefault("logprobs", 1)
        if asked.experts_start:
            params["routed_experts_prompt_start"] = asked.experts_start
        payload: dict[str, Any] = {"request_id": asked.rid}
        if input_ids is not None:
            payload["token_ids"] = input_ids
        elif "token_ids" not in (asked.extra or {}):
            raise ValueError("vLLM's token endpoint takes token ids alone: give input_ids, or token_ids in extra")
        return _with_extra({**payload, "sampling_params": params, **_STREAMED}, asked.extra)

    def _params(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Give the parameters under vLLM's names. Null is no value there."""
        params: dict[str, Any] = {}
        for name, value in self.canonical(_finite(sampling_params)).items():
            if name in self._UNKNOWN and value is not None:
                raise ValueError(f"vLLM has no sampling parameter {name}, and would not say so: see structured_outputs")
            known = self._RENAMED.get(name, name)
            every = known == "top_k" and not (value == -1 or 0 < (value or 0) < _ALL_TOKENS)
            if value is not None and known != "custom_params" and not every:
                params[known] = value
        return {**params, "n": 1}

    def headers(self, rid: str) -> dict[str, str]:
        """Name the request; this wins over the body's."""
        return {"X-Request-Id": rid}

    def route(self, session: str | None, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """Headers both."""
        headers = {} if session is None else {"X-Session-ID": session}
        return headers | ({} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}), {}

    def hint(self, status: int) -> str:
        """Say which flag of the server is missing."""
        if status == 403:
            return "start the server with --enable-scale-out, or use engine='vllm-completions'"
        if status == 404:
            return (
                f"is {self.path} there? It needs vLLM 0.20, and from 0.30 on --enable-scale-out; "
                "engine='vllm-completions' needs neither"
            )
        return ""

    def aborts(self, rid: str) -> Sequence[Post]:
        """Give the endpoint of newer releases, then the developers'. The Rust frontend puts no prefix before ids."""
        return self._aborts([f"generate-tokens-{rid}", rid])

    def _aborts(self, ids: list[str]) -> Sequence[Post]:
        return [(path, {"request_ids": ids}) for path in ("/inference/v1/abort_requests", "/abort_requests")]

    def aborts_all(self) -> Sequence[Post]:
        """Give what the developers' mode has; nothing else ends all requests."""
        return [("/abort_requests", {})]

    def read_load(self, reply: bytes) -> int:
        """Read the two gauges of ``/metrics``, or the count of ``/load``."""
        gauges = re.findall(rb"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? +([0-9.e+]+)", reply, re.MULTILINE)
        if gauges:
            return round(sum(map(float, gauges)))
        told = _json(reply)
        load = told.get("server_load") if isinstance(told, dict) else None
        if not isinstance(load, int):
            raise EngineError(f"the engine's load is of an unknown shape: {quote(reply)}")
        return load


class VllmCompletions(Vllm):
    """vLLM's ``/v1/completions`` with ``return_token_ids``: on every server, without routed experts and masks."""

    name = "vllm-completions"
    dialect = "vllm-completions"
    path = "/v1/completions"
    text_lags = True
    tells_text = True

    def payload(self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
        """Build the request's JSON object."""
        if asked.top_p or _asks_top_p(sampling_params) or asked.experts is not None:
            raise ValueError("/v1/completions streams neither sampling masks nor routed experts: use engine='vllm'")
        params = self._params(sampling_params)
        if asked.logprobs:
            params.setdefault("logprobs", 1)
        prompt: Any = input_ids
        told = dict(asked.extra or {})
        if input_ids is None:
            prompt = told.pop("text", told.pop("prompt", None))
            if prompt is None:
                raise ValueError("there is no prompt: give input_ids, or text in extra")
        payload = {"request_id": asked.rid, "prompt": prompt, **params, "return_token_ids": True, **_STREAMED}
        return _with_extra(payload, told)

    def hint(self, status: int) -> str:
        """Say nothing: this endpoint needs no flag."""
        del status
        return ""

    def aborts(self, rid: str) -> Sequence[Post]:
        """Name the one prompt of the request."""
        return self._aborts([f"cmpl-{rid}-0", f"cmpl-{rid}"])


ENGINES: Final[dict[str, type[Engine]]] = {kind.name: kind for kind in (Sglang, Vllm, VllmCompletions)}

# Usage with each event, so that a lost one shows at once.
_STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _finite(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in sampling_params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"sampling_params[{key!r}] is {value}: JSON has no such number")
    return dict(sampling_params)


def _with_extra(payload: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = sorted(payload.keys() & (extra or {}).keys())
    if taken:
        raise ValueError(f"extra must not hold {', '.join(taken)}: use the argument that sets it")
    return payload | dict(extra or {})


def _json(reply: bytes) -> Any:  # noqa: ANN401  # whatever a server tells
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine's load is no JSON: {quote(reply)}") from error


def _requests(load: object) -> int:
    """Requests of one rank: a total if it is told, otherwise those that run and those that wait."""
    if isinstance(load, dict):
        for keys in (("num_total_reqs",), ("num_reqs",), ("num_running_reqs", "num_waiting_reqs")):
            counts = [load.get(key) for key in keys]
            if all(isinstance(count, int) for count in counts):
                return sum(cast("list[int]", counts))
    raise EngineError(f"the engine's load is of an unknown shape: {repr(load)[:200]}")


def expects_top_p(params: Mapping[str, Any]) -> bool:
    """Whether top-p ids are asked for, and something narrows the choice: otherwise the engine has none to send."""
    if not _asks_top_p(params):
        return False
    top_k = params.get("top_k") or -1
    return (
        _or(params.get("top_p"), 1) < 1
        or 0 < top_k < _ALL_TOKENS
        or _or(params.get("min_p"), 0) > 0
        or params.get("temperature") == 0
    )


def _asks_top_p(params: Mapping[str, Any]) -> bool:
    custom = params.get("custom_params")
    return isinstance(custom, dict) and bool(custom.get("return_top_p_token_ids"))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def token_array(input_ids: TokenIds, vocab_size: int | None = None) -> Ids:
    """Token ids, int32 ``[n]``, C order, from a list, tuple or integer array.

    Raises:
        ValueError: not one-dimensional, not integers, or an id outside 0 to 2**31 - 1, or outside the vocabulary.
    """
    if len(input_ids) == 0:
        return np.empty(0, np.int32)
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be one row of integers, not {ids.ndim} dimensions of {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    largest = _LARGEST_TOKEN if vocab_size is None else vocab_size - 1
    if low < 0 or high > largest:
        raise ValueError(f"input_ids must lie in 0 to {largest}; found {low if low < 0 else high}")
    return np.ascontiguousarray(ids, np.int32)
