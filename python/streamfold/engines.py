"""What differs between inference engines: how to ask, how to end a request, how to see what an engine is doing."""

from __future__ import annotations

import math
import operator
import re
import time
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import orjson

from streamfold.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import httpx
    import numpy.typing as npt

    from streamfold._core import Experts

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

__all__ = ["ENGINES", "Sglang", "error_message", "is_stream", "quote", "refusal", "token_array"]

_LARGEST_TOKEN = 2**31 - 1
_ALL_TOKENS = 1 << 30  # a top_k that leaves every choice
_LONGEST_QUOTE = 200  # characters of a reply that is no message; bytes of one that is no stream
_LONGEST_MESSAGE = 2000


class Sglang:
    """SGLang's native ``/generate``, 0.5.11 and newer, with or without a router before it."""

    name: Final = "sglang"
    dialect: Final = "sglang"  # the parser finds out by itself whether the server streams incrementally
    path: Final = "/generate"
    load_path: Final = "/v1/loads?include=core"
    workers_path: Final = "/workers"

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

    def payload(
        self,
        input_ids: npt.NDArray[np.int32] | None,
        sampling_params: Mapping[str, Any],
        *,
        rid: str,
        logprobs: bool,
        top_p: bool,
        experts: Experts | None,
        experts_start: int,
        extra: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Build the request's JSON object, ``rid`` first. Nothing of the caller's is changed or kept for later.

        Raises:
            ValueError: ``extra`` holds a key that an argument sets, or a sampling parameter is NaN or infinite.
        """
        params = dict(sampling_params)
        for key, value in params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"sampling_params[{key!r}] is {value}: JSON has no such number")
        if top_p:
            params["custom_params"] = {**(params.get("custom_params") or {}), "return_top_p_token_ids": True}
        payload: dict[str, Any] = {"rid": rid}
        if input_ids is not None:
            payload["input_ids"] = input_ids
        payload |= {"sampling_params": params, "stream": True, "return_logprob": logprobs}
        if experts is not None:
            payload["return_routed_experts"] = True
            if experts.dtype != "int32":
                payload["routed_experts_dtype"] = experts.dtype
            if experts_start:
                payload["routed_experts_start_len"] = experts_start
        taken = sorted(payload.keys() & (extra or {}).keys())
        if taken:
            raise ValueError(f"extra must not hold {', '.join(taken)}: use the argument that sets it")
        return payload | dict(extra or {})

    def rename(self, body: bytes, old: str, new: str) -> bytes:
        """Put another ``rid`` into the JSON text of a :meth:`payload`, and leave the rest as it is."""
        was, now = (orjson.dumps({"rid": rid})[:-1] for rid in (old, new))
        if not body.startswith(was):
            raise ValueError(f"this is not the request {old!r}: {quote(body)}")
        return now + body[len(was) :]

    def asks_side_data(self, payload: Mapping[str, Any]) -> bool:
        """Whether the terminal event will carry arrays that come nowhere else, so that an abort has to drain."""
        custom = payload["sampling_params"].get("custom_params")
        top_p = isinstance(custom, dict) and bool(custom.get("return_top_p_token_ids"))
        return top_p or bool(payload.get("return_routed_experts"))

    def abort(self, rid: str) -> tuple[str, dict[str, Any]]:
        """Give path and JSON body of the POST that ends one request. The engine matches ``rid`` by prefix."""
        return "/abort_request", {"rid": rid}

    def abort_all(self) -> tuple[str, dict[str, Any]]:
        """Give path and JSON body of the POST that ends every request of an engine."""
        return "/abort_request", {"abort_all": True}

    def read_workers(self, reply: object) -> list[str]:
        """Worker URLs out of a router's reply to :attr:`workers_path`; none if this is no such reply."""
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list):
            return []
        urls = (worker.get("url") for worker in workers if isinstance(worker, dict))
        # A data-parallel rank is named behind an @ and is no part of the address.
        return list(dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls if isinstance(url, str) and url))

    def read_load(self, reply: object) -> int:
        """Requests that run or wait, summed over the data-parallel ranks of a reply to :attr:`load_path`.

        Raises:
            EngineError: the reply has none of the known shapes.
        """
        loads = reply.get("loads", [reply]) if isinstance(reply, dict) else reply
        if not isinstance(loads, list):
            raise EngineError(f"the engine's load is of an unknown shape: {_quote(reply)}")
        return sum(_requests(load) for load in loads)


