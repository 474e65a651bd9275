"""slime's generate function, streamed: ``--custom-generate-function-path streamfold.slime.generate_streaming``.

What has arrived of a sample is kept however its call ends, and written to it once. It works unchanged in releases of
slime that cancel single requests (they read ``abort_mode``) and in older ones, which abort whole servers.

Settings are attributes of ``args`` (``--custom-config-path FILE.yaml`` sets any) or environment variables; attributes
win. For the ``timeout`` settings ``none`` (in YAML ``null``) stands for no limit.

================================== =============================== ========== ========================================
attribute                          variable                        default    meaning
================================== =============================== ========== ========================================
``streamfold_timeout_connect``     STREAMFOLD_TIMEOUT_CONNECT      10         seconds to open a connection
``streamfold_timeout_first_token`` STREAMFOLD_TIMEOUT_FIRST_TOKEN  600        seconds from the request to its first
                                                                              token: queue and prefill
``streamfold_timeout_next_token``  STREAMFOLD_TIMEOUT_NEXT_TOKEN   300        seconds from one token to the next
``streamfold_drain``               STREAMFOLD_DRAIN                2          seconds that an abort waits for routed
                                                                              experts and top-p ids, which come last
``streamfold_concurrency``         STREAMFOLD_CONCURRENCY          4096       requests at once, to each router; each
                                                                              holds one socket
``streamfold_max_event_bytes``     STREAMFOLD_MAX_EVENT_BYTES      1073741824 bytes in one event; more is an error
``streamfold_model``               STREAMFOLD_MODEL                (none)     which of ``sglang_model_routers`` is
                                                                              asked, if a sample names none in its
                                                                              ``metadata["model_name"]``
================================== =============================== ========== ========================================
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from streamfold._core import Experts
from streamfold.client import Client
from streamfold.engines import expects_top_p
from streamfold.errors import EngineError
from streamfold.limits import Limits, Slots, Timeouts
from streamfold.sample import check_ready, merge, meta_info

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from streamfold._core import Generation
    from streamfold.call import Call

__all__ = ["generate_streaming"]

# The host's own. Its releases differ: what may be missing is read with getattr.
_Args: TypeAlias = Any
_Sample: TypeAlias = Any
_Tokenizer: TypeAlias = Any
_Value: TypeAlias = Any  # of a setting

log = logging.getLogger("streamfold")

_SPANS_AT: Final = ("slime.observability.trace_utils", "slime.utils.trace_utils")  # newer and older releases
_MOST_EXPERTS_IN_UINT8: Final = 256
_LOST: Final = "lost_side_data"
_ENDED: Final = "streamfold_ended"
_NO_LIMIT: Final = ("none", "null", "")
_UNSET: Final = object()


async def generate_streaming(
    args: _Args,
    sample: _Sample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: ARG001, FBT001, FBT002  # the host's signature; both kinds are asked alike
) -> _Sample:
    """Generate the response of one sample, or go on with it, and write what came of the call: once, however it ends.

    Args:
        args: the host's settings. Read, never changed.
        sample: the host's, PENDING or ABORTED.
        sampling_params: as the engine has them; ``max_new_tokens`` counts the whole response, of which the call asks
            for what is missing. Read, never changed.
        evaluation: taken because the host may give it.

    Returns:
        The sample. COMPLETED, TRUNCATED, or ABORTED if the engine ended the request before its time, or the host is
        aborting and nothing was asked.

    Raises:
        StreamfoldError: the call failed. What had arrived is in the sample, which is ABORTED.
        ValueError: something asked for makes no sense, or the reply does not fit the sample.
        asyncio.CancelledError: somebody cancelled this. The request has been aborted, its side data waited for, and
            what had arrived is in the sample, which is ABORTED.

    With top-p replay on, tokens are of no use without the ids they were chosen from. If a call is cut before those
    come, nothing of it is written, and ``sample.metadata["lost_side_data"]`` counts its tokens.
    """
    from slime.rollout.sglang_rollout import (  # type: ignore[import-not-found]  # noqa: PLC0415  # only in the host
        GenerateState,
        _prepare_prompt_ids,
    )

    state = GenerateState(args)
    params = dict(sampling_params)
    _check(args, sample, params)
    statuses = type(sample.status)
    budget = _budget(sample, params)
    ended_as = _noted_end(sample)
    if ended_as is not None and budget != 0:
        sample.status = statuses[ended_as]
        return sample
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    if budget == 0:
        sample.status = statuses.TRUNCATED
        return sample

    seat = await _seat(args, _router(args, sample))
    images = (sample.multimodal_inputs or {}).get("images")
    extra = _with_images(sample, images) if images else None
    trace = _trace()
    with _span(trace, sample, budget) as span:
        try:
            async with seat.slot():
                # Between this look and the request nothing is awaited: none leaves after the host's abort.
                if state.aborted:
                    sample.status = statuses.ABORTED
                    return sample
                call = seat.client.start(
                    None if images else sample.tokens, params, headers=_headers(args, sample), extra=extra
                )
                generation = await _outcome(args, sample, call, params, state.tokenizer)
        except BaseException:
            if sample.status.name == "PENDING":  # nothing could be written
                sample.status = statuses.ABORTED
            raise
        _describe(trace, span, generation)
    return sample


# Newer slime cancels this task to end the request; older slime does not look here.
vars(generate_streaming)["abort_mode"] = "request"


async def _outcome(
    args: _Args, sample: _Sample, call: Call, params: Mapping[str, Any], tokenizer: _Tokenizer
) -> Generation:
    """Await the call and write what came of it, whichever way it ends."""
    try:
        generation = await call
    except (Exception, asyncio.CancelledError) as error:
        kept = await call.abort()  # at once: it has ended
        try:
            _write(args, sample, kept, params, tokenizer)
        except Exception:  # the call's own end is what the host has to know
            log.exception("nothing of request %s could be kept", call.rid)
        else:
            if isinstance(error, asyncio.CancelledError) and sample.status.name in ("COMPLETED", "TRUNCATED"):
                # The engine was faster than the abort, but the host takes the sample for a partial one.
                _note_end(sample, sample.status.name)
        raise
    _write(args, sample, generation, params, tokenizer)
    return generation


def _write(
    args: _Args, sample: _Sample, generation: Generation, params: Mapping[str, Any], tokenizer: _Tokenizer
) -> None:
    """Write a call's outcome to the sample, or count it as lost if it is of no use without what did not come.

    Raises:
        EngineError: the call has come to its end, and arrays that were asked for did not come with it.
        ValueError: it does not fit the sample.
    """
    count = len(generation.token_ids)
    ended = generation.finish_reason in ("stop", "length")
    lacks_top_p = count > 0 and generation.top_p is None and expects_top_p(params)
    lacks_experts = ended and generation.routed_experts is None and _replays_experts(args)
    if lacks_top_p or lacks_experts:
        notes = _notes(sample)
        sample.metadata = {**notes, _LOST: notes.get(_LOST, 0) + count}
        sample.status = type(sample.status).ABORTED
        if ended:
            what = "top-p ids" if lacks_top_p else "routed experts"
            raise EngineError(
                f"the engine sent no {what}, which were asked for, with its last event: was it started with them?",
                partial=generation,
            )
        return
    text = None
    if generation.text is None and count:
        skip = params.get("skip_special_tokens", True)
        text = tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=skip)
    merge(sample, generation, args, text=text)
    if generation.finish_reason == "abort" and _has_stopped(sample, generation, params, tokenizer):
        _note_end(sample, "COMPLETED")


def _note_end(sample: _Sample, status: str) -> None:
    """Remember that a response has come to its end: an ABORTED sample is handed in again, and must not outgrow it."""
    sample.metadata = {**_notes(sample), _ENDED: {"at": sample.response_length, "as": status}}


def _noted_end(sample: _Sample) -> str | None:
    """The status that was noted for the response as it is. The note is taken away, as it holds no longer."""
    notes = _notes(sample)
    if _ENDED not in notes:
        return None
    sample.metadata = {key: value for key, value in notes.items() if key != _ENDED}
    noted: dict[str, Any] = notes[_ENDED]
    status: str = noted["as"]
    return status if noted["at"] == sample.response_length > 0 else None


def _has_stopped(sample: _Sample, generation: Generation, params: Mapping[str, Any], tokenizer: _Tokenizer) -> bool:
    """Whether the last token would have ended the response. An engine that aborts a request does not look."""
    if not len(generation.token_ids):
        return False
    stops = params.get("stop") or ()
    # In the whole response: a stop string may begin before the last cut.
    if any(stop and stop in sample.response for stop in ([stops] if isinstance(stops, str) else stops)):
        return True
    ends = {getattr(tokenizer, "eos_token_id", None), *(params.get("stop_token_ids") or ())}
    return not params.get("ignore_eos") and int(generation.token_ids[-1]) in ends


# What is asked for.


def _check(args: _Args, sample: _Sample, params: Mapping[str, Any]) -> None:
    """Refuse what cannot end well before anything is asked for."""
    if getattr(args, "use_score_centering", False):
        raise ValueError("use_score_centering needs scores that a stream does not carry: switch one of the two off")
    if getattr(args, "ci_test", False) and not isinstance(sample.prompt, str):
        raise ValueError(f"with ci_test the prompt must be a str, not {type(sample.prompt).__name__}")
    check_ready(sample)
    if sample.response_length and expects_top_p(params) != (
        getattr(sample, "rollout_top_p_token_offsets", None) is not None
    ):
        raise ValueError("a part of the response has top-p ids and the rest would not: ask for them always, or never")


def _budget(sample: _Sample, params: dict[str, Any]) -> int | None:
    """Lower what counts the whole response by what it has already; the budget, None if it is left to the engine."""
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - sample.response_length)
    limit = params.get("max_new_tokens")
    if limit is None:
        return None
    budget: int = limit - sample.response_length
    if budget < 0:
        raise ValueError(f"max_new_tokens is {limit}, but the response has {sample.response_length} tokens already")
    params["max_new_tokens"] = budget
    return budget


def _with_images(sample: _Sample, images: Sequence[Any]) -> dict[str, Any]:
    """Images with their prompt: its text at first; all ids, placeholders included, to go on with a response."""
    from slime.utils.processing_utils import (  # type: ignore[import-not-found]  # noqa: PLC0415
        encode_image_for_rollout_engine,
    )

    encoded = [encode_image_for_rollout_engine(image) for image in images]
    if sample.response_length:
        return {"image_data": encoded, "input_ids": sample.tokens}
    if not isinstance(sample.prompt, str):
        raise ValueError(f"beside images the prompt must be a str, not {type(sample.prompt).__name__}")
    return {"image_data": encoded, "text": sample.prompt}


def _headers(args: _Args, sample: _Sample) -> dict[str, str]:
    session = getattr(sample, "session_id", None)
    if session and getattr(args, "router_policy", None) == "consistent_hashing":
        return {"X-SMG-Routing-Key": session}
    return {}


def _router(args: _Args, sample: _Sample) -> str:
    """The address of the router to ask: that of the model that is named, or the only one."""
    routers = getattr(args, "sglang_model_routers", None)
    name = _notes(sample).get("model_name") or _setting(args, "model", None)
    if routers and name:
        if name not in routers:
            raise ValueError(f"no router for the model {name!r}; sglang_model_routers has {', '.join(routers)}")
        host, port = routers[name]
    else:
        host, port = args.sglang_router_ip, args.sglang_router_port
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def _replays_experts(args: _Args) -> bool:
    return bool(getattr(args, "use_rollout_routing_replay", False))


def _experts(args: _Args) -> Experts | None:
    if not _replays_experts(args):
        return None
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise ValueError("use_rollout_routing_replay needs args.num_layers and args.moe_router_topk")
    count = getattr(args, "num_experts", None)
    small = count is not None and count <= _MOST_EXPERTS_IN_UINT8
    return Experts(layers, top_k, count, "uint8" if small else "int32")


def _notes(sample: _Sample) -> dict[str, Any]:
    """The sample's metadata, which may be shared: replace it, never change it."""
    return getattr(sample, "metadata", None) or {}


