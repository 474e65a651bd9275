"""What differs between inference servers (SGLang, vLLM): payloads, and how to abort, query load, list workers."""

from __future__ import annotations

import contextlib
import math
import operator
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import orjson

from streamfold.errors import EngineError, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from streamfold._core import Experts
    from streamfold.errors import StreamfoldError

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
    Ids = npt.NDArray[np.int32]
    Post = tuple[str, dict[str, Any]]  # path and JSON body

__all__ = [
    "ALL_TOKENS",
    "PROMPT_KEYS",
    "EngineSpec",
    "LoadMissing",
    "Pausing",
    "RequestOptions",
    "asks_top_p",
    "check_finite",
    "common_extra",
    "expects_top_p",
    "read_json",
    "with_extra",
]

ALL_TOKENS = 1 << 30  # a top_k that keeps every token
PROMPT_KEYS: Final = frozenset({"text", "input_ids", "token_ids", "prompt"})  # of a request: they hold its prompt
_SIDE_DATA: Final = {  # by the names of a generation's fields
    "routed_experts": "routed experts",
    "top_p": "top-p ids",
    "indexer_topk": "indexer rows",
    "prompt_token_ids": "prompt token ids",
}
_ASKED_BY_KEY: Final = {  # keys of a request that ask for them
    "return_routed_experts": "routed_experts",
    "return_sampling_mask": "top_p",
    "return_indexer_topk": "indexer_topk",
    "return_prompt_token_ids": "prompt_token_ids",
    "return_token_ids": "prompt_token_ids",
}


class RequestOptions(NamedTuple):
    """What a request asks for besides prompt and sampling parameters; the arguments of :meth:`Client.start`."""

    rid: str
    logprobs: bool = True
    top_p: bool = False
    prompt_token_ids: bool = False
    experts: Experts | None = None
    experts_start: int = 0
    extra: Mapping[str, Any] | None = None


class LoadMissing(EngineError):
    """A reply does not tell the load, which another endpoint may."""


class Pausing(NamedTuple):
    """The endpoints that pause an engine.

    Attributes:
        state: tells whether it is paused.
        pause: ends all requests, and lets new ones wait.
        resume: lets them run.
    """

    state: str
    pause: str
    resume: str

    @staticmethod
    def read_state(reply: bytes) -> bool:
        """Whether the engine is paused; EngineError if the reply does not tell."""
        try:
            report = orjson.loads(reply)
        except orjson.JSONDecodeError:
            report = None
        paused = report.get("is_paused") if isinstance(report, dict) else None
        if not isinstance(paused, bool):
            raise EngineError(f"the reply does not tell whether the engine is paused: {quote(reply)}")
        return paused