ENGINES: Final[dict[str, type[Sglang]]] = {Sglang.name: Sglang}


def _requests(load: object) -> int:
    """Requests of one rank: a total if it is told, otherwise those that run and those that wait."""
    if isinstance(load, dict):
        for keys in (("num_total_reqs",), ("num_reqs",), ("num_running_reqs", "num_waiting_reqs")):
            counts = [load.get(key) for key in keys]
            if all(isinstance(count, int) for count in counts):
                return sum(cast("list[int]", counts))
    raise EngineError(f"the engine's load is of an unknown shape: {_quote(load)}")


def expects_top_p(params: Mapping[str, Any]) -> bool:
    """Whether top-p ids are asked for, and something narrows the choice: otherwise the engine has none to send."""
    custom = params.get("custom_params")
    if not isinstance(custom, dict) or not custom.get("return_top_p_token_ids"):
        return False
    top_k = params.get("top_k") or -1
    return (
        _or(params.get("top_p"), 1) < 1
        or 0 < top_k < _ALL_TOKENS
        or _or(params.get("min_p"), 0) > 0
        or params.get("temperature") == 0
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def token_array(input_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Token ids, int32 ``[n]``, C order, from a list, tuple or integer array.

    Raises:
        ValueError: not one-dimensional, not integers, or an id outside 0 to 2**31 - 1.
    """
    if len(input_ids) == 0:
        return np.empty(0, np.int32)
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be one row of integers, not {ids.ndim} dimensions of {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > _LARGEST_TOKEN:
        raise ValueError(f"input_ids must lie in 0 to {_LARGEST_TOKEN}; found {low if low < 0 else high}")
    return np.ascontiguousarray(ids, np.int32)


def is_stream(response: httpx.Response) -> bool:
    """Whether the body may go to the parser: status 200, plain ``text/event-stream``."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = response.headers.get("content-encoding", "").strip().lower()
    return response.status_code == 200 and kind == "text/event-stream" and encoding in ("", "identity")


def refusal(response: httpx.Response, body: bytes) -> EngineError:
    """What a reply that is no stream amounts to."""
    status = response.status_code
    if status >= 400:
        return EngineError(error_message(body), status=status, retry_after=retry_after(response.headers))
    if status >= 300:
        there = response.headers.get("location", "somewhere else")
        return EngineError(f"redirected to {there}, which is not followed: give the final URL", status=status)
    kind = ", ".join(response.headers.get(name, "") for name in ("content-type", "content-encoding")).strip(", ")
    return EngineError(f"no plain text/event-stream but {kind or 'of no type'}: {quote(body)}", status=status)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to be asked again: ``Retry-After`` holds them, or a date."""
    told = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", told):
        return float(told)
    date = _seconds_of(told)
    if date is None:
        return None
    now = _seconds_of(headers.get("date", ""))  # by the server's own clock, which may be wrong
    return max(0.0, date - (time.time() if now is None else now))


def _seconds_of(date: str) -> float | None:
    """Seconds since the epoch of an HTTP date; None if it is none."""
    try:
        when = parsedate_to_datetime(date)
        return when.replace(tzinfo=when.tzinfo or timezone.utc).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):  # its parser gives up in many ways
        return None


def error_message(body: bytes) -> str:
    """The server's own words out of an error reply: any of the shapes that engines and routers use, or its text."""
    try:
        found = _message(orjson.loads(body))
    except orjson.JSONDecodeError:
        found = None
    return found[:_LONGEST_MESSAGE] if found else quote(body)


def _message(reply: object) -> str | None:
    if isinstance(reply, str):
        return reply
    if isinstance(reply, dict):
        for key in ("message", "error", "detail"):
            if found := _message(reply.get(key)):
                return found
    if isinstance(reply, list):  # FastAPI's list of what is wrong, one object for each field
        texts = (
            f"{item['msg']} ({_quote(item.get('loc'))})" for item in reply if isinstance(item, dict) and "msg" in item
        )
        return "; ".join(texts)
    return None


def quote(body: bytes) -> str:
    """The first bytes of a reply that is something else than expected, for an error message."""
    cut = body[:_LONGEST_QUOTE].decode(errors="replace")
    return " ".join(cut.split()) or "an empty reply"


def _quote(value: object) -> str:
    return repr(value)[:_LONGEST_QUOTE]