# The host's spans.


def _trace() -> ModuleType | None:
    """The host's module of span helpers, None if it has none."""
    for name in _SPANS_AT:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _span(trace: ModuleType | None, sample: _Sample, budget: int | None) -> AbstractContextManager[Any]:
    if trace is None:
        return contextlib.nullcontext()
    span: AbstractContextManager[Any] = trace.trace_span(sample, "sglang_generate", attrs={"max_new_tokens": budget})
    return span


def _describe(trace: ModuleType | None, span: object, generation: Generation) -> None:
    build, update = getattr(trace, "build_sglang_meta_trace_attrs", None), getattr(span, "update", None)
    if build is not None and update is not None and generation.finish_reason is not None:
        update(build({**generation.meta, **meta_info(generation)}))


# Settings and clients.


def _setting(args: _Args, name: str, default: _Value) -> _Value:
    value = getattr(args, f"streamfold_{name}", _UNSET)
    if value is _UNSET:
        value = os.environ.get(f"STREAMFOLD_{name.upper()}", default)
    return None if isinstance(value, str) and value.lower() in _NO_LIMIT else value


def _number(args: _Args, name: str, default: float | None, kind: type[float] = float) -> _Value:
    value = _setting(args, name, default)
    try:
        return None if value is None else kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"streamfold_{name} must be a number, or none; not {value!r}") from None