class EngineSpec(ABC):
    """What differs between inference servers. Stateless: one object serves all calls of a client.

    Attributes:
        name: the ``engine`` argument of :class:`~streamfold.Client` that selects it.
        dialect: the ``dialect`` argument of :class:`~streamfold.Parser`.
        path: the endpoint that generates.
        rid_key: the key of the request id in the payload.
        loads: paths that report the load; the next one is tried if a server does not have the first.
        known_params: names of sampling parameters that any supported release knows.
        load_flags: of those paths, the ones that report 0 unless the server has a flag, which is the value.
        pausing: the endpoints that pause an engine whose abort of all requests may miss some; None: it misses none.
        session_header: by which the engine's own router keeps the calls of a session on one worker.
        rank_name: how the engine calls the data-parallel rank in its errors.
        abort_by_disconnect: whether every release ends a request at once when its stream is closed.
        lists_aborts: whether one POST can abort several requests.
        aliases: the engine's own names of sampling parameters, mapped to the names used here.
        length_before_stop: whether a response of ``max_new_tokens`` tokens ends with "length" even if its last token
            is a stop token.
        reports_stop_token: whether a response that ends at the model's own EOS names the token.
        ignores_given_ends: whether ``ignore_eos`` disables ``stop_token_ids`` too.
        tells_text: whether the engine sends text, unless it was started without a tokenizer.
        stops_after_minimum: whether stop strings are matched only after ``min_new_tokens``.
        sends_unrequested_side_data: whether top-p ids and routed experts are a server flag, so that they may come
            although a request did not ask for them.
        abort_drain: seconds that an abort reads on although no side data was requested, for what only the terminal
            event carries in any case.
        resets_penalties: penalties, by the names of their sampling parameters, that count only the tokens that their
            own request has generated, so that those of a resumed response start over.
        repeats_text: whether a stream may send characters twice where an event brings several tokens.
        image_key: the key of a request that holds a list of images; None: they cannot be sent as they are.
        side_data_needs: what side data requires, by the names of a generation's fields, for messages.
        delays_text: whether token ids come before their text, while that may become a stop string or is an
            incomplete character.
    """

    name: ClassVar[str]
    dialect: ClassVar[str]
    path: ClassVar[str]
    rid_key: ClassVar[str]
    session_header: ClassVar[str]
    rank_name: ClassVar[str]
    loads: ClassVar[tuple[str, ...]]
    known_params: ClassVar[frozenset[str]]
    load_flags: ClassVar[Mapping[str, str]] = {}
    pausing: ClassVar[Pausing | None] = None
    abort_by_disconnect: ClassVar[bool] = False
    lists_aborts: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {}
    length_before_stop: ClassVar[bool] = False
    reports_stop_token: ClassVar[bool] = True
    ignores_given_ends: ClassVar[bool] = False
    tells_text: ClassVar[bool] = True
    stops_after_minimum: ClassVar[bool] = False
    sends_unrequested_side_data: ClassVar[bool] = False
    abort_drain: ClassVar[float] = 0.0
    resets_penalties: ClassVar[tuple[str, ...]] = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    repeats_text: ClassVar[bool] = False
    image_key: ClassVar[str | None] = None
    side_data_needs: ClassVar[Mapping[str, str]] = {}
    delays_text: ClassVar[bool] = False
    workers_path: Final = "/workers"

    def normalize_params(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the engine's own names of sampling parameters to the names used here; counts become plain integers.

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
            with contextlib.suppress(TypeError):  # any other type is for the engine to refuse
                if named.get(name) is not None:
                    named[name] = operator.index(named[name])
        return named

    def unknown_params(self, sampling_params: Mapping[str, Any]) -> list[str]:
        """Names of sampling parameters that are sent and that no supported release knows."""
        if sampling_params.keys() <= self.known_params:
            return []
        return [name for name in sampling_params if name not in self.known_params and name not in self.aliases]

    def budget(self, sampling_params: Mapping[str, Any]) -> int | None:
        """``max_new_tokens`` as an integer; None if it is left to the engine.

        Raises:
            ValueError: ``max_new_tokens`` is negative or not an integer, or ``n`` is not 1.
        """
        if sampling_params.get("n", 1) not in (1, None):
            raise ValueError("a call is one generation, so n must be 1: start one call per response")
        budget = sampling_params.get("max_new_tokens")
        if budget is None:
            return None
        try:
            budget = operator.index(budget)
        except TypeError:
            raise ValueError(f"max_new_tokens must be an integer, not {budget!r}") from None
        if budget < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, not {budget}")
        return budget

    @abstractmethod
    def payload(
        self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: RequestOptions
    ) -> dict[str, Any]:
        """Build the payload, the request id first. The arguments are neither changed nor kept.

        Raises:
            ValueError: ``extra`` holds a key that an argument sets, a sampling parameter is NaN or infinite, or the
                engine does not support what was requested.
        """

    def headers(self, rid: str) -> dict[str, str]:
        """Headers that identify the request."""
        del rid
        return {}

    @abstractmethod
    def to_rank(self, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """Headers and payload keys that send a request to a data-parallel rank; none for None."""

    def refuses_rank(self, error: EngineError) -> bool:
        """Whether the engine refuses the data-parallel rank of a request: it has none of that number, or not now."""
        return self.rank_name in error.message

    def rename(self, body: bytes, old: str, new: str) -> bytes:
        """Replace the request id in the JSON text of a :meth:`payload`."""
        was, now = (orjson.dumps({self.rid_key: rid})[:-1] for rid in (old, new))
        if not body.startswith(was):
            raise ValueError(f"this is not the request {old!r}: {quote(body)}")
        return now + body[len(was) :]

    def asks_side_data(self, payload: Mapping[str, Any]) -> bool:
        """Whether side data was requested that only the terminal event carries, so that an abort has to drain."""
        del payload
        return False

    def may_be_abort(self, error: StreamfoldError) -> bool:
        """Whether a stream that somebody has aborted may end with this error, instead of a terminal event."""
        del error
        return False

    def side_data(self, sampling_params: Mapping[str, Any], asked: RequestOptions) -> tuple[str, ...]:
        """What a request asks for that a finished response must have, by the names of a generation's fields."""
        names = _asked_by_key(asked.extra)
        if asked.experts is not None:
            names.add("routed_experts")
        if asked.prompt_token_ids:
            names.add("prompt_token_ids")
        if asked.top_p or asks_top_p(sampling_params):
            names.add("top_p")
        if "top_p" in names and not restricts_sampling(sampling_params):
            names.remove("top_p")  # the engine has none to send
        return tuple(name for name in _SIDE_DATA if name in names) if names else ()

    def lacking(self, name: str) -> str:
        """The end of a message that a response lacks side data: what it is called, and what it needs."""
        needs = self.side_data_needs.get(name)
        return f"{_SIDE_DATA[name]}, which were requested{f': {needs}' if needs else ''}"

    def hint(self, status: int) -> str:
        """Advice to append to an error with that HTTP status; empty if the engine's own message is enough."""
        del status
        return ""

    @abstractmethod
    def aborts(self, rids: Sequence[str]) -> Sequence[tuple[str, Sequence[dict[str, Any]]]]:
        """The POSTs that abort requests, in order of preference; a server that lacks one path gets the next.

        Returns:
            Paths, each with its JSON bodies: one for all requests with :attr:`lists_aborts`, else one for each.
        """

    @abstractmethod
    def aborts_all(self) -> Sequence[Post]:
        """The POSTs that abort every request of an engine, in order of preference."""

    @abstractmethod
    def read_load(self, reply: bytes) -> int:
        """Read the number of running and waiting requests from a reply to one of :attr:`loads`.

        Raises:
            LoadMissing: the reply is of a known shape, and has no load.
            EngineError: the reply has none of the known shapes.
        """

    @abstractmethod
    def read_waiting(self, reply: bytes) -> int:
        """Read the number of waiting requests from a reply to one of :attr:`loads`; 0 if it is not told.

        Raises:
            EngineError: the reply has none of the known shapes.
        """

    def read_workers(self, reply: object) -> list[str]:
        """Read the worker URLs from a router's reply to :attr:`workers_path`; empty for any other reply."""
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list):
            return []
        urls = (worker.get("url") for worker in workers if isinstance(worker, dict))
        # A data-parallel rank follows an @ and is not part of the address.
        return list(dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls if isinstance(url, str) and url))