def _timeouts(args: _Args) -> Timeouts:
    usual = Timeouts()
    return Timeouts(
        connect=_number(args, "timeout_connect", usual.connect),
        first_token=_number(args, "timeout_first_token", usual.first_token),
        next_token=_number(args, "timeout_next_token", usual.next_token),
        drain=_number(args, "drain", usual.drain),
    )


@dataclass(frozen=True)
class _Seat:
    """Where calls to one router are made from, in one event loop."""

    client: Client
    slots: Slots
    closes: AsyncGenerator[None, None]  # kept for the loop, which closes it at its own end

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn. Not in the client's queue, from which a request would leave after the host's abort."""
        await self.slots.wait(self.slots.request())
        try:
            yield
        finally:
            self.slots.release()


_seats: dict[asyncio.AbstractEventLoop, dict[object, _Seat]] = {}


async def _seat(args: _Args, url: str) -> _Seat:
    """The running loop's client for this router, made on first use and closed with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _seats:
        for gone in [other for other in list(_seats) if other.is_closed()]:
            _seats.pop(gone, None)
        _seats[loop] = {}
    usual = Limits()
    at_once = _number(args, "concurrency", usual.calls, int)
    longest = _number(args, "max_event_bytes", usual.max_event_bytes, int)
    if at_once is None or longest is None:
        raise ValueError("streamfold_concurrency and streamfold_max_event_bytes must be numbers: they need a limit")
    limits, timeouts, experts = Limits(at_once, longest), _timeouts(args), _experts(args)
    key = (url, limits, timeouts, experts)
    seat = _seats[loop].get(key)
    if seat is None:
        client = Client(url, timeouts=timeouts, limits=replace(limits, calls=sys.maxsize), experts=experts)
        closes = _closing(loop, client)
        await closes.__anext__()  # which makes it known to the loop, and waits for nothing
        seat = _seats[loop][key] = _Seat(client, Slots(limits.calls), closes)
    return seat


async def _closing(loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
    # asyncio.run and its like end by closing the loop's asynchronous generators.
    try:
        yield
    finally:
        _seats.pop(loop, None)
        await client.aclose()