_FINITE: Final = frozenset({int, bool, str, type(None)})  # of most values; it takes longer to ask for an interface


def check_finite(values: Mapping[str, Any], name: str = "sampling_params") -> dict[str, Any]:
    """Copy sampling parameters, or what ``name`` says; ValueError for a number that JSON would write as null.

    Lists are not looked into: they may be prompts of many thousand tokens.
    """
    for key, value in values.items():
        if type(value) in _FINITE:
            continue
        if isinstance(value, (float, np.floating)) and not math.isfinite(value):
            raise ValueError(f"{name}[{key!r}] is {value}: JSON has no such number")
        if isinstance(value, Mapping):
            check_finite(value, f"{name}[{key!r}]")
    return dict(values)


def with_extra(payload: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the caller's ``extra`` keys to a payload; ValueError for a key that the payload already has."""
    if not extra:
        return payload
    taken = sorted(payload.keys() & extra.keys())
    if taken:
        raise ValueError(f"extra must not hold {', '.join(taken)}: use the argument that sets it")
    return payload | check_finite(extra, "extra")


def common_extra(extra: Mapping[str, Any] | None, engine: EngineSpec | None = None) -> dict[str, Any]:
    """Copy keys that every request gets.

    Args:
        extra: the keys and their values; None: none.
        engine: if given, the keys that it sets itself are refused too.

    Raises:
        ValueError: a key belongs to one request alone, or to the engine; the message names it.
        TypeError: it is no mapping of names to what JSON can write.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f'extra must be a mapping, such as {{"priority": 1}}; not {reprlib.repr(extra)}')
    keys = check_finite(extra, "extra")
    if any(not isinstance(key, str) for key in keys):
        raise TypeError(
            f"the keys of extra must be names, not {next(key for key in keys if not isinstance(key, str))!r}"
        )
    if prompts := sorted(keys.keys() & PROMPT_KEYS):
        raise ValueError(f"extra must not hold {', '.join(prompts)}: every request would get the same prompt")
    try:
        orjson.dumps(keys, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:  # orjson's own is one
        raise TypeError(f"extra cannot be written as JSON: {error}") from None
    if engine is not None:
        engine.payload(np.empty(0, np.int32), {"max_new_tokens": 1}, RequestOptions(rid="", extra=keys))
    return keys


def read_json(reply: bytes) -> Any:  # noqa: ANN401  # any JSON
    """Parse the reply to a load query; EngineError if it is not JSON."""
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine's load is no JSON: {quote(reply)}") from error


def expects_top_p(params: Mapping[str, Any]) -> bool:
    """Whether top-p ids are requested and the parameters restrict sampling: otherwise the engine has none to send."""
    return asks_top_p(params) and restricts_sampling(params)


def restricts_sampling(params: Mapping[str, Any]) -> bool:
    """Whether sampling parameters leave tokens out that the model could have generated."""
    top_k = params.get("top_k") or -1
    return (
        _or(params.get("top_p"), 1) < 1
        or 0 < top_k < ALL_TOKENS
        or _or(params.get("min_p"), 0) > 0
        or params.get("temperature") == 0
    )


def _asked_by_key(extra: Mapping[str, Any] | None) -> set[str]:
    return {name for key, name in _ASKED_BY_KEY.items() if extra.get(key)} if extra else set()


def asks_top_p(params: Mapping[str, Any]) -> bool:
    """Whether ``custom_params`` request the kept token ids of top-p sampling."""
    custom = params.get("custom_params")
    return isinstance(custom, dict) and bool(custom.get("return_top_p_token_ids"))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
